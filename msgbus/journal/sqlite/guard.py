"""SQL of the user on the writer's connection: what a function may do there, and what is refused."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, NoReturn, final
from weakref import WeakSet

from typing_extensions import override

from msgbus.errors import ForbiddenStatementError

PREFIX: Final = "msgbus_"
"""Of all our tables, indexes and views; SQLite does not tell capital letters from small ones."""

_ENDS: Final = {
    sqlite3.SQLITE_TRANSACTION: "BEGIN, COMMIT or ROLLBACK",
    sqlite3.SQLITE_SAVEPOINT: "SAVEPOINT",
    sqlite3.SQLITE_PRAGMA: "PRAGMA",
    sqlite3.SQLITE_ATTACH: "ATTACH",
    sqlite3.SQLITE_DETACH: "DETACH",
}
_READS: Final = {
    sqlite3.SQLITE_SELECT,
    sqlite3.SQLITE_READ,
    sqlite3.SQLITE_FUNCTION,
    sqlite3.SQLITE_RECURSIVE,
}
_RENUMBERS: Final = {sqlite3.SQLITE_DROP_TABLE, sqlite3.SQLITE_ALTER_TABLE}
"""Actions for which SQLite itself changes `sqlite_sequence`."""


@final
class UserConnection(sqlite3.Connection):
    """The writer's connection as a user's function gets it, for as long as it runs.

    It is a `sqlite3.Connection`, but a closed one: what is not passed on to the writer's is
    refused, also what a later Python adds.
    """

    def __init__(self, writer: sqlite3.Connection) -> None:
        super().__init__(":memory:")  # without this, `sqlite3.Cursor(self)` ends the process
        super().close()
        self._writer = writer
        self._thread = threading.get_ident()
        self._cursors: WeakSet[UserCursor] = WeakSet()
        self._refused: str | None = None
        self._is_ended = False
        self._renumbers = False
        self.is_renaming = False
        """Whether a table was renamed: the authorizer is not told to what."""

    # -- what is passed on ---------------------------------------------------------------------

    @override
    def execute(self, sql: str, parameters: Any = (), /) -> UserCursor:
        return self.cursor().execute(sql, parameters)

    @override
    def executemany(self, sql: str, parameters: Any, /) -> UserCursor:
        return self.cursor().executemany(sql, parameters)

    @override
    def cursor(self, factory: None = None) -> UserCursor:  # type: ignore[override]  # pyright: ignore[reportIncompatibleMethodOverride]
        self.require()
        if factory is not None:
            self.refuse("cursor(factory)")
        cursor = self._writer.cursor(partial(UserCursor, owner=self))
        cursor.row_factory = self.row_factory
        self._cursors.add(cursor)
        return cursor

    @property
    @override
    def in_transaction(self) -> bool:
        return not self._is_ended and self._writer.in_transaction

    @property
    @override
    def total_changes(self) -> int:
        self.require()
        return self._writer.total_changes

    @property
    @override
    def text_factory(self) -> Any:
        self.require()
        return self._writer.text_factory

    @text_factory.setter
    def text_factory(self, factory: Any) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self.require()
        self._writer.text_factory = factory

    # -- what is refused -----------------------------------------------------------------------

    def require(self) -> None:
        """Raise unless the function may use the connection now.

        Raises:
            ForbiddenStatementError: It has ended, this is another thread, or the transaction is
                gone.
        """
        if self._is_ended or threading.get_ident() != self._thread:
            message = (
                "A connection of the journal was used outside of the function that it was given "
                "to: after its end, or on another thread. Read what you need inside of it, and "
                "return rows, not cursors."
            )
            raise ForbiddenStatementError(message)
        if not self._writer.in_transaction:
            self.refuse("a statement after a ROLLBACK by a conflict clause or a trigger")
        self._renumbers = False

    def refuse(self, what: str) -> NoReturn:
        """Raise; and again when the function ends, if it swallows the error."""
        self._refused = self._refused or what
        raise self._forbidden(what)

    def raise_refused(self) -> None:
        """Raise again what was refused, and what undid the transaction."""
        if self._refused is not None:
            raise self._forbidden(self._refused)
        if not self._writer.in_transaction:
            raise self._forbidden("a ROLLBACK by a conflict clause or a trigger")

    @staticmethod
    def _forbidden(what: str) -> ForbiddenStatementError:
        return ForbiddenStatementError(
            f"{what} is not allowed here: these statements are one part of the journal's own "
            f"transaction, which commits or rolls back as a whole. To undo, raise an error."
        )

    def authorize(self, action: int, first: str | None, second: str | None, *_: object) -> int:
        """Say to SQLite whether a step of a statement is allowed."""
        if self._is_ended or action in _READS:
            return sqlite3.SQLITE_OK
        self._renumbers |= action in _RENUMBERS
        self.is_renaming |= action == sqlite3.SQLITE_ALTER_TABLE
        what = _ENDS.get(action)
        if what is None:
            # The second is a column of an UPDATE; of all others, the table if the first is not.
            names = [first] if action == sqlite3.SQLITE_UPDATE else [first, second]
            ours = [name for name in names if name and name.lower().startswith(PREFIX)]
            if str(first).lower() == "sqlite_sequence" and not self._renumbers:
                ours.append("sqlite_sequence")
            what = f"a change of {ours[0]}" if ours else None
        if what is None:
            return sqlite3.SQLITE_OK
        self._refused = self._refused or what
        return sqlite3.SQLITE_DENY

    def end(self) -> None:
        """Close all cursors: an open one would hold up the commit, and every later one."""
        self._is_ended = True
        for cursor in list(self._cursors):
            cursor.close()


def _refusing(name: str) -> Any:
    def refuse(self: UserConnection, *_: Any, **__: Any) -> NoReturn:
        self.require()
        self.refuse(name)

    return refuse


for _name, _value in vars(sqlite3.Connection).items():
    if _name in vars(UserConnection) or _name == "row_factory" or _name[0].isupper():
        continue  # capital letters: the classes of its errors
    if _name in ("__call__", "__enter__", "__exit__") or not _name.startswith("__"):
        _refuse = _refusing(f"{_name}()" if callable(_value) else _name)
        setattr(UserConnection, _name, _refuse if callable(_value) else property(_refuse, _refuse))


@final
class UserCursor(sqlite3.Cursor):
    """A cursor of the writer's connection, which can be used as long as the function runs."""

    def __init__(self, connection: sqlite3.Connection, owner: UserConnection) -> None:
        super().__init__(connection)
        self._owner = owner

    @property
    @override
    def connection(self) -> UserConnection:
        return self._owner

    @override
    def execute(self, sql: str, parameters: Any = (), /) -> UserCursor:
        return self._run(super().execute, sql, parameters)

    @override
    def executemany(self, sql: str, seq_of_parameters: Any, /) -> UserCursor:
        return self._run(super().executemany, sql, seq_of_parameters)

    def _run(self, method: Callable[[str, Any], object], sql: str, parameters: Any) -> UserCursor:
        owner = self._owner
        owner.require()
        try:
            method(sql, parameters)
        except sqlite3.DatabaseError:
            if owner.in_transaction:
                owner.raise_refused()
            raise
        return self

    @override
    def executescript(self, sql_script: str, /) -> NoReturn:
        self._owner.require()
        self._owner.refuse("executescript()")

    @override
    def fetchone(self) -> Any:
        self._owner.require()
        return super().fetchone()

    @override
    def fetchmany(self, size: int | None = None) -> list[Any]:
        self._owner.require()
        return super().fetchmany(self.arraysize if size is None else size)

    @override
    def fetchall(self) -> list[Any]:
        self._owner.require()
        return super().fetchall()

    @override
    def __next__(self) -> Any:
        self._owner.require()
        return super().__next__()


@contextmanager
def lent(writer: sqlite3.Connection) -> Generator[UserConnection]:
    """Give the writer's connection to a function of the user, inside an open transaction.

    Raises:
        ForbiddenStatementError: It tried what would end our transaction or change our tables,
            even if it swallowed the error.
    """
    user, text_factory = UserConnection(writer), writer.text_factory
    try:
        writer.set_authorizer(user.authorize)
        yield user
    finally:
        try:
            user.end()
        finally:
            writer.text_factory = text_factory
            writer.set_authorizer(None)
    user.raise_refused()
