"""Tables of a journal file, their version, and the connection that writes."""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING, Final
from uuid import uuid4

from msgbus.errors import (
    ForbiddenStatementError,
    JournalError,
    JournalOpenError,
    JournalVersionError,
    NotAJournalError,
)
from msgbus.journal.sqlite.columns import checksum
from msgbus.journal.sqlite.faults import translated
from msgbus.journal.sqlite.files import (
    MEMORY,
    PAGE_SIZE,
    Connect,
    check_place,
    configure,
    connect as plain_connect,
    make_file,
)
from msgbus.journal.sqlite.messages import associated, decoded

if TYPE_CHECKING:
    from collections.abc import Iterator

    from msgbus.journal.codec import PayloadCodec

APPLICATION_ID: Final = 0x6D736762  # "msgb", shown by `file` and by `PRAGMA application_id`

VERSION: Final = 16
"""Grows with every change of the tables; a file of another version is refused."""

_TABLES: Final = """
CREATE TABLE msgbus_meta (
    key TEXT PRIMARY KEY,
    value TEXT NOT NULL,
    crc INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE msgbus_messages (
    offset INTEGER PRIMARY KEY,
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
    slot INTEGER NOT NULL,
    crc INTEGER NOT NULL
);
CREATE INDEX msgbus_messages_by_flow ON msgbus_messages (correlation_id)
    WHERE correlation_id IS NOT NULL;
CREATE INDEX msgbus_messages_by_session ON msgbus_messages (session_id)
    WHERE session_id IS NOT NULL;
CREATE INDEX msgbus_messages_by_key ON msgbus_messages (key) WHERE key IS NOT NULL;
CREATE INDEX msgbus_messages_by_kind ON msgbus_messages (kind) WHERE kind <> 'event';
CREATE TABLE msgbus_blocks (
    value NOT NULL,
    block INTEGER NOT NULL,
    PRIMARY KEY (value, block)
) WITHOUT ROWID;
CREATE INDEX msgbus_blocks_by_block ON msgbus_blocks (block);
CREATE TABLE msgbus_subscriptions (
    name TEXT NOT NULL,
    partition INTEGER NOT NULL,
    acked INTEGER NOT NULL,
    fetched INTEGER NOT NULL,
    owner INTEGER,
    epoch INTEGER NOT NULL,
    selection TEXT NOT NULL,
    crc INTEGER NOT NULL,
    PRIMARY KEY (name, partition)
) WITHOUT ROWID;
CREATE TABLE msgbus_pending (
    subscription TEXT NOT NULL,
    offset INTEGER NOT NULL,
    partition INTEGER NOT NULL DEFAULT 0,
    key TEXT,
    state TEXT NOT NULL,
    attempt INTEGER NOT NULL DEFAULT 0,
    due REAL,
    owner INTEGER,
    version INTEGER NOT NULL DEFAULT 1,
    alone INTEGER NOT NULL DEFAULT 0,
    error TEXT,
    time REAL NOT NULL,
    body BLOB,
    unique_key TEXT,
    crc INTEGER NOT NULL,
    PRIMARY KEY (subscription, offset)
) WITHOUT ROWID;
CREATE INDEX msgbus_pending_due ON msgbus_pending (subscription, alone, due)
    WHERE due IS NOT NULL;
CREATE INDEX msgbus_pending_owner ON msgbus_pending (owner) WHERE owner IS NOT NULL;
CREATE INDEX msgbus_pending_key ON msgbus_pending (subscription, partition, key, offset)
    WHERE key IS NOT NULL;
CREATE INDEX msgbus_pending_holding ON msgbus_pending (subscription, partition, key)
    WHERE key IS NOT NULL AND state IN ('waiting', 'claimed', 'dead', 'damaged');
CREATE INDEX msgbus_pending_dead ON msgbus_pending (subscription, offset) WHERE state = 'dead';
CREATE INDEX msgbus_pending_damaged ON msgbus_pending (subscription, offset)
    WHERE state = 'damaged';
CREATE INDEX msgbus_pending_done ON msgbus_pending (subscription, partition, offset)
    WHERE state = 'done';
CREATE UNIQUE INDEX msgbus_pending_unique ON msgbus_pending (subscription, unique_key)
    WHERE unique_key IS NOT NULL AND state <> 'dead';
CREATE TABLE msgbus_members (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    process TEXT NOT NULL,
    serves TEXT NOT NULL,
    renewals INTEGER NOT NULL,
    crc INTEGER NOT NULL
);
CREATE TABLE msgbus_results (
    message_id TEXT PRIMARY KEY,
    body BLOB,
    error TEXT,
    time REAL NOT NULL,
    crc INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE msgbus_letters (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    subscription TEXT NOT NULL,
    offset INTEGER NOT NULL,
    message_id TEXT NOT NULL,
    name TEXT NOT NULL,
    session_id TEXT,
    error_type TEXT NOT NULL,
    reason TEXT NOT NULL,
    first_attempt REAL NOT NULL,
    last_attempt REAL NOT NULL,
    traceback TEXT NOT NULL,
    handler TEXT NOT NULL,
    target TEXT NOT NULL,
    scope TEXT,
    answered INTEGER NOT NULL,
    replays INTEGER NOT NULL,
    note TEXT,
    status TEXT NOT NULL,
    earlier INTEGER NOT NULL,
    origin TEXT NOT NULL,
    crc INTEGER NOT NULL,
    UNIQUE (subscription, offset)
);
CREATE INDEX msgbus_letters_by_message ON msgbus_letters (message_id);
CREATE INDEX msgbus_letters_by_status ON msgbus_letters (status);
CREATE INDEX msgbus_letters_by_name ON msgbus_letters (name, status);
CREATE INDEX msgbus_letters_by_handler ON msgbus_letters (handler, status);
CREATE INDEX msgbus_letters_by_error ON msgbus_letters (error_type, status);
CREATE INDEX msgbus_letters_by_session ON msgbus_letters (session_id, status)
    WHERE session_id IS NOT NULL;
CREATE INDEX msgbus_letters_by_time ON msgbus_letters (status, last_attempt);
CREATE TABLE msgbus_deliveries (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    offset INTEGER NOT NULL,
    handler TEXT NOT NULL,
    time REAL NOT NULL,
    attempt INTEGER NOT NULL,
    message_id TEXT NOT NULL,
    outcome TEXT NOT NULL,
    wait REAL NOT NULL,
    run REAL NOT NULL,
    error TEXT,
    crc INTEGER NOT NULL
);
CREATE INDEX msgbus_deliveries_by_offset ON msgbus_deliveries (offset) WHERE offset <> 0;
CREATE INDEX msgbus_deliveries_by_time ON msgbus_deliveries (time, handler, outcome);
CREATE INDEX msgbus_deliveries_unlogged ON msgbus_deliveries (message_id) WHERE offset = 0;
CREATE TABLE msgbus_instances (
    name TEXT NOT NULL,
    key TEXT NOT NULL,
    state BLOB NOT NULL,
    wake REAL,
    version INTEGER NOT NULL,
    crc INTEGER NOT NULL,
    PRIMARY KEY (name, key)
) WITHOUT ROWID;
CREATE INDEX msgbus_instances_wake ON msgbus_instances (wake) WHERE wake IS NOT NULL;
CREATE VIEW msgbus_log AS
SELECT offset, message_id, name, version, topic, key, kind, time,
    coalesce(correlation_id, message_id) AS correlation_id, causation_id,
    coalesce(root_id, message_id) AS root_id, depth, session_id, headers,
    CAST(payload AS TEXT) AS payload
FROM msgbus_messages
"""
_STATEMENTS: Final = tuple(statement.strip() for statement in _TABLES.split(";"))
_FOREIGN: Final = """
SELECT is_temp, type, name, tbl_name
FROM (SELECT 0 AS is_temp, * FROM sqlite_master UNION ALL SELECT 1, * FROM sqlite_temp_master)
WHERE sql IS NOT NULL AND (name LIKE 'msgbus!_%' ESCAPE '!' OR tbl_name LIKE 'msgbus!_%' ESCAPE '!')
"""
_VERSION: Final = "SELECT value FROM msgbus_meta WHERE key = 'schema_version'"
_META: Final = "SELECT value, crc FROM msgbus_meta WHERE key = ?"


