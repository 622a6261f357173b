"""Everything that is read about the schedule: what is due, for whom, and when the next is."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from msgbus.journal.records import Scheduled
from msgbus.journal.sqlite.reads import CHUNK, damaged
from msgbus.journal.sqlite.rows import unpack

if TYPE_CHECKING:
    from msgbus.journal.sqlite.queries import Source

_SELECT: Final = (
    "SELECT id, due, subscription, attempt, name, envelope, payload, crc FROM msgbus_schedule"
)


class Whose(NamedTuple):
    """Which part of the schedule is asked for."""

    subscription: str | None
    names: Collection[str] | None

    def clause(self) -> str:
        """The condition; `IS` and not `=`, so that NULL is a value like others."""
        if self.names is None:
            return "subscription IS ?"
        return f"subscription IS ? AND name IN ({','.join('?' * len(self.names))})"

    def values(self) -> tuple[Any, ...]:
        """What the question marks of the condition stand for."""
        return (self.subscription, *(self.names or ()))


def due_statement(whose: Whose) -> str:
    """Asks for what is due: values of `whose`, then the time and the limit."""
    return f"{_SELECT} WHERE {whose.clause()} AND due <= ? ORDER BY due, rowid LIMIT ?"


def due(source: Source, time: float, limit: int, whose: Whose) -> list[Scheduled]:
    """What is due, the longest overdue first."""
    values = (*whose.values(), time, limit)
    return _entries(source, source.connection.execute(due_statement(whose), values).fetchall())


def next_due_statement(whose: Whose) -> str:
    """Asks when the next one is due."""
    return f"SELECT due FROM msgbus_schedule WHERE {whose.clause()} ORDER BY due LIMIT 1"  # noqa: S608


def next_due(connection: sqlite3.Connection, whose: Whose) -> float | None:
    """When the next one is due."""
    row = connection.execute(next_due_statement(whose), whose.values()).fetchone()
    return None if row is None else float(row[0])


def count(connection: sqlite3.Connection, whose: Whose) -> int:
    """How many wait, due or not."""
    statement = f"SELECT count(*) FROM msgbus_schedule WHERE {whose.clause()}"  # noqa: S608
    (found,) = connection.execute(statement, whose.values()).fetchone()
    return int(found)


def entries(source: Source, ids: Sequence[str]) -> list[Scheduled]:
    """Those of these ids that are there."""
    found: list[Scheduled] = []
    for start in range(0, len(ids), CHUNK):
        chunk = ids[start : start + CHUNK]
        statement = f"{_SELECT} WHERE id IN ({','.join('?' * len(chunk))})"
        found += _entries(source, source.connection.execute(statement, chunk).fetchall())
    return found


def _entries(source: Source, rows: list[tuple[Any, ...]]) -> list[Scheduled]:
    entries: list[Scheduled] = []
    for name, when, who, attempt, wire_name, envelope, payload, crc in rows:
        packed = (envelope, payload, crc)
        record = unpack(packed, source.codec, name, when, who, attempt, wire_name)
        if record is None:
            raise damaged(source.path, f"The scheduled message {name}")
        entries.append(Scheduled(name, when, record, who, attempt))
    return entries
