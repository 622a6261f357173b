"""Check of a whole journal: every checksum of every table, and what must hold between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Final, TypeAlias

from msgbus.journal.records import DELAYED, State
from msgbus.journal.reports import VerifyReport
from msgbus.journal.sqlite.columns import (
    CURSOR,
    INSTANCE,
    LETTER,
    PENDING,
    RESULT,
    pending_row,
    read_cursor,
    read_instance,
    read_letter,
    read_pending,
    read_result,
)
from msgbus.journal.sqlite.messages import BLOCK, MESSAGE, SPAN, Row, block_rows, read_message
from msgbus.journal.sqlite.questions import QuestionReader
from msgbus.journal.sqlite.schema import read_meta

MOST_LISTED: Final = 1000

_Block: TypeAlias = tuple[str, str, float, int]

_PARKED: Final = """
SELECT subscription, offset FROM msgbus_pending AS parked
WHERE state = 'parked' AND NOT EXISTS (
    SELECT 1 FROM msgbus_pending AS other INDEXED BY msgbus_pending_holding
    WHERE other.subscription = parked.subscription AND other.partition = parked.partition
        AND other.key = parked.key AND other.offset < parked.offset
        AND other.state IN ('waiting', 'claimed', 'dead', 'damaged'))
"""
_CLAIMED: Final = """
SELECT subscription, offset FROM msgbus_pending
WHERE (state = 'claimed') <> (owner IS NOT NULL) OR owner IS NOT NULL AND NOT EXISTS (
    SELECT 1 FROM msgbus_members WHERE msgbus_members.id = msgbus_pending.owner)
"""
# A queue of commands has no cursors; KEPT rows stay where they are when a cursor is moved back.
_BEYOND: Final = f"""
SELECT subscription, offset FROM msgbus_pending
WHERE subscription <> '{DELAYED}' AND state <> 'kept'
    AND EXISTS (SELECT 1 FROM msgbus_subscriptions WHERE name = msgbus_pending.subscription)
    AND NOT EXISTS (SELECT 1 FROM msgbus_subscriptions WHERE name = msgbus_pending.subscription
        AND msgbus_subscriptions.partition = msgbus_pending.partition
        AND fetched >= msgbus_pending.offset)
"""  # noqa: S608
# The number of a delayed event is not an offset of the log.
_MISSING: Final = f"""
SELECT subscription, offset FROM msgbus_pending
WHERE body IS NULL AND (subscription = '{DELAYED}' OR NOT EXISTS (
    SELECT 1 FROM msgbus_messages WHERE msgbus_messages.offset = msgbus_pending.offset))
