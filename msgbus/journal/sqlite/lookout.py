"""A look at the file: has another process written?"""

from __future__ import annotations

import sqlite3
import threading
from typing import final

from msgbus.journal.sqlite import reads


@final
class Lookout:
    """Asks SQLite for its data version, which changes with every commit of another connection.

    It takes a few microseconds and no lock, so it is done on the event loop itself.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._seen = -1
        self._guard = threading.Lock()

    def __call__(self) -> int | None:
        """The head if there was a commit since the last look."""
        with self._guard:
            try:
                (version,) = self._connection.execute("PRAGMA data_version").fetchone()
                if version == self._seen:
                    return None
                head = reads.head(self._connection)
            except sqlite3.Error:
                return None  # closed, or being recovered: the next look will see
            self._seen = version
            return head

    def close(self) -> None:
        """Look no more."""
        with self._guard:
            self._connection.close()
