"""The lake: a journal as Parquet files, for Spark and everybody else, and for good."""

from msgbus.pipeline.lake.export import ExportReport, Frames, export, trimmable
from msgbus.pipeline.lake.folder import Lake, Segment
from msgbus.pipeline.lake.reading import Asked, read_all, read_lake

__all__ = [
    "Asked",
    "ExportReport",
    "Frames",
    "Lake",
    "Segment",
    "export",
    "read_all",
    "read_lake",
    "trimmable",
]
