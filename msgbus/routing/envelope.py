"""The envelope: a payload and what routing needs to know about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import Enum
from typing import Any, Final, Generic, TypeAlias, cast, final
from uuid import UUID

from typing_extensions import TypeVar
from uuid_utils import uuid7

from msgbus.messages.message import Command, Message, peek
from msgbus.messages.metadata import NO_HEADERS, Metadata
from msgbus.routing.categories import MessageCategory

T = TypeVar("T", default=Any)

Id: TypeAlias = str | UUID
"""An id as its maker wrote it; it is passed on as it is."""

HOPS_HEADER: Final = "msgbus-hops"
"""The header that carries the number of hops over a bus."""


class MessageKind(Enum):
    """How a message is to be delivered by `MessageRouter.route_message`."""

    REQUEST = "request"
    """To one endpoint, and its answer back."""

    RESPONSE = "response"
    """An answer, to the one who asked."""

    NOTIFICATION = "notification"
    """To every endpoint that a route names; somebody must be there."""

    EVENT = "event"
    """To whoever listens, which may be nobody."""


def new_id() -> str:
    """A fresh id: a UUIDv7 as text."""
    return str(uuid7())


def message_type_name(payload_or_type: object) -> str:
    """How routes and dispatchers call a payload: a message's wire name, else its class's."""
    kind = cast(
        "type[object]",
        payload_or_type if isinstance(payload_or_type, type) else type(payload_or_type),
    )
    return kind.__wire__.name if issubclass(kind, Message) else kind.__name__


@final
@dataclass(frozen=True)  # no slots: a dict is copied faster, and each dispatch makes a copy
class EventEnvelope(Generic[T]):
    """A payload with its addresses and ids. It never changes; dispatchers share it."""

    payload: T
    """What is carried: a message, or any other object."""

    message_type: str = ""
    """What it is called; the payload's wire name or class name unless given."""

    category: MessageCategory | None = None
    """What sort it is, `COMMAND` for a `Command` unless given. Must agree with the topic's, if
    that names one; without either it is an event."""

    correlation_id: Id | None = None
    """The flow it belongs to; for a response the request it answers."""

    trace_id: Id | None = None
    span_id: Id | None = None
    envelope_id: str = field(default_factory=new_id)
    topic: str | None = None
    """Where it is going. A dispatcher sees the topic that was given to `dispatch`."""

    kind: MessageKind = MessageKind.EVENT
    """How `MessageRouter` delivers it."""

    reply_to: str | None = None
    """The endpoint of the one who asks: where a response goes. Never the one asked."""

    hops: int = 0
    """How often it was passed on from a dispatcher's output."""

    headers: Mapping[str, str] = field(default_factory=lambda: NO_HEADERS)
    created_at: datetime = field(default_factory=lambda: datetime.now(UTC))

    def __post_init__(self) -> None:
        """Name the message after its payload, unless it has a name; a command is a command."""
        if not self.message_type:
            object.__setattr__(self, "message_type", message_type_name(self.payload))
        if self.category is None and isinstance(self.payload, Command):
            object.__setattr__(self, "category", MessageCategory.COMMAND)

    @property
    def key(self) -> str | None:
        """The payload's ordering key, if it is a message that has one."""
        return self.payload.key if isinstance(self.payload, Message) else None

    def onward(self, topic: str) -> EventEnvelope[T]:
        """The same message on its way to another topic: a new envelope, one hop further.

        Its category is the one that the new topic names, if any.
        """
        category = MessageCategory.from_topic(topic)
        return replace(
            self, topic=topic, category=category, envelope_id=new_id(), hops=self.hops + 1
        )

    def addressed_to(self, topic: str) -> EventEnvelope[T]:
        """The same envelope with this topic."""
        if self.topic == topic:
            return self
        copy: EventEnvelope[T] = object.__new__(EventEnvelope)
        fields = self.__dict__.copy()
        fields["topic"] = topic
        object.__setattr__(copy, "__dict__", fields)
        return copy

    def response(self, payload: Any) -> EventEnvelope[Any]:
        """The answer to this request, addressed to the one who asked."""
        return EventEnvelope(
            payload,
            kind=MessageKind.RESPONSE,
            correlation_id=self.correlation_id,
            trace_id=self.trace_id,
            topic=self.reply_to,
            headers=self.headers,
        )

    @classmethod
    def of(cls, message: Message, topic: str | None = None) -> EventEnvelope[Any]:
        """A message of a bus in an envelope, with its ids, headers and hops."""
        meta = peek(message)
        published = meta.topic if isinstance(meta, Metadata) else None
        hops = message.headers.get(HOPS_HEADER, "0")
        return EventEnvelope(
            message,
            correlation_id=message.correlation_id,
            envelope_id=message.message_id,
            topic=topic or published or type(message).__wire__.topic,
            hops=int(hops) if hops.isdecimal() else 0,
            headers=message.headers,
            created_at=message.created_at,
        )
