"""What there is to read, and how it is split into ranges that are read side by side."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Generator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from pyspark.sql.datasource import InputPartition

from msgbus.errors import (
    JournalNotFoundError,
    NotAJournalError,
)
from msgbus.journal.sqlite import queries, reads
from msgbus.journal.sqlite.faults import translated
from msgbus.journal.sqlite.schema import has_journal
from msgbus.pipeline.source.options import file_uri
from msgbus.pipeline.source.tables import MESSAGES, Table

ROWS: Final = 250_000
"""Rows of one range, at most, unless the number of ranges is given."""

FEWEST: Final = 10_000
"""Rows for which a range of their own is worth the while."""


class Bounds(NamedTuple):
    """What a table holds at one moment; both ends count."""

    first: int
    last: int
    trimmed: int
    """The highest offset that retention has removed; 0 for other tables than messages."""


class Range(InputPartition):
    """Positions from `low` to `high`, both included, that one task reads."""

    def __init__(self, low: int, high: int) -> None:
        super().__init__((low, high))
        self.low = low
        self.high = high


@contextmanager
def reading(path: str) -> Generator[sqlite3.Connection, None, None]:
    """A connection that reads one state of the file.

    Raises:
        JournalNotFoundError: There is no file.
        NotAJournalError: It is something else.
        JournalVersionError: It was written by another msgbus.
    """
    if not Path(path).is_file():
        raise JournalNotFoundError(path=path)
    with (
        translated(path),
        closing(sqlite3.connect(file_uri(path), uri=True, timeout=30.0)) as connection,
    ):
        connection.isolation_level = None
        connection.execute("BEGIN")
        check(connection, path)
        yield connection


def check(connection: sqlite3.Connection, path: str) -> None:
    """Raise unless this is a journal of this version."""
    if not has_journal(connection, path, adopt=True):
        message = f"{path} is a SQLite database, but there is no journal in it."
        raise NotAJournalError(message, path=path)


def bounds(connection: sqlite3.Connection, table: Table) -> Bounds:
    """What the table holds."""
    if table is MESSAGES:
        head = reads.head(connection)
        return Bounds(queries.first(connection), head, queries.trimmed(connection))
    # One by one: asked for both at once, SQLite looks through the whole table.
    low, high = (
        connection.execute(
            f"SELECT {end}({table.position}) FROM {table.relation}"  # noqa: S608
        ).fetchone()[0]
        for end in ("min", "max")
    )
    return Bounds(1, 0, 0) if low is None else Bounds(int(low), int(high), 0)


def bounds_of(path: str, table: Table = MESSAGES) -> Bounds:
    """What a table of the file holds."""
    with reading(path) as connection:
        return bounds(connection, table)


def split(low: int, high: int, wanted: int | None = None) -> list[Range]:
    """Ranges of nearly equal length that cover everything from `low` to `high`, once."""
    rows = high - low + 1
    if rows <= 0:
        return []
    if wanted is None:
        # As many as there are cores, as soon as there is enough for each; more where a
        # single one would be long to repeat.
        at_least = min(os.cpu_count() or 1, -(-rows // FEWEST))
        wanted = max(at_least, -(-rows // ROWS))
    count = min(wanted, rows)
    size, rest = divmod(rows, count)
    ranges: list[Range] = []
    for number in range(count):
        end = low + size + (number < rest) - 1
        ranges.append(Range(low, end))
        low = end + 1
    return ranges
