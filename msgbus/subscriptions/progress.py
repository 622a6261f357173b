"""What a subscription has done so far."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import final


class Standing(StrEnum):
    """What a subscription is doing in this process."""

    NEW = "new"
    """It has not been started."""

    STANDBY = "standby"
    """Another process works on it; this one follows if that one ends."""

    ACTIVE = "active"
    """It delivers."""

    PAUSED = "paused"
    """It was told to pause."""

    BLOCKED = "blocked"
    """It stands at a message that has failed for the last time."""

    CLOSED = "closed"
    """It has ended."""


@final
@dataclass(slots=True)
class Counts:
    """What happened since the start; only grows."""

    delivered: int = 0
    """Tries that were begun."""
    acked: int = 0
    """Messages that were handled."""
    refused: int = 0
    """Of these, those whose handler raised a `Refusal`."""
    skipped: int = 0
    """Messages that were marked as handled already, and not delivered again."""
    failed: int = 0
    """Tries that ended in an error, time-outs included."""
    timed_out: int = 0
    """Tries that were not answered in time."""
    late_acks: int = 0
    """Answers that came after their time, and were accepted."""
    redelivered: int = 0
    """Tries that were not a message's first in this process."""
    dead_lettered: int = 0
    dropped: int = 0
    """Messages given up by `on_poison=Poison.DROP`."""
    stalls: int = 0
    """Times that the watchdog found work that nobody did."""
    flushes: int = 0
    """Writes of the cursor."""
    errors: int = 0
    """Times that the journal could not be read or written; tried again each time."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How a subscription stands."""

    name: str
    standing: Standing
    owner: str | None
    """While it stands by: who works on it; the process id comes first."""
    last_acked: int
    """Everything up to this offset is done."""
    persisted: int
    """Everything up to this offset is done, and the journal knows it."""
    head: int
    """The newest offset of the journal, as last seen."""
    lag: int
    """Offsets between `last_acked` and `head`: the upper bound of what is left to do."""
    oldest_unacked_age: float
    """Seconds since the oldest message that is not done was recorded; 0 if there is none."""
    in_flight: int
    """Messages that are being handled."""
    buffered: int
    """Messages in memory, those in flight included."""
    waiting: int
    """Of these, those that wait for another attempt."""
    shelved: int
    """Messages that wait behind others of their key, and are in memory as offsets only."""
    scheduled: int
    """Messages that wait for another attempt in the journal's schedule."""
    consumers: int
    parked_keys: int
    """Keys whose messages go to the dead letters."""
    blocked_at: int | None
    """The offset at which `Poison.BLOCK` holds it."""
    is_recovering: bool
    """Whether it goes one by one through what was in flight when the last process died."""
    counts: Counts
    last_error: str | None
    """Text of the last error of the journal, with secrets removed."""
