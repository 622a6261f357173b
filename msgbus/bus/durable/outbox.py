"""`Outbox`: events that wait in a database of the user's own until they are published."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Protocol, final
from uuid import UUID

from msgbus.errors import StoredMessageError
from msgbus.journal.codec import MessageCodec, RawMessage
from msgbus.journal.records import Kind, Record
from msgbus.messages.frame import current_frame, fix_in_frame
from msgbus.messages.message import Event, metadata_of, require_event


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxEntry:
    """One event, as text that fits in any table. The first three are required."""

    id: str
    """The event's message id, a UUID. Of two entries with one id, one is published."""
    name: str
    """Wire name of its class."""
    payload: str
    """Its fields as JSON."""
    version: int = 1
    """Version of its class when it was written."""
    time: float | None = None
    """Seconds since the epoch when it was written; says how long it has waited."""
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    topic: str | None = None
    """The topic to publish under, instead of its class's own."""
    correlation_id: str | None = None
    causation_id: str | None = None
    root_id: str | None = None
    depth: int = 0
    session_id: str | None = None

    @classmethod
    def of(cls, event: Event) -> OutboxEntry:
        """The entry of an event, to be written in the transaction that it speaks of.

        Inside a handler the message being handled is its cause, as if it were published there.

        Raises:
            WrongMessageTypeError: It is no event.
            StoredMessageError: It would not come back as it is.
        """
        require_event(event)
        fix_in_frame(event, current_frame.get())
        meta = metadata_of(event)
        record = MessageCodec().encode(event, time=meta.created_at.timestamp())
        return cls(
            id=record.message_id,
            name=record.name,
            payload=record.payload.decode(),
            version=record.version,
            time=record.time,
            headers=dict(record.headers),
            topic=meta.topic,
            correlation_id=record.correlation_id,
            causation_id=record.causation_id,
            root_id=record.root_id,
            depth=record.depth,
            session_id=record.session_id,
        )

    def to_json(self) -> str:
        """The whole of it as text, for a table with one column more than its key."""
        return json.dumps({**asdict(self), "headers": dict(self.headers)}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> OutboxEntry:
        """The entry whose `to_json()` this is."""
        return cls(**json.loads(text))

    def event(self, codec: MessageCodec) -> Event:
        """The event itself, under its own id.

        Raises:
            StoredMessageError: Its class is not known, or the payload does not fit it.
        """
        event = codec.decode(self._record())
        if isinstance(event, RawMessage) or not isinstance(event, Event):
            message = (
                f"{self.name} {self.id} cannot be published: this process has no event class of "
                f"that name. Import its module before the relay starts."
            )
            raise StoredMessageError(message, message_id=self.id)
        metadata_of(event).topic = self.topic
        return event

    def _record(self) -> Record:
        try:
            message_id = str(UUID(self.id))
        except ValueError as error:
            message = f"The id {self.id!r:.60} of an outbox entry ({self.name}) is no UUID."
            raise StoredMessageError(message, message_id=str(self.id)) from error
        return Record(
            message_id,
            self.name,
            self.version,
            self.topic or self.name,
            None,
            Kind.EVENT,
            self.time or 0.0,
            self.correlation_id or message_id,
            self.causation_id,
            self.root_id or message_id,
            self.depth,
            self.session_id,
            self.headers,
            self.payload.encode(),
        )


class Outbox(Protocol):
    """Where entries are kept: a table beside those that the events speak of.

    An entry is written in the transaction of what it tells about. `bus.relay` publishes it
    and then has it marked; a crash in between publishes nothing twice, as the journal knows
    the id.
    """

    async def pending(self, limit: int) -> Sequence[OutboxEntry]:
        """The oldest entries that are not marked as done, at most `limit`, oldest first."""
        ...

    async def done(self, entries: Sequence[OutboxEntry]) -> None:
        """Mark these, or delete them: they are published."""
        ...
