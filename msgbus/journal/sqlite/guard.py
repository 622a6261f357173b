"""The writer's connection, with a guard while a user's statements run on it."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Final

from msgbus.errors import ForbiddenStatementError

_ENDS: Final = {
    sqlite3.SQLITE_TRANSACTION: "BEGIN, COMMIT or ROLLBACK",
    sqlite3.SQLITE_SAVEPOINT: "SAVEPOINT",
    sqlite3.SQLITE_PRAGMA: "PRAGMA",
    sqlite3.SQLITE_ATTACH: "ATTACH",
    sqlite3.SQLITE_DETACH: "DETACH",
}
_WRITES: Final = {
    sqlite3.SQLITE_INSERT,
    sqlite3.SQLITE_UPDATE,
    sqlite3.SQLITE_DELETE,
    sqlite3.SQLITE_DROP_TABLE,
    sqlite3.SQLITE_DROP_INDEX,
    sqlite3.SQLITE_DROP_VIEW,
}


class GuardedConnection(sqlite3.Connection):
    """A connection that a user's function may work with, but not end."""

    _is_guarded = False
    _refused: str | None = None

    @contextmanager
    def guarded(self) -> Generator[None]:
        """Let the user's statements in, and refuse those that would end our transaction.

        Raises:
            ForbiddenStatementError: One was tried, even if the user swallowed the error.
        """
        self._refused = None
        self._is_guarded = True
        super().set_authorizer(self._authorize)
        try:
            yield
        except sqlite3.DatabaseError as error:
            if self._refused is not None:
                raise self._forbidden(self._refused) from error
            raise
        finally:
            self._is_guarded = False
            super().set_authorizer(None)
        if self._refused is not None:
            raise self._forbidden(self._refused)

    def _authorize(
        self,
        action: int,
        first: str | None,
        second: str | None,
        database: str | None,
        trigger: str | None,
    ) -> int:
        del database, trigger
        what = _ENDS.get(action)
        if what is None and action in _WRITES and str(first).startswith("msgbus_"):
            what = f"a change of the table {first}"
        if what is None and action == sqlite3.SQLITE_ALTER_TABLE:
            is_ours = str(second).startswith("msgbus_")
            what = f"a change of the table {second}" if is_ours else None
        if what is None:
            return sqlite3.SQLITE_OK
        self._refused = what
        return sqlite3.SQLITE_DENY

    @staticmethod
    def _forbidden(what: str) -> ForbiddenStatementError:
        return ForbiddenStatementError(
            f"{what} is not allowed here: these statements are one part of the journal's own "
            f"transaction, which commits or rolls back as a whole. To undo, raise an error."
        )

    def _refuse_if_guarded(self, what: str) -> None:
        if self._is_guarded:
            self._refused = what
            raise self._forbidden(what)

    # Methods that do not pass the authorizer, or would remove it.

    def close(self) -> None:
        """Close the connection; refused to the user's functions."""
        self._refuse_if_guarded("close()")
        super().close()

    def set_authorizer(self, authorizer_callback: Callable[..., int] | None) -> None:
        """Refused to the user's functions: it would remove the guard."""
        self._refuse_if_guarded("set_authorizer()")
        super().set_authorizer(authorizer_callback)

    def executescript(self, sql_script: str) -> Any:
        """Refused to the user's functions: it would commit first."""
        self._refuse_if_guarded("executescript()")
        return super().executescript(sql_script)
