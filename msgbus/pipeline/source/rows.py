"""Rows of a frame as records: the columns of `messages`, or an event's own fields."""

from __future__ import annotations

import json
import time as clock
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any, Final, final

from pydantic_core import to_json
from pyspark.sql.types import (
    ByteType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructType,
    TimestampType,
)

from msgbus.errors import InvalidTopicError, PipelineError
from msgbus.journal.records import Kind, Record
from msgbus.messages.topics.pattern import check_topic
from msgbus.pipeline.arrow import Batch
from msgbus.pipeline.source.ids import Ids
from msgbus.pipeline.source.options import WriteOptions, microseconds

_NUMBERS: Final = (ByteType, ShortType, IntegerType, LongType)
_ENVELOPE: Final[Mapping[str, tuple[type[DataType], ...]]] = {
    "message_id": (StringType,),
    "name": (StringType,),
    "version": _NUMBERS,
    "topic": (StringType,),
    "key": (StringType,),
    "kind": (StringType,),
    "time": (TimestampType,),
    "correlation_id": (StringType,),
    "causation_id": (StringType,),
    "root_id": (StringType,),
    "depth": _NUMBERS,
    "session_id": (StringType,),
    "headers": (MapType,),
}
_SHOWN: Final = ("message_id", "name", "version", "topic", "kind", "time")
LEFT_OUT: Final = frozenset({"offset", "_corrupt", "_error"})
"""Columns of frames that were read: not a part of a new message."""


def check_schema(schema: StructType, options: WriteOptions) -> None:
    """Raise unless rows of this schema can be messages.

    Raises:
        PipelineError: A column is missing, or has the wrong type.
    """
    types = {field.name: field.dataType for field in schema.fields}
    if "name" not in types and options.name is None:
        message = (
            "Rows need a wire name to be messages: give the frame a column 'name', or write with "
            ".option('name', 'shop.OrderPlaced')."
        )
        raise PipelineError(message)
    for name, wanted in _ENVELOPE.items():
        if name in types and not isinstance(types[name], wanted):
            message = (
                f"The column {name!r} of messages is {wanted[-1].typeName()}, not "
                f"{types[name].simpleString()}. Cast it first."
            )
            raise PipelineError(message)
    if "payload" in types and not isinstance(types["payload"], (StringType, StructType)):
        message = (
            f"The column 'payload' is JSON text or a struct, not "
            f"{types['payload'].simpleString()}. Cast it first."
        )
        raise PipelineError(message)


@final
class RowRecords:
    """Makes records of batches; one for each write, as it counts equal rows."""

    def __init__(self, options: WriteOptions, scope: str) -> None:
        self._options = options
        self._ids = Ids(scope)
        self._now = clock.time()
        self._topics: set[str] = set()

    def of(self, batch: Batch) -> Iterator[Record]:
        """The records of a batch.

        Raises:
            PipelineError: A row cannot be a message.
        """
        for row in batch.to_pylist(maps_as_pydicts="lossy"):
            yield self._record(row)

    def _record(self, row: dict[str, Any]) -> Record:
        name = row.get("name") or self._options.name
        if not name:
            raise _wrong(row, "has no name")
        topic = row.get("topic") or name
        self._check_topic(topic, row)
        message_id = row.get("message_id") or ""
        causation_id = row.get("causation_id")
        correlation_id = row.get("correlation_id") or causation_id or ""
        record = Record(
            message_id,
            name,
            row.get("version") or 1,
            topic,
            row.get("key"),
            _kind(row),
            self._time(row.get("time")),
            correlation_id,
            causation_id,
            row.get("root_id") or correlation_id,
            _depth(row),
            row.get("session_id"),
            dict(row.get("headers") or ()),
            _payload(row),
        )
        if message_id:
            return _rooted(record)
        return _rooted(record._replace(message_id=self._ids.of(record)))

    def _time(self, moment: datetime | None) -> float:
        return self._now if moment is None else microseconds(moment) / 1_000_000

    def _check_topic(self, topic: str, row: Mapping[str, Any]) -> None:
        if topic in self._topics:
            return
        try:
            check_topic(topic)
        except InvalidTopicError as error:
            raise _wrong(row, f"has the topic {topic!r}: {error}") from None
        self._topics.add(topic)


def _rooted(record: Record) -> Record:
    """A message without a cause is the beginning of its own flow."""
    own = record.message_id
    return record._replace(
        correlation_id=record.correlation_id or own, root_id=record.root_id or own
    )


def _kind(row: Mapping[str, Any]) -> Kind:
    kind = row.get("kind") or Kind.EVENT.value
    try:
        return Kind(kind)
    except ValueError:
        raise _wrong(row, f"has the kind {kind!r}; write event or command") from None


def _depth(row: Mapping[str, Any]) -> int:
    depth: int | None = row.get("depth")
    if depth is not None:
        return depth
    return 0 if row.get("causation_id") is None else 1


def _payload(row: Mapping[str, Any]) -> bytes:
    if "payload" not in row:
        fields = {
            name: value
            for name, value in row.items()
            if name not in _ENVELOPE and name not in LEFT_OUT
        }
        return to_json(fields, inf_nan_mode="strings")
    payload = row["payload"]
    if isinstance(payload, dict):
        return to_json(payload, inf_nan_mode="strings")
    try:
        json.loads(payload)
    except (TypeError, ValueError):
        raise _wrong(row, f"has a payload that is not JSON, but {type(payload).__name__}") from None
    return str(payload).encode()


def _wrong(row: Mapping[str, Any], problem: str) -> PipelineError:
    # Not the payload, whether it is one column or many, nor the key, which is a part of it.
    shown = {name: row[name] for name in _SHOWN if name in row}
    return PipelineError(
        f"A row {problem}. Nothing of this write was kept. The row: {shown!r:.300}"
    )
