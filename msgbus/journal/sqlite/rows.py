"""Records to rows and back, with a checksum over everything that is stored of a message."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Sequence
from functools import lru_cache
from struct import (
    Struct,
    error as StructError,  # noqa: N812
)
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from zlib import crc32

from msgbus.errors import CorruptRecordError, StoredMessageError
from msgbus.journal.records import Kind, Record
from msgbus.messages.metadata import NO_HEADERS
from msgbus.telemetry.redaction import redact_exception

if TYPE_CHECKING:
    from msgbus.journal.codec import PayloadCodec

Row: TypeAlias = tuple[Any, ...]

COLUMNS: Final = (
    "offset, message_id, name, version, topic, key, kind, time, correlation_id, causation_id, "
    "root_id, depth, session_id, headers, payload, from_system, crc"
)
PLAIN_COLUMNS: Final = "offset, message_id, name, version, topic, key, kind, time, payload, crc"
"""What differs from the default in a message without a cause, a session and headers."""

# Older versions of SQLite take no more than 999 values.
_LARGEST: Final = 250 if sqlite3.sqlite_version_info >= (3, 32) else 50
SIZES: Final = (_LARGEST, 50, 10, 1)
"""Rows of one statement, as large as there are rows for. Each statement hands the interpreter
over to the event loop's thread and back, which costs more than a row."""

_numbers: Final = Struct("<qqqqd").pack
_NO_TEXTS: Final = "\x1f" * 5
"""The ends of five texts that a message without a cause, a session and headers lacks."""

_KINDS: Final = {kind.value: kind for kind in Kind}
_TEXTS: Final = {kind: kind.value for kind in Kind}


def checksum(fields: Iterable[object], payload: bytes) -> int:
    """A CRC over the fields and the payload; any bit that flips changes it."""
    text = "\x1f".join(map(str, fields))
    return crc32(payload, crc32(text.encode()))


def record_checksum(
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
    flag: int,
) -> int:
    """The same over the columns of a message, in the way that is fastest: all of them count."""
    texts = (
        message_id,
        name,
        topic,
        key or "",
        kind,
        correlation_id or "",
        causation_id or "",
        root_id or "",
        session_id or "",
        headers or "",
    )
    start = crc32(_numbers(offset, version, depth, flag, time))
    return crc32(payload, crc32("\x1f".join(texts).encode(), start))


def insert(columns: str, rows: int = 1) -> str:
    """The statement that adds so many rows."""
    places = f"({','.join('?' * (columns.count(',') + 1))})"
    return f"INSERT INTO msgbus_messages ({columns}) VALUES {','.join([places] * rows)}"  # noqa: S608


def to_row(record: Record, offset: int, codec: PayloadCodec | None) -> Row:
    """What to insert for a record at `offset`: `PLAIN_COLUMNS` if that is enough, or `COLUMNS`.

    A root's correlation and root are its own id; stored as NULL, they take no room, not in
    the index either.
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
    if (
        correlation_id == message_id == root_id
        and causation_id is None
        and session_id is None
        and not (headers or depth or from_system)
    ):
        # What is below gives the same for most messages, in more time.
        word, seconds = _TEXTS[kind], float(time)
        joined = f"{message_id}\x1f{name}\x1f{topic}\x1f{key or ''}\x1f{word}{_NO_TEXTS}"
        crc = crc32(
            payload, crc32(joined.encode(), crc32(_numbers(offset, version, 0, 0, seconds)))
        )
        return offset, message_id, name, version, topic, key, word, seconds, payload, crc
    correlation = None if correlation_id == message_id else correlation_id
    root = None if root_id == message_id else root_id
    text = json.dumps(dict(headers), separators=(",", ":")) if headers else None
    flag = 1 if from_system else 0
    before = (offset, message_id, name, version, topic, key, _TEXTS[kind], float(time))
    after = (correlation, causation_id, root, depth, session_id, text)
    return (*before, *after, payload, flag, record_checksum(*before, *after, payload, flag))


def from_row(row: Sequence[Any], path: str, codec: PayloadCodec | None) -> Record:
    """The record of a row.

    Raises:
        CorruptRecordError: The checksum does not fit.
        StoredMessageError: The codec refuses the payload.
    """
    *columns, crc = row
    found = _checksum_of(columns)
    if found is None or found != crc:
        raise CorruptRecordError("is damaged: its checksum does not fit", path=path, offset=row[0])
    (
        offset,
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
        flag,
    ) = columns
    return Record(
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


def _checksum_of(columns: Sequence[Any]) -> int | None:
    try:
        return record_checksum(*columns)
    except (TypeError, UnicodeEncodeError, StructError):
        return None  # values that no writer could have written


def decoded(codec: PayloadCodec, payload: bytes, message_id: str) -> bytes:
    """The payload as it was before the codec.

    Raises:
        StoredMessageError: The codec refuses it.
    """
    try:
        return codec.decode(payload)
    except Exception as error:
        message = (
            f"The codec cannot decode message {message_id}: {redact_exception(error)}. "
            f"Is it the codec, and the key, that the message was written with?"
        )
        raise StoredMessageError(message, message_id=message_id) from error


@lru_cache(maxsize=256)
def _headers(text: str) -> MappingProxyType[str, str]:
    # Most messages of one flow have the same headers.
    return MappingProxyType(json.loads(text))


# -- records inside other rows: dead letters and the schedule ------------------------------


def pack(record: Record, codec: PayloadCodec | None, *beside: object) -> tuple[str, bytes, int]:
    """Envelope, payload and a checksum that covers what stands beside them as well."""
    payload = record.payload if codec is None else codec.encode(record.payload)
    envelope = record.envelope()
    return envelope, payload, checksum((*beside, envelope), payload)


def unpack(
    packed: tuple[str, bytes, int],
    codec: PayloadCodec | None,
    *beside: object,
) -> Record | None:
    """The record of a `pack`; `None` if the checksum does not fit."""
    envelope, payload, crc = packed
    if checksum((*beside, envelope), payload) != crc:
        return None
    record = Record.from_envelope(envelope, payload)
    if codec is None:
        return record
    return record._replace(payload=decoded(codec, payload, record.message_id))


def cursor_checksum(name: str, offset: int, fetched: int, epoch: int) -> int:
    """The checksum of a cursor: a wrong one would skip messages."""
    return checksum((name, offset, fetched, epoch), b"")
