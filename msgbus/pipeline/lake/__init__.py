"""The lake: a journal as Parquet files, for Spark and everybody else, and for good."""

from msgbus.pipeline.lake.export import ExportReport, Frames, export, trimmable
from msgbus.pipeline.lake.folder import Lake, Segment
from msgbus.pipeline.lake.reading import read_lake

__all__ = [
    "ExportReport",
    "Frames",
    "Lake",
    "Segment",
    "export",
    "read_lake",
    "trimmable",
]
