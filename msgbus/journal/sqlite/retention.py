"""Removing the oldest messages: by age, size and count, never what a cursor still needs."""

from __future__ import annotations

import sqlite3
from typing import Final, NamedTuple

from msgbus.journal.records import Retention, TrimReport
from msgbus.journal.sqlite import queries, reads
from msgbus.journal.sqlite.letters import forget_done
from msgbus.journal.sqlite.schema import write_meta
from msgbus.journal.sqlite.store import Store

CHUNK: Final = 200
"""Messages per transaction: little enough for the reserve to cover its log."""


class Limit(NamedTuple):
    """How far a trim may go, and who stops it from going further."""

    offset: int
    held_back_by: tuple[str, ...]


def limit_of(connection: sqlite3.Connection, path: str, wanted: int) -> Limit:
    """What may go of the messages up to `wanted`: only what every cursor has passed."""
    behind = [one for one in reads.cursors(connection, path) if one.offset < wanted]
    if not behind:
        return Limit(wanted, ())
    return Limit(min(one.offset for one in behind), tuple(one.name for one in behind))


def wanted_by(connection: sqlite3.Connection, retention: Retention, now: float) -> int:
    """The highest offset that `retention` would not keep; the size is seen to by steps."""
    head = reads.head(connection)
    last = queries.first(connection) - 1
    if retention.max_count is not None:
        last = max(last, head - retention.max_count)
    if retention.max_age is not None:
        # Up to the first that is young enough: a clock that jumped never costs a young one.
        last = max(last, queries.offset_at(connection, now - retention.max_age) - 1)
    return min(last, head)


def bytes_in_use(connection: sqlite3.Connection) -> int:
    """Size of the pages that hold something."""
    pages, free, size = (
        int(connection.execute(f"PRAGMA {name}").fetchone()[0])
        for name in ("page_count", "freelist_count", "page_size")
    )
    return (pages - free) * size


def remove_chunk(store: Store, last: int) -> int:
    """Remove the oldest messages up to `last`, at most a chunk, and what belongs to them."""
    connection = store.connection
    rows = connection.execute(
        "SELECT offset, message_id FROM msgbus_messages WHERE offset <= ? ORDER BY offset LIMIT ?",
        (last, CHUNK),
    ).fetchall()
    if not rows:
        return 0
    forget_done(connection, [message_id for _, message_id in rows])
    ids = [(message_id,) for _, message_id in rows]
    for table in ("deliveries", "markers"):
        statement = f"DELETE FROM msgbus_{table} WHERE message_id = ?"  # noqa: S608
        connection.executemany(statement, ids)
    connection.executemany(
        "DELETE FROM msgbus_tickets WHERE message_id = ? AND state <> 'pending'", ids
    )
    end = int(rows[-1][0])
    connection.execute("DELETE FROM msgbus_messages WHERE offset <= ?", (end,))
    write_meta(connection, "trimmed", str(end))
    return len(rows)


def report(
    connection: sqlite3.Connection, removed: int, held_back_by: tuple[str, ...]
) -> TrimReport:
    """What the trim did."""
    return TrimReport(removed=removed, first=queries.first(connection), held_back_by=held_back_by)
