"""Statements that a journal executes, and how SQLite plans to run them."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any


def recorded(statements: list[tuple[str, Any]]) -> Callable[[str, float], sqlite3.Connection]:
    """Make a function that opens connections, which record what they execute."""

    class RecordingConnection(sqlite3.Connection):
        def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
            statements.append((sql, parameters))
            return super().execute(sql, parameters)

    def connect(path: str, lock_timeout: float) -> sqlite3.Connection:
        return sqlite3.connect(
            path,
            timeout=lock_timeout,
            isolation_level=None,
            check_same_thread=False,
            factory=RecordingConnection,
        )

    return connect


SMALL = ("msgbus_subscriptions", "msgbus_members", "msgbus_meta")


def plan_of(path: Path, statements: Sequence[tuple[str, Any]]) -> list[str]:
    """Return the steps of all these statements."""
    verbs = ("SELECT", "WITH", "DELETE", "UPDATE")
    with closing(sqlite3.connect(path)) as connection:
        return [
            str(step[-1])
            for statement, values in statements
            if statement.lstrip().startswith(verbs)
            for step in connection.execute(f"EXPLAIN QUERY PLAN {statement}", values)
        ]


def whole_table_scans(plan: Sequence[str]) -> list[str]:
    """Return the steps that read a whole table, or an index of all its rows."""
    return [
        step
        for step in plan
        if step.startswith("SCAN")
        and not step.startswith(("SCAN CONSTANT ROW", "SCAN found", "SCAN json_each"))
        and not step.endswith(" INDEX msgbus_pending_dead")  # has the dead rows only
        and not any(table in step for table in SMALL)
    ]
