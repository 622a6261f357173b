"""The Spark data source `msgbus`: its options, readers and writers.

Imported by the rest of the pipeline, and by Spark's workers; imports the journal.
"""

from msgbus.pipeline.source.source import JournalSource, register
from msgbus.pipeline.source.tables import NAME

__all__ = ["NAME", "JournalSource", "register"]
