"""Rows of the tables beside the log: values to SQL parameters and back.

Each has a checksum that covers all its columns, the key included.
"""

from __future__ import annotations

import json
from struct import Struct
from typing import TYPE_CHECKING, Final
from zlib import crc32

from msgbus.journal.letters import handler_of
from msgbus.journal.records import (
    Cursor,
    DeliveryRecord,
    Instance,
    Letter,
    Member,
    Outcome,
    Pending,
    Record,
    Result,
    State,
)
from msgbus.journal.sqlite.messages import (
    DAMAGE,
    NONE,
    Row,
    associated,
    decoded,
    decoded_text,
    encoded_text,
    pack,
    unpack,
)

if TYPE_CHECKING:
    from msgbus.journal.codec import PayloadCodec

PENDING: Final = (
    "subscription, offset, partition, key, state, attempt, due, owner, version, alone, error, "
    "time, body, unique_key, crc"
)
PLAIN_PENDING: Final = "subscription, offset, state, due, owner, time, crc"
"""What differs from the default in a new row without a key."""

CURSOR: Final = "name, partition, acked, fetched, owner, epoch, selection, crc"
LETTER: Final = (
    f"subscription, offset, message_id, name, session_id, {', '.join(Letter._fields)}, crc"
)
"""With some fields of the message, by which letters are searched."""

DELIVERY: Final = "offset, handler, time, attempt, message_id, outcome, wait, run, error, crc"
RESULT: Final = "message_id, body, error, time, crc"
INSTANCE: Final = "name, key, state, wake, version, crc"
MEMBER: Final = "id, process, serves, renewals, crc"
"""The renewals are not in its checksum: a wrong counter costs at most a TTL."""

DELIVERY_ERROR: Final = "deliveries.error"

_STATES: Final = {str(state): state for state in State}
_NEVER: Final = float("-inf")
_OUTCOMES: Final = {str(outcome): outcome for outcome in Outcome}
_numbers: Final = Struct("<qqqqqqdd").pack
_figures: Final = Struct("<qqddd").pack


def checksum(*fields: object) -> int:
    """Return a CRC of plain values."""
    # Not repr(): what that escapes depends on the version of Python.
    return crc32(ascii(fields).encode())


def _pending_checksum(
    subscription: str,
    offset: int,
    partition: int,
    key: str | None,
    state: str,
    attempt: int,
    due: float | None,
    owner: int | None,
    version: int,
    alone: int,
    error: str | None,
    time: float,
    body: bytes | None,
    unique: str | None,
) -> int:
    numbers = _numbers(
        offset,
        partition,
        attempt,
        -1 if owner is None else owner,
        version,
        alone,
        _NEVER if due is None else due,
        time,
    )
    if key is error is unique is None:
        text = f"{subscription}\x1f{state}\x1f{NONE}\x1f{NONE}\x1f{NONE}"
    else:
        texts = [NONE if text is None else text for text in (key, error, unique)]
        text = "\x1f".join((subscription, state, *texts))
    crc = crc32(text.encode(), crc32(numbers))
    return crc if body is None else crc32(body, crc)


def pending_row(row: Pending, codec: PayloadCodec | None) -> Row:
    """Return what to write for a row: values of `PENDING`."""
    place = (row.subscription, row.offset, row.version)
    body, error = None, row.error
    if row.body is not None:
        body = pack(row.body, codec, "pending.body", *place)
    if codec is not None and error is not None:
        error = encoded_text(codec, error, "pending.error", *place)
    columns = (
        *row[:4],
        row.state._value_,
        row.attempt,
        None if row.due is None else float(row.due),
        *(row.owner, row.version, int(row.alone), error, float(row.time), body, row.unique),
    )
    return *columns, _pending_checksum(*columns)


def new_row(row: Pending, codec: PayloadCodec | None) -> Row:
    """Return what to insert for a row: `PLAIN_PENDING` if that is enough, or `PENDING`."""
    (
        subscription,
        offset,
        partition,
        key,
        state,
        attempt,
        due,
        owner,
        version,
        alone,
        error,
        time,
        body,
        unique,
    ) = row
    is_plain = key is None and error is None and body is None and unique is None
    if partition or attempt or alone or version != 1 or not is_plain:
        return pending_row(row, codec)
    word = state._value_
    crc = _pending_checksum(
        *(subscription, offset, 0, None, word, 0, due, owner, 1, 0, None, time, None, None)
    )
    return subscription, offset, word, due, owner, time, crc


