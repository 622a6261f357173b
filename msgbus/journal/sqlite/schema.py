"""The tables of a journal, and the version that tells a file of another form."""

from __future__ import annotations

import sqlite3
from typing import Final

from msgbus.errors import JournalVersionError, NotAJournalError

APPLICATION_ID: Final = 0x6D736762  # "msgb", shown by `file` and by `PRAGMA application_id`

VERSION: Final = 3
"""Grows with every change of the tables; a file of another version is refused."""

_TABLES: Final = """
CREATE TABLE msgbus_meta (key TEXT PRIMARY KEY, value TEXT);
CREATE TABLE msgbus_messages (
    offset INTEGER PRIMARY KEY AUTOINCREMENT,
    message_id TEXT NOT NULL UNIQUE,
    name TEXT NOT NULL,
    version INTEGER NOT NULL,
    topic TEXT NOT NULL,
    key TEXT,
    kind TEXT NOT NULL,
    time REAL NOT NULL,
    correlation_id TEXT,
    causation_id TEXT,
    root_id TEXT,
    depth INTEGER NOT NULL DEFAULT 0,
    session_id TEXT,
    headers TEXT,
    payload BLOB NOT NULL,
    from_system INTEGER NOT NULL DEFAULT 0,
    crc INTEGER NOT NULL
);
CREATE INDEX msgbus_messages_by_flow ON msgbus_messages (correlation_id)
    WHERE correlation_id IS NOT NULL;
CREATE INDEX msgbus_messages_by_session ON msgbus_messages (session_id)
    WHERE session_id IS NOT NULL;
CREATE TABLE msgbus_deliveries (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    message_id TEXT NOT NULL,
    handler TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    outcome TEXT NOT NULL,
    wait REAL NOT NULL,
    run REAL NOT NULL,
    time REAL NOT NULL,
    error TEXT,
    offset INTEGER
);
CREATE INDEX msgbus_deliveries_by_message ON msgbus_deliveries (message_id);
CREATE TABLE msgbus_cursors (
    name TEXT PRIMARY KEY,
    offset INTEGER NOT NULL,
    fetched INTEGER NOT NULL,
    epoch INTEGER NOT NULL,
    crc INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE msgbus_attempts (
    name TEXT NOT NULL,
    offset INTEGER NOT NULL,
    attempts INTEGER NOT NULL,
    PRIMARY KEY (name, offset)
) WITHOUT ROWID;
CREATE TABLE msgbus_leases (
    name TEXT PRIMARY KEY,
    holder TEXT,
    epoch INTEGER NOT NULL,
    renewals INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE msgbus_markers (
    message_id TEXT NOT NULL,
    subscription TEXT NOT NULL,
    PRIMARY KEY (message_id, subscription)
) WITHOUT ROWID;
CREATE TABLE msgbus_dead_letters (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    letter_id TEXT NOT NULL UNIQUE,
    message_id TEXT NOT NULL,
    message_type TEXT NOT NULL,
    version INTEGER NOT NULL,
    kind TEXT NOT NULL,
    subscription TEXT,
    handler TEXT NOT NULL,
    scope TEXT,
    target TEXT NOT NULL,
    status TEXT NOT NULL,
    error_type TEXT NOT NULL,
    error TEXT NOT NULL,
    reason TEXT NOT NULL,
    attempts INTEGER NOT NULL,
    first_attempt INTEGER NOT NULL,
    last_attempt INTEGER NOT NULL,
    replays INTEGER NOT NULL,
    answered INTEGER NOT NULL,
    note TEXT,
    correlation_id TEXT NOT NULL,
    causation_id TEXT,
    root_id TEXT,
    depth INTEGER NOT NULL,
    session_id TEXT,
    topic TEXT,
    key TEXT,
    headers TEXT NOT NULL,
    origin TEXT NOT NULL,
    from_system INTEGER NOT NULL,
    offset INTEGER NOT NULL,
    recorded REAL,
    owner TEXT,
    claimed_at REAL,
    counted INTEGER NOT NULL,
    crc INTEGER NOT NULL,
    traceback TEXT NOT NULL,
    payload BLOB NOT NULL
);
CREATE INDEX msgbus_letters_by_status ON msgbus_dead_letters (status);
CREATE INDEX msgbus_letters_by_type ON msgbus_dead_letters (message_type, status);
CREATE INDEX msgbus_letters_by_handler ON msgbus_dead_letters (handler, status);
CREATE INDEX msgbus_letters_by_error ON msgbus_dead_letters (error_type, status);
CREATE INDEX msgbus_letters_by_session ON msgbus_dead_letters (session_id, status)
    WHERE session_id IS NOT NULL;
CREATE INDEX msgbus_letters_by_time ON msgbus_dead_letters (status, last_attempt);
CREATE INDEX msgbus_letters_by_group ON msgbus_dead_letters
    (status, error_type, handler, message_type, first_attempt, last_attempt);
CREATE TABLE msgbus_schedule (
    id TEXT PRIMARY KEY,
    due REAL NOT NULL,
    subscription TEXT,
    attempt INTEGER NOT NULL,
    name TEXT NOT NULL,
    envelope TEXT NOT NULL,
    payload BLOB NOT NULL,
    crc INTEGER NOT NULL
);
CREATE INDEX msgbus_schedule_by_due ON msgbus_schedule (subscription, due);
CREATE TABLE msgbus_tickets (
    message_id TEXT PRIMARY KEY,
    state TEXT NOT NULL,
    result BLOB,
    error TEXT,
    time REAL NOT NULL
);
CREATE VIEW msgbus_log AS
SELECT offset, message_id, name, version, topic, key, kind, time,
    coalesce(correlation_id, message_id) AS correlation_id, causation_id,
    coalesce(root_id, message_id) AS root_id, depth, session_id, headers,
    CAST(payload AS TEXT) AS payload
FROM msgbus_messages
"""

