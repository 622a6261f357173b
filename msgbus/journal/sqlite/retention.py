"""Retention of a journal file: trims, by hand, as it grows, and when the disk is full."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Sequence
from contextlib import suppress
from copy import copy
from typing import Final, NamedTuple, final

from msgbus.errors import JournalFullError
from msgbus.journal.records import DELAYED, LETTERS, Cursor
from msgbus.journal.reports import Retention, TrimReport
from msgbus.journal.sqlite.claims import JournalSteps
from msgbus.journal.sqlite.faults import is_full
from msgbus.journal.sqlite.holds import Holds
from msgbus.journal.sqlite.messages import BLOCK
from msgbus.journal.sqlite.questions import QuestionReader
from msgbus.journal.sqlite.reads import Source, places
from msgbus.journal.sqlite.reserve import Reserve
from msgbus.journal.sqlite.schema import read_meta, write_meta
from msgbus.runtime.clock import Clock
from msgbus.telemetry.logging import log
from msgbus.telemetry.redaction import redact_exception

EVERY: Final = 1000
"""Messages after which a journal is trimmed again."""

REST: Final = 1.0
"""Seconds after which a full disk is tried again, if there was nothing to remove."""

HURRY: Final = 1.0
"""Seconds that a write on a full disk waits for a trim."""

CHUNK: Final = 200
"""Messages that one commit of a trim looks at: other commits need not wait long."""

_OLDEST: Final = (
    "SELECT offset, message_id FROM msgbus_messages WHERE offset > ? AND offset <= ? "
    "ORDER BY offset LIMIT ?"
)
_FIRST_YOUNG: Final = """
SELECT offset FROM msgbus_messages WHERE offset > ? AND time >= ? ORDER BY offset LIMIT 1
"""
"""Walks over what is to be removed."""

_FORGET_BLOCK: Final = f"""
DELETE FROM msgbus_blocks WHERE block = :block AND NOT EXISTS (SELECT 1 FROM msgbus_messages
    WHERE offset >= :block * {BLOCK} AND offset < (:block + 1) * {BLOCK})
