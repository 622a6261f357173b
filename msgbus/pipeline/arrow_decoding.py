"""Messages of one class as rows of its own fields; decoded on the workers, as the bus would."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from pyspark.sql.types import StringType, StructField, StructType

from msgbus.errors import ConfigurationError, StoredMessageError
from msgbus.journal.codec import MessageCodec
from msgbus.journal.records import Kind, Record
from msgbus.messages.message import Message
from msgbus.messages.upcasting import Upcaster, restore_upcasters, upcasters_of
from msgbus.pipeline.arrow import Array, Batch, Schema, arrow_schema, arrow_type, pa
from msgbus.pipeline.schemas import known_subclasses, model_shape, spark_schema, to_row
from msgbus.pipeline.source.tables import MESSAGES
from msgbus.pipeline.stored import Plain
from msgbus.telemetry.redaction import redact_exception

ENVELOPE: Final = (
    "offset",
    "message_id",
    "name",
    "version",
    "time",
    "key",
    "session_id",
    "correlation_id",
    "causation_id",
)
"""What a row has beside the fields of its class."""

SOURCE: Final = (*ENVELOPE, "payload", "_corrupt")
"""The columns of `messages` that events are made from."""

_ENDS: Final = ("_corrupt", "_error")


def classes_of(
    message_type: type[Message], types: Iterable[type[Message]] = ()
) -> dict[str, type[Message]]:
    """A class, its subclasses, and those of `types` that are, by wire name.

    A class that was defined again in the same place, as in a notebook, stands for the first.

    Raises:
        ConfigurationError: Two different classes have one name.
    """
    found: dict[str, type[Message]] = {}
    extra = [one for one in types if issubclass(one, message_type)]
    for one in [*known_subclasses(message_type), *extra]:
        name = one.__wire__.name
        known = found.get(name)
        if known is not None and known is not one and _place(known) != _place(one):
            message = (
                f"Two classes below {message_type.__name__} are called {name!r} on the wire: "
                f"{'.'.join(_place(known))} and {'.'.join(_place(one))}. Give one another name=."
            )
            raise ConfigurationError(message)
        found[name] = one
    return found


def _place(message_type: type[Message]) -> tuple[str, str]:
    return message_type.__module__, message_type.__qualname__


def envelope_names(fields: Sequence[str]) -> dict[str, str]:
    """Names of the envelope's columns: with a `_` before them where a field has the name."""
    taken = {name.lower() for name in (*fields, *_ENDS)}
    found: dict[str, str] = {}
    for name in ENVELOPE:
        column = name
        while column in taken:
            column = f"_{column}"
        taken.add(column)
        found[name] = column
    return found


def event_schema(message_type: type[Message]) -> StructType:
    """The columns of `events`: the envelope, the fields, and what could not be decoded."""
    fields = spark_schema(message_type).fields
    names = envelope_names([one.name for one in fields])
    envelope = [StructField(names[one], MESSAGES.columns[one].type) for one in ENVELOPE]
    return StructType([*envelope, *fields, *(StructField(one, StringType()) for one in _ENDS)])


class Decoded(NamedTuple):
    """One row: the fields, or what is wrong."""

    fields: Mapping[str, Any] | None
    error: str | None = None


@dataclass
class Decoder:
    """Turns batches of messages into batches of events; travels to the workers."""

    message_type: type[Message]
    types: dict[str, type[Message]]
    upcasters: dict[str, dict[int, Upcaster]] = field(default_factory=dict)

    @classmethod
    def of(cls, message_type: type[Message], types: dict[str, type[Message]]) -> Decoder:
        """With the upcasters that this process knows: a worker may not import their module."""
        return cls(message_type, types, {name: upcasters_of(one) for name, one in types.items()})

    def run(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The batches of a partition; runs on a worker."""
        for name, known in self.upcasters.items():
            restore_upcasters(self.types[name], known)
        codec = MessageCodec()
        plain: dict[str, Plain] = {}
        for name, one in self.types.items():
            codec.register(one, name=name)
            plain[name] = Plain.of(one)
        schema = arrow_schema(event_schema(self.message_type))
        for batch in batches:
            yield self.batch(codec, plain, batch, schema)

    def batch(
        self, codec: MessageCodec, plain: Mapping[str, Plain], batch: Batch, schema: Schema
    ) -> Batch:
        """One batch of events."""
        columns: dict[str, Array] = dict(zip(batch.schema.names, batch.columns, strict=True))
        texts: list[str | None] = columns["payload"].to_pylist()
        envelopes = (columns[name].to_pylist() for name in ("message_id", "name", "version"))
        rows = [
            self.decoded(codec, plain, text, *envelope)
            for text, *envelope in zip(texts, *envelopes, strict=True)
        ]
        own, rows = _arrays(self.message_type, rows)
        was: list[str | None] = columns["_corrupt"].to_pylist()
        corrupt = [
            None if row.error is None else (text if text is not None else before)
            for row, text, before in zip(rows, texts, was, strict=True)
        ]
        errors = [row.error for row in rows]
        ends = [pa.array(corrupt, pa.string()), pa.array(errors, pa.string())]
        envelope = [columns[name] for name in ENVELOPE]
        return pa.RecordBatch.from_arrays([*envelope, *own, *ends], schema=schema)

    def decoded(
        self,
        codec: MessageCodec,
        plain: Mapping[str, Plain],
        text: str | None,
        message_id: str,
        name: str,
        version: int,
    ) -> Decoded:
        """The fields of one message, or why there are none."""
        if text is None:
            return Decoded(None, "The payload is not JSON.")
        way = plain.get(name)
        if way is not None and way.version == version:
            try:
                message = way.validate(text, by_alias=False, by_name=True)
                return Decoded(to_row(message, self.message_type))
            except Exception:
                way = None  # by the codec then, which says what is wrong
        record = Record(
            message_id, name, version, name, None, Kind.EVENT, 0.0, message_id, None,
            message_id, 0, None, {}, text.encode(),
        )  # fmt: skip
        try:
            return Decoded(to_row(codec.decode(record), self.message_type))
        except StoredMessageError as error:
            return Decoded(None, str(error))
        except Exception as error:
            # Whatever a class does with its values: one message must not fail a job.
            return Decoded(None, redact_exception(error))


def _arrays(message_type: type[Message], rows: list[Decoded]) -> tuple[list[Array], list[Decoded]]:
    """The columns of the fields; a row that Arrow refuses becomes one with an error."""
    try:
        return _columns(message_type, rows), rows
    except (pa.ArrowException, ValueError, TypeError, OverflowError):
        checked = [_checked(message_type, row) for row in rows]
        return _columns(message_type, checked), checked


def _checked(message_type: type[Message], row: Decoded) -> Decoded:
    for one in _fields(message_type):
        try:
            _column(one, [row])
        except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
            # Not its text: Arrow's shows the value.
            kind = one.dataType.simpleString()
            name = type(error).__name__
            return Decoded(None, f"{name}: the value of {one.name} does not fit into {kind}")
    return row


def _columns(message_type: type[Message], rows: list[Decoded]) -> list[Array]:
    return [_column(one, rows) for one in _fields(message_type)]


def _fields(message_type: type[Message]) -> list[StructField]:
    struct = model_shape(message_type).type
    assert isinstance(struct, StructType)  # noqa: S101 (for the type checkers)
    return struct.fields


def _column(field: StructField, rows: list[Decoded]) -> Array:
    values = [None if row.fields is None else row.fields[field.name] for row in rows]
    return pa.array(values, arrow_type(field.dataType))