def read_pending(row: Row, codec: PayloadCodec | None) -> Pending:
    """Return the row of `PENDING`; one that is damaged as `DAMAGED`."""
    return sound_row(row, codec) or _damaged_row(row)


def sound_row(row: Row, codec: PayloadCodec | None) -> Pending | None:
    """Return the row of `PENDING`; `None` if it is damaged."""
    try:
        if _pending_checksum(*row[:-1]) != row[-1]:
            return None
        values = list(row[:-1])
        place = (row[0], row[1], row[8])
        values[4], values[9] = _STATES[row[4]], bool(row[9])
        if codec is not None and row[10] is not None:
            values[10] = decoded_text(codec, row[10], "pending.error", *place)
        values[12] = None if row[12] is None else unpack(row[12], codec, "pending.body", *place)
        return Pending._make(values)
    except DAMAGE:
        return None


def _damaged_row(row: Row) -> Pending:
    """Keep of a damaged row what has the right type."""
    subscription, offset, partition, key, _, attempt, _, _, version, _, _, time, *_ = row
    return Pending(
        subscription,
        offset,
        number(partition),
        text(key),
        State.DAMAGED,
        number(attempt),
        None,
        None,
        number(version),
        False,
        "The row is damaged: its checksum does not fit, or the codec refuses what is in it.",
        time if isinstance(time, float) else 0.0,
    )


def number(value: object) -> int:
    """Return a stored number; 0 if it is none."""
    return value if isinstance(value, int) else 0


def text(value: object) -> str | None:
    """Return a stored text; `None` if it is none."""
    # Surrogates stand for bytes that are no text.
    is_text = isinstance(value, str) and not any("\ud800" <= one <= "\udfff" for one in value)
    return str(value) if is_text else None


def _plain(value: object) -> object:
    return int(value) if isinstance(value, bool) else value


# -- the others ----------------------------------------------------------------------------------


def cursor_row(cursor: Cursor) -> Row:
    """Return what to write for a cursor: values of `CURSOR`."""
    return *cursor, checksum(*cursor)


def read_cursor(row: Row) -> Cursor | None:
    """Return the cursor of a row of `CURSOR`; `None` if it is damaged."""
    return Cursor._make(row[:-1]) if checksum(*row[:-1]) == row[-1] else None


def letter_row(
    row: Pending, letter: Letter, record: Record | None, codec: PayloadCodec | None
) -> Row:
    """Return what to write for the letter of a row: values of `LETTER`."""
    of_message: tuple[str, str, str | None] = ("", "", None)
    if record is not None:
        of_message = (record.message_id, record.name, record.session_id)
    plain = letter._replace(
        first_attempt=float(letter.first_attempt),
        last_attempt=float(letter.last_attempt),
        handler=handler_of(row, letter),  # searched by index, whoever names it
    )
    if codec is not None:
        # All in one, bound to the rest of the row.
        content = json.dumps([letter.reason, letter.traceback, letter.note])
        plain = plain._replace(reason="", traceback="", note=None)
        place = _letter_place(row.subscription, row.offset, plain)
        plain = plain._replace(reason=encoded_text(codec, content, *place))
    columns = (row.subscription, row.offset, *of_message, *map(_plain, plain))
    return *columns, checksum(*columns)


def _letter_place(subscription: str, offset: int, letter: Letter) -> tuple[object, ...]:
    """Return what binds the texts of a letter to its row, and to what else it says."""
    return "letters.reason", subscription, offset, *map(_plain, letter._replace(reason=""))


