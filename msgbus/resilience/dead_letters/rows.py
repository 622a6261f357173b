"""Dead letters as rows of a journal, and back."""

from __future__ import annotations

from datetime import datetime
from hashlib import blake2b
from typing import Final

from msgbus.errors import JournalCorruptError
from msgbus.journal.letters import LetterSelection, LetterTotal, StoredLetter, handler_of
from msgbus.journal.operations import Drop, Operation, Put
from msgbus.journal.ports import Rows
from msgbus.journal.records import LETTERS, Kind, Letter, Member, Pending, Record, State
from msgbus.resilience.dead_letters.entry import (
    DONE,
    DeadLetterEntry,
    LetterStatus,
    letter_id_of,
    moment,
)
from msgbus.resilience.dead_letters.filters import LetterFilter, position
from msgbus.resilience.dead_letters.store import LetterGroup
from msgbus.subscriptions.in_flight import InFlight

_FIRST: Final = 1 << 61
"""Rows of `LETTERS` have numbers from here on: no offset of the log is as high."""


def number_of(letter_id: str) -> int:
    """Return the number of a letter's row in `LETTERS`, the same in every process."""
    digest = blake2b(letter_id.encode(errors="surrogatepass"), digest_size=8).digest()
    return _FIRST | int.from_bytes(digest) >> 3


def selection_of(which: LetterFilter) -> LetterSelection:
    """Return a filter as journals understand it."""
    return LetterSelection(
        names=which.message_types,
        handler=which.handler,
        error_type=which.error_type,
        session_id=which.session_id,
        since=None if which.since is None else _seconds(which.since),
        until=None if which.until is None else _seconds(which.until),
        statuses=None if which.status is None else (which.status.value,),
        answered=which.answered,
        upto=None if which.upto is None else position(which.upto),
    )


def _seconds(given: datetime) -> float:
    # Times of durable handlers have more digits than a `datetime`.
    return moment(given).timestamp() - 5e-7


def group_of(total: LetterTotal) -> LetterGroup:
    """Return a count of letters as a group."""
    return LetterGroup(
        error_type=total.error_type,
        handler=total.handler,
        message_type=total.name,
        count=total.size,
        first=moment(total.first),
        last=moment(total.last),
        sample=total.error or "",
    )


def id_of(stored: StoredLetter) -> str:
    """Return the id of a stored letter; empty if it is damaged."""
    _, row, letter, record = stored
    if letter is None or record is None:
        return ""
    return letter_id_of(record.message_id, handler_of(row, letter), letter.scope, letter.target)


def entry_of(stored: StoredLetter) -> DeadLetterEntry:
    """Return a stored letter as an entry.

    Raises:
        JournalCorruptError: It is damaged.
    """
    number, row, letter, record = stored
    if letter is None or record is None:
        raise JournalCorruptError(
            f"Dead letter {number} of {row.subscription!r} is damaged: its checksum, or that of "
            f"its message, does not fit. It stays as it is; the others can be used."
        )
    return DeadLetterEntry(
        letter_id=id_of(stored),
        message_id=record.message_id,
        message_type=record.name,
        version=record.version,
        kind="command" if record.kind is Kind.COMMAND else "event",
        payload=_text(record),
        handler=handler_of(row, letter),
        error=row.error or "",
        error_type=letter.error_type,
        traceback=letter.traceback,
        attempts=letter.earlier + row.attempt,
        first_attempt=moment(letter.first_attempt),
        last_attempt=moment(letter.last_attempt),
        reason=letter.reason,
        correlation_id=record.correlation_id,
        causation_id=record.causation_id,
        session_id=record.session_id,
        topic=record.topic or None,
        headers=record.headers,
        answered=letter.answered,
        status=_status(row, letter),
        note=letter.note,
        replays=letter.replays,
        origin=letter.origin,
        from_system=record.from_system,
        scope=letter.scope,
        target=letter.target,
        key=record.key,
        offset=record.offset,
        root_id=record.root_id,
        depth=record.depth,
        subscription="" if row.subscription == LETTERS else row.subscription,
    )


def _text(record: Record) -> str:
    # Any bytes can be a payload; what is no text can be looked at all the same.
    return record.payload.decode(errors="replace")


def _status(row: Pending, letter: Letter) -> LetterStatus:
    if row.state in {State.DEAD, State.KEPT}:
        return LetterStatus(letter.status)
    if row.subscription == LETTERS and row.state is State.WAITING:
        return LetterStatus.DEAD  # the process that replayed it has ended
    return LetterStatus.REPLAYING


