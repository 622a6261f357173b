"""The file of dead letters: its tables, and what can be wrong with it."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Final

from msgbus.errors import DeadLetterStoreError
from msgbus.resilience.letter_rows import LetterRows, LetterTable

SCHEMA_VERSION: Final = 2
APPLICATION_ID: Final = 0x6D626C74  # "mblt", so that other files are told apart

_TABLE: Final = """
CREATE TABLE letters (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    letter_id TEXT NOT NULL UNIQUE,
    message_id TEXT NOT NULL, message_type TEXT NOT NULL, version INTEGER NOT NULL,
    kind TEXT NOT NULL, payload TEXT NOT NULL, handler TEXT NOT NULL,
    error TEXT NOT NULL, error_type TEXT NOT NULL, traceback TEXT NOT NULL,
    attempts INTEGER NOT NULL, first_attempt INTEGER NOT NULL, last_attempt INTEGER NOT NULL,
    reason TEXT NOT NULL, correlation_id TEXT NOT NULL, causation_id TEXT, session_id TEXT,
    topic TEXT, headers TEXT NOT NULL, answered INTEGER NOT NULL, status TEXT NOT NULL,
    note TEXT, replays INTEGER NOT NULL, origin TEXT NOT NULL, from_system INTEGER NOT NULL,
    scope TEXT, target TEXT NOT NULL,
    owner TEXT, claimed_at REAL, counted INTEGER NOT NULL
);
CREATE TABLE counts (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
INSERT INTO counts VALUES ('letters', 0);
CREATE TRIGGER letters_added AFTER INSERT ON letters
    BEGIN UPDATE counts SET value = value + 1 WHERE name = 'letters'; END;
CREATE TRIGGER letters_removed AFTER DELETE ON letters
    BEGIN UPDATE counts SET value = value - 1 WHERE name = 'letters'; END;
"""

# Every index ends with the rowid, `seq`: with a status given, a page needs no sorting.
INDEXES: Final = {
    "letters_by_status": "(status)",
    "letters_by_type": "(message_type, status)",
    "letters_by_handler": "(handler, status)",
    "letters_by_error": "(error_type, status)",
    "letters_by_session": "(session_id, status) WHERE session_id IS NOT NULL",
    "letters_by_time": "(status, last_attempt)",
    "letters_by_group": "(status, error_type, handler, message_type, first_attempt, last_attempt)",
}

LETTERS: Final = LetterTable("letters", size="SELECT value FROM counts WHERE name = 'letters'")


def rows_of(connection: sqlite3.Connection) -> LetterRows:
    """The letters of the file that is open on this connection."""
    return LetterRows(connection, LETTERS)


def open_writer(path: Path, *, timeout: float) -> sqlite3.Connection:
    """A connection that writes; the file is made if it is new.

    Raises:
        DeadLetterStoreError: The file belongs to something else, or to another msgbus.
        sqlite3.Error: It cannot be read or written.
    """
    return _opened(path, timeout, _prepare_writer)


def open_reader(path: Path, *, timeout: float) -> sqlite3.Connection:
    """A connection that only reads, from a file that is there.

    Raises:
        DeadLetterStoreError: The file belongs to something else, or to another msgbus.
        sqlite3.Error: It cannot be read.
    """
    return _opened(path, timeout, _prepare_reader)


def _opened(
    path: Path, timeout: float, prepare: Callable[[sqlite3.Connection, Path], None]
) -> sqlite3.Connection:
    """A connection that other threads may use, one at a time."""
    connection = sqlite3.connect(
        path, timeout=timeout, isolation_level=None, check_same_thread=False
    )
    try:
        prepare(connection, path)
    except BaseException:
        connection.close()
        raise
    return connection


def _prepare_reader(connection: sqlite3.Connection, path: Path) -> None:
    connection.execute("PRAGMA query_only = ON")
    _has_letters(connection, path)


def _prepare_writer(connection: sqlite3.Connection, path: Path) -> None:
    is_made = _has_letters(connection, path)
    connection.execute("PRAGMA journal_mode = WAL").fetchall()
    connection.execute("PRAGMA synchronous = FULL")
    if not is_made:
        _create(connection, path)


def _has_letters(connection: sqlite3.Connection, path: Path) -> bool:
    """Whether the tables are there; changes nothing.

    Raises:
        DeadLetterStoreError: They are another application's, or those of another version.
    """
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if tables == 0:
        return False
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if application != APPLICATION_ID:
        raise DeadLetterStoreError(
            f"{path} is a database, but not one of dead letters. Give them a file of their own."
        )
    if version != SCHEMA_VERSION:
        raise DeadLetterStoreError(
            f"{path} has schema version {version}, and this msgbus reads version {SCHEMA_VERSION} "
            f"only. Open it with the msgbus that wrote it, or choose another path."
        )
    return True


def _create(connection: sqlite3.Connection, path: Path) -> None:
    """Make the tables, unless another process has just done so."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        if not _has_letters(connection, path):
            statements = [one for one in _TABLE.split(";\n") if one.strip()]
            statements += [f"CREATE INDEX {name} ON letters {on}" for name, on in INDEXES.items()]
            for statement in statements:
                connection.execute(statement)
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        connection.execute("COMMIT")
    except BaseException:
        connection.execute("ROLLBACK")
        raise


def explained(error: sqlite3.Error, path: Path) -> DeadLetterStoreError:
    """What a database error means for a user."""
    if not path.parent.is_dir():
        text = f"The folder {path.parent} does not exist. Create it, or choose another path."
    elif path.is_dir():
        text = f"{path} is a folder. Name a file in it."
    elif is_busy(error):
        text = (
            f"{path} is locked: another process has held it for longer than the time-out. "
            f"Try again, make timeout= larger, or end that process."
        )
    elif _code(error) == sqlite3.SQLITE_NOTADB:
        text = f"{path} is not a SQLite database. Choose another path, or remove the file."
    elif _code(error) == sqlite3.SQLITE_READONLY:
        text = f"{path} cannot be written. Check the permissions of the file and its folder."
    elif _code(error) == sqlite3.SQLITE_FULL:
        text = f"{path} cannot grow: the disk is full. Make room."
    else:
        text = f"{path}: {error}."
    return DeadLetterStoreError(text)


def is_busy(error: BaseException) -> bool:
    """Whether somebody else has the file just now."""
    return isinstance(error, sqlite3.Error) and _code(error) in {
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
    }


def _code(error: sqlite3.Error) -> int:
    code: int = getattr(error, "sqlite_errorcode", 0) or 0
    return code & 0xFF  # without the extended part
