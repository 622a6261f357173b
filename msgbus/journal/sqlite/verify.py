"""Check of a whole journal: every checksum of every table, and what must hold between them."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from itertools import chain, islice, starmap
from typing import TYPE_CHECKING, Final, TypeAlias

from msgbus.journal.records import DELAYED, Record
from msgbus.journal.reports import VerifyReport
from msgbus.journal.sqlite.columns import (
    CURSOR,
    DELIVERY,
    INSTANCE,
    LETTER,
    MEMBER,
    PENDING,
    RESULT,
    read_cursor,
    read_delivery,
    read_instance,
    read_letter,
    read_member,
    read_result,
    sound_row,
)
from msgbus.journal.sqlite.faults import is_undecodable
from msgbus.journal.sqlite.messages import BLOCK, MESSAGE, SPAN, Row, block_rows, read_message
from msgbus.journal.sqlite.questions import QuestionReader
from msgbus.journal.sqlite.reads import MOST_MISSING
from msgbus.journal.sqlite.schema import META, changed_objects, foreign_objects, read_meta

if TYPE_CHECKING:
    from msgbus.journal.codec import PayloadCodec

MOST_LISTED: Final = 1000

_OF_CONTENT: Final = (
    sqlite3.SQLITE_ERROR,  # of a table whose columns are not what they were
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_NOTADB,
)
"""Primary codes of errors that the content of the file causes, not the disk or another process."""

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
_WITHOUT_TIME: Final = """
SELECT subscription, offset FROM msgbus_pending WHERE (state = 'waiting') <> (due IS NOT NULL)
"""
_WITHOUT_LETTER: Final = """
SELECT subscription, offset FROM msgbus_pending AS row WHERE state = 'dead' AND NOT EXISTS (
    SELECT 1 FROM msgbus_letters AS letter
    WHERE letter.subscription = row.subscription AND letter.offset = row.offset)
"""
_WITHOUT_ROW: Final = """
SELECT subscription, offset FROM msgbus_letters AS letter WHERE NOT EXISTS (
    SELECT 1 FROM msgbus_pending AS row
    WHERE row.subscription = letter.subscription AND row.offset = letter.offset
        AND row.state <> 'done')
