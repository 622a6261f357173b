"""Reads by one connection: in a snapshot, or in the transaction of the writer."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, final

from msgbus.errors import CursorError, JournalCorruptError
from msgbus.journal.ports import Due, KeyRows, Scan
from msgbus.journal.records import (
    Cursor,
    Instance,
    Kind,
    Letter,
    Member,
    Pending,
    Record,
    Result,
    Selection,
    State,
)
from msgbus.journal.rows import beyond_head
from msgbus.journal.sqlite.columns import (
    CURSOR,
    INSTANCE,
    LETTER,
    MEMBER,
    PENDING,
    RESULT,
    checksum,
    number,
    read_cursor,
    read_instance,
    read_letter,
    read_member,
    read_pending,
    read_result,
)
from msgbus.journal.sqlite.messages import MESSAGE, Row, read_message
from msgbus.journal.sqlite.schema import meta_value, read_meta

if TYPE_CHECKING:
    from msgbus.journal.codec import PayloadCodec

SCAN: Final = 5_000
"""Offsets that one read looks at."""

CHUNK: Final = 500
"""Values of one `IN (...)`; older versions of SQLite take no more than 999."""

_MOST_NAMES: Final = 200

MOST_MISSING: Final = 1000
"""Missing offsets of one gap that are reported: a damaged offset may leave a gap of any size."""

_PRECEDING: Final = "SELECT max(offset) FROM msgbus_messages WHERE offset < ?"
_FOLLOWING: Final = "SELECT min(offset) FROM msgbus_messages WHERE offset > ?"

_HEAD: Final = """
SELECT (SELECT max(offset) FROM msgbus_messages), value, crc FROM msgbus_meta
WHERE key = 'trimmed'
"""
_OTHER_KINDS: Final = {
    kind: ", ".join(f"'{other}'" for other in Kind if other is not kind) for kind in Kind
}
_REPAIR: Final = (
    "is damaged: its checksum does not fit. Restore a backup, or seek it to where it should be; "
    "starting anywhere else would skip or repeat messages."
)
_STATES: Final = {str(state): state for state in State}
_DUE: Final = f"SELECT {PENDING} FROM msgbus_pending INDEXED BY msgbus_pending_due"  # noqa: S608
_FIRST_DUE: Final = (
    "SELECT due FROM msgbus_pending INDEXED BY msgbus_pending_due "
    "WHERE subscription = ? AND alone = ? AND due <= 9e999"
)
"""Without a time that is damaged to a text."""
_DAMAGED: Final = (
    "SELECT count(*) FROM msgbus_pending INDEXED BY msgbus_pending_damaged "
    "WHERE subscription = ? AND state = 'damaged'"
)
SKIPPED: Final = "skipped:"
"""Before the name of a subscription: key of the number of messages removed before it had them."""

WARNED: Final = "overdue:"
"""The same: key of the time since when it is known to hold back more than it may."""

_NOTE: Final = "SELECT value, crc FROM msgbus_meta WHERE key = ?"
_HELD: Final = """
WITH RECURSIVE found (key) AS (
    SELECT (SELECT min(key) FROM msgbus_pending INDEXED BY msgbus_pending_key
        WHERE subscription = ? AND partition = ? AND key IS NOT NULL)
    UNION ALL
    SELECT (SELECT min(key) FROM msgbus_pending INDEXED BY msgbus_pending_key
        WHERE subscription = ? AND partition = ? AND key > found.key)
    FROM found WHERE found.key IS NOT NULL
)
SELECT key, (SELECT min(offset) FROM msgbus_pending INDEXED BY msgbus_pending_key
    WHERE subscription = ? AND partition = ? AND key = found.key)
