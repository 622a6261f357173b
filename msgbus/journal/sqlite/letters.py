"""The journal's dead letters: of subscriptions, written as they pass them, and of the bus.

They are rows as `msgbus.resilience` knows them, with what else a record has beside it. The
payload is stored as the journal's codec leaves it, and a checksum covers the whole row.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple, final

from msgbus.errors import JournalCorruptError
from msgbus.journal.records import DeadLetter, Kind, Record
from msgbus.journal.sqlite.reads import damaged
from msgbus.journal.sqlite.rows import checksum, decoded
from msgbus.resilience.letter_rows import COLUMNS, LetterRows, LetterTable, record_of, row_of
from msgbus.resilience.letters import DeadLetterEntry, at, letter_id_of, micros
from msgbus.resilience.stores import Record as LetterRecord, added

if TYPE_CHECKING:
    from msgbus.journal.codec import PayloadCodec

_PAYLOAD: Final = COLUMNS.index("payload")


class Beside(NamedTuple):
    """What a record has and a letter lacks; nothing of it in letters that the bus wrote."""

    offset: int = 0
    key: str | None = None
    recorded: float | None = None
    root_id: str | None = None
    depth: int = 0
    subscription: str | None = None


LETTERS: Final = LetterTable("msgbus_dead_letters", beside=(*Beside._fields, "crc"))

_STORED: Final = (
    f"SELECT payload, {', '.join(Beside._fields)} FROM {LETTERS.name} "  # noqa: S608
    f"WHERE letter_id = ?"
)
# With a plus sign no index serves: paging through all of them in their order costs less than
# sorting what is left anew for every page.
_OPEN: Final = (
    f"SELECT seq, {LETTERS.listed} FROM {LETTERS.name} "  # noqa: S608
    f"WHERE seq > ? AND (? IS NULL OR coalesce(subscription, handler) = ?) "
    f"AND +status IN ('dead', 'replaying') ORDER BY seq LIMIT ?"
)
_FORGET: Final = (
    f"DELETE FROM {LETTERS.name} WHERE letter_id >= ? || '-' AND letter_id < ? || '.' "  # noqa: S608
    f"AND message_id = ? AND status NOT IN ('dead', 'replaying')"
)


@final
class JournalRows(LetterRows):
    """The letters of a journal, on one of its connections."""

    def __init__(
        self, connection: sqlite3.Connection, path: str, codec: PayloadCodec | None
    ) -> None:
        super().__init__(connection, LETTERS)
        self._path = path
        self._codec = codec

    # -- as `msgbus.resilience` sees them --------------------------------------------------------

    def to_row(self, record: LetterRecord) -> Sequence[Any]:
        """A letter that the bus wrote."""
        payload = record.letter.payload.encode()
        return _row(record, self._encoded(payload), Beside())

    def from_row(self, row: Sequence[Any]) -> LetterRecord:
        """The record of a row.

        Raises:
            JournalCorruptError: The checksum does not fit.
            StoredMessageError: The codec refuses the payload.
        """
        self._check(row)
        values = list(row[: len(COLUMNS)])
        # Any bytes can be a record's payload; what is no text can be looked at all the same.
        values[_PAYLOAD] = self._decoded(row).decode(errors="replace")
        return record_of(values)

    def update(self, record: LetterRecord) -> None:
        """Write a record in the place of the one with its id; what stands beside it stays."""
        letter = record.letter
        stored, *rest = self.connection.execute(_STORED, (letter.letter_id,)).fetchone()
        text = self._plain(stored, letter.message_id).decode(errors="replace")
        payload = stored if text == letter.payload else self._encoded(letter.payload.encode())
        self._overwrite(_row(record, payload, Beside(*rest)), letter.letter_id)

    # -- as subscriptions see them ---------------------------------------------------------------

    def add(self, letter: DeadLetter) -> None:
        """Keep a letter that came, perhaps again."""
        record, entry = letter.record, _entry(letter)
        old = self.get(entry.letter_id)
        beside = Beside(
            record.offset,
            record.key,
            float(record.time),
            record.root_id,
            record.depth,
            letter.subscription,
        )
        row = _row(added(old, entry), self._encoded(record.payload), beside)
        if old is None:
            self.connection.execute(self.table.insert, row)
        else:
            self._overwrite(row, entry.letter_id)

    def open_letters(self, subscription: str | None, after: int, limit: int) -> list[DeadLetter]:
        """Those about which something is left to do, oldest first."""
        values = (after, subscription, subscription, limit)
        rows = self.connection.execute(_OPEN, values).fetchall()
        return [self._letter(seq, row) for seq, *row in rows]

    def drop(self, seq: int) -> None:
        """Forget a letter."""
        self.connection.execute("DELETE FROM msgbus_dead_letters WHERE seq = ?", (seq,))

    def check_all(self) -> list[str]:
        """Read everything, and say what is damaged."""
        problems: list[str] = []
        for row in self.connection.execute(f"SELECT {LETTERS.listed} FROM {LETTERS.name}"):  # noqa: S608
            try:
                self._check(row)
            except JournalCorruptError as error:
                problems.append(str(error))
        return problems

    # -- inside ----------------------------------------------------------------------------------

    def _letter(self, seq: int, row: Sequence[Any]) -> DeadLetter:
        entry = self.from_row(row).letter
        beside = Beside(*row[len(COLUMNS) : -1])
        first, last = micros(entry.first_attempt) / 1e6, micros(entry.last_attempt) / 1e6
        record = Record(
            entry.message_id,
            entry.message_type,
            entry.version,
            entry.topic or entry.message_type,
            beside.key,
            Kind(entry.kind),
            first if beside.recorded is None else beside.recorded,
            entry.correlation_id,
            entry.causation_id,
            beside.root_id or entry.correlation_id,
            beside.depth,
            entry.session_id,
            entry.headers,
            self._decoded(row),
            entry.from_system,
            beside.offset,
        )
        subscription = beside.subscription or entry.handler
        return DeadLetter(
            subscription,
            record,
            entry.attempts,
            entry.error or None,
            last,
            seq,
            error_type=entry.error_type,
            traceback=entry.traceback,
            reason=entry.reason,
            first_time=None if first == last else first,
            answered=entry.answered,
            handler="" if entry.handler == subscription else entry.handler,
            scope=entry.scope,
            target=entry.target,
        )

    def _overwrite(self, row: Sequence[Any], letter_id: str) -> None:
        self.connection.execute(self.table.update, (*row, letter_id))

    def _encoded(self, payload: bytes) -> bytes:
        return payload if self._codec is None else self._codec.encode(payload)

    def _decoded(self, row: Sequence[Any]) -> bytes:
        return self._plain(row[_PAYLOAD], row[COLUMNS.index("message_id")])

    def _plain(self, payload: bytes, message_id: str) -> bytes:
        return payload if self._codec is None else decoded(self._codec, payload, message_id)

    def _check(self, row: Sequence[Any]) -> None:
        *values, crc = row
        try:
            is_sound = _checksum(values) == crc
        except (TypeError, UnicodeEncodeError):
            is_sound = False  # values that no writer could have written
        if not is_sound:
            raise damaged(self._path, f"Dead letter {row[0]!r:.80}")


def forget_done(connection: sqlite3.Connection, message_ids: Sequence[str]) -> None:
    """Remove letters about these messages, unless something is left to do about them."""
    connection.executemany(_FORGET, [(one, one, one) for one in message_ids])


def _row(record: LetterRecord, payload: bytes, beside: Beside) -> Sequence[Any]:
    values = [*row_of(record), *beside]
    values[_PAYLOAD] = payload
    return (*values, _checksum(values))


def _checksum(values: Sequence[Any]) -> int:
    return checksum((*values[:_PAYLOAD], *values[_PAYLOAD + 1 :]), values[_PAYLOAD])


def _entry(letter: DeadLetter) -> DeadLetterEntry:
    """What a subscription gave up, as a letter of its own name, or of its handler's."""
    record = letter.record
    handler = letter.handler or letter.subscription
    died = _moment(letter.time)
    return DeadLetterEntry(
        letter_id=letter_id_of(record.message_id, handler, letter.scope, letter.target),
        message_id=record.message_id,
        message_type=record.name,
        version=record.version,
        kind="command" if record.kind is Kind.COMMAND else "event",
        payload="",  # as bytes, beside it
        handler=handler,
        scope=letter.scope,
        target=letter.target,
        error=letter.error or "",
        error_type=letter.error_type,
        traceback=letter.traceback,
        attempts=letter.attempts,
        first_attempt=died if letter.first_time is None else _moment(letter.first_time),
        last_attempt=died,
        reason=letter.reason,
        correlation_id=record.correlation_id,
        causation_id=record.causation_id,
        session_id=record.session_id,
        topic=record.topic,
        headers=record.headers,
        answered=letter.answered,
        from_system=record.from_system,
    )


def _moment(seconds: float) -> datetime:
    return at(round(seconds, 6))
