"""Statements for many rows at once."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from itertools import chain
from typing import Any, Final, TypeAlias, final

Row: TypeAlias = tuple[Any, ...]

_LARGEST: Final = 128 if sqlite3.sqlite_version_info >= (3, 32) else 48
"""Older versions of SQLite take no more than 999 values."""


@final
class MultiRow:
    """A statement for many rows: each call of SQLite releases the interpreter's lock."""

    def __init__(self, start: str, row: str, end: str = "") -> None:
        self._sizes = [
            (size, f"{start} {','.join([row] * size)}{end}") for size in (_LARGEST, 16, 4, 1)
        ]

    def run(self, connection: sqlite3.Connection, rows: Sequence[Row], before: Row = ()) -> int:
        """Run it for all rows, in few calls; return the number of rows changed."""
        start, left, changed = 0, len(rows), 0
        for size, statement in self._sizes:
            while left >= size:
                values = list(chain(before, *rows[start : start + size]))
                changed += connection.execute(statement, values).rowcount
                start, left = start + size, left - size
        return changed


def inserting(table: str, columns: str, verb: str = "INSERT") -> MultiRow:
    """Make the statement that adds rows."""
    places = f"({','.join('?' * (columns.count(',') + 1))})"
    return MultiRow(f"{verb} INTO msgbus_{table} ({columns}) VALUES", places)
