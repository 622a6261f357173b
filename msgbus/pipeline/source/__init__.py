"""The data source `msgbus`: journals read and written by Spark."""

from msgbus.pipeline.source.source import NAME, JournalSource, register

__all__ = ["NAME", "JournalSource", "register"]
