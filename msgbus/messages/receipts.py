"""What became of a publish: nothing is refused or dropped without one of these."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final, final

from msgbus.messages.message import Event


class PublishStatus(Enum):
    """The outcome of a publish."""

    ACCEPTED = "accepted"
    """Every handler's queue has it, or it is scheduled."""

    DURABLE = "durable"
    """It is committed to the journal."""

    FILTERED = "filtered"
    """A filter of the bus turned it away."""

    REJECTED = "rejected"
    """A queue was full and refuses new events; no handler got it."""

    DROPPED = "dropped"
    """Accepted, and a full queue dropped an older event for it; `dropped` says which."""


@final
@dataclass(frozen=True, slots=True)
class Undelivered:
    """An event that one handler will not see."""

    event: Event
    handler: str


class OutcomeStatus(Enum):
    """How one handler ended with one event."""

    DONE = "done"
    """The handler succeeded."""

    FAILED = "failed"
    """The handler failed for good, after its retries; `error` says why."""

    TIMED_OUT = "timed out"
    """The handler ran out of time, after its retries."""

    FILTERED = "filtered"
    """The handler's own filter turned the event away."""

    DROPPED = "dropped"
    """The event fell out of a full queue, or was cut off because the handler, its session or
    the bus ended."""


@final
@dataclass(frozen=True, slots=True)
class HandlerOutcome:
    """How one handler ended with an event that was published with `wait=True`."""

    handler: str
    status: OutcomeStatus
    error: str = ""
    """The error it failed with, redacted."""


@final
@dataclass(frozen=True, slots=True)
class PublishReceipt:
    """What the bus did with one event."""

    status: PublishStatus
    handlers: int = 0
    """How many handlers will get the event."""

    dropped: tuple[Undelivered, ...] = ()
    """What fell out to make room, and for which handler."""

    reason: str = ""
    """Why it was rejected, or which filter turned it away."""

    cancel: Callable[[], bool] | None = None
    """For an event scheduled in memory: takes it back; false if it was too late.
    `bus.unschedule` does so for every scheduled event."""

    offset: int | None = None
    """Its place in the journal, if it is `DURABLE` and not scheduled."""

    duplicate: bool = False
    """The journal had this message already; nobody gets it again."""

    outcomes: tuple[HandlerOutcome, ...] = ()
    """With `wait=True`: how each handler in memory ended, highest priority first."""

    @property
    def accepted(self) -> bool:
        """Whether the event will reach its handlers."""
        return self.status in _ACCEPTED


ENLISTED: Final = PublishReceipt(PublishStatus.ACCEPTED)
"""The receipt of an event in a transaction, whose end decides whether it is published."""

_ACCEPTED = frozenset({PublishStatus.ACCEPTED, PublishStatus.DURABLE, PublishStatus.DROPPED})


@final
@dataclass(slots=True)
class PublishSummary:
    """What became of many publishes, counted. `published` is the sum of the first three."""

    accepted: int = 0
    filtered: int = 0
    rejected: int = 0
    dropped: int = 0
    """Older (event, handler) pairs that fell out to make room."""

    @property
    def published(self) -> int:
        """How many events were handed in."""
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
    """What a session left undone when it ended, in (event, handler) pairs of its own handlers."""

    abandoned: int = 0
    """Not finished in time: queued, delayed, waiting for a circuit, or cut off while running."""

    leftovers: tuple[Undelivered, ...] = ()
    """The abandoned ones that no handler was at work on, handed back."""


@final
@dataclass(frozen=True, slots=True)
class DrainReport:
    """What `stop` did with the work that was there, in (event, handler) pairs."""

    handled: int = 0
    """Finished while draining, successes and failures."""

    persisted: int = 0
    """Left in the journal for the next start."""

    abandoned: int = 0
    """Not finished in time: queued, or cut off while running."""

    leftovers: tuple[Undelivered, ...] = ()
    """The abandoned ones that were still queued, handed back."""

    scheduled: tuple[Event, ...] = ()
    """Delayed events whose time had not come, handed back."""
