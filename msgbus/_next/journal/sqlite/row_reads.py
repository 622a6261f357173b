"""Pending rows, letters, results and instances, as one connection sees them."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, final

from msgbus._next.journal.ports import Due
from msgbus._next.journal.records import Instance, Letter, Pending, Result, State
from msgbus._next.journal.sqlite.columns import (
    INSTANCE,
    LETTER,
    PENDING,
    RESULT,
    read_instance,
    read_letter,
    read_pending,
    read_result,
)
from msgbus._next.journal.sqlite.statements import Row
from msgbus.errors import JournalCorruptError

if TYPE_CHECKING:
    from msgbus.journal.codec import PayloadCodec

_STATES: Final = {str(state): state for state in State}
_DUE: Final = f"SELECT {PENDING} FROM msgbus_pending INDEXED BY msgbus_pending_due"  # noqa: S608
_FIRST_DUE: Final = (
    "SELECT due FROM msgbus_pending INDEXED BY msgbus_pending_due "
    "WHERE subscription = ? AND alone = ? AND due IS NOT NULL"
)
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
        """Make the error for a row whose checksum does not fit."""
        message = f"{what} of the journal {self.path} is damaged: its checksum does not fit."
        return JournalCorruptError(message, path=self.path)


class RowReader:
    """Reads the tables beside the log on one connection."""

    def __init__(self, connection: sqlite3.Connection, source: Source) -> None:
        self._connection = connection
        self._source = source
        self._codec = source.codec

    def _first(self, query: str, *values: object) -> Any:
        return self._connection.execute(query, values).fetchone()

    # -- pending rows ------------------------------------------------------------------------

    def pending(self, query: str, values: Sequence[object]) -> list[Pending]:
        """Return the rows of a query for `PENDING`; those that are damaged as `DAMAGED`."""
        rows = self._connection.execute(query, values).fetchall()
        return [read_pending(row, self._codec) for row in rows]

    def row(self, name: str, offset: int) -> Pending | None:
        """Return one row; one that is damaged as `DAMAGED`."""
        query = f"SELECT {PENDING} FROM msgbus_pending WHERE subscription = ? AND offset = ?"  # noqa: S608
        row = self._first(query, name, offset)
        return None if row is None else read_pending(row, self._codec)

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
        rows = (read_pending(row, self._codec) for row in self._connection.execute(query, values))
        return list(islice((row for row in rows if row.state in states), max(limit, 0)))

    def count(self, name: str | None = None) -> dict[State, int]:
        """Count rows by state."""
        where, values = ("", ()) if name is None else (" WHERE subscription = ?", (name,))
        query = f"SELECT state, count(*) FROM msgbus_pending{where} GROUP BY state"  # noqa: S608
        counts: dict[State, int] = {}
        for word, number in self._connection.execute(query, values):
            state = _STATES.get(word, State.DAMAGED)
            counts[state] = counts.get(state, 0) + number
        return counts

    def held(self, name: str, partition: int) -> dict[str, int]:
        """Return the lowest offset of a row of each key."""
        return dict(self._connection.execute(_HELD, (name, partition) * 3))

    def blocked_keys(self, name: str, partition: int) -> set[str]:
        """Return the keys of a partition that have rows."""
        return set(self.held(name, partition))

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
        return Due(min(times, default=None), suspect is not None)

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
        letter: Letter | None = self._checked(found, read_letter, what)
        return letter

    def result(self, message_id: str) -> Result | None:
        """Return the result of an enqueued command."""
        query = f"SELECT {RESULT} FROM msgbus_results WHERE message_id = ?"  # noqa: S608
        result: Result | None = self._checked(
            self._first(query, message_id),
            lambda row: read_result(row, self._codec),
            f"The result of {message_id}",
        )
        return result

    def instance(self, name: str, key: str) -> Instance | None:
        """Return one instance."""
        query = f"SELECT {INSTANCE} FROM msgbus_instances WHERE name = ? AND key = ?"  # noqa: S608
        instance: Instance | None = self._checked(
            self._first(query, name, key),
            lambda row: read_instance(row, self._codec),
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
        found = (read_instance(row, self._codec) for row in rows)
        return list(islice((one for one in found if one is not None), max(limit, 0)))


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
