"""The journal in one SQLite file: `journal.SqliteJournal`."""
