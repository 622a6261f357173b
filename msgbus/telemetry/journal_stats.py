"""Snapshots of a journal and of durable handlers; only a bus with a journal imports them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SubscriptionStats:
    """Snapshot of one durable handler. Counters are of this process, since its start."""

    name: str
    """Its name in the journal."""
    handler: str
    """The handler's name in logs and in `BusStats.handlers`."""
    standing: str = "new"
    """Its state in this process: `new`, `standby`, `active`, `paused`, `blocked`, `closed`."""
    owner: str | None = None
    """While on standby: the process id of a process that delivers it."""
    last_acked: int = 0
    """All messages up to this offset are acknowledged."""
    lag: int = 0
    """Messages for it that are not done; see `Progress.lag`."""
    oldest_unacked_age: float = 0.0
    """Age in seconds of the oldest unacknowledged message; 0 if there is none."""
    in_flight: int = 0
    """Messages in flight in the handler."""
    buffered: int = 0
    """Messages in memory, those in flight included."""
    waiting: int = 0
    """Of these, those that wait for a retry."""
    scheduled: int = 0
    """Messages that wait for a retry in the journal, as last counted."""
    damaged: int = 0
    """Messages that cannot be read, set aside in the journal, as last counted."""
    trimmed: int = 0
    """Messages that retention has removed before they were handed out, at most, in all time."""
    parked_keys: int = 0
    """Keys whose later messages wait in the journal for an earlier one."""
    is_recovering: bool = False
    """Whether messages run alone that were in flight when their process ended."""
    delivered: int = 0
    """Attempts begun."""
    acked: int = 0
    """Messages acknowledged."""
    refused: int = 0
    """Of these, those whose handler raised a `Refusal`."""
    skipped: int = 0
    """Messages that were handled before, and not delivered again (`idempotent=True`)."""
    failed: int = 0
    """Attempts that failed, timeouts included."""
    timed_out: int = 0
    """Attempts that timed out."""
    redelivered: int = 0
    """Attempts that were not the first of their message in this process."""
    dead_lettered: int = 0
    """Messages dead-lettered."""
    dropped: int = 0
    """Messages dropped by `on_poison=Poison.DROP`."""
    stalls: int = 0
    """Times that messages were found which nobody had begun."""
    errors: int = 0
    """Times that the journal could not be read or written; retried each time."""
    last_error: str | None = None
    """Text of the last error, with secrets removed."""

    @property
    def is_active(self) -> bool:
        """Whether it delivers in this process."""
        return self.standing == "active"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class JournalStats:
    """Snapshot of what a bus writes to its journal."""

    level: str | None = None
    """Durability that a publish has when it returns; `None` before the journal is opened."""
    appended: int = 0
    """The highest offset that this bus has appended."""
    backlog: int = 0
    """Commands and deliveries that wait to be recorded; lost in a crash."""
    write_failures: int = 0
    """Times that these could not be written; retried each time."""
    relayed: int = 0
    """Events published from outboxes."""
    relay_failures: int = 0
    """Times that an outbox could not be read or written; retried each time."""
