"""EventEnvelope: a payload with its topic, category, kind and ids."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import Enum
from typing import Any, Final, Generic, TypeAlias, cast, final
from uuid import UUID

from typing_extensions import TypeVar
from uuid_utils import uuid7

from msgbus.errors import ConfigurationError
from msgbus.messages.message import Command, Message, peek
from msgbus.messages.metadata import NO_HEADERS, Metadata

T = TypeVar("T", default=Any)

Id: TypeAlias = str | UUID
"""An id, kept in the form in which it was given."""

HOPS_HEADER: Final = "msgbus-hops"
"""The header with the number of hops of a message published on a bus."""


class MessageCategory(Enum):
    """The category of a message in a dispatch engine."""

    EVENT = "event"
    """Something that happened."""

    COMMAND = "command"
    """Something to do."""

    INTENT = "intent"
    """A wish that a dispatcher turns into commands."""

    PROJECTION = "projection"
    """A view built from other messages."""

    # Enum's own is written in Python, and each dispatch hashes several times.
    __hash__ = object.__hash__

    @classmethod
    def from_topic(cls, topic: str) -> MessageCategory | None:
        """Return the category that a segment of `topic` names, as `events` in `shop.events.v1`.

        The first such segment counts; case is ignored. `None` if there is none: then the
        envelope's category applies, and `EVENT` without one.
        """
        for segment in topic.lower().split("."):
            category = _SEGMENTS.get(segment)
            if category is not None:
                return category
        return None

    @property
    def segment(self) -> str:
        """The topic segment that names this category."""
        return f"{self.value}s"


_SEGMENTS: Final = {category.segment: category for category in MessageCategory}


def require_category(what: str, value: object) -> None:
    """Raise `ConfigurationError` unless `value` is a `MessageCategory`."""
    if not isinstance(value, MessageCategory):
        raise ConfigurationError(not_a_category(what, value))


def not_a_category(what: str, value: object) -> str:
    """Return the error text for a category that is not a `MessageCategory`."""
    names = ", ".join(f"MessageCategory.{one}" for one in MessageCategory.__members__)
    return f"category={value!r:.80} of {what} is not a MessageCategory. Give one of: {names}."


class MessageKind(Enum):
    """How `MessageRouter.route_message` delivers a message."""

    REQUEST = "request"
    """To one endpoint, which replies."""

    RESPONSE = "response"
    """A reply, to the sender of the request."""

    NOTIFICATION = "notification"
    """To the endpoints of all matching routes; at least one route must match."""

    EVENT = "event"
    """To the endpoints of all matching routes, if any, and to `publish`."""


def new_id() -> str:
    """Return a new UUIDv7 as text."""
    return str(uuid7())


def message_type_name(payload_or_type: object) -> str:
    """Return the name of a payload's type: the wire name of a message, else the class name."""
    kind = cast(
        "type[object]",
        payload_or_type if isinstance(payload_or_type, type) else type(payload_or_type),
    )
    return kind.__wire__.name if issubclass(kind, Message) else kind.__name__


@final
@dataclass(frozen=True)  # no slots: a dict is copied faster, and each dispatch makes a copy
class EventEnvelope(Generic[T]):
    """An immutable message for routing: a payload with its topic, category, kind and ids."""

    payload: T
    """A message, or any other object."""

    message_type: str = ""
    """The name of its type; by default the payload's wire name or class name."""

    category: MessageCategory | None = None
    """`COMMAND` for a `Command` by default. Must agree with the category that the topic names, if
    any; without either the message is an event."""

    correlation_id: Id | None = None
    """The correlation it belongs to; for a response, the request it replies to."""

    trace_id: Id | None = None
    span_id: Id | None = None
    envelope_id: str = field(default_factory=new_id)
    topic: str | None = None
    """Its destination. A dispatcher sees the topic passed to `dispatch`."""

    kind: MessageKind = MessageKind.EVENT
    """How `MessageRouter` delivers it."""

    reply_to: str | None = None
    """The endpoint of the requester, to which the response goes."""

    hops: int = 0
    """How often it was published as a dispatcher's output."""

    headers: Mapping[str, str] = field(default_factory=lambda: NO_HEADERS)
    created_at: datetime = field(default_factory=lambda: datetime.now(UTC))

    def __post_init__(self) -> None:
        """Set the defaults of `message_type` and `category` from the payload."""
        if not self.message_type:
            object.__setattr__(self, "message_type", message_type_name(self.payload))
        if self.category is None and isinstance(self.payload, Command):
            object.__setattr__(self, "category", MessageCategory.COMMAND)

    @property
    def key(self) -> str | None:
        """The payload's ordering key, if it is a message that has one."""
        return self.payload.key if isinstance(self.payload, Message) else None

    def onward(self, topic: str) -> EventEnvelope[T]:
        """Return a new envelope of the same payload for another topic, with one more hop.

        Its category is the one that the new topic names, if any.
        """
        category = MessageCategory.from_topic(topic)
        return replace(
            self, topic=topic, category=category, envelope_id=new_id(), hops=self.hops + 1
        )

    def addressed_to(self, topic: str) -> EventEnvelope[T]:
        """Return this envelope with another topic."""
        if self.topic == topic:
            return self
        copy: EventEnvelope[T] = object.__new__(EventEnvelope)
        fields = self.__dict__.copy()
        fields["topic"] = topic
        object.__setattr__(copy, "__dict__", fields)
        return copy

    def response(self, payload: Any) -> EventEnvelope[Any]:
        """Return the response to this request, addressed to its `reply_to`."""
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
        """Return an envelope of a bus message, with its ids, headers and hops."""
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
