"""The embedded journal: one SQLite file."""

from msgbus.journal.sqlite.journal import SqliteJournal

__all__ = ["SqliteJournal"]
