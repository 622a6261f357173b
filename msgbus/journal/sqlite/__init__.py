"""The SQLite engine: one writer thread, a pool of readers, one map of errors."""

from msgbus.journal.sqlite.journal import SqliteJournal

__all__ = ["SqliteJournal"]
