"""Connections that count commits and fail when told to; plain SQL beside a journal."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, cast

from msgbus.journal.sqlite.journal import SqliteJournal


class CountingConnection(sqlite3.Connection):
    """Counts its commits, and fails at the next statements that begin with `fails_at`."""

    commits = 0
    fails_at: str | None = None

    def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
        if self.fails_at is not None and sql.lstrip().startswith(self.fails_at):
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorcode = sqlite3.SQLITE_FULL
            raise error
        self.commits += sql == "COMMIT"
        return super().execute(sql, parameters)


def connect(path: str, lock_timeout: float) -> sqlite3.Connection:
    return sqlite3.connect(
        path,
        timeout=lock_timeout,
        isolation_level=None,
        check_same_thread=False,
        factory=CountingConnection,
    )


def open_counted(path: Path, **options: Any) -> tuple[SqliteJournal, CountingConnection]:
    options.setdefault("reserve", 0)
    journal = SqliteJournal(path, **options, _connect=connect)
    return journal, cast("CountingConnection", journal._connection)  # pyright: ignore[reportPrivateUsage]


def sql(path: Path, statement: str, values: Sequence[object] = ()) -> list[Any]:
    """Run plain SQL on a file, as another program would; return the rows."""
    with closing(sqlite3.connect(path)) as connection, connection:
        return connection.execute(statement, values).fetchall()


def change(path: Path, statement: str, values: Sequence[object] = ()) -> None:
    """Run plain SQL that has to change one row."""
    with closing(sqlite3.connect(path)) as connection, connection:
        assert connection.execute(statement, values).rowcount == 1
