"""Messages to records and back: JSON by wire name and version, with the metadata restored."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from types import MappingProxyType
from typing import Any, Protocol, cast, final

from pydantic import JsonValue, ValidationError
from pydantic_core import from_json, to_json

from msgbus.errors import ConfigurationError, StoredMessageError
from msgbus.journal.payloads import PayloadWriter, writer_of
from msgbus.journal.records import Kind, Record
from msgbus.messages.message import Command, Message, classes_defined, metadata_of, set_meta
from msgbus.messages.metadata import NO_HEADERS, Metadata, UnvalidatedMetadata
from msgbus.messages.upcasting import missing_upcasters, upcast
from msgbus.telemetry.redaction import redact_exception


class PayloadCodec(Protocol):
    """Encrypts or signs what users put into messages, and what comes of it.

    It runs on threads of the journal, so it must be thread-safe.

    `associated` names what the bytes belong to: a JSON list of the column and the row, such as
    `["messages.payload", "<message id>", "shop.OrderPlaced", 1]`. It is not stored. A codec that
    authenticates it refuses bytes of another row, another column or another version of the row.
    """

    def encode(self, payload: bytes, associated: bytes) -> bytes:
        """Return what to store."""
        ...

    def decode(self, payload: bytes, associated: bytes) -> bytes:
        """Return what `encode` was given; raise if it is damaged or belongs to something else."""
        ...


@final
class RawMessage(Message):
    """A stored message whose class this process does not have, readable as plain data."""

    name: str
    version: int
    kind: Kind
    data: JsonValue


@final
class MessageCodec:
    """Knows message classes by wire name; turns messages into records and back."""

    def __init__(self, types: Iterable[type[Message]] = ()) -> None:
        self._types: dict[str, type[Message]] = {}
        self._seen: dict[str, type[Message]] = {}
        self._writers: dict[type[Message], PayloadWriter] = {}
        for message_type in types:
            self.register(message_type)

    def register(self, message_type: type[Message], *, name: str | None = None) -> None:
        """Make a class known by its wire name, or by an older `name` it once had.

        Raises:
            ConfigurationError: Another class has this name.
        """
        name = name or message_type.__wire__.name
        known = self._types.setdefault(name, message_type)
        if known is not message_type:
            message = (
                f"Two message classes are called {name!r} on the wire: "
                f"{known.__module__}.{known.__qualname__} and "
                f"{message_type.__module__}.{message_type.__qualname__}. "
                f"Give one of them another name=."
            )
            raise ConfigurationError(message)

    def learn(self, message_type: type[Message]) -> None:
        """Decode records of its wire name as this class, unless one was registered for it.

        For classes that are merely there: two of one name are no fault before one is used.
        """
        self._seen[message_type.__wire__.name] = message_type

    def other_names(self, message_type: type[Message]) -> list[str]:
        """Older names by which a class or one of its subclasses is known."""
        return [
            name
            for name, known in list(self._types.items())
            if known.__wire__.name != name and issubclass(known, message_type)
        ]

    def knows(self, name: str) -> bool:
        """Whether there is a class of this wire name."""
        return name in self._types or name in self._seen

    def type_of(self, name: str) -> type[Message] | None:
        """The class of this wire name, if it is known."""
        return self._types.get(name)

    def encode(self, message: Message, *, time: float) -> Record:
        """The record of a message, recorded at `time` (seconds since the epoch).

        Its class becomes known by the way.

        Raises:
            StoredMessageError: It is no JSON, or would not be read back as it is.
            ConfigurationError: Another class has its wire name.
        """
        message_type = type(message)
        if message_type is RawMessage:
            return _raw_record(cast("RawMessage", message), time)
        wire = message_type.__wire__
        writer = self._writers.get(message_type)
        if writer is None:
            self.register(message_type)
            writer = self._writers[message_type] = writer_of(message_type)
        meta = metadata_of(message)
        message_id, correlation_id, root_id = meta.ids()
        try:
            payload = writer.write(message, is_valid=type(meta) is not UnvalidatedMetadata)
        except StoredMessageError as error:
            raise _refused(message_type, message_id, error) from error.__cause__
        return Record(
            message_id,
            wire.name,
            wire.version,
            meta.topic or wire.topic or wire.name,
            message.key,
            Kind.COMMAND if isinstance(message, Command) else Kind.EVENT,
            time,
            correlation_id,
            meta.causation_id,
            root_id,
            meta.depth,
            meta.session_id,
            meta.headers,
            payload,
            meta.from_system,
        )

    def decode(self, record: Record) -> Message:
        """The message of a record, with its metadata; a `RawMessage` if its class is unknown.

        It knows its offset and time.

        Raises:
            StoredMessageError: The payload does not fit the class.
        """
        message_type = self._types.get(record.name) or self._seen.get(record.name)
        message: Message
        if message_type is None:
            message = _raw(record)
        else:
            payload = record.payload
            if record.version != message_type.__wire__.version:
                payload = _upcast_payload(message_type, record)
            try:
                # By field name, as it was written, whatever aliases the class has.
                message = cast(
                    "Message",
                    message_type.__pydantic_validator__.validate_json(
                        payload, by_alias=False, by_name=True
                    ),
                )
            except ValidationError as error:
                raise _unreadable(message_type, record, error) from error
        meta = stored_metadata(record)
        meta.recorded = (record.offset, record.time)
        set_meta(message, meta)
        return message


# -- wire names --------------------------------------------------------------------------------


@final
class WireNames(Collection[str]):
    """Grows when a subclass is defined, so that none of its messages is passed over."""

    def __init__(
        self, message_types: type[Message] | tuple[type[Message], ...], codec: MessageCodec
    ) -> None:
        self._types = message_types if isinstance(message_types, tuple) else (message_types,)
        self._codec = codec
        self._seen = -1
        self._names: frozenset[str] = frozenset()

    def _now(self) -> frozenset[str]:
        defined = classes_defined()
        if self._seen != defined:
            self._seen = defined
            self._names = frozenset(
                name for one in self._types for name in _names(one, self._codec)
            )
        return self._names

    def __contains__(self, name: object) -> bool:
        # Names are never taken away; asked for every record that is appended.
        return name in self._names or name in self._now()

    def __iter__(self) -> Iterator[str]:
        return iter(self._now())

    def __len__(self) -> int:
        return len(self._now())


def _names(message_type: type[Message], codec: MessageCodec) -> Iterator[str]:
    """Also makes the classes known, so that their records can be decoded."""
    codec.learn(message_type)
    yield message_type.__wire__.name
    for subclass in message_type.__subclasses__():
        yield from _names(subclass, codec)
    yield from codec.other_names(message_type)


def type_named(name: str, base: type[Message], codec: MessageCodec) -> type[Message] | None:
    """The class of this wire name below `base`, if this process has one; it becomes known."""
    known = codec.type_of(name)
    if known is None:
        known = _find(name, base)
        if known is not None:
            codec.learn(known)
    return known


def _find(name: str, base: type[Message]) -> type[Message] | None:
    if base.__wire__.name == name:
        return base
    below = (_find(name, subclass) for subclass in base.__subclasses__())
    return next((found for found in below if found is not None), None)


# -- payloads ----------------------------------------------------------------------------------


def _unreadable(
    message_type: type[Message], record: Record, error: ValidationError
) -> StoredMessageError:
    message = (
        f"{record.name} {record.message_id} (version {record.version}) does not fit "
        f"{message_type.__name__}: {redact_exception(error)}. If its fields have changed, "
        f"raise version= and add an @upcasts function."
    )
    return StoredMessageError(message, message_id=record.message_id)


def _upcast_payload(message_type: type[Message], record: Record) -> bytes:
    newest = message_type.__wire__.version
    missing = missing_upcasters(message_type, record.version)
    if record.version > newest or missing:
        fix = (
            "Deploy the newer class."
            if record.version > newest
            else f"Add @upcasts({message_type.__name__}, from_version={missing[0]})."
        )
        message = (
            f"{record.name} {record.message_id} has version {record.version}, and "
            f"{message_type.__name__} is at version {newest}. {fix}"
        )
        raise StoredMessageError(message, message_id=record.message_id)
    try:
        data: dict[str, Any] = from_json(record.payload)
        return to_json(upcast(message_type, data, record.version))
    except Exception as error:
        message = (
            f"An upcaster of {message_type.__name__} failed on {record.message_id} "
            f"(version {record.version}): {redact_exception(error)}"
        )
        raise StoredMessageError(message, message_id=record.message_id) from error


def _raw(record: Record) -> RawMessage:
    try:
        data: JsonValue = from_json(record.payload)
    except ValueError as error:
        message = f"The payload of {record.name} {record.message_id} is not JSON."
        raise StoredMessageError(message, message_id=record.message_id) from error
    return RawMessage(name=record.name, version=record.version, kind=record.kind, data=data)


def _raw_record(message: RawMessage, time: float) -> Record:
    """What a message of an unknown class was read from, to be stored again as it was."""
    meta = metadata_of(message)
    return Record(
        meta.message_id,
        message.name,
        message.version,
        meta.topic or message.name,
        None,
        message.kind,
        time,
        meta.correlation_id,
        meta.causation_id,
        meta.root_id,
        meta.depth,
        meta.session_id,
        meta.headers,
        to_json(message.data),
        meta.from_system,
    )


def stored_metadata(record: Record) -> Metadata:
    """What rides beside the message of a record."""
    message_id = record.message_id
    return Metadata(
        message_id,
        correlation_id=record.correlation_id,
        causation_id=record.causation_id,
        session_id=record.session_id,
        headers=MappingProxyType(dict(record.headers)) if record.headers else NO_HEADERS,
        topic=record.topic,
        fixed=True,
        from_system=record.from_system,
        root_id=record.root_id,
        depth=record.depth,
    )


def _refused(
    message_type: type[Message], message_id: str, error: StoredMessageError
) -> StoredMessageError:
    message = f"{message_type.__name__} {message_id} is not stored: {error}"
    return StoredMessageError(message, message_id=message_id, field=error.field)
