"""The transaction of the writer: parts that are undone on their own, statements for many rows."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Final, TypeVar, cast, final

from msgbus.errors import JournalError
from msgbus.journal.ports import Claim
from msgbus.journal.sqlite.files import MEMORY
from msgbus.journal.sqlite.guard import GuardedConnection
from msgbus.journal.sqlite.messages import Row
from msgbus.journal.sqlite.readers import data_version
from msgbus.journal.sqlite.reads import Source, TableReader

T = TypeVar("T")

_LARGEST: Final = 128 if sqlite3.sqlite_version_info >= (3, 32) else 48
"""Older versions of SQLite take no more than 999 values."""


class NotAtOnce(Exception):  # noqa: N818
    """Some of many rows are not as expected: they are to be written one by one."""


@final
class WriteTransaction:
    """One transaction after another on one connection; one thread uses it."""

    def __init__(self, connection: sqlite3.Connection, source: Source) -> None:
        self.connection = connection
        self.reader = TableReader(connection, source)
        self.head = 0
        self.appended: list[Claim] = []
        """What it has appended, if `is_feeding`."""
        self.is_feeding = False
        self.commits = 0
        """Commits of this connection."""
        self._version = data_version(connection)
        self._saw_others = False
        self._place = FilePlace(source.path)

    def begin(self, *, is_feeding: bool) -> None:
        """Begin, with the sole right to write from the first moment on."""
        self.connection.execute("BEGIN IMMEDIATE")
        self._look_for_others()
        # Read anew each time: another process may have written since.
        self.head = self.reader.head()
        self.appended = []
        self.is_feeding = is_feeding

    def commit(self) -> None:
        """End it; when this returns, the disk has it, in the file of this path.

        Raises:
            JournalError: The file was moved, deleted or replaced.
        """
        self.connection.execute("COMMIT")
        self.commits += 1
        self._place.check()

    def _look_for_others(self) -> None:
        # Commits of this connection do not change its data version.
        version = data_version(self.connection)
        self._saw_others |= version != self._version
        self._version = version

    def has_others(self) -> bool:
        """Tell whether other connections have committed since the last call."""
        if not self.connection.in_transaction:
            self._look_for_others()
        saw_others, self._saw_others = self._saw_others, False
        return saw_others

    def roll_back(self) -> None:
        """Undo it; SQLite may have done so itself."""
        if self.connection.in_transaction:
            self.connection.execute("ROLLBACK")

    def attempt(self, function: Callable[[], T]) -> T:
        """Return the value of `function`; if it raises, nothing that it did is kept."""
        head, length = self.head, len(self.appended)
        self.connection.execute("SAVEPOINT part")
        try:
            value = function()
        except BaseException:
            self.head = head
            del self.appended[length:]
            # After some errors, such as a full disk, there is no transaction left at all.
            if self.connection.in_transaction:
                self.connection.execute("ROLLBACK TO part")
                self.connection.execute("RELEASE part")
            raise
        self.connection.execute("RELEASE part")
        return value

    def together(self, at_once: Callable[[], T], one_by_one: Callable[[], T]) -> T:
        """Write many rows in few statements; if one of them is refused, one by one."""
        try:
            return self.attempt(at_once)
        except (NotAtOnce, sqlite3.IntegrityError):
            return one_by_one()

    def call(self, function: Callable[[sqlite3.Connection], T]) -> T:
        """Return the value of a user's function, which cannot end the transaction."""
        connection = cast("GuardedConnection", self.connection)
        factories = connection.row_factory, connection.text_factory
        try:
            with connection.guarded():
                return function(connection)
        finally:
            connection.row_factory, connection.text_factory = factories


def each(step: Callable[[T], object], values: Iterable[T]) -> None:
    """Run a step for each value."""
    for value in values:
        step(value)


@final
class MultiRow:
    """A statement for many rows: each call of SQLite releases the interpreter's lock."""

    def __init__(self, start: str, row: str, end: str = "") -> None:
        self._sizes = [
            (size, f"{start} {','.join([row] * size)}{end}") for size in (_LARGEST, 16, 4, 1)
        ]

    def run(self, connection: sqlite3.Connection, rows: Sequence[Row], before: Row = ()) -> int:
        """Run it for all rows, in few calls; return the number of rows changed."""
        start, left, changed = 0, len(rows), 0
        for size, statement in self._sizes:
            while left >= size:
                values = list(chain(before, *rows[start : start + size]))
                changed += connection.execute(statement, values).rowcount
                start, left = start + size, left - size
        return changed


def inserting(table: str, columns: str, verb: str = "INSERT") -> MultiRow:
    """Make the statement that adds rows."""
    places = f"({','.join('?' * (columns.count(',') + 1))})"
    return MultiRow(f"{verb} INTO msgbus_{table} ({columns}) VALUES", places)


@final
class FilePlace:
    """Remembers which files a path names: SQLite goes on with those it has opened."""

    def __init__(self, path: str) -> None:
        self._path = path
        paths = () if path == MEMORY else (path, f"{path}-wal")
        self._files = {one: _identity(one) for one in paths}

    def check(self) -> None:
        """Look again.

        Raises:
            JournalError: The path names no file, or another one.
        """
        for path, known in self._files.items():
            found = _identity(path)
            if found == known:
                continue
            if known is not None:
                message = (
                    f"The file {path} was moved, deleted or replaced while the journal was open: "
                    f"what was just written is not in it. Stop all processes that use the "
                    f"journal, put the file back, and open it again."
                )
                raise JournalError(message, path=self._path)
            self._files[path] = found  # the log is made by the first commit


def _identity(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)  # noqa: PTH116 (twice a commit)
    except OSError:
        return None
    return found.st_dev, found.st_ino