"""  # noqa: S608
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
_LOGGED: Final = "msgbus_deliveries_by_offset WHERE offset <> 0"
_UNLOGGED: Final = "msgbus_deliveries_unlogged WHERE offset = 0"


class _Chunk(NamedTuple):
    """Messages that one commit removes, and who needs those between them."""

    removed: Sequence[tuple[int, str]]
    upto: int
    needed_by: frozenset[str]


class _Limits(NamedTuple):
    """How much to keep, in one of three ways or several."""

    age: float | None
    size: int | None
    newest: int | None


@final
class Trimming:
    """One trim, as a series of small commits.

    Args:
        retention: How much to keep.
        before: Also remove what lies before this offset.
        now: Seconds since the epoch.
    """

    def __init__(self, retention: Retention, before: int | None, now: float) -> None:
        self._keep = _Limits(retention.max_age, retention.max_bytes, retention.max_count)
        self._hold = _Limits(retention.hold_age, retention.hold_bytes, retention.hold_count)
        self._holds: Holds = Holds(retention, now)
        self._before = before
        self._now = now
        self._wanted: int | None = None
        self._unheld: int | None = None
        self._after = 0
        self.removed = 0
        """Messages that the steps have removed."""
        self._held_back_by: frozenset[str] = frozenset()
        self._first = 0

    @property
    def report(self) -> TrimReport:
        """What the steps have done."""
        return TrimReport(
            removed=self.removed,
            first=self._first,
            held_back_by=tuple(sorted(self._held_back_by)),
            overdue=tuple(sorted(self._holds.overdue)),
            skipped=self._holds.skipped,
        )

    def log_from(self, before: Trimming, path: str) -> None:
        """Log what a step has found and done, now that it is committed."""
        self._holds.log_from(before._holds, path)

    def step(self, steps: JournalSteps) -> bool:
        """Remove some messages in the open transaction; tell whether there may be more.

        Raises:
            CursorError: A cursor is damaged: nobody knows what its subscription needs.
        """
        connection = steps.store.transaction.connection
        reader = QuestionReader(connection, Source(steps.store.path, None))
        goal = self._next_goal(reader)
        behind = [cursor for cursor in _cursors(reader) if cursor.acked < goal]
        # What is kept is changed last: a step that meets damaged text is run twice.
        holds = copy(self._holds)
        limit = holds.limit(reader, behind, goal, self._next_unheld(reader, goal))
        if self._after >= limit:
            self._first, self._holds = reader.first(), holds
            if self._after < goal:
                self._held_back_by |= {cursor.name for cursor in behind}
            return False
        chunk = _chunk(connection, self._after, limit, holds.in_flight(behind))
        holds.count(reader, behind, [offset for offset, _ in chunk.removed])
        _remove(connection, chunk)
        steps.store.transaction.known_blocks.clear()
        steps.store.transaction.tail.clear()
        self._after, self._holds = chunk.upto, holds
        self.removed += len(chunk.removed)
        self._held_back_by |= chunk.needed_by
        return True

    def _next_goal(self, reader: QuestionReader) -> int:
        """Return the offset up to which to remove now; the size is looked at last."""
        head = reader.head()
        if self._wanted is None:
            before = 0 if self._before is None else self._before - 1
            self._wanted = min(max(before, self._unwanted(reader, head, self._keep)), head)
        if self._after < self._wanted or not _is_too_large(reader.connection, self._keep):
            return self._wanted
        return head

    def _next_unheld(self, reader: QuestionReader, goal: int) -> int:
        """Return the offset up to which no subscription should hold anything back now."""
        head = reader.head()
        if self._unheld is None:
            self._unheld = self._unwanted(reader, head, self._hold)
        return min(head if _is_too_large(reader.connection, self._hold) else self._unheld, goal)

    def _unwanted(self, reader: QuestionReader, head: int, limits: _Limits) -> int:
        """Return the highest offset that need not be kept, whatever the size."""
        last = [0]
        if limits.newest is not None:
            last.append(head - limits.newest)
        if limits.age is not None:
            # Up to the first that is young enough, in case the clock has jumped.
            young = self._now - limits.age
            found = reader.connection.execute(_FIRST_YOUNG, (reader.trimmed(), young)).fetchone()
            last.append(head if found is None else found[0] - 1)
        return min(max(last), head)


def _is_too_large(connection: sqlite3.Connection, limits: _Limits) -> bool:
    return limits.size is not None and bytes_in_use(connection) > limits.size


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


def _chunk(
    connection: sqlite3.Connection, after: int, limit: int, in_flight: Sequence[Cursor]
) -> _Chunk:
    rows = connection.execute(_OLDEST, (after, limit, CHUNK)).fetchall()
    upto = rows[-1][0] if len(rows) == CHUNK else limit
    present = {offset for offset, _ in rows}
    needed: set[int] = set()
    needed_by: set[str] = set()
    for name in _queues(connection):
        found = connection.execute(_NEEDED, (name, after + 1, upto)).fetchall()
        offsets = present.intersection(offset for (offset,) in found)
        if offsets:
            needed |= offsets
            needed_by.add(name)
    for cursor in in_flight:
        offsets = {offset for offset in present if cursor.acked < offset <= cursor.fetched}
        if offsets:
            needed |= offsets
            needed_by.add(cursor.name)
    return _Chunk([row for row in rows if row[0] not in needed], upto, frozenset(needed_by))


def _queues(connection: sqlite3.Connection) -> list[str]:
    """Return the names that have rows whose offsets are those of the log."""
    return [name for (name,) in connection.execute(_NAMES) if name != DELAYED]


def _remove(connection: sqlite3.Connection, chunk: _Chunk) -> None:
    """Delete messages with their results, deliveries and kept rows."""
    if chunk.upto > int(read_meta(connection, "trimmed")):
        write_meta(connection, "trimmed", str(chunk.upto))
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
    _remove_letters(connection, among_ids, ids)
    for where, values in (
        (f"deliveries INDEXED BY {_LOGGED} AND {among}", offsets),
        (f"deliveries INDEXED BY {_UNLOGGED} AND {among_ids}", ids),
        (f"results WHERE {among_ids}", ids),
        (f"messages WHERE {among}", offsets),
    ):
        connection.execute(f"DELETE FROM msgbus_{where}", values)  # noqa: S608
    blocks = {offset // BLOCK for offset in offsets}
    connection.executemany(_FORGET_BLOCK, [{"block": block} for block in blocks])


def _remove_letters(connection: sqlite3.Connection, among_ids: str, ids: Sequence[str]) -> None:
    """Delete letters of messages about which nothing is left to do."""
    found = connection.execute(
        f"SELECT subscription, offset FROM msgbus_letters WHERE {among_ids} "  # noqa: S608
        f"AND status NOT IN ('dead', 'replaying') AND subscription = ?",
        (*ids, LETTERS),
    ).fetchall()
    for table in ("pending", "letters"):
        connection.executemany(
            f"DELETE FROM msgbus_{table} WHERE subscription = ? AND offset = ?",  # noqa: S608
            found,
        )


@final
class Retainer:
    """Trims a journal in small commits between those of its callers; used on the writer's thread.

    Args:
        steps: The journal.
        retention: How much to keep.
        reserve: Space on the disk to give back when there is none left.
        clock: The age of messages.
    """

    def __init__(
        self, steps: JournalSteps, retention: Retention, reserve: Reserve, clock: Clock
    ) -> None:
        self._steps = steps
        self._transaction = steps.store.transaction
        self._retention = retention
        self._reserve = reserve
        self._clock = clock
        self._trimmed_at = steps.store.reader.head()
        self._trimming: Trimming | None = None
        self._removed = 0
        self._rests_until = 0.0

    @property
    def is_trimming(self) -> bool:
        """Whether there may be more to remove."""
        return self._trimming is not None

    def look(self, head: int) -> None:
        """Begin to trim if the log has grown by `EVERY` messages."""
        if head - self._trimmed_at >= EVERY:
            self._begin(head)

    def _begin(self, head: int) -> None:
        self._trimmed_at = head
        self._trimming = Trimming(self._retention, None, self._clock.time())

    def step(self) -> None:
        """Remove some messages."""
        try:
            if not self._commit():
                self._end()
        except Exception as error:
            path = self._steps.store.path
            log.warning("journal_trim_failed", journal=path, error=redact_exception(error))
            self._end()

    def _end(self) -> None:
        self._trimming = None
        self._reserve.fill()

    def make_room(self) -> bool:
        """Remove what need not be kept, as the disk is full; tell whether there was any.

        What takes longer is left to later steps: somebody waits.
        """
        before, end = self._removed, time.monotonic() + HURRY
        self._begin(self._trimmed_at)
        while self.is_trimming and time.monotonic() < end:
            self.step()
        if self._removed == before:
            self._rests_until = end - HURRY + REST
        return self._removed > before

    def open_reserve(self) -> bool:
        """Let the next commits use the space of the reserve; false if that was of no use lately."""
        if time.monotonic() < self._rests_until:
            return False
        if self._reserve.drop():
            checkpoint(self._transaction.connection)
        return True

    def _commit(self) -> bool:
        """Remove some messages, with the space of the reserve if need be."""
        try:
            return self._commit_once()
        except (sqlite3.Error, JournalFullError) as error:
            if not is_full(error, self._steps.store.path) or not self._reserve.drop():
                raise
        checkpoint(self._transaction.connection)
        return self._commit_once()

    def _commit_once(self) -> bool:
        before = self._trimming
        assert before is not None  # noqa: S101 (the writer asks `is_trimming` before)
        trimming = copy(before)  # what it has done counts only once it is committed
        try:
            self._transaction.begin(is_feeding=False)
            has_more = trimming.step(self._steps)
            self._transaction.commit()
        except BaseException:
            self._transaction.roll_back()
            raise
        trimming.log_from(before, self._steps.store.path)
        self._trimming = trimming
        self._removed += trimming.removed - before.removed
        checkpoint(self._transaction.connection)
        return has_more


def checkpoint(connection: sqlite3.Connection) -> None:
    """Move the write-ahead log into the file, so that the next step need not make it longer.

    If the disk has no room even for that, what was removed is removed all the same.
    """
    with suppress(sqlite3.OperationalError):
        connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
