"""The lake: a journal as Parquet files, for Spark and everybody else, and for good."""

from msgbus.pipeline.lake.export import ExportReport, Frames, export, trimmable
from msgbus.pipeline.lake.folder import Lake, Segment
from msgbus.pipeline.lake.reading import Parts, parts_of, read_all, read_lake

__all__ = [
    "ExportReport",
    "Frames",
    "Lake",
    "Parts",
    "Segment",
    "export",
    "parts_of",
    "read_all",
    "read_lake",
    "trimmable",
]