"""  # noqa: S608
_ROW_RULES: Final = {
    _PARKED: "is parked behind no other row of its key",
    _CLAIMED: "is claimed by no member, or has an owner without being claimed",
    _BEYOND: "is beyond what its subscription has fetched",
    _MISSING: "has no message, neither in the log nor in the row",
}


def verify(reader: QuestionReader) -> VerifyReport:
    """Read everything and report what is wrong; no codec is needed, checksums cover stored bytes.

    The whole file is read: this takes time, but nobody waits for it.
    """
    messages, damaged, blocks = _messages(reader)
    problems = chain(
        _file(reader),
        _meta(reader),
        _blocks(reader, blocks),
        _cursors(reader),
        _checksums(reader, "pending", PENDING, _is_sound_row),
        _checksums(reader, "letters", LETTER, read_letter),
        _checksums(reader, "results", RESULT, lambda row: read_result(row, None)),
        _checksums(reader, "instances", INSTANCE, lambda row: read_instance(row, None)),
        _rows(reader),
    )
    return VerifyReport(
        messages=messages,
        damaged=tuple(damaged[:MOST_LISTED]),
        problems=tuple(islice(problems, MOST_LISTED)),
    )


def _messages(reader: QuestionReader) -> tuple[int, list[int], set[_Block]]:
    """Count the sound messages; list the damaged ones, and those missing beyond the trimmed.

    Returns also what the table of blocks must have.
    """
    sound, damaged, expected = 0, list[int](), reader.trimmed() + 1
    blocks: set[_Block] = set()
    query = f"SELECT {MESSAGE} FROM msgbus_messages ORDER BY offset"  # noqa: S608
    for row in reader.connection.execute(query):
        offset: int = row[0]
        damaged += range(expected, min(offset, expected + MOST_LISTED))
        expected = max(offset + 1, expected)
        record = read_message(row, None)
        if isinstance(record, int):
            damaged.append(offset)
        else:
            sound += 1
            blocks.add((record.name, record.topic, record.time // SPAN, offset // BLOCK))
    return sound, damaged, blocks


def _blocks(reader: QuestionReader, blocks: set[_Block]) -> Iterator[str]:
    stored = set(reader.connection.execute("SELECT value, block FROM msgbus_blocks"))
    for value, block in sorted(set(block_rows(blocks)) - stored, key=repr):
        first, last = block * BLOCK, (block + 1) * BLOCK - 1
        yield (
            f"The table msgbus_blocks has no row for {value!a} between the offsets {first} and "
            f"{last}: look-ups do not find those messages."
        )


def _file(reader: QuestionReader) -> Iterator[str]:
    for (text,) in reader.connection.execute("PRAGMA integrity_check(100)"):
        if text != "ok":
            yield str(text)


def _meta(reader: QuestionReader) -> Iterator[str]:
    for key in ("schema_version", "trimmed", "delayed"):
        if not (read_meta(reader.connection, key) or "").isdecimal():
            yield f"The table msgbus_meta has no number for {key!r}."
    delayed = read_meta(reader.connection, "delayed") or ""
    query = "SELECT max(offset) FROM msgbus_pending WHERE subscription = ?"
    (highest,) = reader.connection.execute(query, (DELAYED,)).fetchone()
    if delayed.isdecimal() and highest is not None and highest > int(delayed):
        yield f"Delayed event {highest} has a number that was not given yet."


def _checksums(
    reader: QuestionReader, table: str, columns: str, is_sound: Callable[[Row], object]
) -> Iterator[str]:
    """Check a table whose key is the first column, or the first two."""
    query = f"SELECT {columns} FROM msgbus_{table}"  # noqa: S608
    for row in reader.connection.execute(query):
        if not is_sound(row):
            key = row[:1] if table == "results" else row[:2]
            which = ", ".join(ascii(value) for value in key)
            yield f"The row ({which}) of msgbus_{table} is damaged: its checksum does not fit."


def _is_sound_row(row: Row) -> bool:
    found = read_pending(row, None)
    # One that was set aside as damaged is sound, as a row.
    return found.state is not State.DAMAGED or pending_row(found, None) == row


def _cursors(reader: QuestionReader) -> Iterator[str]:
    head, members = reader.head(), {member.id for member in reader.members()}
    query = f"SELECT {CURSOR} FROM msgbus_subscriptions"  # noqa: S608
    for row in reader.connection.execute(query):
        cursor = read_cursor(row)
        which = f"Partition {row[1]} of {row[0]!a}"
        if cursor is None:
            yield f"{which} is damaged: its checksum does not fit."
            continue
        if not 0 <= cursor.acked <= cursor.fetched <= head:
            yield (
                f"{which} is acknowledged up to {cursor.acked} and fetched up to "
                f"{cursor.fetched}, with the head at {head}."
            )
        if cursor.owner is not None and cursor.owner not in members:
            yield f"{which} is owned by member {cursor.owner}, which does not exist."


def _rows(reader: QuestionReader) -> Iterator[str]:
    for query, what in _ROW_RULES.items():
        for subscription, offset in reader.connection.execute(query):
            yield f"Message {offset} of {subscription!a} {what}."
