"""Detection of commits by other processes."""

from __future__ import annotations

import sqlite3
import threading
from typing import final

from msgbus._next.journal.sqlite.reads import TableReader
from msgbus._next.journal.sqlite.row_reads import Source


@final
class ChangeDetector:
    """Asks SQLite for its data version, which changes with every commit of another connection.

    It takes a few microseconds and no lock, so it is done on the event loop itself.
    """

    def __init__(self, connection: sqlite3.Connection, source: Source) -> None:
        self._connection = connection
        self._reader = TableReader(connection, source)
        self._seen = -1
        self._guard = threading.Lock()

    def __call__(self) -> int | None:
        """Return the head if there was a commit since the last call."""
        with self._guard:
            try:
                (version,) = self._connection.execute("PRAGMA data_version").fetchone()
                if version == self._seen:
                    return None
                head = self._reader.head()
            except sqlite3.Error:
                return None  # closed, or being recovered: the next call will see
            self._seen = version
            return head

    def close(self) -> None:
        """Release the connection."""
        with self._guard:
            self._connection.close()
