"""What a journal's codec has made, decoded on Spark's workers."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, Final, NamedTuple

from msgbus.journal.codec import PayloadCodec
from msgbus.journal.sqlite.columns import DELIVERY_ERROR
from msgbus.journal.sqlite.messages import HEADERS, PAYLOAD, decoded, decoded_text
from msgbus.pipeline.arrow import Array, pa
from msgbus.pipeline.source.tables import DELIVERIES, MESSAGES, Table


class Encoded(NamedTuple):
    """A part that goes through the codec."""

    part: str
    decode: Callable[..., bytes]
    """Takes the codec, the bytes, and the values of `place`."""
    place: tuple[str, ...]
    """The parts that it is bound to."""


def _text(column: str, codec: PayloadCodec, stored: bytes, *place: object) -> bytes:
    return decoded_text(codec, stored, column, *place).encode()


def _payload(codec: PayloadCodec, stored: bytes, *place: object) -> bytes:
    return decoded(codec, stored, PAYLOAD, *place)


_OF_MESSAGE: Final = ("message_id", "name", "version")
_OF_DELIVERY: Final = ("offset", "message_id", "handler", "attempt", "time")

_ENCODED: Final[Mapping[str, tuple[Encoded, ...]]] = {
    MESSAGES.name: (
        Encoded("payload", _payload, _OF_MESSAGE),
        Encoded("headers", partial(_text, HEADERS), _OF_MESSAGE),
    ),
    DELIVERIES.name: (Encoded("error", partial(_text, DELIVERY_ERROR), _OF_DELIVERY),),
}


def plain_parts(
    codec: PayloadCodec, parts: Mapping[str, Array], table: Table, columns: Collection[str]
) -> tuple[dict[str, Array], Array | None]:
    """The parts as they were before the codec, and which rows it refuses, if it does.

    Nothing is decoded if none of it is among the columns.
    """
    found, encoded = dict(parts), _ENCODED[table.name]
    if {"_corrupt", *(one.part for one in encoded)}.isdisjoint(columns):
        return found, None
    refused = [False] * len(parts[table.position])
    for one in encoded:
        stored = parts[one.part].to_pylist()
        places = zip(*(_values(parts[name]) for name in one.place), strict=True)
        for index, (value, place) in enumerate(zip(stored, places, strict=True)):
            try:
                if value is not None:
                    stored[index] = one.decode(codec, value, *place)
            except ValueError:
                refused[index] = True
        found[one.part] = pa.array(stored, pa.binary())
        if one.part == "payload" and "_is_json" in parts:
            found["_is_json"] = pa.array(map(_is_json, stored), pa.int64())
    return found, pa.array(refused) if any(refused) else None


def _values(part: Array) -> list[Any]:
    return (part.cast(pa.string()) if pa.types.is_binary(part.type) else part).to_pylist()  # type: ignore[no-any-return]


def _is_json(payload: bytes) -> int:
    try:
        json.loads(payload)
    except (ValueError, RecursionError):
        return 0
    return 1
