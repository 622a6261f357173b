"""Upkeep of a journal's file: trim it, compact it, back it up."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Final, NamedTuple, final

from msgbus._next.journal.records import DELAYED, Cursor
from msgbus._next.journal.reports import Retention, TrimReport
from msgbus._next.journal.sqlite.claims import JournalSteps
from msgbus._next.journal.sqlite.questions import QuestionReader
from msgbus._next.journal.sqlite.reads import places
from msgbus._next.journal.sqlite.row_reads import Source
from msgbus.errors import JournalOpenError
from msgbus.journal.sqlite.faults import translated
from msgbus.journal.sqlite.files import MEMORY, configure

CHUNK: Final = 200
"""Messages that one commit of a trim looks at: other commits need not wait long."""

_OLDEST: Final = (
    "SELECT offset, message_id FROM msgbus_messages WHERE offset > ? AND offset <= ? "
    "ORDER BY offset LIMIT ?"
)
_NAMES: Final = """
WITH RECURSIVE found (name) AS (
    SELECT (SELECT min(subscription) FROM msgbus_pending)
    UNION ALL
    SELECT (SELECT min(subscription) FROM msgbus_pending WHERE subscription > found.name)
    FROM found WHERE found.name IS NOT NULL
)
SELECT name FROM found WHERE name IS NOT NULL
"""
"""One step in the primary key for each subscription, however many rows it has."""
_NEEDED: Final = """
SELECT offset FROM msgbus_pending
WHERE subscription = ? AND offset >= ? AND offset <= ? AND body IS NULL AND state <> 'kept'
"""
"""By subscription: an index by offset would be one more to write with every claim."""
_SET_TRIMMED: Final = """
UPDATE msgbus_meta SET value = ? WHERE key = 'trimmed' AND CAST(value AS INTEGER) < ?
"""
_LEFTOVERS: Final = ("", "-journal", "-wal", "-shm")


class _Chunk(NamedTuple):
    """Messages that one commit removes, and who needs those between them."""

    removed: Sequence[tuple[int, str]]
    upto: int
    needed_by: frozenset[str]


@final
class Trimming:
    """One trim, as a series of small commits.

    Args:
        retention: How much to keep.
        before: Also remove what lies before this offset.
        now: Seconds since the epoch.
    """

    def __init__(self, retention: Retention, before: int | None, now: float) -> None:
        self._retention = retention
        self._before = before
        self._now = now
        self._wanted: int | None = None
        self._after = 0
        self._removed = 0
        self._held_back_by: frozenset[str] = frozenset()
        self._first = 0

    @property
    def report(self) -> TrimReport:
        """What the steps have done."""
        held = tuple(sorted(self._held_back_by))
        return TrimReport(removed=self._removed, first=self._first, held_back_by=held)

    def step(self, steps: JournalSteps) -> bool:
        """Remove some messages in the open transaction; tell whether there may be more.

        Raises:
            CursorError: A cursor is damaged: nobody knows what its subscription needs.
        """
        connection = steps.store.transaction.connection
        reader = QuestionReader(connection, Source(steps.store.path, None))
        goal = self._next_goal(reader)
        behind = [cursor for cursor in _cursors(reader) if cursor.acked < goal]
        limit = min((cursor.acked for cursor in behind), default=goal)
        # What is kept is changed last: a step that meets damaged text is run twice.
        if self._after >= limit:
            self._first = reader.first()
            if self._after < goal:
                self._held_back_by |= {cursor.name for cursor in behind}
            return False
        chunk = _chunk(connection, self._after, limit)
        _remove(connection, chunk)
        self._after = chunk.upto
        self._removed += len(chunk.removed)
        self._held_back_by |= chunk.needed_by
        return True

    def _next_goal(self, reader: QuestionReader) -> int:
        """Return the offset up to which to remove now; the size is looked at last."""
        head = reader.head()
        if self._wanted is None:
            self._wanted = self._unwanted(reader, head)
        if self._after < self._wanted or not self._is_too_large(reader.connection):
            return self._wanted
        return head

    def _unwanted(self, reader: QuestionReader, head: int) -> int:
        """Return the highest offset that need not be kept, whatever the size."""
        last = [0 if self._before is None else self._before - 1]
        if self._retention.max_count is not None:
            last.append(head - self._retention.max_count)
        if self._retention.max_age is not None:
            # Up to the first that is young enough, in case the clock has jumped.
            last.append(reader.offset_at(self._now - self._retention.max_age) - 1)
        return min(max(last), head)

    def _is_too_large(self, connection: sqlite3.Connection) -> bool:
        most = self._retention.max_bytes
        return most is not None and bytes_in_use(connection) > most


def bytes_in_use(connection: sqlite3.Connection) -> int:
    """Return the size of the pages that hold something."""
    pages, free, size = (
        int(connection.execute(f"PRAGMA {name}").fetchone()[0])
        for name in ("page_count", "freelist_count", "page_size")
    )
    return (pages - free) * size


def _cursors(reader: QuestionReader) -> list[Cursor]:
    """Return all cursors; raise if one is damaged."""
    names = reader.connection.execute("SELECT DISTINCT name FROM msgbus_subscriptions").fetchall()
    return [cursor for (name,) in names for cursor in reader.cursors(name)]


def _chunk(connection: sqlite3.Connection, after: int, limit: int) -> _Chunk:
    rows = connection.execute(_OLDEST, (after, limit, CHUNK)).fetchall()
    upto = rows[-1][0] if len(rows) == CHUNK else limit
    needed: set[int] = set()
    needed_by: set[str] = set()
    for name in _queues(connection):
        found = connection.execute(_NEEDED, (name, after + 1, upto)).fetchall()
        offsets = {offset for (offset,) in found}.intersection(offset for offset, _ in rows)
        if offsets:
            needed |= offsets
            needed_by.add(name)
    return _Chunk([row for row in rows if row[0] not in needed], upto, frozenset(needed_by))


def _queues(connection: sqlite3.Connection) -> list[str]:
    """Return the names that have rows whose offsets are those of the log."""
    return [name for (name,) in connection.execute(_NAMES) if name != DELAYED]


def _remove(connection: sqlite3.Connection, chunk: _Chunk) -> None:
    """Delete messages with their results, deliveries and kept rows."""
    connection.execute(_SET_TRIMMED, (chunk.upto, chunk.upto))
    if not chunk.removed:
        return
    offsets = [offset for offset, _ in chunk.removed]
    ids = [message_id for _, message_id in chunk.removed]
    among, among_ids = f"offset IN ({places(offsets)})", f"message_id IN ({places(ids)})"
    for name in _queues(connection):
        connection.execute(
            f"DELETE FROM msgbus_pending WHERE subscription = ? AND {among} AND state = 'kept'",  # noqa: S608
            (name, *offsets),
        )
    for where, values in (
        (f"deliveries WHERE {among}", offsets),
        (f"deliveries INDEXED BY msgbus_deliveries_unlogged WHERE offset = 0 AND {among_ids}", ids),
        (f"results WHERE {among_ids}", ids),
        (f"messages WHERE {among}", offsets),
    ):
        connection.execute(f"DELETE FROM msgbus_{where}", values)  # noqa: S608


def compact(path: str, connect: Callable[[], sqlite3.Connection]) -> None:
    """Return free pages, and the write-ahead log, to the file system."""
    # On a connection of its own: VACUUM is not possible inside a transaction.
    with translated(path), closing(connect()) as connection:
        configure(connection)
        connection.execute("VACUUM")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()


def backup(reader: QuestionReader, target: str | os.PathLike[str]) -> None:
    """Copy one consistent state of the journal to a new file, while others write.

    The file gets the permissions of the journal, and its name once it is complete.

    Raises:
        JournalOpenError: The file exists, or its folder does not.
    """
    file = Path(target)
    _check_target(file)
    partial = file.with_name(f"{file.name}.partial")
    try:
        _unlink(partial)
        _make_like(partial, reader.path)
        with closing(sqlite3.connect(partial, isolation_level=None)) as copy:
            reader.connection.backup(copy)
            # One file, complete in itself.
            copy.execute("PRAGMA journal_mode = DELETE").fetchall()
        partial.rename(file)
    finally:
        _unlink(partial)


def _check_target(file: Path) -> None:
    if file.exists():
        message = f"{file} exists: name a new file for the backup, or remove it first."
        raise JournalOpenError(message, path=str(file))
    if not file.parent.is_dir():
        message = f"The folder of the backup {file} does not exist: make {file.parent} first."
        raise JournalOpenError(message, path=str(file))


def _make_like(file: Path, journal: str) -> None:
    """Make an empty file that no one else may read who may not read the journal."""
    mode = 0o600 if journal == MEMORY else Path(journal).stat().st_mode & 0o777
    os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    file.chmod(mode)


def _unlink(file: Path) -> None:
    for ending in _LEFTOVERS:
        file.with_name(f"{file.name}{ending}").unlink(missing_ok=True)