def read_letter(row: Row, codec: PayloadCodec | None) -> Letter | None:
    """Return the letter of a row of `LETTER`; `None` if it is damaged."""
    if checksum(*row[:-1]) != row[-1]:
        return None
    letter = Letter._make(row[5:-1])
    if codec is not None:
        try:
            place = _letter_place(row[0], row[1], letter)
            reason, traceback, note = json.loads(decoded_text(codec, letter.reason, *place))
        except DAMAGE:
            return None
        letter = letter._replace(reason=reason, traceback=traceback, note=note)
    handler = "" if letter.handler == row[0] else letter.handler
    return letter._replace(answered=bool(letter.answered), handler=handler)


def result_row(
    message_id: str, body: bytes | None, error: str | None, time: float, codec: PayloadCodec | None
) -> Row:
    """Return what to write for a result: values of `RESULT`."""
    if codec is not None:
        if body is not None:
            body = codec.encode(body, associated("results.body", message_id))
        if error is not None:
            error = encoded_text(codec, error, "results.error", message_id)
    columns = (message_id, body, error, float(time))
    return *columns, checksum(*columns)


def read_result(row: Row, codec: PayloadCodec | None) -> Result | None:
    """Return the result of a row of `RESULT`; `None` if it is damaged."""
    if checksum(*row[:-1]) != row[-1]:
        return None
    message_id, body, error, time, _ = row
    try:
        if codec is not None and body is not None:
            body = decoded(codec, body, "results.body", message_id)
        if codec is not None and error is not None:
            error = decoded_text(codec, error, "results.error", message_id)
    except DAMAGE:
        return None
    return Result(message_id, body, error, time)


def instance_row(instance: Instance, codec: PayloadCodec | None) -> Row:
    """Return what to write for an instance: values of `INSTANCE`."""
    name, key, state, wake, version = instance
    if codec is not None:
        state = codec.encode(state, associated("instances.state", name, key, version))
    columns = (name, key, state, None if wake is None else float(wake), version)
    return *columns, checksum(*columns)


def read_instance(row: Row, codec: PayloadCodec | None) -> Instance | None:
    """Return the instance of a row of `INSTANCE`; `None` if it is damaged."""
    if checksum(*row[:-1]) != row[-1]:
        return None
    instance = Instance._make(row[:-1])
    if codec is None:
        return instance
    name, key, state, _, version = instance
    try:
        return instance._replace(state=decoded(codec, state, "instances.state", name, key, version))
    except DAMAGE:
        return None


def delivery_row(delivery: DeliveryRecord, codec: PayloadCodec | None) -> Row:
    """Return what to write for a delivery: values of `DELIVERY`."""
    message_id, handler, attempt, outcome, wait, run, time, error, offset = delivery
    offset, word = offset or 0, outcome._value_
    if codec is not None and error is not None:
        place = (DELIVERY_ERROR, offset, message_id, handler, attempt, float(time))
        error = encoded_text(codec, error, *place)
    text = f"{handler}\x1f{message_id}\x1f{word}\x1f{NONE if error is None else error}"
    crc = crc32(_figures(offset, attempt, time, wait, run) + text.encode())
    return offset, handler, time, attempt, message_id, word, wait, run, error, crc


def read_delivery(row: Row, codec: PayloadCodec | None) -> DeliveryRecord | None:
    """Return the delivery of a row of `DELIVERY`; `None` if it is damaged."""
    offset, handler, time, attempt, message_id, word, wait, run, error, crc = row
    try:
        values = (message_id, handler, attempt, _OUTCOMES[word], wait, run, time, error)
        found = DeliveryRecord(*values, offset or None)
        if delivery_row(found, None)[-1] != crc:
            return None
        if codec is None or error is None:
            return found
        place = (DELIVERY_ERROR, offset, message_id, handler, attempt, time)
        return found._replace(error=decoded_text(codec, error, *place))
    except DAMAGE:
        return None


def member_row(member: Member) -> Row:
    """Return what to write for a member: values of `MEMBER`."""
    serves = json.dumps(dict(member.serves))
    crc = checksum(member.id, member.process, serves)
    return member.id, member.process, serves, member.renewals, crc


def read_member(row: Row) -> Member | None:
    """Return the member of a row of `MEMBER`; `None` if it is damaged."""
    id, process, serves, renewals, crc = row  # noqa: A001
    if checksum(id, process, serves) != crc or not isinstance(renewals, int):
        return None
    return Member(id, process, json.loads(serves), renewals)
