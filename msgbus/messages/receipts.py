"""Receipts and reports: the outcome of a publish, a session and a stop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, final

from msgbus.messages.message import Event


class PublishStatus(Enum):
    """The outcome of a publish."""

    ACCEPTED = "accepted"
    """It is in the queue of every handler, or scheduled."""

    DURABLE = "durable"
    """It is committed to the journal."""

    FILTERED = "filtered"
    """A filter of the bus did not pass it."""

    REJECTED = "rejected"
    """A full queue refused it; no handler gets it."""

    DROPPED = "dropped"
    """Accepted, and a full queue dropped an older event for it; `dropped` lists them."""


@final
@dataclass(frozen=True, slots=True)
class Undelivered:
    """An event that one handler will not get."""

    event: Event
    handler: str


class OutcomeStatus(Enum):
    """The outcome of one handler for one event."""

    DONE = "done"
    """The handler succeeded."""

    FAILED = "failed"
    """The last attempt failed; `error` has the error."""

    TIMED_OUT = "timed out"
    """The last attempt exceeded its timeout."""

    FILTERED = "filtered"
    """The filter of the handler did not pass the event."""

    DROPPED = "dropped"
    """A full queue dropped the event, or the handler, its session or the bus ended first."""


@final
@dataclass(frozen=True, slots=True)
class HandlerOutcome:
    """The outcome of one handler for an event published with `wait=True`."""

    handler: str
    status: OutcomeStatus
    error: str = ""
    """The error as text, redacted."""


@final
@dataclass(frozen=True, slots=True)
class PublishReceipt:
    """The outcome of publishing one event."""

    status: PublishStatus
    handlers: int = 0
    """The number of handlers that get the event."""

    dropped: tuple[Undelivered, ...] = ()
    """The older events that full queues dropped, each with its handler."""

    reason: str = ""
    """Why it was rejected, or which filter did not pass it."""

    cancel: Callable[[], bool] | None = None
    """Cancels an event scheduled in memory; returns false if it was too late.
    `bus.unschedule` cancels any scheduled event."""

    offset: int | None = None
    """Its offset in the journal, if it is `DURABLE` and not scheduled."""

    duplicate: bool = False
    """Whether the journal already had this message; it is not delivered again."""

    outcomes: tuple[HandlerOutcome, ...] = ()
    """With `wait=True`: the outcome of each handler in memory, highest priority first."""

    @property
    def accepted(self) -> bool:
        """Whether the event will reach its handlers."""
        return self.status in _ACCEPTED


ENLISTED: Final = PublishReceipt(PublishStatus.ACCEPTED)
"""The receipt of an event in a transaction, which is published at commit."""

_ACCEPTED = frozenset({PublishStatus.ACCEPTED, PublishStatus.DURABLE, PublishStatus.DROPPED})


@final
@dataclass(slots=True)
class PublishSummary:
    """Counts of many publishes; `published` is the sum of the first three."""

    accepted: int = 0
    filtered: int = 0
    rejected: int = 0
    dropped: int = 0
    """Older (event, handler) pairs that full queues dropped."""

    @property
    def published(self) -> int:
        """The number of events that were passed to `publish_many`."""
        return self.accepted + self.filtered + self.rejected

    def add(self, receipt: PublishReceipt) -> None:
        """Count one receipt."""
        if receipt.status is PublishStatus.FILTERED:
            self.filtered += 1
        elif receipt.status is PublishStatus.REJECTED:
            self.rejected += 1
        else:
            self.accepted += 1
            self.dropped += len(receipt.dropped)


@final
@dataclass(frozen=True, slots=True)
class SessionReport:
    """Unfinished work of a session at its end, in (event, handler) pairs of its own handlers."""

    abandoned: int = 0
    """Not finished in time: queued, delayed, waiting for a circuit, or cancelled while running."""

    leftovers: tuple[Undelivered, ...] = ()
    """The abandoned ones that were not running."""


@final
@dataclass(frozen=True, slots=True)
class DrainReport:
    """The outcome of `stop`, in (event, handler) pairs."""

    handled: int = 0
    """Finished while draining, successfully or not."""

    persisted: int = 0
    """Left in the journal for other processes or the next start: not lost. At most so many."""

    abandoned: int = 0
    """Not finished in time: queued, or cancelled while running."""

    leftovers: tuple[Undelivered, ...] = ()
    """The abandoned ones that were still queued."""

    scheduled: tuple[Event, ...] = ()
    """Delayed events that were not due yet."""

    persisted_by: Mapping[str, int] = field(default_factory=dict[str, int])
    """The same by durable handler, `commands:` and wire name, and `msgbus.delayed` events."""
