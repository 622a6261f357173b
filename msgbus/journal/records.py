"""What a journal keeps: messages, deliveries, cursors, leases and the rest, as plain values.

Everything here is read-only. Tuples, not models: they are made for every message, and a
journal's row becomes one without a constructor.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from types import MappingProxyType
from typing import Any, Final, NamedTuple, final

from msgbus.messages.metadata import NO_HEADERS


class AckLevel(IntEnum):
    """What has happened to a message when its append returns; higher is safer."""

    MEMORY = 0
    """It is in this process's memory: a crash loses it."""

    OS = 1
    """The operating system has it: it survives a crash of the process."""

    FSYNC = 2
    """The disk has confirmed it: it survives a power cut."""

    QUORUM = 3
    """A majority of servers have it in memory."""

    QUORUM_FSYNC = 4
    """The disks of a majority of servers have confirmed it."""


class Kind(StrEnum):
    """What a recorded message is."""

    EVENT = "event"
    COMMAND = "command"


class Outcome(StrEnum):
    """How one delivery ended."""

    OK = "ok"
    FAILED = "failed"
    REFUSED = "refused"
    TIMED_OUT = "timed_out"
    CANCELLED = "cancelled"
    DEAD_LETTERED = "dead_lettered"
    DROPPED = "dropped"


class Record(NamedTuple):
    """One message as it is stored: its envelope, and its fields as bytes."""

    message_id: str
    name: str
    """Wire name of its class."""
    version: int
    """Schema version of the payload."""
    topic: str
    key: str | None
    kind: Kind
    time: float
    """Seconds since the epoch when it was recorded, by the clock of whoever recorded it."""
    correlation_id: str
    causation_id: str | None
    root_id: str
    """The message at the beginning of its chain of causes."""
    depth: int
    """How many causes are above it."""
    session_id: str | None
    headers: Mapping[str, str]
    payload: bytes
    from_system: bool = False
    """Whether one of the bus's own events is among its causes."""
    offset: int = 0
    """Its place in the journal, given by `append`; 0 until then."""

    def json(self) -> Any:
        """The payload as plain data, whatever its class: for types this process lacks."""
        return json.loads(self.payload)

    def envelope(self) -> str:
        """Everything but the payload, as text."""
        fields = {**self._asdict(), "headers": dict(self.headers)}
        del fields["payload"]
        return json.dumps(fields, separators=(",", ":"))

    @classmethod
    def from_envelope(cls, envelope: str, payload: bytes) -> Record:
        """The record whose `envelope()` this is."""
        fields: dict[str, Any] = json.loads(envelope)
        headers = fields.pop("headers")
        fields["headers"] = MappingProxyType(headers) if headers else NO_HEADERS
        fields["kind"] = Kind(fields["kind"])
        return cls(payload=payload, **fields)


class Ack(NamedTuple):
    """What became of one appended record."""

    offset: int
    level: AckLevel
    duplicate: bool = False
    """The journal already had this message; `offset` is where."""


@final
class Page(list[Record]):
    """Records in the order of their offsets, and where the next read begins."""

    __slots__ = ("next",)

    def __init__(self, records: Iterable[Record] = (), *, next: int = 0) -> None:  # noqa: A002
        super().__init__(records)
        self.next = next
        """Start of the next read: behind all that was looked at, matching or not."""


class DeliveryRecord(NamedTuple):
    """One try to handle one message, and how it ended."""

    message_id: str
    handler: str
    """The subscription's or handler's name."""
    attempt: int
    outcome: Outcome
    wait: float
    """Seconds between its publish and this try."""
    run: float
    """Seconds in the handler."""
    time: float
    """Seconds since the epoch when it ended."""
    error: str | None = None
    """Text of the error, with secrets removed."""
    offset: int | None = None
    """The message's place in the journal, if it is known."""


class Cursor(NamedTuple):
    """How far one subscription has come."""

    name: str
    offset: int
    """Everything up to here is done."""
    fetched: int
    """The last offset that was handed out. Beyond `offset` after an unclean end only."""
    epoch: int
    """The epoch of the lease under which it was last written; 0 without a lease."""

    @property
    def is_clean(self) -> bool:
        """Whether nothing was in flight when it was last written."""
        return self.fetched <= self.offset


class Lease(NamedTuple):
    """Who may work on something exclusively."""

    name: str
    holder: str | None
    """`None` if it was released."""
    epoch: int
    """Grows with every new holder; writes of older epochs are refused."""
    renewals: int
    """Grows with every renewal; if it stands still for a TTL, the holder is gone."""


class DeadLetter(NamedTuple):
    """A message that a subscription has given up on; has its own copy of the record."""

    subscription: str
    record: Record
    attempts: int
    error: str | None
    """Text of the last error, with secrets removed."""
    time: float
    """Seconds since the epoch when it was given up, kept to the microsecond."""
    id: int = 0
    """Given by the journal."""
    error_type: str = ""
    """The class of the last error."""
    traceback: str = ""
    """Of the last error, with secrets removed."""
    reason: str = "retries exhausted"
    """Why it was given up."""
    first_time: float | None = None
    """When it was first tried, if that was another time."""
    answered: bool = False
    """Whether a command's caller saw the failure."""
    handler: str = ""
    """The handler's name, if it is another than the subscription's."""
    scope: str | None = None
    """The session whose handler it is; `None` for a handler of the bus."""
    target: str = ""
    """What the handler is registered for, if that is known."""


class Scheduled(NamedTuple):
    """A message that waits for its time."""

    id: str
    due: float
    """Seconds since the epoch."""
    record: Record
    subscription: str | None = None
    """Who is to get it, if it is one subscription's retry; else it is for everybody."""
    attempt: int = 1
    """The number of the try that is due."""


class TicketState(StrEnum):
    """How an enqueued command stands."""

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"


class TicketRow(NamedTuple):
    """An enqueued command and, once it is handled, its result."""

    message_id: str
    state: TicketState
    result: bytes | None = None
    """The reply as JSON."""
    error: str | None = None
    """Text of the error, with secrets removed."""
    time: float = 0.0
    """Seconds since the epoch of the last change."""


@final
@dataclass(frozen=True, slots=True)
class FlowNode:
    """One message of a flow, with those it caused below it, in the order of the journal."""

    record: Record
    children: tuple[FlowNode, ...] = ()


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """How much a journal keeps; what a cursor has not passed is kept in any case."""

    max_age: float | None = None
    """Seconds."""

    max_bytes: int | None = None
    """Size of what is in use in the file."""

    max_count: int | None = None
    """Messages."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TrimReport:
    """What a trim did."""

    removed: int
    """Messages."""

    first: int
    """The lowest offset that is left, or the next one if none is."""

    held_back_by: tuple[str, ...] = ()
    """Subscriptions that still need messages which would otherwise have gone."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What a check of the whole journal found."""

    messages: int
    """Records that were read and are sound."""

    damaged: tuple[int, ...] = ()
    """Offsets of records that are damaged or missing; the first thousand of them."""

    problems: tuple[str, ...] = ()
    """Everything else that is wrong, in words."""

    @property
    def is_sound(self) -> bool:
        """Whether nothing is wrong."""
        return not self.damaged and not self.problems


LARGEST_OFFSET: Final = 2**63 - 1
