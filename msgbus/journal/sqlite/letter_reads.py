"""Search among the letters of dead rows, by the indexes of their table."""

from __future__ import annotations

import sqlite3
from typing import Final

from msgbus.journal.letters import LetterSelection, LetterTotal, StoredLetter
from msgbus.journal.records import Pending, Record, State
from msgbus.journal.sqlite.columns import LETTER, read_letter
from msgbus.journal.sqlite.faults import translated
from msgbus.journal.sqlite.files import open_reader
from msgbus.journal.sqlite.messages import Row
from msgbus.journal.sqlite.questions import QuestionReader
from msgbus.journal.sqlite.schema import has_journal

_DEAD: Final = LetterSelection(statuses=("dead",))
_COUNT_DEAD: Final = (
    "SELECT count(*) FROM msgbus_pending INDEXED BY msgbus_pending_dead WHERE state = 'dead'"
)
_LAST: Final = "SELECT seq FROM sqlite_sequence WHERE name = 'msgbus_letters'"
_NO_ROW: Final = Pending("", 0, 0, None, State.DAMAGED, 0, None, None, 0, False, None, 0.0)


def _where(which: LetterSelection, after: int = 0) -> tuple[str, list[object]]:
    """Return the conditions and their values.

    With a time given, a plus sign keeps the planner from walking all letters by number.
    """
    number = "number" if which.since is None and which.until is None else "+number"
    tests: list[tuple[str, object]] = [
        (f"{number} > ?", after),
        ("handler = ?", which.handler),
        ("error_type = ?", which.error_type),
        ("session_id = ?", which.session_id),
        ("last_attempt >= ?", which.since),
        ("last_attempt < ?", which.until),
        ("answered = ?", which.answered),
        (f"{number} <= ?", which.upto),
    ]
    given = [(test, value) for test, value in tests if value is not None]
    conditions, bound = [test for test, _ in given], [value for _, value in given]
    several = [
        ("message_id", which.message_ids),
        ("name", which.names),
        ("status", which.statuses),
    ]
    for column, values in several:
        if values is not None:
            conditions.append(f"{column} IN ({', '.join('?' * len(values))})")
            bound += sorted(values)
    return " AND ".join(conditions), bound


def find_letters(
    reader: QuestionReader, which: LetterSelection, *, after: int = 0, limit: int = 100
) -> list[StoredLetter]:
    """Return letters behind a number; see `Letters.find_letters`."""
    where, values = _where(which, after)
    # The numbers first: what has to be sorted is small.
    numbers = f"SELECT number FROM msgbus_letters WHERE {where} ORDER BY number LIMIT ?"  # noqa: S608
    query = f"SELECT number, {LETTER} FROM msgbus_letters WHERE number IN ({numbers})"  # noqa: S608
    found = reader.connection.execute(f"{query} ORDER BY number", (*values, limit))
    return [_stored(reader, row) for row in found.fetchall()]


def _stored(reader: QuestionReader, found: Row) -> StoredLetter:
    number, name, offset = found[:3]
    row = reader.row(name, offset)
    record: Record | None = None
    if row is not None and row.state is not State.DAMAGED:
        record = reader.record(row)
    row = row or _NO_ROW._replace(subscription=name, offset=offset)
    return StoredLetter(number, row, read_letter(found[1:], reader.codec), record)


def count_dead(connection: sqlite3.Connection) -> int:
    """Return the number of dead letters."""
    return int(connection.execute(_COUNT_DEAD).fetchall()[0][0])


def count_dead_in_file(path: str, lock_timeout: float) -> int:
    """Return the number of dead letters in a file that is not open, in the caller's thread."""
    connection = open_reader(path, lock_timeout)
    try:
        with translated(path):
            is_ours = has_journal(connection, path, adopt=False)
            return count_dead(connection) if is_ours else 0
    finally:
        connection.close()


def count_letters(reader: QuestionReader, which: LetterSelection) -> int:
    """Return the number of letters."""
    if which == _DEAD:
        return count_dead(reader.connection)
    where, values = _where(which)
    query = f"SELECT count(*) FROM msgbus_letters WHERE {where}"  # noqa: S608
    return int(reader.connection.execute(query, values).fetchone()[0])


def total_letters(reader: QuestionReader, which: LetterSelection) -> list[LetterTotal]:
    """Count letters by type of error, handler and name of message."""
    where, values = _where(which)
    query = (
        f"SELECT error_type, handler, name, count(*), min(first_attempt), max(last_attempt), "  # noqa: S608
        f"max(number) FROM msgbus_letters WHERE {where} GROUP BY 1, 2, 3 ORDER BY 4 DESC, 1, 2, 3"
    )
    return [
        LetterTotal._make((*group, _error(reader, number)))
        for *group, number in reader.connection.execute(query, values).fetchall()
    ]


def _error(reader: QuestionReader, number: int) -> str | None:
    query = "SELECT subscription, offset FROM msgbus_letters WHERE number = ?"
    row = reader.row(*reader.connection.execute(query, (number,)).fetchone())
    return None if row is None else row.error


def last_letter(reader: QuestionReader) -> int:
    """Return the highest number of a letter that ever was."""
    found = reader.connection.execute(_LAST).fetchone()
    return 0 if found is None else int(found[0])
