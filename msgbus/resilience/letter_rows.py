"""Dead letters as rows of a table, in a file of their own or in a journal's."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Sequence
from types import MappingProxyType
from typing import Any, Final

from msgbus.errors import MsgBusError
from msgbus.resilience.claims import Claim
from msgbus.resilience.letters import FIELDS, DeadLetterEntry, LetterStatus, micros, moment
from msgbus.resilience.stores import (
    LetterFilter,
    LetterGroup,
    LetterPage,
    Record,
    position,
)

COLUMNS: Final = (*FIELDS, "owner", "claimed_at", "counted")
"""What every table of letters has, beside its rowid, which is called `seq`."""


class LetterTable:
    """The statements about one table.

    Only names of our own tables and columns are put into these texts, never a value.

    Args:
        name: The table.
        beside: Columns that it has in addition, at the end of a row.
        size: The statement that counts all letters, if there is a quicker one.
    """

    def __init__(self, name: str, *, beside: Sequence[str] = (), size: str | None = None) -> None:
        columns = (*COLUMNS, *beside)
        places = ", ".join("?" * len(columns))
        changes = ", ".join(f"{column} = ?" for column in columns)
        self.name = name
        self.listed = ", ".join(columns)
        self.insert = f"INSERT INTO {name} ({self.listed}) VALUES ({places})"  # noqa: S608
        self.update = f"UPDATE {name} SET {changes} WHERE letter_id = ?"  # noqa: S608
        self.get = f"SELECT {self.listed} FROM {name} WHERE letter_id = ?"  # noqa: S608
        self.claimed = f"SELECT {self.listed} FROM {name} WHERE status = 'replaying'"  # noqa: S608
        self.size = size or f"SELECT count(*) FROM {name}"  # noqa: S608
        self.head = f"SELECT coalesce(max(seq), 0) FROM {name}"  # noqa: S608
        self.remove = f"DELETE FROM {name} WHERE letter_id = ?"  # noqa: S608
        self.oldest = f"SELECT {self.listed} FROM {name} WHERE status = ? ORDER BY seq LIMIT 1"  # noqa: S608

    def page(self, which: LetterFilter, after: str | None, limit: int) -> tuple[str, list[Any]]:
        """One page; its first column is `seq`.

        The places come first, from an index alone where that is possible: what has to be
        sorted are numbers, not letters.
        """
        condition, values = where(which, after)
        order = _place(which)
        places = f"SELECT seq FROM {self.name} WHERE {condition} ORDER BY {order} LIMIT ?"  # noqa: S608
        return (
            f"SELECT seq, {self.listed} FROM {self.name} WHERE seq IN ({places}) ORDER BY seq",  # noqa: S608
            [*values, limit],
        )

    def count(self, which: LetterFilter) -> tuple[str, list[Any]]:
        """How many."""
        condition, values = where(which)
        return f"SELECT count(*) FROM {self.name} WHERE {condition}", values  # noqa: S608

    def groups(self, which: LetterFilter) -> tuple[str, list[Any]]:
        """Groups with their newest letter's error."""
        condition, values = where(which)
        return (
            "SELECT g.error_type, g.handler, g.message_type, g.number, g.first, g.last, l.error "  # noqa: S608
            "FROM (SELECT error_type, handler, message_type, count(*) AS number, "
            "min(first_attempt) AS first, max(last_attempt) AS last, max(seq) AS newest "
            f"FROM {self.name} WHERE {condition} GROUP BY error_type, handler, message_type) g "
            f"JOIN {self.name} l ON l.seq = g.newest "
            "ORDER BY g.number DESC, g.error_type, g.handler",
            values,
        )