FROM found WHERE key IS NOT NULL
"""
"""Two steps in the index for each key, however many rows it has."""


@final
class Source:
    """Path, codec and names of messages, shared by all connections to one file."""

    def __init__(self, path: str, codec: PayloadCodec | None) -> None:
        self.path = path
        self.codec = codec
        self.names: frozenset[str] = frozenset()
        """Names that undamaged messages have: those not wanted are left out by SQLite.

        Not the other way round: a message whose name is damaged would be passed in silence.
        """

    def damaged(self, what: str) -> JournalCorruptError:
        """Make the error for a row whose checksum does not fit, or that the codec refuses."""
        message = (
            f"{what} of the journal {self.path} is damaged: its checksum does not fit"
            f"{'' if self.codec is None else ', or the codec refuses it'}."
        )
        return JournalCorruptError(message, path=self.path)


class TableReader:
    """Reads all tables of one journal on one connection."""

    def __init__(self, connection: sqlite3.Connection, source: Source) -> None:
        self._connection = connection
        self._source = source
        self.codec = source.codec

    def _first(self, query: str, *values: object) -> Any:
        return self._connection.execute(query, values).fetchone()

    # -- the log -----------------------------------------------------------------------------

    def head(self) -> int:
        """Return the highest offset ever given."""
        highest, value, crc = self._first(_HEAD) or (None, None, None)
        return max(highest or 0, int(meta_value("trimmed", value, crc)))

    def trimmed(self) -> int:
        """Return the offset up to which retention has removed what nobody needs."""
        return int(read_meta(self._connection, "trimmed"))

    def read(
        self,
        after: int,
        limit: int,
        selection: Selection,
        partitions: Collection[int] | None = None,
    ) -> Scan:
        """Read records behind an offset; see `Log.read`."""
        return self.scan(after, self.head(), limit, selection, partitions)

    def scan(
        self,
        after: int,
        until: int,
        limit: int,
        selection: Selection,
        partitions: Collection[int] | None = None,
    ) -> Scan:
        """Read records behind the offset `after`, up to `until`."""
        limit, upto = max(limit, 1), max(min(until, after + SCAN), after)
        where, values = self._where(selection, partitions)
        query = (
            f"SELECT {MESSAGE} FROM msgbus_messages "  # noqa: S608
            f"WHERE offset > ? AND offset <= ?{where} ORDER BY offset LIMIT ?"
        )
        found: list[Record | int] = []
        last, seen, is_full = after, 0, False
        while last < upto and not is_full:
            rows = self._connection.execute(query, (last, upto, *values, limit)).fetchall()
            for row in rows:
                seen += 1
                record = read_message(row, self.codec)
                if self._is_wanted(record, row, selection, partitions):
                    found.append(record)
                    is_full = len(found) >= limit
                    if is_full:
                        upto = row[0]
                        break
            if len(rows) < limit:
                break
            last = rows[-1][0]
        # Its slot is missing, too: it goes to one partition, as if its slot were 0.
        trimmed = self.trimmed()
        if seen < upto - after and (partitions is None or 0 in partitions):
            return self._with_missing(Scan(found, upto, trimmed), after, until, limit)
        return Scan(found, upto, trimmed)

    def _with_missing(self, scan: Scan, after: int, until: int, limit: int) -> Scan:
        """Add the offsets of messages that are neither there nor trimmed, as if damaged."""
        missing = self.missing(after, scan.upto)
        if not missing:
            return scan
        found = sorted([*scan.records, *missing], key=_offset)
        if len(found) >= limit:
            return Scan(found[:limit], _offset(found[limit - 1]), scan.trimmed)
        upto = scan.upto
        if upto - self._before(upto + 1) > MOST_MISSING:
            following = self._first(_FOLLOWING, upto)[0]
            upto = until if following is None else min(until, following - 1)
        return Scan(found, upto, scan.trimmed)

    def _before(self, offset: int) -> int:
        """Return the offset that is there or trimmed before another."""
        return max(self._first(_PRECEDING, offset)[0] or 0, self.trimmed())

    def missing(self, after: int, upto: int) -> list[int]:
        """Return offsets that are neither there nor trimmed, of each gap the first thousand."""
        count = "SELECT count(*) FROM msgbus_messages WHERE offset > ? AND offset <= ?"
        if self._first(count, after, upto)[0] >= upto - after:
            return []
        after = max(after, self.trimmed())
        query = (
            "SELECT offset FROM msgbus_messages WHERE offset > ? AND offset <= ? ORDER BY offset"
        )
        offsets = [offset for (offset,) in self._connection.execute(query, (after, upto))]
        before, found = self._before(after + 1), list[int]()
        for offset in (*offsets, upto + 1):
            first = max(before, after) + 1
            found += range(first, min(offset, before + 1 + MOST_MISSING))
            before = offset
        return found

    def _where(
        self, selection: Selection, partitions: Collection[int] | None
    ) -> tuple[str, list[object]]:
        """Leave out what is surely not wanted."""
        where = f" AND kind NOT IN ({_OTHER_KINDS[selection.kind]})"
        values: list[object] = []
        if selection.names is not None:
            others = sorted(self._source.names.difference(selection.names))[:_MOST_NAMES]
            where += f" AND name NOT IN ({places(others)})"
            values += others
        if partitions is not None and selection.key is None:
            wanted = ", ".join(str(int(partition)) for partition in partitions)
            where += f" AND slot % {selection.partitions:d} IN ({wanted})"
        return where, values

    def _is_wanted(
        self,
        record: Record | int,
        row: Row,
        selection: Selection,
        partitions: Collection[int] | None,
    ) -> bool:
        if isinstance(record, int):
            # Whose it is cannot be known: it goes to all, but to one partition only.
            slot = row[-2] if isinstance(row[-2], int) else 0
            return partitions is None or slot % selection.partitions in partitions
        if not selection.takes(record):
            if record.name not in self._source.names:
                self._source.names |= {record.name}
            return False
        is_checked = partitions is None or selection.key is None
        return is_checked or selection.partition(record) in partitions  # type: ignore[operator]

    def messages(self, offsets: Sequence[int]) -> dict[int, Record]:
        """Return those of these messages that are there and undamaged, by offset."""
        found: dict[int, Record] = {}
        for start in range(0, len(offsets), CHUNK):
            chunk = offsets[start : start + CHUNK]
            query = f"SELECT {MESSAGE} FROM msgbus_messages WHERE offset IN ({places(chunk)})"  # noqa: S608
            for row in self._connection.execute(query, chunk):
                record = read_message(row, self.codec)
                if isinstance(record, Record):
                    found[record.offset] = record
        return found

    def offset_of(self, message_id: str) -> int | None:
        """Return the offset of a message, if the log has it."""
        row = self._first("SELECT offset FROM msgbus_messages WHERE message_id = ?", message_id)
        return None if row is None else int(row[0])

    # -- members and cursors -----------------------------------------------------------------

    def members(self) -> list[Member]:
        """Return all members, by id; one that is damaged serves nothing, by no known process."""
        query = f"SELECT {MEMBER} FROM msgbus_members ORDER BY id"  # noqa: S608
        rows: list[Row] = self._connection.execute(query).fetchall()
        return [read_member(row) or Member(row[0], "", {}, number(row[3])) for row in rows]

    def cursors(self, name: str | None = None) -> list[Cursor]:
        """Return the cursors of one subscription, or of all, by name and partition.

        Raises:
            CursorError: One of the subscription is damaged, or beyond the head; among all it
                is left out if it is damaged.
        """
        where, values = ("", ()) if name is None else (" WHERE name = ?", (name,))
        query = f"SELECT {CURSOR} FROM msgbus_subscriptions{where} ORDER BY name, partition"  # noqa: S608
        found: list[Cursor] = []
        for row in self._connection.execute(query, values).fetchall():
            cursor = read_cursor(row)
            if cursor is not None:
                found.append(cursor)
            elif name is not None:
                raise CursorError(name, _REPAIR, path=self._source.path)
        if name is not None and found:
            self._check_positions(name, max(cursor.fetched for cursor in found))
        return found

    def _check_positions(self, name: str, fetched: int) -> None:
        head = self.head()
        if fetched > head:
            raise beyond_head(name, fetched, head, self._source.path)

    def cursor(self, name: str, partition: int) -> Cursor | None:
        """Return one cursor, if it is there.

        Raises:
            CursorError: It is damaged.
        """
        query = f"SELECT {CURSOR} FROM msgbus_subscriptions WHERE name = ? AND partition = ?"  # noqa: S608
        row = self._first(query, name, partition)
        cursor = None if row is None else read_cursor(row)
        if row is not None and cursor is None:
            raise CursorError(name, _REPAIR, path=self._source.path)
        return cursor

    def record(self, row: Pending) -> Record | None:
        """Return the message of a row; `None` if it is damaged."""
        return row.body or self.messages([row.offset]).get(row.offset)

    # -- pending rows ------------------------------------------------------------------------

    def pending(self, query: str, values: Sequence[object]) -> list[Pending]:
        """Return the rows of a query for `PENDING`; those that are damaged as `DAMAGED`."""
        rows = self._connection.execute(query, values).fetchall()
        return [read_pending(row, self.codec) for row in rows]

    def row(self, name: str, offset: int) -> Pending | None:
        """Return one row; one that is damaged as `DAMAGED`."""
        query = f"SELECT {PENDING} FROM msgbus_pending WHERE subscription = ? AND offset = ?"  # noqa: S608
        row = self._first(query, name, offset)
        return None if row is None else read_pending(row, self.codec)

    def find(
        self,
        name: str | None,
        states: Collection[State],
        *,
        key: str | None = None,
        after: Pending | None = None,
        limit: int = 100,
    ) -> list[Pending]:
        """Return rows of a subscription, or of all; see `Rows.find`."""
        is_dead = set(states) == {State.DEAD}
        index, where = "", ["state = 'dead'" if is_dead else _condition(states)]
        values: list[object] = []
        if name is not None:
            index = " INDEXED BY msgbus_pending_dead" if is_dead else ""
            where.append("subscription = ?")
            values.append(name)
        if after is not None:
            where.append("offset >= ? AND (offset, subscription) > (?, ?)")
            values += [after.offset, after.offset, after.subscription]
        if key is not None:
            where.append("key = ?")
            values.append(key)
        query = (
            f"SELECT {PENDING} FROM msgbus_pending{index} WHERE {' AND '.join(where)} "  # noqa: S608
            f"ORDER BY offset, subscription"
        )
        rows = (read_pending(row, self.codec) for row in self._connection.execute(query, values))
        return list(islice((row for row in rows if row.state in states), max(limit, 0)))

    def count(self, name: str | None = None) -> dict[State, int]:
        """Count rows by state."""
        where, values = ("", ()) if name is None else (" WHERE subscription = ?", (name,))
        query = f"SELECT state, count(*) FROM msgbus_pending{where} GROUP BY state"  # noqa: S608
        counts: dict[State, int] = {}
        for word, rows in self._connection.execute(query, values):
            state = _STATES.get(word, State.DAMAGED)
            counts[state] = counts.get(state, 0) + rows
        return counts

    def held(self, name: str, partition: int) -> dict[str, int]:
        """Return the lowest offset of a row of each key."""
        return dict(self._connection.execute(_HELD, (name, partition) * 3))

    def blocked_keys(self, name: str, partition: int) -> set[str]:
        """Return the keys of a partition that have rows."""
        return set(self.held(name, partition))

    def key_rows(self, name: str, partition: int, key: str) -> KeyRows:
        """Return how many rows a key of a partition has, and the first."""
        query = (
            "SELECT min(offset), count(*) FROM msgbus_pending INDEXED BY msgbus_pending_key "
            "WHERE subscription = ? AND partition = ? AND key = ?"
        )
        return KeyRows(*self._first(query, name, partition, key))

    def offsets(self, name: str, after: int, upto: int) -> set[int]:
        """Return the offsets of rows in a range."""
        query = (
            "SELECT offset FROM msgbus_pending WHERE subscription = ? AND offset > ? "
            "AND offset <= ?"
        )
        return {offset for (offset,) in self._connection.execute(query, (name, after, upto))}

    def next_due(self, name: str, partitions: Collection[int] | None = None) -> Due:
        """Return when the next row is due."""
        query = f"{_FIRST_DUE}{_among(partitions)} ORDER BY due LIMIT 1"
        usual, suspect = (self._first(query, name, alone) for alone in (0, 1))
        times = [row[0] for row in (usual, suspect) if row is not None]
        damaged = self._first(f"{_DAMAGED}{_among(partitions)}", name)[0]
        return Due(min(times, default=None), suspect is not None, damaged, self.skipped(name))

    def skipped(self, name: str) -> int:
        """Return how many messages were removed before a subscription was given them, at most."""
        return int(self.note(SKIPPED + name) or 0)

    def note(self, key: str) -> str | None:
        """Return what a trim has noted of a subscription; `None` if nothing, or it is damaged."""
        value, crc = self._first(_NOTE, key) or (None, None)
        return str(value) if value is not None and checksum(key, value) == crc else None

    def due_rows(
        self,
        name: str,
        now: float,
        limit: int,
        partitions: Collection[int] | None = None,
        *,
        alone: bool,
    ) -> list[Pending]:
        """Return waiting rows whose time has come, and damaged ones as `DAMAGED`."""
        where = f"subscription = ? AND alone = ? AND due <= ?{_among(partitions)}"
        query = f"{_DUE} WHERE {where} ORDER BY due, offset LIMIT ?"
        return self.pending(query, (name, int(alone), now, max(limit, 0)))

    def due(self, name: str, now: float, limit: int = 100) -> list[Pending]:
        """Return the same, whether they run alone or not."""
        found = [
            *self.due_rows(name, now, limit, alone=False),
            *self.due_rows(name, now, limit, alone=True),
        ]
        return sorted(found, key=_overdue)[: max(limit, 0)]

    # -- letters, results, instances ---------------------------------------------------------

    def _checked(self, row: Any, read: Callable[[Row], Any], what: str) -> Any:
        value = None if row is None else read(row)
        if row is not None and value is None:
            raise self._source.damaged(what)
        return value

    def letter(self, row: Pending) -> Letter | None:
        """Return the letter of a dead row."""
        query = f"SELECT {LETTER} FROM msgbus_letters WHERE subscription = ? AND offset = ?"  # noqa: S608
        found = self._first(query, row.subscription, row.offset)
        what = f"The letter of message {row.offset} of {row.subscription!r}"
        letter: Letter | None = self._checked(found, lambda row: read_letter(row, self.codec), what)
        return letter

    def result(self, message_id: str) -> Result | None:
        """Return the result of an enqueued command."""
        query = f"SELECT {RESULT} FROM msgbus_results WHERE message_id = ?"  # noqa: S608
        result: Result | None = self._checked(
            self._first(query, message_id),
            lambda row: read_result(row, self.codec),
            f"The result of {message_id}",
        )
        return result

    def results(self, message_ids: Collection[str]) -> list[Result]:
        """Return those results of these commands that are there, without damaged ones."""
        wanted = "message_id IN (SELECT value FROM json_each(?))"
        query = f"SELECT {RESULT} FROM msgbus_results WHERE {wanted}"  # noqa: S608
        rows: Iterator[Row] = self._connection.execute(query, (json.dumps(list(message_ids)),))
        found = (read_result(row, self.codec) for row in rows)
        return [one for one in found if one is not None]

    def instance(self, name: str, key: str) -> Instance | None:
        """Return one instance."""
        query = f"SELECT {INSTANCE} FROM msgbus_instances WHERE name = ? AND key = ?"  # noqa: S608
        instance: Instance | None = self._checked(
            self._first(query, name, key),
            lambda row: read_instance(row, self.codec),
            f"Instance {key!r} of {name!r}",
        )
        return instance

    def due_instances(self, now: float, limit: int = 100) -> list[Instance]:
        """Return instances whose `wake` has come, without damaged ones."""
        query = (
            f"SELECT {INSTANCE} FROM msgbus_instances INDEXED BY msgbus_instances_wake "  # noqa: S608
            f"WHERE wake <= ? ORDER BY wake, name, key"
        )
        rows: Iterator[Row] = self._connection.execute(query, (now,))
        found = (read_instance(row, self.codec) for row in rows)
        return list(islice((one for one in found if one is not None), max(limit, 0)))


def places(values: Collection[object]) -> str:
    """Return as many question marks."""
    return ", ".join("?" * len(values))


def _offset(one: Record | int) -> int:
    return one if isinstance(one, int) else one.offset


def _condition(states: Collection[State]) -> str:
    """Choose rows by state; every unknown one is a damaged row, and any may be."""
    if State.DAMAGED in states:
        return "1"
    return f"state IN ({', '.join(repr(str(state)) for state in states)})"


def _among(partitions: Collection[int] | None) -> str:
    if partitions is None:
        return ""
    # An empty list and INDEXED BY do not go together.
    wanted = ", ".join(str(int(one)) for one in partitions) or "NULL"
    return f" AND partition IN ({wanted})"


def _overdue(row: Pending) -> tuple[float, int]:
    return row.due or 0.0, row.offset