async def delivery_of(journal: Rows, entry: DeadLetterEntry) -> InFlight | None:
    """Return the delivery of a letter that is being replayed, if the journal has its row."""
    name, number = LETTERS, number_of(entry.letter_id)
    if entry.subscription:
        name, number = entry.subscription, entry.offset
    row = await journal.row(name, number)
    if row is None or row.owner is None:
        return None
    record = await journal.record(row)
    if record is None or record.message_id != entry.message_id:
        return None
    member = Member(row.owner, "", {}, 0)
    return InFlight(entry.subscription or entry.handler, record, 1, None, member, row=row)


def with_history(stored: StoredLetter, record: StoredLetter | None) -> StoredLetter:
    """Return a letter with the history in its record: it was done before, and is dead again."""
    letter = stored.letter
    if record is None or record.letter is None or letter is None or record == stored:
        return stored
    letter = letter._replace(
        first_attempt=min(letter.first_attempt, record.letter.first_attempt),
        replays=max(letter.replays, record.letter.replays),
        earlier=letter.earlier or record.row.attempt,
    )
    return stored._replace(letter=letter)


def new_row(entry: DeadLetterEntry, now: float) -> Put:
    """Return the operation that adds a letter to `LETTERS`."""
    number = number_of(entry.letter_id)
    row = Pending(LETTERS, number, 0, None, State.DEAD, 0, None, None, 0, False, None, now)
    return _moved(row, entry, None, None, now)


def changes(
    entry: DeadLetterEntry,
    stored: StoredLetter,
    record: StoredLetter | None,
    member: Member | None,
    now: float,
) -> list[Operation]:
    """Return the operations that make a stored letter what `entry` says.

    `record` is the letter of this id in `LETTERS`, if there is one; `member` replays it.
    """
    row, letter = stored.row, stored.letter
    if row.subscription == LETTERS:
        return [_moved(row, entry, stored.record, member, now)]
    if entry.status in DONE:
        # The subscription is done with it: the row goes, and those parked behind it go on.
        kept = new_row(entry, now).row._replace(version=0) if record is None else record.row
        return [Drop(row), _moved(kept, entry, stored.record, None, now)]
    assert letter is not None  # noqa: S101 (a damaged one has no entry)
    new = _letter(entry)._replace(handler=letter.handler, earlier=letter.earlier)
    moved = row.moved(
        _state(entry),
        time=now,
        owner=_owner(entry, member),
        attempt=entry.attempts - letter.earlier,
        error=entry.error,
        alone=False,
    )
    return [Put(moved, new, is_whole=True)]


def _state(entry: DeadLetterEntry) -> State:
    if entry.status is LetterStatus.REPLAYING:
        return State.CLAIMED
    return State.KEPT if entry.status in DONE else State.DEAD


def _owner(entry: DeadLetterEntry, member: Member | None) -> int | None:
    return member.id if member is not None and entry.status is LetterStatus.REPLAYING else None


def _moved(
    row: Pending, entry: DeadLetterEntry, known: Record | None, member: Member | None, now: float
) -> Put:
    moved = row.moved(
        _state(entry),
        time=now,
        owner=_owner(entry, member),
        attempt=entry.attempts,
        error=entry.error,
        alone=False,
        body=_record(entry, known),
    )
    return Put(moved, _letter(entry), is_whole=True)


def _letter(entry: DeadLetterEntry) -> Letter:
    return Letter(
        entry.error_type,
        entry.reason,
        entry.first_attempt.timestamp(),
        entry.last_attempt.timestamp(),
        entry.traceback,
        entry.handler,
        entry.target,
        entry.scope,
        entry.answered,
        entry.replays,
        entry.note,
        entry.status.value,
        0,
        entry.origin,
    )


def _record(entry: DeadLetterEntry, known: Record | None) -> Record:
    if known is not None and (known.name, _text(known)) == (entry.message_type, entry.payload):
        return known
    return Record(
        entry.message_id,
        entry.message_type,
        entry.version,
        entry.topic or "",
        entry.key,
        Kind.COMMAND if entry.kind == "command" else Kind.EVENT,
        entry.first_attempt.timestamp(),
        entry.correlation_id,
        entry.causation_id,
        entry.root_id,
        entry.depth,
        entry.session_id,
        entry.headers,
        entry.stored_payload().encode(),
        entry.from_system,
        entry.offset,
    )
