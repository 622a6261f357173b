"""Everything that is read about messages: pages, single ones, flows, searches."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from msgbus.errors import CorruptRecordError
from msgbus.journal.flows import flow_trees
from msgbus.journal.records import LARGEST_OFFSET, FlowNode, Kind, Page, Record
from msgbus.journal.sqlite import reads
from msgbus.journal.sqlite.rows import COLUMNS, from_row
from msgbus.journal.sqlite.schema import read_meta

if TYPE_CHECKING:
    from msgbus.journal.codec import PayloadCodec

_SELECT: Final = f"SELECT {COLUMNS} FROM msgbus_messages"  # noqa: S608


class Source(NamedTuple):
    """A connection with a snapshot open, and how to read its records."""

    connection: sqlite3.Connection
    path: str
    codec: PayloadCodec | None

    def record(self, row: tuple[Any, ...]) -> Record:
        """The record of a row; raises if it is damaged."""
        return from_row(row, self.path, self.codec)


class Terms(NamedTuple):
    """Conditions of a search, as SQL."""

    clauses: list[str]
    values: list[Any]

    def add(self, clause: str, *values: object) -> None:
        """One more condition, unless its value is `None`."""
        if values[0] is not None:
            self.clauses.append(clause)
            self.values.extend(values)


def first(connection: sqlite3.Connection) -> int:
    """The lowest offset that is left."""
    row = connection.execute("SELECT min(offset) FROM msgbus_messages").fetchone()
    return reads.head(connection) + 1 if row[0] is None else int(row[0])


def offset_at(connection: sqlite3.Connection, time: float) -> int:
    """The lowest offset recorded at `time` or later.

    A scan, not a search by halves: a clock that jumped leaves times out of order.
    """
    row = connection.execute(
        "SELECT offset FROM msgbus_messages WHERE time >= ? ORDER BY offset LIMIT 1", (time,)
    ).fetchone()
    return reads.head(connection) + 1 if row is None else int(row[0])


def read(
    source: Source,
    start: int,
    limit: int,
    topic: str | None,
    names: Collection[str] | None,
) -> Page:
    """Records from `start` on; see `Journal.read`."""
    head = reads.head(source.connection)
    start = max(start, 1)
    if start > head or limit <= 0:
        return Page(next=start)
    terms = Terms(["offset >= ?"], [start])
    terms.add("topic = ?", topic)
    if names is not None:
        terms.clauses.append(f"name IN ({','.join('?' * len(names))})")
        terms.values.extend(names)
    rows = _rows(source, terms, "offset", limit)
    if topic is None and names is None:
        return _dense(source, rows, start, head)
    records, broken = _sound(source, rows)
    if broken is not None:
        return Page(records, next=broken)
    # Everything up to the head was looked at, unless the limit ended it.
    return Page(records, next=records[-1].offset + 1 if len(records) == limit else head + 1)


def _rows(source: Source, terms: Terms, order: str, limit: int) -> list[tuple[Any, ...]]:
    statement = f"{_SELECT} WHERE {' AND '.join(terms.clauses)} ORDER BY {order} LIMIT ?"
    return source.connection.execute(statement, (*terms.values, limit)).fetchall()


def _sound(source: Source, rows: list[tuple[Any, ...]]) -> tuple[list[Record], int | None]:
    """Records up to the first damaged one, and where that is. Raises if it is the first."""
    records: list[Record] = []
    for row in rows:
        try:
            records.append(source.record(row))
        except CorruptRecordError as error:
            if not records:
                raise
            return records, error.offset
    return records, None


def _dense(source: Source, rows: list[tuple[Any, ...]], start: int, head: int) -> Page:
    """A page without a gap: offsets are given without one, so a gap is a record that is lost."""
    if not rows or rows[0][0] != start:
        start = max(start, trimmed(source.connection) + 1)
        if start > head:
            return Page(next=start)
        if not rows or rows[0][0] != start:
            raise CorruptRecordError("is missing", path=source.path, offset=start)
    for place, row in enumerate(rows):
        if row[0] != start + place:
            rows = rows[:place]
            break
    records, broken = _sound(source, rows)
    return Page(records, next=broken or start + len(rows))


def trimmed(connection: sqlite3.Connection) -> int:
    """The highest offset that retention has removed."""
    return int(read_meta(connection, "trimmed") or 0)


def message(source: Source, message_id: str) -> Record | None:
    """The message of this id."""
    row = source.connection.execute(f"{_SELECT} WHERE message_id = ?", (message_id,)).fetchone()
    return None if row is None else source.record(row)


def flow(source: Source, correlation_id: str) -> tuple[FlowNode, ...]:
    """All messages of one flow, as trees."""
    rows = source.connection.execute(
        f"{_SELECT} WHERE (correlation_id = ? OR (message_id = ? AND correlation_id IS NULL)) "
        "ORDER BY offset",
        (correlation_id, correlation_id),
    ).fetchall()
    return flow_trees([source.record(row) for row in rows])


def find(
    source: Source,
    *,
    topic: str | None,
    name: str | None,
    key: str | None,
    kind: Kind | None,
    session_id: str | None,
    correlation_id: str | None,
    since: float | None,
    until: float | None,
    start: int,
    limit: int,
    newest_first: bool,
) -> Page:
    """Messages that fit; see `Journal.find`."""
    terms = Terms([], [])
    if newest_first:
        terms.add("offset <= ?", start or LARGEST_OFFSET)
    else:
        terms.add("offset >= ?", start)
    terms.add("topic = ?", topic)
    terms.add("name = ?", name)
    terms.add("key = ?", key)
    terms.add("kind = ?", None if kind is None else kind.value)
    terms.add("session_id = ?", session_id)
    terms.add("time >= ?", since)
    terms.add("time < ?", until)
    if correlation_id is not None:
        terms.add(
            "(correlation_id = ? OR (message_id = ? AND correlation_id IS NULL))",
            correlation_id,
            correlation_id,
        )
    order = "offset DESC" if newest_first else "offset"
    records = [source.record(row) for row in _rows(source, terms, order, limit)]
    if newest_first:
        more = len(records) == limit and limit > 0
        return Page(records, next=max(records[-1].offset - 1, 0) if more else 0)
    if len(records) == limit and limit > 0:
        return Page(records, next=records[-1].offset + 1)
    return Page(records, next=max(start, reads.head(source.connection) + 1))
