"""Rows of the log: records to SQL parameters and back, with a checksum over all columns."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Iterable
from functools import lru_cache
from struct import (
    Struct,
    error as StructError,  # noqa: N812
)
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from zlib import crc32

from msgbus.journal.records import Kind, Record
from msgbus.messages.metadata import NO_HEADERS

if TYPE_CHECKING:
    from msgbus.journal.codec import PayloadCodec

Row: TypeAlias = tuple[Any, ...]
"""Values of one row, in the order of its columns."""

MESSAGE: Final = (
    "offset, message_id, name, version, topic, key, kind, time, correlation_id, causation_id, "
    "root_id, depth, session_id, headers, payload, from_system, slot, crc"
)
PLAIN_MESSAGE: Final = (
    "offset, message_id, name, version, topic, key, kind, time, payload, slot, crc"
)
"""What differs from the default in a message without a cause, a session and headers."""

BLOCK: Final = 1024
"""Offsets of one block.

The table of blocks tells in which blocks a name, a topic or a span of time occurs. It answers
questions as an index of all messages would, at a hundredth of the cost.
"""

SPAN: Final = 10
"""Seconds of one span of time."""

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
        payload = codec.encode(payload, associated(PAYLOAD, message_id, name, version))
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
    if codec is not None and words is not None:
        words = encoded_text(codec, words, HEADERS, message_id, name, version)
    columns = (
        *(offset, message_id, name, version, topic, key, word, time),
        *(correlation, causation_id, root, depth, session_id, words),
        *(payload, int(from_system), slot),
    )
    return *columns, _checksum(*columns)


def block_rows(found: Iterable[tuple[str, str, float, int]]) -> list[Row]:
    """Return what the table of blocks must have.

    Args:
        found: Name, topic, number of the span of time and number of the block of messages.
    """
    entries: set[Row] = set()
    for name, topic, span, block in found:
        entries.update(((name, block), (topic, block), (int(span), block)))
    return list(entries)


def read_message(row: Row, codec: PayloadCodec | None) -> Record | int:
    """Return the record of a row of `MESSAGE`, or its offset if it is damaged."""
    offset, message_id, name, version, topic, key, kind, time = row[:8]
    correlation_id, causation_id, root_id, depth, session_id, headers, payload, flag = row[8:16]
    try:
        if _checksum(*row[:-1]) != row[-1]:
            return int(offset)
        if codec is not None:
            payload = decoded(codec, payload, PAYLOAD, message_id, name, version)
            if headers is not None:
                headers = decoded_text(codec, headers, HEADERS, message_id, name, version)
    except DAMAGE:
        return int(offset)
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
            payload,
            bool(flag),
            offset,
        )
    )


@lru_cache(maxsize=256)
def _headers(text: str) -> MappingProxyType[str, str]:
    # Most messages of one flow have the same headers.
    return MappingProxyType(json.loads(text))


# -- what a codec sees -----------------------------------------------------------------------------

PAYLOAD: Final = "messages.payload"
HEADERS: Final = "messages.headers"


def associated(*fields: object) -> bytes:
    """Return what binds stored bytes to their column and row; see `PayloadCodec`."""
    return json.dumps(fields).encode()


def decoded(codec: PayloadCodec, stored: bytes, *fields: object) -> bytes:
    """Return what was encoded for these fields.

    Raises:
        ValueError: The codec refuses it.
    """
    try:
        return codec.decode(stored, associated(*fields))
    except Exception as error:
        message = "The codec refuses it."
        raise ValueError(message) from error


def encoded_text(codec: PayloadCodec, text: str, *fields: object) -> str:
    """Return a text as the codec stores it, in base64: the column stays one of text."""
    return b64encode(codec.encode(text.encode(), associated(*fields))).decode()


def decoded_text(codec: PayloadCodec, stored: str | bytes, *fields: object) -> str:
    """Return the text that was encoded for these fields.

    Raises:
        ValueError: The codec refuses it.
    """
    return decoded(codec, b64decode(stored, validate=True), *fields).decode()


def pack(record: Record, codec: PayloadCodec | None, *place: object) -> bytes:
    """Return a whole record as bytes, for a row at this place.

    A codec gets headers and payload in one: only what a journal looks for stays readable.
    """
    payload = record.payload
    if codec is not None:
        headers = json.dumps(dict(record.headers)).encode()
        fields = (*place, record.message_id, record.name, record.version)
        payload = codec.encode(b"%s\n%s" % (headers, payload), associated(*fields))
        record = record._replace(headers=NO_HEADERS)
    return b"%s\n%s" % (record.envelope().encode(), payload)


def unpack(body: bytes, codec: PayloadCodec | None, *place: object) -> Record:
    """Return the record that was packed; raise one of `DAMAGE` if that cannot be."""
    envelope, _, payload = body.partition(b"\n")
    record = Record.from_envelope(envelope.decode(), payload)
    if codec is None:
        return record
    fields = (*place, record.message_id, record.name, record.version)
    headers, _, payload = decoded(codec, payload, *fields).partition(b"\n")
    return record._replace(payload=payload, headers=_headers(headers.decode()) or NO_HEADERS)
