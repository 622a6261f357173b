"""Looking after a journal's file: verify, compact, back up, trim."""

from __future__ import annotations

import sqlite3
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from msgbus.errors import CorruptRecordError, JournalError, JournalOpenError
from msgbus.journal.records import Retention, TrimReport, VerifyReport
from msgbus.journal.sqlite import queries, reads, retention
from msgbus.journal.sqlite.letters import JournalRows
from msgbus.journal.sqlite.rows import COLUMNS, from_row
from msgbus.journal.sqlite.store import Store

if TYPE_CHECKING:
    from collections.abc import Iterator

MOST_LISTED = 1000


def verify(source: queries.Source) -> VerifyReport:
    """Read everything, and say what is wrong."""
    connection = source.connection
    problems = [
        str(row[0]) for row in connection.execute("PRAGMA integrity_check(100)") if row[0] != "ok"
    ]
    damaged: list[int] = []
    messages = 0
    expected = queries.trimmed(connection) + 1
    head = reads.head(connection)
    for offset, is_sound in _records(source):
        damaged += range(expected, min(offset, expected + MOST_LISTED))
        expected = offset + 1
        if is_sound:
            messages += 1
        else:
            damaged.append(offset)
    damaged += range(expected, min(head + 1, expected + MOST_LISTED))
    # Without the codec, as above.
    problems += JournalRows(connection, source.path, None).check_all()[:MOST_LISTED]
    try:
        reads.cursors(connection, source.path)
    except JournalError as error:
        problems.append(str(error))
    return VerifyReport(
        messages=messages, damaged=tuple(damaged[:MOST_LISTED]), problems=tuple(problems)
    )


def _records(source: queries.Source) -> Iterator[tuple[int, bool]]:
    rows = source.connection.execute(
        f"SELECT {COLUMNS} FROM msgbus_messages ORDER BY offset"  # noqa: S608
    )
    for row in rows:
        try:
            # Without the codec: the checksum is over what is stored, so no key is needed.
            from_row(row, source.path, None)
        except CorruptRecordError:
            yield int(row[0]), False
        else:
            yield int(row[0]), True


def compact(connection: sqlite3.Connection) -> None:
    """Give free pages, and the write-ahead log, back to the disk."""
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    connection.execute("VACUUM")
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()


def backup(connection: sqlite3.Connection, target: str) -> None:
    """Copy one consistent state of the journal into a new file, while others write.

    Raises:
        JournalOpenError: The file is there already, or its folder is not.
    """
    file = Path(target)
    if file.exists():
        message = f"{target} is there already: name a new file, or remove it first."
        raise JournalOpenError(message, path=target)
    if not file.parent.is_dir():
        message = f"The folder of the backup {target} does not exist: make {file.parent} first."
        raise JournalOpenError(message, path=target)
    # Under another name until it is complete: half a backup must not look like one.
    partial = file.with_name(f"{file.name}.partial")
    partial.unlink(missing_ok=True)
    try:
        with closing(sqlite3.connect(str(partial), isolation_level=None)) as copy:
            connection.backup(copy)
            # One file, complete in itself.
            copy.execute("PRAGMA journal_mode = DELETE").fetchall()
        partial.rename(file)
    finally:
        partial.unlink(missing_ok=True)


def trim(store: Store, wanted: Retention, now: float, before: int | None) -> TrimReport:
    """Remove what need not be kept, in small transactions.

    Runs between two groups: with a transaction of its own for each step, so that the log of
    each fits into the space of the reserve.
    """
    connection = store.connection
    last = retention.wanted_by(connection, wanted, now)
    if before is not None:
        last = max(last, min(before - 1, reads.head(connection)))
    limit = retention.limit_of(connection, store.path, last)
    removed = 0
    while step := _step(store, limit.offset):
        removed += step
    held_back_by = limit.held_back_by
    if wanted.max_bytes is not None:
        limit = retention.limit_of(connection, store.path, reads.head(connection))
        while retention.bytes_in_use(connection) > wanted.max_bytes:
            step = _step(store, limit.offset)
            removed += step
            if not step:
                held_back_by = held_back_by or limit.held_back_by
                break
    return retention.report(connection, removed, held_back_by)


def _step(store: Store, last: int) -> int:
    store.begin()
    try:
        removed = retention.remove_chunk(store, last)
        store.commit()
    except BaseException:
        store.rollback()
        raise
    # Now, so that the next step finds the log empty, not a little longer. If the disk has no
    # room even for that, what was removed is removed all the same.
    with suppress(sqlite3.OperationalError):
        store.connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
    return removed