Connection = sqlite3.Connection


def has_journal(connection: Connection, path: str, *, adopt: bool) -> bool:
    """Whether the file has our tables; changes nothing.

    Raises:
        JournalVersionError: They are those of another version.
        NotAJournalError: It is another program's database, and `adopt` is not given.
    """
    tables = {
        str(name)
        for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
    }
    if "msgbus_meta" in tables:
        found = int(read_meta(connection, "schema_version") or 0)
        if found != VERSION:
            raise JournalVersionError(path=path, found=found, supported=VERSION)
        return True
    foreign = sorted(name for name in tables if not name.startswith("sqlite_"))
    if foreign and not adopt:
        message = (
            f"{path} is a SQLite database with tables of its own ({', '.join(foreign[:5])}), and "
            f"no journal. Choose another path; or, to keep the journal beside those tables, "
            f"open it with adopt=True (in a URL: ?adopt=true)."
        )
        raise NotAJournalError(message, path=path)
    return False


def create(connection: Connection, path: str, *, adopt: bool) -> None:
    """Make the tables, unless another process has just done so.

    Raises:
        JournalVersionError: It made those of another version.
        NotAJournalError: It is another program's database, and `adopt` is not given.
    """
    connection.execute("BEGIN IMMEDIATE")
    try:
        if not has_journal(connection, path, adopt=adopt):
            for statement in _TABLES.split(";"):
                connection.execute(statement)
            write_meta(connection, "schema_version", str(VERSION))
            write_meta(connection, "trimmed", "0")
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def read_meta(connection: Connection, key: str) -> str | None:
    """A value that belongs to the file as a whole."""
    row = connection.execute("SELECT value FROM msgbus_meta WHERE key = ?", (key,)).fetchone()
    return None if row is None else str(row[0])


def write_meta(connection: Connection, key: str, value: str) -> None:
    """Set such a value."""
    connection.execute("INSERT OR REPLACE INTO msgbus_meta VALUES (?, ?)", (key, value))
