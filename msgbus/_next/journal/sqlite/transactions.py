"""The transaction of the writer, and parts of it that are undone on their own."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable
from typing import TypeVar, cast, final

from msgbus._next.journal.ports import Claim
from msgbus._next.journal.sqlite.place import FilePlace
from msgbus._next.journal.sqlite.reads import TableReader
from msgbus._next.journal.sqlite.row_reads import Source
from msgbus.journal.sqlite.guard import GuardedConnection

T = TypeVar("T")


class NotAtOnce(Exception):  # noqa: N818
    """Some of many rows are not as expected: they are to be written one by one."""


@final
class Transaction:
    """One transaction after another on one connection; one thread uses it."""

    def __init__(self, connection: sqlite3.Connection, source: Source) -> None:
        self.connection = connection
        self.reader = TableReader(connection, source)
        self.head = 0
        self.appended: list[Claim] = []
        """What it has appended, if `is_feeding`."""
        self.is_feeding = False
        self._place = FilePlace(source.path)

    def begin(self, *, is_feeding: bool) -> None:
        """Begin, with the sole right to write from the first moment on."""
        self.connection.execute("BEGIN IMMEDIATE")
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
        self._place.check()

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
