"""What a bus with a journal counts beyond the rest, at one moment; plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SubscriptionStats:
    """One durable handler at one moment. Counters are of this process, since its start."""

    name: str
    """Its name in the journal."""
    handler: str
    """The handler's name in logs and in `BusStats.handlers`."""
    standing: str = "new"
    """What it does in this process: `new`, `standby`, `active`, `paused`, `blocked`, `closed`."""
    owner: str | None = None
    """While it stands by: who works on it; the process id comes first."""
    last_acked: int = 0
    """Everything up to this offset is done."""
    lag: int = 0
    """Offsets between that and the newest: the upper bound of what is left to do."""
    oldest_unacked_age: float = 0.0
    """Seconds since the oldest message that is not done was recorded; 0 if there is none."""
    in_flight: int = 0
    """Messages that the handler has in hand."""
    buffered: int = 0
    """Messages in memory, those in flight included."""
    waiting: int = 0
    """Of these, those that wait for another try."""
    scheduled: int = 0
    """Messages that wait for another try in the journal's schedule."""
    parked_keys: int = 0
    """Keys whose messages go to the dead letters."""
    is_recovering: bool = False
    """Whether it goes through what was in flight when the last process died."""
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
    redelivered: int = 0
    """Tries that were not a message's first in this process."""
    dead_lettered: int = 0
    """Messages that are dead letters now."""
    dropped: int = 0
    """Messages given up by `on_poison=Poison.DROP`."""
    stalls: int = 0
    """Times that the watchdog found work that nobody did."""
    errors: int = 0
    """Times that the journal could not be read or written; tried again each time."""
    last_error: str | None = None
    """Text of the last of these, with secrets removed."""

    @property
    def is_active(self) -> bool:
        """Whether it delivers in this process."""
        return self.standing == "active"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class JournalStats:
    """What a bus writes to its journal, at one moment."""

    level: str | None = None
    """What a publish has reached when it returns; none before the journal is opened."""
    appended: int = 0
    """The highest offset that this bus was given."""
    backlog: int = 0
    """Commands and deliveries that wait to be recorded; lost in a crash."""
    write_failures: int = 0
    """Times that these could not be written; tried again each time."""
    relayed: int = 0
    """Events that relays have published from outboxes."""
    relay_failures: int = 0
    """Times that an outbox could not be read or written; tried again each time."""
