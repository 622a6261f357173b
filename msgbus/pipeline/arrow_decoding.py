"""Decode messages out of Arrow batches on Spark's workers, as the bus would.

A payload of the current version is validated straight from its JSON. Everything else, such as
old versions and damaged payloads, goes through the journal's codec.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, cast, final

from pydantic import ValidationError
from pyspark.sql.types import StringType, StructField, StructType

from msgbus.errors import ConfigurationError, StoredMessageError
from msgbus.journal.codec import MessageCodec, stored_metadata
from msgbus.journal.records import Kind, Record
from msgbus.messages.message import Message, set_meta
from msgbus.messages.metadata import NO_HEADERS, Metadata, StoredMetadata
from msgbus.messages.upcasting import Upcaster, restore_upcasters, upcasters_of
from msgbus.pipeline.arrow import Array, Batch, Schema, arrow_schema, arrow_type, mapped, pa
from msgbus.pipeline.schemas import known_subclasses, model_shape, spark_schema, to_row
from msgbus.pipeline.source.tables import MESSAGES
from msgbus.telemetry.redaction import redact_exception

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class PlainPayload(NamedTuple):
    """Validate a payload of the current version of a class."""

    version: int
    validate: Callable[..., Any]

    @classmethod
    def of(cls, message_type: type[Message]) -> PlainPayload:
        """For one class."""
        validator = message_type.__pydantic_validator__
        return cls(message_type.__wire__.version, validator.validate_json)


# -- as messages -----------------------------------------------------------------------------

COLUMNS: Final = (
    *("message_id", "name", "version", "topic", "key", "kind"),
    *("correlation_id", "causation_id", "root_id", "depth", "session_id"),
    *("headers", "payload", "_corrupt", "offset"),
)
"""The columns that a record is made from, in the record's order; without its time."""

_KINDS: Final = {kind.value: kind for kind in Kind}

Decode: TypeAlias = Callable[[Record], Message | None]
"""Decode through the journal's codec; `None` leaves the message out."""