def open_writer(
    path: str,
    lock_timeout: float,
    *,
    adopt: bool = False,
    codec: PayloadCodec | None = None,
    connect: Connect = plain_connect,
) -> sqlite3.Connection:
    """Open the connection that writes; a new file gets its tables.

    Raises:
        JournalOpenError: It cannot be opened, is not a journal, one of another version, or
            written with another codec or key.
        JournalLockedError: Another process holds it.
    """
    if path != MEMORY:
        check_place(path)
        make_file(path)
    with translated(path):
        connection = connect(path, lock_timeout)
        try:
            _prepare(connection, path, codec, adopt=adopt)
            check_codec(connection, path, codec)
        except BaseException:
            connection.close()
            raise
    return connection


def _prepare(
    connection: sqlite3.Connection, path: str, codec: PayloadCodec | None, *, adopt: bool
) -> None:
    # First of all a read: it finds out whether this is our database, and changes nothing.
    is_made = has_journal(connection, path, adopt=adopt)
    require_no_triggers(connection, path, JournalOpenError)
    if not is_made and not adopt:
        connection.execute(f"PRAGMA page_size = {PAGE_SIZE}")
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute("PRAGMA journal_mode = WAL").fetchall()
    configure(connection)
    if not is_made:  # nothing is written to a file that is there: its disk may be full
        _create(connection, path, codec, adopt=adopt)


