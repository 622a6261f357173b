"""Counters, written on the hot path as plain ints, and snapshots of them.

Prometheus metrics and JSON are computed from the snapshots on request.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, final

if TYPE_CHECKING:
    from msgbus.telemetry.journal_stats import JournalStats, SubscriptionStats

BOUNDS: Final[tuple[float, ...]] = (
    1e-6, 2.5e-6, 5e-6, 1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4,
    1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
)  # fmt: skip
"""Upper bounds of the duration buckets, in seconds; one more bucket is for longer ones."""


class Durations:
    """Number of calls and a histogram of their durations.

    The hot path only appends to `recent`; every 128 calls these are folded into the histogram.
    """

    __slots__ = ("_buckets", "_finished", "_folding", "_seconds", "every", "recent")

    FOLD_AT: Final = 128

    def __init__(self, every: int = 1) -> None:
        self.recent: list[float] = []
        self.every = every
        self._finished = 0
        self._seconds = 0.0
        self._buckets = [0] * (len(BOUNDS) + 1)
        # A metrics server may read from another thread during a fold.
        self._folding = threading.Lock()

    def add(self, seconds: float) -> None:
        """Count one call; the hot paths write this out instead."""
        self.recent.append(seconds)
        if len(self.recent) >= self.FOLD_AT:
            self.fold()

    def fold(self) -> None:
        """Move the recent durations into the histogram."""
        with self._folding:
            recent, self.recent = self.recent, []
            self._finished += len(recent)
            self._seconds += sum(recent)
            add_to_buckets(self._buckets, recent[:: self.every])

    def read(self) -> tuple[int, float, list[int]]:
        """Number of calls, their total seconds, and the histogram."""
        with self._folding:
            recent = list(self.recent)
            buckets = list(self._buckets)
            add_to_buckets(buckets, recent[:: self.every])
            return self._finished + len(recent), self._seconds + sum(recent), buckets

    @property
    def finished(self) -> int:
        """Calls that have ended, whatever the outcome."""
        return self._finished + len(self.recent)


def add_to_buckets(buckets: list[int], seconds: list[float]) -> None:
    """Count durations into the buckets of `BOUNDS`."""
    # Sorted first: that costs a fifth of a look-up for each, and leaves one per used bucket.
    ordered = sorted(seconds)
    begin = 0
    while begin < len(ordered):
        index = bisect_left(BOUNDS, ordered[begin])
        last = index == len(BOUNDS)
        end = len(ordered) if last else bisect_right(ordered, BOUNDS[index], begin)
        buckets[index] += end - begin
        begin = end


@final
class CommandCounts(Durations):
    """Counters of one command handler."""

    __slots__ = ("cancelled", "failed", "retried", "sent")

    def __init__(self, every: int = 1) -> None:
        super().__init__(every)
        self.sent = 0
        self.failed = 0
        self.cancelled = 0
        self.retried = 0

    @property
    def running(self) -> int:
        """Calls that have begun and not ended."""
        return self.sent - self.finished

    @property
    def handled(self) -> int:
        """Calls that succeeded."""
        return self.finished - self.failed - self.cancelled


@final
class LaneCounts(Durations):
    """Counters of one event handler, in (event, handler) pairs.

    A single event has one duration, and so has a list; the counters of lists tell them apart.
    """

    __slots__ = (
        "abandoned", "dropped", "failed", "failed_in_lists", "filtered", "handled_in_lists",
        "lists", "overflowed", "retried",
    )  # fmt: skip

    def __init__(self, every: int = 1) -> None:
        super().__init__(every)
        self.lists = 0
        self.handled_in_lists = 0
        self.failed_in_lists = 0
        self.failed = 0
        self.filtered = 0
        self.dropped = 0
        self.abandoned = 0
        self.overflowed = 0
        self.retried = 0

    @property
    def handled(self) -> int:
        """Pairs that succeeded."""
        return self.handled_of(self.finished)

    def handled_of(self, finished: int) -> int:
        """Pairs that succeeded, given the number of durations."""
        singles = finished - self.lists - (self.failed - self.failed_in_lists)
        return singles + self.handled_in_lists


@final
class EventCounts:
    """Counters of one event type, in events.

    `pairs` are the (event, handler) pairs admitted, counted by the publishing side alone, so
    that it can be checked against what the handlers count.
    """

    __slots__ = ("admitted", "filtered", "pairs", "rejected")

    def __init__(self) -> None:
        self.admitted = 0
        self.pairs = 0
        self.filtered = 0
        self.rejected = 0

    @property
    def published(self) -> int:
        """Events published, whatever the outcome."""
        return self.admitted + self.filtered + self.rejected


@final
class BusCounters:
    """All counters of one bus, by (handler name, message type).

    Handlers of one name share their counters, and those of sessions are named by their
    functions, so that sessions with the same handlers add no counters.
    """

    __slots__ = ("_every", "commands", "events", "lanes")

    def __init__(self, every: int = 1) -> None:
        self._every = every
        self.commands: dict[tuple[str, str], CommandCounts] = {}
        self.lanes: dict[tuple[str, str], LaneCounts] = {}
        self.events: dict[str, EventCounts] = {}

    def command(self, handler: str, message_type: str) -> CommandCounts:
        """The counters of one command handler."""
        return self.commands.setdefault((handler, message_type), CommandCounts(self._every))

    def lane(self, handler: str, message_type: str) -> LaneCounts:
        """The counters of one event handler."""
        return self.lanes.setdefault((handler, message_type), LaneCounts(self._every))

    def event(self, message_type: str) -> EventCounts:
        """The counters of one event type."""
        return self.events.setdefault(message_type, EventCounts())


def percentile(buckets: Sequence[int], share: float) -> float:
    """The duration below which `share` of the calls lie, interpolated inside its bucket.

    Zero if there are none. Durations above the last bound count as that bound.
    """
    total = sum(buckets)
    if total == 0:
        return 0.0
    rank = share * total
    seen = 0
    for index, count in enumerate(buckets):
        if count and seen + count >= rank:
            if index == len(BOUNDS):
                return BOUNDS[-1]
            low = BOUNDS[index - 1] if index else 0.0
            return low + (BOUNDS[index] - low) * max(rank - seen, 0.0) / count
        seen += count
    return BOUNDS[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class DurationStats:
    """Snapshot of durations."""

    seconds: float
    buckets: tuple[int, ...]

    def percentile(self, share: float) -> float:
        """The duration below which `share` (0 to 1) of the calls lie."""
        return percentile(self.buckets, share)

    @property
    def p50(self) -> float:
        """Half of the calls were faster."""
        return self.percentile(0.5)

    @property
    def p95(self) -> float:
        """95 % of the calls were faster."""
        return self.percentile(0.95)

    @property
    def p99(self) -> float:
        """99 % of the calls were faster."""
        return self.percentile(0.99)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CommandHandlerStats(DurationStats):
    """Snapshot of one command handler."""

    handler: str
    message_type: str
    sent: int
    handled: int
    failed: int
    cancelled: int
    running: int
    retried: int = 0
    """Attempts after the first."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class EventHandlerStats(DurationStats):
    """Snapshot of one event handler, in (event, handler) pairs."""

    handler: str
    message_type: str
    handled: int
    failed: int
    filtered: int
    dropped: int
    abandoned: int
    overflowed: int
    queued: int
    running: int
    backpressure: bool
    """Whether its queue makes publishers wait, slows them, refuses or drops events."""
    retried: int = 0
    """Attempts after the first."""

    @property
    def pending(self) -> int:
        """Pairs that are queued or running."""
        return self.queued + self.running

    @property
    def admitted(self) -> int:
        """Pairs that ever entered the queue, whatever the outcome."""
        ended = self.handled + self.failed + self.filtered + self.dropped + self.abandoned
        return ended + self.pending


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class EventTypeStats:
    """Snapshot of one event type."""

    message_type: str
    published: int
    admitted: int
    pairs: int
    """(event, handler) pairs admitted, counted by the publishing side."""
    filtered: int
    rejected: int


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BusStats:
    """Snapshot of all counters of a bus."""

    name: str
    state: str
    timestamp: float = 0.0
    """When the snapshot was made, by the bus's clock: seconds since the epoch."""

    commands: Mapping[str, CommandHandlerStats]
    """By handler name; those of sessions by the function's name, all sessions together."""

    handlers: Mapping[str, EventHandlerStats]
    """By handler name; those of sessions by the function's name, all sessions together."""

    events: Mapping[str, EventTypeStats]
    """By event type."""

    active_sessions: int = 0
    registered_handlers: int = 0
    scheduled: int = 0
    """Events scheduled for later."""

    circuits: Mapping[str, str] = field(default_factory=dict[str, str])
    """The state of each circuit breaker, by name: `closed`, `half_open` or `open`."""

    dead_letters: int = 0
    """Dead letters."""

    subscriptions: Mapping[str, SubscriptionStats] = field(
        default_factory=dict[str, "SubscriptionStats"]
    )
    """Durable handlers, by their names in the journal."""

    journal: JournalStats | None = None
    """The journal, if the bus has one."""

    def total(self, counter: str) -> int:
        """The sum of one counter over all event handlers, as `total("handled")`."""
        return sum(int(getattr(stats, counter)) for stats in self.handlers.values())

    def as_dict(self) -> dict[str, Any]:
        """The same as JSON-ready data, with percentiles.

        `bucket_bounds` are the upper bounds of all `buckets`, in seconds; one more bucket is
        for longer ones.
        """
        return {
            "bus": self.name,
            "state": self.state,
            "timestamp": self.timestamp,
            "bucket_bounds": list(BOUNDS),
            "commands": {name: _plain(stats) for name, stats in self.commands.items()},
            "handlers": {name: _plain(stats) for name, stats in self.handlers.items()},
            "events": {name: _plain(stats) for name, stats in self.events.items()},
            "active_sessions": self.active_sessions,
            "registered_handlers": self.registered_handlers,
            "scheduled": self.scheduled,
            "circuits": dict(self.circuits),
            "dead_letters": self.dead_letters,
            "subscriptions": {name: _plain(stats) for name, stats in self.subscriptions.items()},
            "journal": None if self.journal is None else _plain(self.journal),
        }


def _plain(stats: Any) -> dict[str, Any]:
    row = {name: getattr(stats, name) for name in stats.__dataclass_fields__}
    if isinstance(stats, DurationStats):
        row["buckets"] = list(stats.buckets)
        row |= {"p50": stats.p50, "p95": stats.p95, "p99": stats.p99}
    return row
