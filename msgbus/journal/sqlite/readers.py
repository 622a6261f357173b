"""Connections that only read, each used by one thread at a time; detection of changes."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar, final

import anyio
import anyio.to_thread

from msgbus.journal.sqlite.faults import closed, forked, is_undecodable, translated
from msgbus.journal.sqlite.files import Connect, open_reader
from msgbus.journal.sqlite.reads import Source, TableReader
from msgbus.journal.sqlite.transactions import FilePlace

T = TypeVar("T")


def lenient(raw: bytes) -> str:
    """Text that may be damaged; its checksum will not fit."""
    return raw.decode(errors="surrogateescape")


def snapshot(connection: sqlite3.Connection, function: Callable[[sqlite3.Connection], T]) -> T:
    """The value of `function`, which sees one state of the file throughout."""
    connection.execute("BEGIN")
    try:
        return function(connection)
    except sqlite3.OperationalError as error:
        if not is_undecodable(error):
            raise
        # Read on, so that the checksum can say which record it is.
        connection.text_factory = lenient
        return function(connection)
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")


@final
class Readers:
    """A small pool; readers never wait for the writer, nor the writer for them."""

    def __init__(
        self, place: FilePlace, path: str, lock_timeout: float, connect: Connect, *, most: int = 4
    ) -> None:
        self._place = place
        self._path = path
        self._lock_timeout = lock_timeout
        self._connect = connect
        self._most = most
        self._idle: list[sqlite3.Connection] = []
        self._guard = threading.Lock()
        self._is_closed = False
        self._closed_by = closed
        """Makes the error for what comes later."""

    def forked(self) -> None:
        """Refuse everything from now on: the connections are the parent's."""
        self._is_closed, self._closed_by = True, forked
        self._guard, self._idle = threading.Lock(), []

    async def run(
        self, function: Callable[[sqlite3.Connection], T], *, in_snapshot: bool = True
    ) -> T:
        """The value of `function`, on a snapshot of the file, in a worker thread."""
        if not threading.main_thread().is_alive():  # as it ends, the interpreter starts no thread
            return self.run_now(function, in_snapshot)
        return await anyio.to_thread.run_sync(
            self.run_now, function, in_snapshot, abandon_on_cancel=True
        )

    def run_now(self, function: Callable[[sqlite3.Connection], T], in_snapshot: bool = True) -> T:
        """The same in the caller's own thread.

        Raises:
            JournalError: The file was moved, deleted, replaced or emptied.
        """
        connection = self._take()
        try:
            with translated(self._path):
                found = function(connection) if not in_snapshot else snapshot(connection, function)
        finally:
            self._give_back(connection)
        if not self._is_closed:
            self._place.check()  # all connections, whenever they were opened, read one file
        return found

    def run_alone(self, function: Callable[[sqlite3.Connection], T]) -> T:
        """The same on a connection of its own, also after the end."""
        if not Path(self._path).exists():
            raise closed(self._path)
        connection = open_reader(self._path, self._lock_timeout, self._connect)
        try:
            with translated(self._path):
                return snapshot(connection, function)
        finally:
            connection.close()

    def _take(self) -> sqlite3.Connection:
        with self._guard:
            if self._is_closed:
                raise self._closed_by(self._path)
            self._place.check()  # SQLite would make a new file
            if self._idle:
                return self._idle.pop()
        return open_reader(self._path, self._lock_timeout, self._connect)

    def _give_back(self, connection: sqlite3.Connection) -> None:
        with self._guard:
            is_fit = not connection.in_transaction  # else it could not be rolled back
            if is_fit and not self._is_closed and len(self._idle) < self._most:
                self._idle.append(connection)
                return
        connection.close()

    def close(self) -> None:
        """Close what is idle now; the rest as soon as it is given back."""
        with self._guard:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()


@final
class ChangeDetector:
    """Asks SQLite for its data version, which changes with every commit of another connection.

    It takes a few microseconds and no lock, so it is done on the event loop itself. The writer of
    this process is another connection, too: if it has committed meanwhile, it is asked whether
    there was somebody else, and tells by itself.

    Args:
        connection: A connection of its own.
        source: The file.
        place: Where it is.
        own: Returns the number of commits of this process.
        ask_writer: Lets the writer look for commits of others.
    """

    def __init__(
        self,
        connection: sqlite3.Connection,
        source: Source,
        place: FilePlace,
        own: Callable[[], int],
        ask_writer: Callable[[], None],
    ) -> None:
        self._connection = connection
        self._reader = TableReader(connection, source)
        self._place = place
        self._is_closed = False
        self._own = own
        self._ask_writer = ask_writer
        self._seen = -1
        self._own_seen = 0
        self._guard = threading.Lock()

    def __call__(self) -> int | None:
        """Return the head if another process has committed since the last call.

        Raises:
            JournalError: The file was moved, deleted, replaced or emptied: there will be no news.
        """
        with self._guard:
            if not self._is_closed:
                self._place.check()
            try:
                version = data_version(self._connection)
                if version == self._seen:
                    return None
                head = self._reader.head()
            except (sqlite3.Error, MemoryError):
                return None  # closed, or being recovered: the next call will see
            self._seen = version
            own, before = self._own(), self._own_seen
            self._own_seen = own
        if own == before:
            return head
        self._ask_writer()
        return None

    def close(self) -> None:
        """Release the connection."""
        with self._guard:
            self._is_closed = True
            self._connection.close()


def data_version(connection: sqlite3.Connection) -> int:
    """Return a number that changes with commits of other connections."""
    (version,) = connection.execute("PRAGMA data_version").fetchone()
    return int(version)
