"""Room in a file of dead letters: who goes when it is full."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import final

from msgbus.resilience import sqlite_schema as schema
from msgbus.resilience.letters import DONE, DeadLetterEntry, LetterStatus
from msgbus.resilience.stores import Notice, Overflow, Record, added


def stored_record(connection: sqlite3.Connection, letter_id: str) -> Record | None:
    """One record, read in the transaction that is under way."""
    row = connection.execute(schema.GET, (letter_id,)).fetchone()
    return None if row is None else schema.record_of(row)


@final
class Room:
    """At most so many letters in a file."""

    def __init__(self, max_size: int | None, overflow: Overflow) -> None:
        self._max_size = max_size
        self._overflow = overflow

    def keep(self, connection: sqlite3.Connection, letter: DeadLetterEntry) -> Sequence[Notice]:
        """Write a letter that came, perhaps again."""
        record = stored_record(connection, letter.letter_id)
        if record is None:
            return self.insert(connection, Record(letter))
        row = schema.row_of(added(record, letter))
        connection.execute(schema.UPDATE, (*row, letter.letter_id))
        return ()

    def insert(
        self, connection: sqlite3.Connection, record: Record, *, must_fit: bool = False
    ) -> Sequence[Notice]:
        """Write a new record if there is room, or room can be made; who was lost for it."""
        notices: list[Notice] = []
        if self._max_size is not None:
            (size,) = connection.execute(schema.SIZE).fetchone()
            reason = f"the store is full ({self._max_size} letters)"
            for _ in range(size + 1 - self._max_size):
                found = self._least_needed(connection)
                if found is None and not must_fit:
                    return [Notice("refused", record.letter, reason)]
                if found is None:
                    break
                connection.execute(schema.REMOVE, (found.letter_id,))
                if found.status not in DONE:
                    notices.append(Notice("dropped", found, reason))
        connection.execute(schema.INSERT, schema.row_of(record))
        return notices

    def _least_needed(self, connection: sqlite3.Connection) -> DeadLetterEntry | None:
        """The letter to go first: one that is done, else the oldest if that may be dropped."""
        wanted = sorted(DONE)
        if self._overflow is Overflow.DROP_OLDEST:
            wanted.append(LetterStatus.DEAD)
        for status in wanted:
            row = connection.execute(schema.OLDEST, (status.value, 1)).fetchone()
            if row is not None:
                return schema.record_of(row).letter
        return None
