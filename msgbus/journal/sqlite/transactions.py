"""The transaction of the writer: parts that are undone on their own, statements for many rows."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import chain
from time import monotonic
from typing import Final, ParamSpec, TypeVar, final

from msgbus.errors import JournalError, MemberEndedError
from msgbus.journal.ports import Claim, Scan
from msgbus.journal.records import Record, Selection
from msgbus.journal.sqlite.files import MEMORY
from msgbus.journal.sqlite.guard import lent
from msgbus.journal.sqlite.messages import Row
from msgbus.journal.sqlite.reads import Source, TableReader
from msgbus.journal.sqlite.reserve import Reserve
from msgbus.journal.sqlite.schema import require_no_triggers, require_own_objects

P = ParamSpec("P")
T = TypeVar("T")

_SIZES: Final = (512, 256, 128, 64, 32, 16, 8, 4, 2, 1)
"""Rows of one statement."""

_MOST_VALUES: Final = 32_766 if sqlite3.sqlite_version_info >= (3, 32) else 999
"""Values that SQLite takes in one statement."""

FRESH: Final = 0.001
"""Seconds after which the file is looked for before a commit, too, and not only after it."""

COMMITS: Final = 16
"""Commits whose messages are kept."""

MOST_BYTES: Final = 4_000_000
"""Bytes of payloads that are kept, unless one commit has more."""


class NotAtOnce(Exception):  # noqa: N818
    """Some of many rows are not as expected: they are to be written one by one."""


@final
class WriteTransaction:
    """One transaction after another on one connection; one thread uses it.

    What it knows of the file holds until another connection has committed, or something was
    undone: only then is it read again.
    """

    def __init__(self, connection: sqlite3.Connection, source: Source) -> None:
        self.connection = connection
        self.reader = TableReader(connection, source)
        self.head = 0
        self.known_members: set[int] = set()
        """Members that are there."""
        self.known_blocks: set[Row] = set()
        """Entries that the table of blocks has."""
        self.without_done: set[tuple[str, int]] = set()
        """Partitions that have no `DONE` rows, with their subscription."""
        self.appended: list[Claim] = []
        """What it has appended, if `is_feeding`."""
        self.appended_size = 0
        """Bytes of their payloads."""
        self.tail = Tail()
        self.is_feeding = False
        self.commits = 0
        """Commits of this connection."""
        self._is_known = False
        self._version = -1
        self._schema = -1
        """Grows with every change of tables, indexes and triggers."""
        self._is_whole = True
        """Whether what was refused is undone."""
        self._saw_others = False
        self._path = source.path
        self.reserve: Reserve | None = None
        """What to leave on the disk; asked before the file outgrows it."""
        (self.page_size,) = connection.execute("PRAGMA page_size").fetchone()
        self._used_pages = 0
        self._look_for_others()
        self._saw_others = False
        self.place = FilePlace(source.path)

    def begin(self, *, is_feeding: bool) -> None:
        """Begin, with the sole right to write from the first moment on."""
        if self.connection.in_transaction:  # it could not be rolled back the last time
            self.connection.execute("ROLLBACK")
        self.connection.execute("BEGIN IMMEDIATE")
        self._look_for_others()
        if not self._is_known:
            (schema,) = self.connection.execute("PRAGMA schema_version").fetchone()
            if schema != self._schema:
                require_no_triggers(self.connection, self._path)
                self._schema = schema
            self.head = self.reader.head()
            self._forget()
            self._is_whole = True
        self._is_known = False  # until it is committed
        self.appended, self.appended_size = [], 0
        self.is_feeding = is_feeding

    def _forget(self) -> None:
        self.known_members.clear()
        self.known_blocks.clear()
        self.without_done.clear()

    def commit(self) -> None:
        """End it; when this returns, the disk has it, in the file of this path.

        Raises:
            JournalError: The file was moved, deleted, replaced or emptied, and nothing is written,
                unless that happened in this very moment; or a part of this that was refused
                could not be undone.
            JournalFullError: The disk could not hold the file and its log.
        """
        if not self._is_whole:
            message = f"A part of a commit of the journal {self._path} could not be undone."
            raise JournalError(message, path=self._path)
        reserve, used = self.reserve, 0
        if reserve is not None:
            (pages,) = self.connection.execute("PRAGMA page_count").fetchone()
            (free,) = self.connection.execute("PRAGMA freelist_count").fetchone()
            used, size = pages - free, self.page_size
            if pages * size > self.place.size + reserve.held:
                reserve.require_room(pages * size, (used - self._used_pages) * size)
        if monotonic() - self.place.checked > FRESH:
            self.place.check()
        self.connection.execute("COMMIT")
        self.commits += 1
        self._used_pages = used
        self.place.check(is_written=True)
        self._is_known = True
        if self.appended:
            self.tail.add(self.appended, self.appended_size)

    def _look_for_others(self) -> None:
        # Commits of this connection do not change its data version.
        (version,) = self.connection.execute("PRAGMA data_version").fetchone()
        if version != self._version:
            self._version = version
            self._saw_others = True
            self._is_known = False
            self.tail.clear()

    def has_others(self) -> bool:
        """Tell whether other connections have committed since the last call."""
        if not self.connection.in_transaction:
            self._look_for_others()
        saw_others, self._saw_others = self._saw_others, False
        return saw_others

    def has_member(self, member: int) -> bool:
        """Tell whether a member exists."""
        if member not in self.known_members:
            query = "SELECT 1 FROM msgbus_members WHERE id = ?"
            if self.connection.execute(query, (member,)).fetchone() is None:
                return False
            self.known_members.add(member)
        return True

    def require_member(self, member: int) -> None:
        """Raise unless the member exists."""
        if not self.has_member(member):
            raise MemberEndedError(member)

    def roll_back(self) -> None:
        """Undo it; SQLite may have done so itself."""
        if self.connection.in_transaction:
            self.connection.execute("ROLLBACK")

    def attempt(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the value of `function`; if it raises, nothing that it did is kept."""
        head, length = self.head, len(self.appended)
        self.connection.execute("SAVEPOINT part")
        try:
            value = function(*args, **kwargs)
            self.connection.execute("RELEASE part")
        except BaseException:
            self.head = head
            del self.appended[length:]
            self._forget()
            # After some errors, such as a full disk, there is no transaction left at all.
            if self.connection.in_transaction:
                is_whole, self._is_whole = self._is_whole, False
                self.connection.execute("ROLLBACK TO part")
                self.connection.execute("RELEASE part")
                self._is_whole = is_whole
            raise
        return value

    def together(self, at_once: Callable[[], T], one_by_one: Callable[[], T]) -> T:
        """Write many rows in few statements; if one of them is refused, one by one."""
        try:
            return self.attempt(at_once)
        except (NotAtOnce, sqlite3.IntegrityError):
            return one_by_one()

    def call(self, function: Callable[[sqlite3.Connection], T]) -> T:
        """Return the value of a user's function, which cannot end the transaction."""
        with lent(self.connection) as connection:
            value = function(connection)
        if connection.is_renaming:
            require_own_objects(self.connection)
        return value


