"""The lake: a journal exported to Parquet files, for Spark, DuckDB, Polars and others.

Imported by the pipeline's other modules and by users; imports the data source.
"""

from msgbus.pipeline.lake.export import ExportReport, Frames, export, trimmable
from msgbus.pipeline.lake.folder import Lake, SealedSegment
from msgbus.pipeline.lake.reading import read_lake

__all__ = [
    "ExportReport",
    "Frames",
    "Lake",
    "SealedSegment",
    "export",
    "read_lake",
    "trimmable",
]
