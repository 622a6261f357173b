"""Messages out of Arrow batches: fields at once, metadata when somebody looks at it.

Most projections look at the fields alone. So what is decoded here is a payload of today's
version, and nothing else; all that is less plain goes the way of the journal's own codec.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple, TypeAlias, final

from pydantic import ValidationError

from msgbus.journal.codec import stored_metadata
from msgbus.journal.records import Kind, Record
from msgbus.messages.message import Message, set_meta
from msgbus.messages.metadata import NO_HEADERS, Metadata, StoredMetadata
from msgbus.pipeline.arrow import Batch

COLUMNS: Final = (
    "message_id",
    "name",
    "version",
    "topic",
    "key",
    "kind",
    "correlation_id",
    "causation_id",
    "root_id",
    "depth",
    "session_id",
    "headers",
    "payload",
    "_corrupt",
    "offset",
)
"""What a record is made from, in its own order. Not its time: no event has it."""

_KINDS: Final = {kind.value: kind for kind in Kind}

Decode: TypeAlias = Callable[[Record], Message | None]
"""The journal's own way; `None` for a message that is to be left out."""


class Plain(NamedTuple):
    """How a payload of today's version becomes a message."""

    version: int
    validate: Callable[..., Any]

    @classmethod
    def of(cls, message_type: type[Message]) -> Plain:
        """The plain way of a class."""
        validator = message_type.__pydantic_validator__
        return cls(message_type.__wire__.version, validator.validate_json)


@final
class StoredRows:
    """The messages of one batch that has `COLUMNS`."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._known: dict[str, list[Any]] = {}

    def column(self, name: str) -> list[Any]:
        """The values of a column, taken out of Arrow at the first use."""
        values = self._known.get(name)
        if values is None:
            values = self._known[name] = self._batch.column(name).to_pylist()
        return values

    def messages(self, plain: Mapping[str, Plain], decode: Decode) -> Iterator[Message | None]:
        """The message of each row, or what `decode` gives for it."""
        rows = zip(self.column("name"), self.column("version"), self.column("payload"), strict=True)
        load = self.metadata
        for place, (name, version, payload) in enumerate(rows):
            way = plain.get(name)
            if way is None or way.version != version or payload is None:
                yield decode(self.record(place))
                continue
            try:
                # By field name, as it was written, whatever aliases the class has.
                message: Message = way.validate(payload, by_alias=False, by_name=True)
            except ValidationError:
                yield decode(self.record(place))  # which says what is wrong
                continue
            set_meta(message, StoredMetadata(load, place))
            yield message

    def record(self, place: int) -> Record:
        """One row as the journal has it."""
        (
            message_id, name, version, topic, key, kind, correlation_id, causation_id, root_id,
            depth, session_id, headers, payload, corrupt, offset,
        ) = (self.column(one)[place] for one in COLUMNS)  # fmt: skip
        return Record(
            message_id, name, version, topic, key, _KINDS[kind], 0.0, correlation_id,
            causation_id, root_id, depth, session_id, dict(headers) if headers else NO_HEADERS,
            (payload if payload is not None else corrupt).encode(), False, offset,
        )  # fmt: skip

    def metadata(self, place: int) -> Metadata:
        """What rides beside one message."""
        return stored_metadata(self.record(place))