@final
class StoredRows:
    """The messages of one batch that has `COLUMNS`; metadata is decoded when it is read."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._known: dict[str, list[Any]] = {}

    def column(self, name: str) -> list[Any]:
        """The values of a column, converted from Arrow on first use."""
        values = self._known.get(name)
        if values is None:
            values = self._known[name] = self._batch.column(name).to_pylist()
        return values

    def messages(
        self, plain: Mapping[str, PlainPayload], decode: Decode
    ) -> Iterator[Message | None]:
        """The message of each row, or what `decode` returns for it."""
        rows = zip(self.column("name"), self.column("version"), self.column("payload"), strict=True)
        load = self.metadata
        for index, (name, version, payload) in enumerate(rows):
            found = plain.get(name)
            if found is None or found.version != version or payload is None:
                yield decode(self.record(index))
                continue
            try:
                # By field name, as it was written, whatever aliases the class has.
                message: Message = found.validate(payload, by_alias=False, by_name=True)
            except ValidationError:
                yield decode(self.record(index))  # which says what is wrong
                continue
            set_meta(message, StoredMetadata(load, index))
            yield message

    def record(self, index: int) -> Record:
        """One row as a record of the journal."""
        (
            message_id, name, version, topic, key, kind, correlation_id, causation_id, root_id,
            depth, session_id, headers, payload, corrupt, offset,
        ) = (self.column(one)[index] for one in COLUMNS)  # fmt: skip
        return Record(
            message_id, name, version, topic, key, _KINDS[kind], 0.0, correlation_id,
            causation_id, root_id, depth, session_id, dict(headers) if headers else NO_HEADERS,
            (payload if payload is not None else corrupt).encode(), False, offset,
        )  # fmt: skip

    def metadata(self, index: int) -> Metadata:
        """The metadata of one row."""
        return stored_metadata(self.record(index))


# -- as rows of fields -------------------------------------------------------------------------

ENVELOPE: Final = (
    *("offset", "message_id", "name", "version", "time", "key"),
    *("session_id", "correlation_id", "causation_id"),
)
"""The columns of an event besides the fields of its class."""

SOURCE: Final = (*ENVELOPE, "payload", "_corrupt")
"""The columns of `messages` that events are decoded from."""

_ERROR_COLUMNS: Final = ("_corrupt", "_error")


def classes_of(
    message_type: type[Message], types: Iterable[type[Message]] = ()
) -> dict[str, type[Message]]:
    """A class, its known subclasses, and its subclasses among `types`, by wire name.

    A class that was defined again under the same name, as in a notebook, replaces the first.

    Raises:
        ConfigurationError: Two different classes have one name.
    """
    found: dict[str, type[Message]] = {}
    extra = [one for one in types if issubclass(one, message_type)]
    for one in [*known_subclasses(message_type), *extra]:
        name = one.__wire__.name
        known = found.get(name, one)
        if _qualified_name(known) != _qualified_name(one):
            message = (
                f"Two classes below {message_type.__name__} are called {name!r} on the wire: "
                f"{_qualified_name(known)} and {_qualified_name(one)}. Give one another name=."
            )
            raise ConfigurationError(message)
        found[name] = one
    return found


def _qualified_name(message_type: type[Message]) -> str:
    return f"{message_type.__module__}.{message_type.__qualname__}"


def envelope_names(fields: Sequence[str]) -> dict[str, str]:
    """Column names of the envelope, with a `_` in front where a field has the name."""
    taken = {name.lower() for name in (*fields, *_ERROR_COLUMNS)}
    found: dict[str, str] = {}
    for name in ENVELOPE:
        column = name
        while column in taken:
            column = f"_{column}"
        taken.add(column)
        found[name] = column
    return found


def event_schema(message_type: type[Message]) -> StructType:
    """The columns of `events`: envelope, fields, and what could not be decoded."""
    fields = spark_schema(message_type).fields
    names = envelope_names([one.name for one in fields])
    envelope = [StructField(names[one], MESSAGES.columns[one].type) for one in ENVELOPE]
    errors = [StructField(one, StringType()) for one in _ERROR_COLUMNS]
    return StructType([*envelope, *fields, *errors])


class DecodedRow(NamedTuple):
    """The fields of one message, or the error that it did not decode with."""

    fields: Mapping[str, Any] | None
    error: str | None = None


@dataclass
class Decoder:
    """Decode batches of messages into batches of events; pickled and sent to the workers."""

    message_type: type[Message]
    types: dict[str, type[Message]]
    upcasters: dict[str, dict[int, Upcaster]]

    @classmethod
    def of(cls, message_type: type[Message], types: Iterable[type[Message]]) -> Decoder:
        """With the upcasters known here: a worker may not have imported their module."""
        classes = classes_of(message_type, types)
        return cls(
            message_type, classes, {name: upcasters_of(one) for name, one in classes.items()}
        )

    @property
    def names(self) -> list[str]:
        """The wire names that are decoded."""
        return sorted(self.types)

    def frame(self, messages: DataFrame) -> DataFrame:
        """A frame of events, from a frame of messages with these names."""
        return mapped(messages.select(*SOURCE), self.run, event_schema(self.message_type))

    def run(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Decode the batches of a partition; runs on a worker."""
        for name, known in self.upcasters.items():
            restore_upcasters(self.types[name], known)
        codec = MessageCodec()
        plain: dict[str, PlainPayload] = {}
        for name, one in self.types.items():
            codec.register(one, name=name)
            plain[name] = PlainPayload.of(one)
        schema = arrow_schema(event_schema(self.message_type))
        for batch in batches:
            yield self._batch(codec, plain, batch, schema)

    def _batch(
        self, codec: MessageCodec, plain: Mapping[str, PlainPayload], batch: Batch, schema: Schema
    ) -> Batch:
        columns: dict[str, Array] = dict(zip(batch.schema.names, batch.columns, strict=True))
        texts: list[str | None] = columns["payload"].to_pylist()
        was: list[str | None] = columns["_corrupt"].to_pylist()
        envelopes = (columns[name].to_pylist() for name in ("message_id", "name", "version"))
        rows = [
            DecodedRow(None, before)
            if message_id is None
            else self._row(codec, plain, text, message_id, name, version)
            for text, before, message_id, name, version in zip(texts, was, *envelopes, strict=True)
        ]
        own, rows = _arrays(self.message_type, rows)
        corrupt = [
            None if row.error is None else (text if text is not None else before)
            for row, text, before in zip(rows, texts, was, strict=True)
        ]
        errors = [row.error for row in rows]
        ends = [pa.array(corrupt, pa.string()), pa.array(errors, pa.string())]
        envelope = [columns[name] for name in ENVELOPE]
        return pa.RecordBatch.from_arrays([*envelope, *own, *ends], schema=schema)

    def _row(
        self,
        codec: MessageCodec,
        plain: Mapping[str, PlainPayload],
        text: str | None,
        message_id: str,
        name: str,
        version: int,
    ) -> DecodedRow:
        if text is None:
            return DecodedRow(None, "The payload is not JSON.")
        found = plain.get(name)
        if found is not None and found.version == version:
            try:
                message = found.validate(text, by_alias=False, by_name=True)
                return DecodedRow(to_row(message, self.message_type))
            except Exception:
                found = None  # by the codec then, which says what is wrong
        record = Record(
            message_id, name, version, name, None, Kind.EVENT, 0.0, message_id, None,
            message_id, 0, None, {}, text.encode(),
        )  # fmt: skip
        try:
            return DecodedRow(to_row(codec.decode(record), self.message_type))
        except StoredMessageError as error:
            return DecodedRow(None, str(error))
        except Exception as error:
            # Whatever a class does with its values: one message must not fail a job.
            return DecodedRow(None, redact_exception(error))


def _arrays(
    message_type: type[Message], rows: list[DecodedRow]
) -> tuple[list[Array], list[DecodedRow]]:
    """The columns of the fields; a row that Arrow refuses becomes one with an error."""
    fields = cast("StructType", model_shape(message_type).type).fields
    try:
        return [_column(one, rows) for one in fields], rows
    except (pa.ArrowException, ValueError, TypeError, OverflowError):
        checked = [_checked(fields, row) for row in rows]
        return [_column(one, checked) for one in fields], checked


def _checked(fields: list[StructField], row: DecodedRow) -> DecodedRow:
    for one in fields:
        try:
            _column(one, [row])
        except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
            # Not its text: Arrow's shows the value.
            kind = one.dataType.simpleString()
            name = type(error).__name__
            return DecodedRow(None, f"{name}: the value of {one.name} does not fit into {kind}")
    return row


def _column(field: StructField, rows: list[DecodedRow]) -> Array:
    values = [None if row.fields is None else row.fields[field.name] for row in rows]
    return pa.array(values, arrow_type(field.dataType))
