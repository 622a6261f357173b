"""Everything that is read about subscriptions: cursors, leases, tickets.

Functions of a connection, so that the writer may ask inside its transaction, and readers
outside of it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from typing import Final

from msgbus.errors import CursorError, JournalCorruptError
from msgbus.journal.records import (
    Cursor,
    DeliveryRecord,
    Lease,
    Outcome,
    TicketRow,
    TicketState,
)
from msgbus.journal.sqlite.rows import cursor_checksum

# More would pass the limit of parameters in older versions of SQLite.
CHUNK: Final = 500


def head(connection: sqlite3.Connection) -> int:
    """The highest offset ever given."""
    row = connection.execute(
        "SELECT seq FROM sqlite_sequence WHERE name = 'msgbus_messages'"
    ).fetchone()
    return 0 if row is None else int(row[0])


def cursor(connection: sqlite3.Connection, name: str, path: str) -> Cursor | None:
    """One cursor.

    Raises:
        CursorError: It is damaged, or beyond the head.
    """
    row = connection.execute(
        "SELECT name, offset, fetched, epoch, crc FROM msgbus_cursors WHERE name = ?", (name,)
    ).fetchone()
    return None if row is None else _checked(connection, row, path)


def cursors(connection: sqlite3.Connection, path: str) -> list[Cursor]:
    """All cursors, by name."""
    rows = connection.execute(
        "SELECT name, offset, fetched, epoch, crc FROM msgbus_cursors ORDER BY name"
    ).fetchall()
    return [_checked(connection, row, path) for row in rows]


def _checked(
    connection: sqlite3.Connection, row: tuple[str, int, int, int, int], path: str
) -> Cursor:
    *fields, crc = row
    found = Cursor(*fields)  # type: ignore[arg-type]
    if cursor_checksum(*found) != crc:
        problem = (
            "is damaged: its checksum does not fit. Restore a backup, or put it where it "
            "should be with DropCursor and CreateCursor; starting anywhere else would skip "
            "or repeat messages."
        )
        raise CursorError(found.name, problem, path=path)
    end = head(connection)
    if found.offset > end:
        problem = (
            f"is at {found.offset}, beyond the head at {end}: the end of the journal is "
            f"missing. Restore the newest backup, or seek to {end}."
        )
        raise CursorError(found.name, problem, path=path)
    return found


def attempts(connection: sqlite3.Connection, name: str) -> dict[int, int]:
    """How often messages were tried, by offset."""
    return dict(
        connection.execute(
            "SELECT offset, attempts FROM msgbus_attempts WHERE name = ? ORDER BY offset", (name,)
        )
    )


def lease(connection: sqlite3.Connection, name: str) -> Lease | None:
    """Who holds a lease."""
    row = connection.execute(
        "SELECT name, holder, epoch, renewals FROM msgbus_leases WHERE name = ?", (name,)
    ).fetchone()
    return None if row is None else Lease(*row)


def offsets(connection: sqlite3.Connection, message_ids: Sequence[str]) -> dict[str, int]:
    """Where those of these messages are that are there."""
    found: dict[str, int] = {}
    for start in range(0, len(message_ids), CHUNK):
        chunk = message_ids[start : start + CHUNK]
        places = ",".join("?" * len(chunk))
        found.update(
            connection.execute(
                "SELECT message_id, offset FROM msgbus_messages "  # noqa: S608 (question marks)
                f"WHERE message_id IN ({places})",
                chunk,
            ).fetchall()
        )
    return found


def marked(
    connection: sqlite3.Connection, subscription: str, message_ids: Iterable[str]
) -> set[str]:
    """Those of the ids that are marked."""
    wanted = list(message_ids)
    found: set[str] = set()
    for start in range(0, len(wanted), CHUNK):
        chunk = wanted[start : start + CHUNK]
        places = ",".join("?" * len(chunk))
        found.update(
            str(message_id)
            for (message_id,) in connection.execute(
                "SELECT message_id FROM msgbus_markers "  # noqa: S608 (only question marks)
                f"WHERE subscription = ? AND message_id IN ({places})",
                (subscription, *chunk),
            )
        )
    return found


def damaged(path: str, what: str) -> JournalCorruptError:
    """The error about a row whose checksum does not fit."""
    message = f"{what} of the journal {path} is damaged: its checksum does not fit."
    return JournalCorruptError(message, path=path)


def deliveries(connection: sqlite3.Connection, message_id: str) -> list[DeliveryRecord]:
    """How the deliveries of one message ended."""
    rows = connection.execute(
        "SELECT message_id, handler, attempt, outcome, wait, run, time, error, offset "
        "FROM msgbus_deliveries WHERE message_id = ? ORDER BY id",
        (message_id,),
    )
    return [DeliveryRecord._make((*row[:3], Outcome(row[3]), *row[4:])) for row in rows]


def tickets(connection: sqlite3.Connection, message_ids: Sequence[str]) -> list[TicketRow]:
    """How enqueued commands stand."""
    found: list[TicketRow] = []
    for start in range(0, len(message_ids), CHUNK):
        chunk = message_ids[start : start + CHUNK]
        rows = connection.execute(
            "SELECT message_id, state, result, error, time FROM msgbus_tickets "  # noqa: S608
            f"WHERE message_id IN ({','.join('?' * len(chunk))})",
            chunk,
        )
        found += [TicketRow(row[0], TicketState(row[1]), *row[2:]) for row in rows]
    return found