"""
_ROW_RULES: Final = {
    _PARKED: "is parked behind no other row of its key",
    _CLAIMED: "is claimed by no member, or has an owner without being claimed",
    _BEYOND: "is beyond what its subscription has fetched",
    _MISSING: "has no message, neither in the log nor in the row",
    _WITHOUT_TIME: "waits for no time, or has one without waiting",
    _WITHOUT_LETTER: "is dead and has no letter",
    _WITHOUT_ROW: "has a letter, but is neither dead nor being replayed",
}
_NUMBERED: Final = {"members": "id", "letters": "number", "deliveries": "id"}
_KEYS: Final = {
    "members": "id",
    "pending": "subscription, offset",
    "letters": "subscription, offset",
    "results": "message_id",
    "instances": "name, key",
    "deliveries": "id",
}


def verify(reader: QuestionReader) -> VerifyReport:
    """Read everything and report what is wrong, also what the codec refuses.

    The whole file is read: this takes time, but nobody waits for it.
    """
    log = _LogCheck()
    checks = {
        "log": log.check(reader),
        "file": _file(reader),
        "schema": _schema(reader),
        "table msgbus_meta": _meta(reader),
        "table msgbus_blocks": _blocks(reader, log.blocks),
        "table msgbus_subscriptions": _cursors(reader),
        "table msgbus_members": _checksums(reader, "members", MEMBER, _read_member),
        "table msgbus_pending": _checksums(reader, "pending", PENDING, sound_row),
        "table msgbus_letters": _checksums(reader, "letters", LETTER, read_letter),
        "table msgbus_results": _checksums(reader, "results", RESULT, read_result),
        "table msgbus_instances": _checksums(reader, "instances", INSTANCE, read_instance),
        "table msgbus_deliveries": _checksums(reader, "deliveries", DELIVERY, read_delivery),
        "relation between tables": chain(_rows(reader), _numbers(reader)),
    }
    problems = chain.from_iterable(starmap(_to_the_end, checks.items()))
    return VerifyReport(
        problems=tuple(islice(problems, MOST_LISTED)),
        messages=log.sound,
        damaged=tuple(log.damaged[:MOST_LISTED]),
    )


def _to_the_end(what: str, problems: Iterator[str]) -> Iterator[str]:
    """Report a part of the file that cannot be read, and go on with the next one."""
    try:
        yield from problems
    except sqlite3.DatabaseError as error:
        # With text that is no text, everything is read again, leniently.
        if is_undecodable(error) or (error.sqlite_errorcode & 0xFF) not in _OF_CONTENT:
            raise
        yield f"The {what} cannot be read to its end: {error!a}."


class _LogCheck:
    """The messages: how many are sound, which are not, and what the table of blocks must have."""

    def __init__(self) -> None:
        self.sound = 0
        self.damaged: list[int] = []
        """Offsets of those that are damaged, or missing beyond the trimmed."""
        self.blocks: set[_Block] = set()

    def check(self, reader: QuestionReader) -> Iterator[str]:
        """Read the log."""
        expected = reader.trimmed() + 1
        query = f"SELECT {MESSAGE} FROM msgbus_messages ORDER BY offset"  # noqa: S608
        for row in reader.connection.execute(query):
            offset: int = row[0]
            self.damaged += range(expected, min(offset, expected + MOST_MISSING))
            expected = max(offset + 1, expected)
            self._note(offset, read_message(row, reader.codec))
        yield from ()

    def _note(self, offset: int, record: Record | int) -> None:
        if isinstance(record, int):
            self.damaged.append(offset)
        else:
            self.sound += 1
            block = offset // BLOCK
            self.blocks.add((record.name, record.topic, record.time // SPAN, block))


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


def _schema(reader: QuestionReader) -> Iterator[str]:
    for name in changed_objects(reader.connection):
        yield f"{name} is missing, or not as this version of msgbus makes it."
    for kind, name, table in foreign_objects(reader.connection):
        yield f"The {kind} {name!a} on {table!a} was not made by msgbus."


def _meta(reader: QuestionReader) -> Iterator[str]:
    found = reader.connection.execute("SELECT key FROM msgbus_meta").fetchall()
    for key in dict.fromkeys((*META, *(key for (key,) in found))):
        try:
            read_meta(reader.connection, key)
        except sqlite3.DatabaseError as error:
            yield f"{str(error).capitalize()}."


def _checksums(
    reader: QuestionReader,
    table: str,
    columns: str,
    read: Callable[[Row, PayloadCodec | None], object],
) -> Iterator[str]:
    """Check the rows of a table one by one."""
    keys = _KEYS[table]
    query = f"SELECT {keys}, {columns} FROM msgbus_{table}"  # noqa: S608
    count = keys.count(",") + 1
    reason = "its checksum does not fit"
    if reader.codec is not None:
        reason += ", or the codec refuses it"
    for row in reader.connection.execute(query):
        if read(row[count:], reader.codec) is None:
            which = ", ".join(ascii(value) for value in row[:count])
            yield f"The row ({which}) of msgbus_{table} is damaged: {reason}."


def _read_member(row: Row, codec: PayloadCodec | None) -> object:  # noqa: ARG001 (as the others)
    return read_member(row)


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


def _numbers(reader: QuestionReader) -> Iterator[str]:
    """Check that no number will be given again."""
    query = "SELECT max(offset) FROM msgbus_pending WHERE subscription = ?"
    (highest,) = reader.connection.execute(query, (DELAYED,)).fetchone()
    if highest is not None and highest > int(read_meta(reader.connection, "delayed")):
        yield f"Delayed event {highest} has a number that was not given yet."
    for table, column in _NUMBERED.items():
        query = (
            f"SELECT coalesce((SELECT seq FROM sqlite_sequence WHERE name = 'msgbus_{table}'), 0), "  # noqa: S608
            f"coalesce((SELECT max({column}) FROM msgbus_{table}), 0)"
        )
        given, highest = reader.connection.execute(query).fetchone()
        if highest > given:
            yield f"The row ({highest}) of msgbus_{table} has a number that was not given yet."


def _rows(reader: QuestionReader) -> Iterator[str]:
    for query, what in _ROW_RULES.items():
        for subscription, offset in reader.connection.execute(query):
            yield f"Message {offset} of {subscription!a} {what}."
