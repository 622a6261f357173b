"""The file of dead letters: its tables, its statements, and what can be wrong with it."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from msgbus.errors import DeadLetterStoreError
from msgbus.resilience.claims import Claim
from msgbus.resilience.letters import FIELDS, DeadLetterEntry, LetterStatus, micros, moment
from msgbus.resilience.stores import LetterFilter, Record, position

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

COLUMNS: Final = (*FIELDS, "owner", "claimed_at", "counted")
_LISTED: Final = ", ".join(COLUMNS)

# Only names of our own columns are put into these texts, never a value.
INSERT: Final = f"INSERT INTO letters ({_LISTED}) VALUES ({', '.join('?' * len(COLUMNS))})"  # noqa: S608
UPDATE: Final = (
    f"UPDATE letters SET {', '.join(f'{name} = ?' for name in COLUMNS)} "  # noqa: S608
    f"WHERE letter_id = ?"
)
GET: Final = f"SELECT {_LISTED} FROM letters WHERE letter_id = ?"  # noqa: S608
CLAIMED: Final = f"SELECT {_LISTED} FROM letters WHERE status = 'replaying'"  # noqa: S608
SIZE: Final = "SELECT value FROM counts WHERE name = 'letters'"
HEAD: Final = "SELECT coalesce(max(seq), 0) FROM letters"
REMOVE: Final = "DELETE FROM letters WHERE letter_id = ?"
OLDEST: Final = f"SELECT {_LISTED} FROM letters WHERE status = ? ORDER BY seq LIMIT ?"  # noqa: S608


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


# -- rows --------------------------------------------------------------------------------------


def row_of(record: Record) -> tuple[Any, ...]:
    """A record as values under `COLUMNS`."""
    letter = record.letter
    values: dict[str, Any] = {name: getattr(letter, name) for name in FIELDS}
    values["first_attempt"] = micros(letter.first_attempt)
    values["last_attempt"] = micros(letter.last_attempt)
    values["headers"] = json.dumps(dict(letter.headers))
    values["status"] = letter.status.value
    claim = record.claim
    owned = (None, None) if claim is None else (claim.owner, claim.at)
    return (*values.values(), *owned, record.counted)


def record_of(row: Sequence[Any]) -> Record:
    """The other way round."""
    values: dict[str, Any] = dict(zip(COLUMNS, row, strict=True))
    owner, claimed_at, counted = (values.pop(name) for name in COLUMNS[-3:])
    values["first_attempt"] = moment(values["first_attempt"])
    values["last_attempt"] = moment(values["last_attempt"])
    values["headers"] = MappingProxyType(json.loads(values["headers"]))
    values["status"] = LetterStatus(values["status"])
    values["answered"] = bool(values["answered"])
    values["from_system"] = bool(values["from_system"])
    letter = DeadLetterEntry(**values)
    claim = None if owner is None else Claim(letter.letter_id, owner, claimed_at)
    return Record(letter, claim, bool(counted))


# -- questions ---------------------------------------------------------------------------------


def where(which: LetterFilter, after: str | None = None) -> tuple[str, list[Any]]:
    """A filter as a condition, and its values."""
    seq = _place(which)
    tests: list[tuple[str, Any]] = [
        ("handler = ?", which.handler),
        ("error_type = ?", which.error_type),
        ("session_id = ?", which.session_id),
        ("answered = ?", which.answered),
        ("status = ?", None if which.status is None else which.status.value),
        ("last_attempt >= ?", None if which.since is None else micros(which.since)),
        ("last_attempt < ?", None if which.until is None else micros(which.until)),
        (f"{seq} > ?", None if after is None else position(after)),
        (f"{seq} <= ?", None if which.upto is None else position(which.upto)),
    ]
    given = [(test, value) for test, value in tests if value is not None]
    conditions, values = [test for test, _ in given], [value for _, value in given]
    if which.message_types is not None:
        names = sorted(which.message_types)
        conditions.append(f"message_type IN ({', '.join('?' * len(names))})")
        values += names
    return " AND ".join(conditions) or "1", values


def _place(which: LetterFilter) -> str:
    """How a question names `seq`; with `+` no index serves for it.

    With times given, that keeps the planner from walking all letters in their order.
    """
    return "seq" if which.since is None and which.until is None else "+seq"


def page_query(which: LetterFilter, after: str | None, limit: int) -> tuple[str, list[Any]]:
    """One page; its first column is `seq`.

    The places come first, from an index alone where that is possible: what has to be sorted
    are numbers, not letters.
    """
    condition, values = where(which, after)
    order = _place(which)
    places = f"SELECT seq FROM letters WHERE {condition} ORDER BY {order} LIMIT ?"  # noqa: S608
    return (
        f"SELECT seq, {_LISTED} FROM letters WHERE seq IN ({places}) ORDER BY seq",  # noqa: S608
        [*values, limit],
    )


def count_query(which: LetterFilter) -> tuple[str, list[Any]]:
    """How many."""
    condition, values = where(which)
    return f"SELECT count(*) FROM letters WHERE {condition}", values  # noqa: S608


def groups_query(which: LetterFilter) -> tuple[str, list[Any]]:
    """Groups with their newest letter's error."""
    condition, values = where(which)
    return (
        "SELECT g.error_type, g.handler, g.message_type, g.number, g.first, g.last, l.error "  # noqa: S608
        "FROM (SELECT error_type, handler, message_type, count(*) AS number, "
        "min(first_attempt) AS first, max(last_attempt) AS last, max(seq) AS newest "
        f"FROM letters WHERE {condition} GROUP BY error_type, handler, message_type) g "
        "JOIN letters l ON l.seq = g.newest "
        "ORDER BY g.number DESC, g.error_type, g.handler",
        values,
    )
