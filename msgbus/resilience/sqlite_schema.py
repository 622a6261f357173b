"""The file of dead letters: its tables, and what can be wrong with it."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Final

from msgbus.errors import DeadLetterStoreError
from msgbus.resilience.letter_rows import LetterRows, LetterTable

SCHEMA_VERSION: Final = 1
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


def connect(path: Path, *, timeout: float, read_only: bool = False) -> sqlite3.Connection:
    """A connection that other threads may use, one at a time.

    Raises:
        sqlite3.Error: It cannot be opened.
    """
    connection = sqlite3.connect(
        path, timeout=timeout, isolation_level=None, check_same_thread=False
    )
    if read_only:
        connection.execute("PRAGMA query_only = ON")
    return connection


def prepare(connection: sqlite3.Connection, path: Path) -> None:
    """Make the tables, or check that they are ours.

    Raises:
        DeadLetterStoreError: The file belongs to something else, or to a newer msgbus.
        sqlite3.Error: It cannot be read or written.
    """
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("BEGIN IMMEDIATE")
    try:
        if _is_empty(connection):
            _create(connection)
        else:
            _check(connection, path)
        connection.execute("COMMIT")
    except BaseException:
        connection.execute("ROLLBACK")
        raise


def _is_empty(connection: sqlite3.Connection) -> bool:
    with closing(connection.execute("SELECT count(*) FROM sqlite_master")) as rows:
        return bool(rows.fetchone()[0] == 0)


def _create(connection: sqlite3.Connection) -> None:
    statements = [one for one in _TABLE.split(";\n") if one.strip()]
    statements += [f"CREATE INDEX {name} ON letters {what}" for name, what in INDEXES.items()]
    for statement in statements:
        connection.execute(statement)
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def _check(connection: sqlite3.Connection, path: Path) -> None:
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if application != APPLICATION_ID:
        raise DeadLetterStoreError(
            f"{path} is a database, but not one of dead letters. Give them a file of their own."
        )
    if version > SCHEMA_VERSION:
        raise DeadLetterStoreError(
            f"{path} has schema version {version}; this msgbus knows up to {SCHEMA_VERSION}. "
            f"Upgrade msgbus, or give it another file."
        )


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
