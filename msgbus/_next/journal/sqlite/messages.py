"""Rows of the log: records to SQL parameters and back, with a checksum over all columns."""

from __future__ import annotations

import json
from functools import lru_cache
from struct import (
    Struct,
    error as StructError,  # noqa: N812
)
from types import MappingProxyType
from typing import TYPE_CHECKING, Final
from zlib import crc32

from msgbus._next.journal.records import Kind, Record
from msgbus._next.journal.sqlite.statements import Row
from msgbus.errors import StoredMessageError
from msgbus.messages.metadata import NO_HEADERS
from msgbus.telemetry.redaction import redact_exception

if TYPE_CHECKING:
    from msgbus.journal.codec import PayloadCodec

MESSAGE: Final = (
    "offset, message_id, name, version, topic, key, kind, time, correlation_id, causation_id, "
    "root_id, depth, session_id, headers, payload, from_system, slot, crc"
)
PLAIN_MESSAGE: Final = (
    "offset, message_id, name, version, topic, key, kind, time, payload, slot, crc"
)
"""What differs from the default in a message without a cause, a session and headers."""

NONE: Final = "\x1e"
"""Stands for a text that is not there."""

DAMAGE: Final = (TypeError, ValueError, StructError, KeyError)
"""What values raise that no writer could have written."""

_KINDS: Final = {str(kind): kind for kind in Kind}
_NO_TEXTS: Final = f"\x1f{NONE}" * 5
_numbers: Final = Struct("<qqqqqd").pack


def _checksum(
    offset: int,
    message_id: str,
    name: str,
    version: int,
    topic: str,
    key: str | None,
    kind: str,
    time: float,
    correlation_id: str | None,
    causation_id: str | None,
    root_id: str | None,
    depth: int,
    session_id: str | None,
    headers: str | None,
    payload: bytes,
    from_system: int,
    slot: int,
) -> int:
    texts = [
        NONE if text is None else text
        for text in (key, correlation_id, causation_id, root_id, session_id, headers)
    ]
    text = "\x1f".join((message_id, name, topic, kind, *texts))
    numbers = _numbers(offset, version, depth, from_system, slot, time)
    return crc32(payload, crc32(text.encode(), crc32(numbers)))


def message_row(record: Record, offset: int, codec: PayloadCodec | None) -> Row:
    """Return what to insert for a record: `PLAIN_MESSAGE` if that is enough, or `MESSAGE`.

    A correlation and a root that are the id itself are stored as NULL: they take no room then,
    not in the index either.
    """
    (
        message_id,
        name,
        version,
        topic,
        key,
        kind,
        time,
        correlation_id,
        causation_id,
        root_id,
        depth,
        session_id,
        headers,
        payload,
        from_system,
        _,
    ) = record
    if codec is not None:
        payload = codec.encode(payload)
    # Here and not by slot_of(), which costs as much as the rest of this line.
    slot = crc32((message_id if key is None else key).encode()) & 0xFFFF
    word, time = kind._value_, float(time)
    if (
        correlation_id == message_id == root_id
        and causation_id is None
        and session_id is None
        and not (headers or depth or from_system)
    ):
        text = f"{message_id}\x1f{name}\x1f{topic}\x1f{word}\x1f{NONE if key is None else key}"
        numbers = _numbers(offset, version, 0, 0, slot, time)
        crc = crc32(payload, crc32((text + _NO_TEXTS).encode(), crc32(numbers)))
        return offset, message_id, name, version, topic, key, word, time, payload, slot, crc
    correlation = None if correlation_id == message_id else correlation_id
    root = None if root_id == message_id else root_id
    words = json.dumps(dict(headers), separators=(",", ":")) if headers else None
    columns = (
        *(offset, message_id, name, version, topic, key, word, time),
        *(correlation, causation_id, root, depth, session_id, words),
        *(payload, int(from_system), slot),
    )
    return *columns, _checksum(*columns)


def read_message(row: Row, codec: PayloadCodec | None) -> Record | int:
    """Return the record of a row of `MESSAGE`, or its offset if it is damaged.

    Raises:
        StoredMessageError: The codec refuses the payload.
    """
    try:
        if _checksum(*row[:-1]) != row[-1]:
            return int(row[0])
    except DAMAGE:
        return int(row[0])
    offset, message_id, name, version, topic, key, kind, time = row[:8]
    correlation_id, causation_id, root_id, depth, session_id, headers, payload, flag = row[8:16]
    return Record._make(
        (
            message_id,
            name,
            version,
            topic,
            key,
            _KINDS[kind],
            time,
            correlation_id or message_id,
            causation_id,
            root_id or message_id,
            depth,
            session_id,
            NO_HEADERS if headers is None else _headers(headers),
            payload if codec is None else decoded(codec, payload, message_id),
            bool(flag),
            offset,
        )
    )


@lru_cache(maxsize=256)
def _headers(text: str) -> MappingProxyType[str, str]:
    # Most messages of one flow have the same headers.
    return MappingProxyType(json.loads(text))


def decoded(codec: PayloadCodec, payload: bytes, message_id: str) -> bytes:
    try:
        return codec.decode(payload)
    except Exception as error:
        message = (
            f"The codec cannot decode message {message_id}: {redact_exception(error)}. "
            f"Is it the codec, and the key, that the message was written with?"
        )
        raise StoredMessageError(message, message_id=message_id) from error


def pack(record: Record, codec: PayloadCodec | None) -> bytes:
    payload = record.payload if codec is None else codec.encode(record.payload)
    return b"%s\n%s" % (record.envelope().encode(), payload)


def unpack(body: bytes, codec: PayloadCodec | None) -> Record:
    envelope, _, payload = body.partition(b"\n")
    record = Record.from_envelope(envelope.decode(), payload)
    if codec is None:
        return record
    return record._replace(payload=decoded(codec, payload, record.message_id))