def check_codec(connection: sqlite3.Connection, path: str, codec: PayloadCodec | None) -> None:
    """Raise if this is not the codec of the file.

    It would find every message damaged; and without one, plain text would go beside the rest.
    """
    sample = bytes.fromhex(read_meta(connection, "codec")) or _SAMPLE
    try:
        if codec is not None:
            sample = decoded(codec, sample, _PLACE)
    except ValueError:
        sample = b""
    if sample != _SAMPLE:
        message = (
            f"The journal {path} was made with another codec, another key, or none. Open it with "
            f"the codec it was made with, which may know several keys."
            if codec is not None
            else f"The journal {path} was made with a codec: open it with codec=."
        )
        raise JournalOpenError(message, path=path)


def has_journal(connection: sqlite3.Connection, path: str, *, adopt: bool) -> bool:
    """Tell whether the file has our tables; changes nothing.

    Raises:
        JournalVersionError: They are those of another version.
        NotAJournalError: It is another program's database, and `adopt` is not given.
    """
    tables = {
        str(name)
        for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
    }
    if "msgbus_meta" in tables:
        # Without its checksum: another version may have none.
        row = connection.execute(_VERSION).fetchone()
        found = int(row[0]) if row is not None and str(row[0]).isdecimal() else 0
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


def _create(
    connection: sqlite3.Connection, path: str, codec: PayloadCodec | None, *, adopt: bool
) -> None:
    """Make the tables, unless another process has just done so."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        if not has_journal(connection, path, adopt=adopt):
            for statement in _STATEMENTS:
                connection.execute(statement)
            for key, value in _meta(codec).items():
                write_meta(connection, key, value)
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


_SAMPLE: Final = b"msgbus"
"""What the codec of a file is known by; as it is if there is none."""

_PLACE: Final = "meta.codec"

META: Final = ("schema_version", "journal_id", "trimmed", "delayed", "codec")
"""Keys of the values that belong to the file as a whole."""


def _meta(codec: PayloadCodec | None) -> dict[str, str]:
    sample = b"" if codec is None else codec.encode(_SAMPLE, associated(_PLACE))
    values = (str(VERSION), uuid4().hex, "0", "0", sample.hex())
    return dict(zip(META, values, strict=True))


def read_meta(connection: sqlite3.Connection, key: str) -> str:
    """Return a value that belongs to the file as a whole.

    Raises:
        sqlite3.DatabaseError: It is damaged or missing, as SQLite says it of its own.
    """
    row = connection.execute(_META, (key,)).fetchone()
    return meta_value(key, *(row or (None, None)))


def meta_value(key: str, value: object, crc: object) -> str:
    """Return a value of the file as a whole if its checksum fits; see `read_meta`."""
    if checksum(key, value) != crc:
        error = sqlite3.DatabaseError(f"the row {key!r} of msgbus_meta is damaged or missing")
        error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
        raise error
    return str(value)


def write_meta(connection: sqlite3.Connection, key: str, value: str) -> None:
    """Write a value that belongs to the file as a whole."""
    values = (key, value, checksum(key, value))
    connection.execute("INSERT OR REPLACE INTO msgbus_meta VALUES (?, ?, ?)", values)


def changed_objects(connection: sqlite3.Connection) -> Iterator[str]:
    """Name the tables, indexes and views that are not as they were made."""
    found = {
        str(name): str(text)
        for name, text in connection.execute(
            "SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL"
        )
    }
    yield from (name for name, statement in _EXPECTED.items() if found.get(name) != statement)


def foreign_objects(connection: sqlite3.Connection) -> list[tuple[str, str, str]]:
    """Return what others have made on our tables or under our names: type, name and table."""
    found = connection.execute(_FOREIGN)
    return [(*which,) for is_temp, *which in found if is_temp or which[1] not in _EXPECTED]


def require_no_triggers(
    connection: sqlite3.Connection, path: str, kind: type[JournalError] = JournalError
) -> None:
    """Raise if our tables have triggers: they could drop or change what is written, unseen.

    Raises:
        JournalError: They have; an error of `kind`.
    """
    found = [
        f"{name} on {table}"
        for kind_of_object, name, table in foreign_objects(connection)
        if kind_of_object == "trigger"
    ]
    if found:
        message = (
            f"The journal {path} has triggers that others have made ({', '.join(found)}). They "
            f"could change what is written or prevent it, so nothing is written. Remove them "
            f"with DROP TRIGGER."
        )
        raise kind(message, path=path)


def require_own_objects(connection: sqlite3.Connection) -> None:
    """Raise if others have made something under our names.

    Raises:
        ForbiddenStatementError: They have.
    """
    for kind, name, _ in foreign_objects(connection):
        message = f"The {kind} {name} has a name of msgbus, which begin with msgbus_: rename it."
        raise ForbiddenStatementError(message)


def _name(statement: str) -> str:
    """Return what a statement creates."""
    words = statement.split()
    return words[3] if words[1] == "UNIQUE" else words[2]


_EXPECTED: Final = {_name(statement): statement for statement in _STATEMENTS}
