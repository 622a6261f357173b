"""The values of a report, without Spark and without HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import NamedTuple


class Totals(NamedTuple):
    """Counts of the whole report."""

    messages: int = 0
    events: int = 0
    commands: int = 0
    types: int = 0
    attempts: int = 0
    failed: int = 0
    retries: int = 0
    dead_letters: int = 0


class Percentiles(NamedTuple):
    """Durations of one group, in seconds."""

    attempts: int
    mean: float
    p50: float
    p95: float
    p99: float
    longest: float


class Period(NamedTuple):
    """One column of the charts over time."""

    start: datetime
    published: Mapping[str, int]
    """Messages by type."""
    attempts: int
    failed: int
    retries: int
    dead_letters: int
    latency: Percentiles | None


class HandlerLatency(NamedTuple):
    """Latency of a handler with one type."""

    handler: str
    name: str | None
    run: Percentiles
    wait: Percentiles


class Failure(NamedTuple):
    """One cause of failures."""

    cause: str
    handler: str
    name: str | None
    outcomes: Mapping[str, int]
    """Deliveries by outcome."""
    attempts: int
    messages: int
    recovered: int
    dead: int
    unfinished: int
    first: datetime
    last: datetime
    example: str | None
    example_id: str


class SessionLine(NamedTuple):
    """One session."""

    session_id: str
    outcome: str
    started: datetime
    ended: datetime
    duration: float
    messages: int
    attempts: int
    failed: int
    dead_letters: int


class Sessions(NamedTuple):
    """Sessions by outcome, and the longest of them."""

    outcomes: Mapping[str, int]
    longest: Sequence[SessionLine]
    median: float | None = None


class TreeNode(NamedTuple):
    """A message of a chain."""

    message_id: str
    causation_id: str | None
    name: str
    depth: int
    start: float
    """Seconds after the root."""
    end: float
    """Seconds from the root to the end of its last attempt; its start if there was none."""
    outcome: str | None
    """The worst outcome of its handlers; `None` if there was no attempt."""
    is_critical: bool
    """Whether it is on the path from the root to the last message."""


class Tree(NamedTuple):
    """One chain of causes."""

    root_id: str
    nodes: Sequence[TreeNode]
    """In the order of the journal."""
    messages: int
    """How many there are; `nodes` may be fewer."""
    depth: int
    widest: int
    duration: float


class Effect(NamedTuple):
    """A type that causes another."""

    cause: str
    effect: str
    times: int
    most: int
    seconds: float


class Slow(NamedTuple):
    """A message that took long."""

    message_id: str
    name: str | None
    handler: str
    outcome: str
    attempts: int
    seconds: float
    run: float
    ended: datetime


class Stuck(NamedTuple):
    """Stuck messages of one type, handler and reason."""

    name: str
    handler: str | None
    reason: str
    messages: int
    oldest_id: str
    age: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportData:
    """Everything that a report shows."""

    source: str
    """Which journal."""
    made: datetime
    first: datetime | None = None
    """Time of the first message or attempt; `None` if there is none."""
    last: datetime | None = None
    step: timedelta = timedelta(minutes=1)
    """Length of a period."""
    totals: Totals = field(default_factory=Totals)
    latency: Percentiles | None = None
    """From publish to the end of an attempt, for all types."""
    periods: Sequence[Period] = ()
    handlers: Sequence[HandlerLatency] = ()
    failures: Sequence[Failure] = ()
    failures_left_out: int = 0
    sessions: Sessions = field(default_factory=lambda: Sessions({}, ()))
    tree: Tree | None = None
    effects: Sequence[Effect] = ()
    slowest: Sequence[Slow] = ()
    stuck: Sequence[Stuck] = ()
    stuck_after: float = 300.0

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to show."""
        return self.first is None