class LetterRows:
    """The letters of one table, read and written on one connection.

    Opens no transaction: whoever calls has one, and ends it.
    """

    def __init__(self, connection: sqlite3.Connection, table: LetterTable) -> None:
        self.connection = connection
        self.table = table

    # -- rows ------------------------------------------------------------------------------------

    def to_row(self, record: Record) -> Sequence[Any]:
        """A new record as values of the table's columns."""
        return row_of(record)

    def from_row(self, row: Sequence[Any]) -> Record:
        """The record of such values."""
        return record_of(row)

    # -- one letter ------------------------------------------------------------------------------

    def get(self, letter_id: str) -> Record | None:
        """One record."""
        row = self.connection.execute(self.table.get, (letter_id,)).fetchone()
        return None if row is None else self.from_row(row)

    def insert(self, record: Record) -> None:
        """Add a record whose id is new."""
        self.connection.execute(self.table.insert, self.to_row(record))

    def update(self, record: Record) -> None:
        """Write a record in the place of the one with its id."""
        letter_id = record.letter.letter_id
        self.connection.execute(self.table.update, (*self.to_row(record), letter_id))

    def remove(self, letter_id: str) -> None:
        """Forget a letter."""
        self.connection.execute(self.table.remove, (letter_id,))

    # -- many ------------------------------------------------------------------------------------

    def size(self) -> int:
        """How many there are, whatever their status."""
        return self._number(self.table.size)

    def head(self) -> int:
        """The place of the newest letter."""
        return self._number(self.table.head)

    def count(self, which: LetterFilter) -> int:
        """How many fit."""
        return self._number(*self.table.count(which))

    def _number(self, statement: str, values: Sequence[Any] = ()) -> int:
        (number,) = self.connection.execute(statement, values).fetchone()
        return int(number)

    def oldest(self, status: LetterStatus) -> DeadLetterEntry | None:
        """The first that came of those that have this status."""
        row = self.connection.execute(self.table.oldest, (status.value,)).fetchone()
        return None if row is None else self.from_row(row).letter

    def claimed(self) -> list[Record]:
        """Those that are being replayed; damaged ones are left as they are."""
        return self._readable(self.connection.execute(self.table.claimed))[0]

    def _readable(self, rows: Iterable[Sequence[Any]]) -> tuple[list[Record], list[MsgBusError]]:
        """The records of rows, and what is wrong with the others."""
        records: list[Record] = []
        damaged: list[MsgBusError] = []
        for row in rows:
            try:
                records.append(self.from_row(row))
            except MsgBusError as error:
                damaged.append(error)
        return records, damaged

    def page(self, which: LetterFilter, after: str | None, limit: int) -> LetterPage:
        """At most `limit` letters behind the cursor `after`."""
        # One more than asked for says whether there is a next page.
        rows = self.connection.execute(*self.table.page(which, after, limit + 1)).fetchall()
        records, damaged = self._readable(row[1:] for row in rows[:limit])
        return LetterPage(
            tuple(record.letter for record in records),
            str(rows[limit - 1][0]) if len(rows) > limit else None,
            tuple(damaged),
        )

    def groups(self, which: LetterFilter) -> list[LetterGroup]:
        """Letters by error type, handler and message type; the largest group first."""
        return [
            LetterGroup(
                error_type=error_type,
                handler=handler,
                message_type=message_type,
                count=number,
                first=moment(first),
                last=moment(last),
                sample=sample,
            )
            for error_type, handler, message_type, number, first, last, sample in (
                self.connection.execute(*self.table.groups(which))
            )
        ]


# -- records and rows --------------------------------------------------------------------------


def row_of(record: Record) -> tuple[Any, ...]:
    """A record as values under `COLUMNS`, just as they come back."""
    letter = record.letter
    values: dict[str, Any] = {name: getattr(letter, name) for name in FIELDS}
    values["first_attempt"] = micros(letter.first_attempt)
    values["last_attempt"] = micros(letter.last_attempt)
    values["headers"] = json.dumps(dict(letter.headers))
    values["status"] = letter.status.value
    values["answered"] = int(letter.answered)
    values["from_system"] = int(letter.from_system)
    claim = record.claim
    owned = (None, None) if claim is None else (claim.owner, float(claim.at))
    return (*values.values(), *owned, int(record.counted))


def record_of(row: Sequence[Any]) -> Record:
    """The other way round."""
    values: dict[str, Any] = dict(zip(COLUMNS, row, strict=True))
    owner, claimed_at, counted = (values.pop(name) for name in COLUMNS[-3:])
    values["first_attempt"] = moment(values["first_attempt"])
    values["last_attempt"] = moment(values["last_attempt"])
    values["headers"] = MappingProxyType(json.loads(values["headers"]))
    values["status"] = LetterStatus(values["status"])
    values["answered"] = bool(values["answered"])
    values["from_system"] = bool(values["from_system"])
    letter = DeadLetterEntry(**values)
    claim = None if owner is None else Claim(letter.letter_id, owner, claimed_at)
    return Record(letter, claim, bool(counted))


# -- questions ---------------------------------------------------------------------------------


def where(which: LetterFilter, after: str | None = None) -> tuple[str, list[Any]]:
    """A filter as a condition, and its values."""
    seq = _place(which)
    tests: list[tuple[str, Any]] = [
        ("handler = ?", which.handler),
        ("error_type = ?", which.error_type),
        ("session_id = ?", which.session_id),
        ("answered = ?", which.answered),
        ("status = ?", None if which.status is None else which.status.value),
        ("last_attempt >= ?", None if which.since is None else micros(which.since)),
        ("last_attempt < ?", None if which.until is None else micros(which.until)),
        (f"{seq} > ?", None if after is None else position(after)),
        (f"{seq} <= ?", None if which.upto is None else position(which.upto)),
    ]
    given = [(test, value) for test, value in tests if value is not None]
    conditions, values = [test for test, _ in given], [value for _, value in given]
    if which.message_types is not None:
        names = sorted(which.message_types)
        conditions.append(f"message_type IN ({', '.join('?' * len(names))})")
        values += names
    return " AND ".join(conditions) or "1", values


def _place(which: LetterFilter) -> str:
    """How a question names `seq`; with `+` no index serves for it.

    With times given, that keeps the planner from walking all letters in their order.
    """
    return "seq" if which.since is None and which.until is None else "+seq"