def each(step: Callable[[T], object], values: Iterable[T]) -> None:
    """Run a step for each value."""
    for value in values:
        step(value)


@final
class MultiRow:
    """A statement for many rows: each call of SQLite releases the interpreter's lock."""

    def __init__(self, start: str, row: str, end: str = "") -> None:
        most = (_MOST_VALUES - start.count("?")) // row.count("?")
        self._statements = [
            (size, f"{start} {','.join([row] * size)}{end}") for size in _SIZES if size <= most
        ]

    def run(self, connection: sqlite3.Connection, rows: Sequence[Row], before: Row = ()) -> int:
        """Run it for all rows, in few calls; return the number of rows changed."""
        start, left, changed = 0, len(rows), 0
        for size, statement in self._statements:
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
    """Remembers which files a path names: SQLite goes on with those it has opened.

    It may be asked on any thread.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        # Those beside it are named by SQLite after the file itself, whatever link leads to it.
        real = os.path.realpath(path)
        self._main = os.path.abspath(path)  # noqa: PTH100 (a text; the working folder may change)
        paths = () if path == MEMORY else (self._main, f"{real}-wal", f"{real}-shm")
        self._files: dict[str, tuple[int, int] | None] = dict.fromkeys(paths)
        self.size = 0
        """Bytes of the file, without its log."""
        self._is_lost = False
        """Something was written to a file that is not in its place: nobody will find it."""
        self.checked = 0.0
        """Monotonic seconds when it was found in its place."""
        self.check()

    def check(self, *, is_written: bool = False) -> None:
        """Look again; as often as something is written, so in one piece.

        Args:
            is_written: Whether a commit has just ended, which is lost if it is in no file here.

        Raises:
            JournalError: The path names no file, another one, or one that is empty.
        """
        found: tuple[int, int] | None
        for path, known in self._files.items():
            try:
                status = os.stat(path)  # noqa: PTH116 (twice a commit)
                found = status.st_dev, status.st_ino
                if path == self._main:
                    self.size = status.st_size
                    if not self.size:
                        found = None
            except OSError:
                found = None
            if found is not None and known is None:
                self._files[path] = found  # the log is made by the first commit
            elif found != known or self._is_lost:
                self._is_lost = self._is_lost or is_written
                message = (
                    f"The file {path} was moved, deleted, replaced or emptied while the journal "
                    f"was open. Stop all processes that use the journal, put the file back, and "
                    f"open it again."
                )
                raise JournalError(message, path=self._path)
        self.checked = monotonic()


@final
class Tail:
    """The messages of the last commits of this process, as long as nobody else has committed any.

    They need not be read from the file. The writer's thread adds to it; any thread may read.
    """

    def __init__(self) -> None:
        self._commits: tuple[Sequence[Claim], ...] = ()
        self._sizes: tuple[int, ...] = ()

    def add(self, appended: Sequence[Claim], size: int) -> None:
        """Keep what was just committed, with payloads of so many bytes."""
        commits = self._commits
        if commits and commits[-1][-1].record.offset + 1 != appended[0].record.offset:
            commits = self._sizes = ()  # another process has appended what lies between them
        sizes = (*self._sizes[1 - COMMITS :], size)
        while len(sizes) > 1 and sum(sizes) > MOST_BYTES:
            sizes = sizes[1:]
        self._sizes = sizes
        self._commits = (*commits, appended)[-len(sizes) :]

    def clear(self) -> None:
        """Forget all of it."""
        self._commits = self._sizes = ()

    def scan(
        self, after: int, limit: int, selection: Selection, partitions: Collection[int] | None
    ) -> Scan | None:
        """Read records behind an offset, as `Log.read`; `None` if they have to be read there."""
        commits = self._commits
        if not commits:
            return None
        first, last = commits[0][0].record.offset, commits[-1][-1].record.offset
        if not first <= after + 1 <= last:
            return None
        found: list[Record | int] = []
        for commit in commits:
            start = max(after + 1 - commit[0].record.offset, 0)
            for place in range(start, len(commit)):
                record = commit[place].record
                if not selection.takes(record):
                    continue
                if partitions is not None and selection.partition(record) not in partitions:
                    continue
                found.append(record)
                if len(found) >= limit:
                    return Scan(found, record.offset)
        return Scan(found, last)
