"""What a dispatch engine counts: exact from any number of threads, read as a snapshot."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, final

from msgbus.routing.categories import MessageCategory
from msgbus.routing.dispatch import DispatchOutcome, DispatchStatus

BUCKETS_MS: Final = (1, 5, 10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10000)
"""Upper bounds of the latency buckets, in milliseconds; a last bucket takes the rest."""

BUCKET_NAMES: Final = (*(f"le_{bound}ms" for bound in BUCKETS_MS), f"gt_{BUCKETS_MS[-1]}ms")


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyMetrics:
    """Durations in milliseconds, at one moment."""

    avg_latency_ms: float
    min_latency_ms: float
    max_latency_ms: float
    latency_histogram: Mapping[str, int]
    """How many fell into each bucket, by its name: `le_1ms` to `gt_10000ms`."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DispatcherMetrics(LatencyMetrics):
    """One dispatcher at one moment."""

    dispatcher_id: str
    execution_count: int
    """Executions that have ended, in whatever way but cancellation."""

    success_count: int
    error_count: int
    """Executions that failed; those out of time are among them."""

    timeout_count: int
    skipped_count: int
    last_error_message: str | None
    last_executed_at: datetime | None

    @property
    def success_rate(self) -> float:
        """Successes among all executions, 0 to 1."""
        return _share(self.success_count, self.execution_count)

    @property
    def error_rate(self) -> float:
        """Errors among all executions, 0 to 1."""
        return _share(self.error_count, self.execution_count)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchMetrics(LatencyMetrics):
    """A whole engine at one moment."""

    total_dispatches: int
    """Dispatches that have ended, in whatever way: the sum of `status_counts` and
    `cancelled_dispatches`."""

    status_counts: Mapping[str, int]
    """How many ended with each status, by its value."""

    cancelled_dispatches: int
    """Dispatches whose caller was cancelled."""

    dispatcher_executions: int
    """Executions of all dispatchers."""

    category_metrics: Mapping[str, int]
    """How many messages of each category came, by its value."""

    dispatcher_metrics: Mapping[str, DispatcherMetrics]
    """By dispatcher id."""

    @property
    def successful_dispatches(self) -> int:
        """Dispatches in which everything went well."""
        return self.status_counts[DispatchStatus.SUCCESS.value]

    @property
    def partial_dispatches(self) -> int:
        """Dispatches in which some dispatchers failed and some did not."""
        return self.status_counts[DispatchStatus.PARTIAL.value]

    @property
    def failed_dispatches(self) -> int:
        """Dispatches that went wrong as a whole; partial failures are counted apart."""
        errors = sum(
            self.status_counts[status.value] for status in DispatchStatus if _fails(status)
        )
        return errors - self.partial_dispatches

    @property
    def no_dispatcher_count(self) -> int:
        """Messages for which there was no dispatcher."""
        return self.status_counts[DispatchStatus.NO_DISPATCHER.value]

    @property
    def success_rate(self) -> float:
        """Successes among all dispatches, 0 to 1."""
        return _share(self.successful_dispatches, self.total_dispatches)

    @property
    def error_rate(self) -> float:
        """Dispatches with any error among all, 0 to 1."""
        return _share(self.failed_dispatches + self.partial_dispatches, self.total_dispatches)


def _fails(status: DispatchStatus) -> bool:
    return status.is_error()


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


class _Latencies:
    __slots__ = ("buckets", "count", "highest", "lowest", "total")

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self.lowest = 0.0
        self.highest = 0.0
        self.buckets = [0] * len(BUCKET_NAMES)

    def add(self, milliseconds: float) -> None:
        if not self.count or milliseconds < self.lowest:
            self.lowest = milliseconds
        self.highest = max(self.highest, milliseconds)
        self.count += 1
        self.total += milliseconds
        self.buckets[bisect_left(BUCKETS_MS, milliseconds) if milliseconds > 1 else 0] += 1

    @property
    def average(self) -> float:
        return self.total / self.count if self.count else 0.0

    def histogram(self) -> dict[str, int]:
        return dict(zip(BUCKET_NAMES, self.buckets, strict=True))


@final
class DispatcherCounts(_Latencies):
    """One dispatcher's numbers; written under the engine's lock."""

    __slots__ = ("last_error", "last_time", "statuses")

    def __init__(self) -> None:
        super().__init__()
        self.statuses = dict.fromkeys(DispatchStatus, 0)
        self.last_error: str | None = None
        self.last_time: float | None = None

    def record(self, outcome: DispatchOutcome, at: float) -> None:
        """Take one execution into account."""
        self.add(outcome.duration_ms)
        self.statuses[outcome.status] += 1
        self.last_time = at
        if outcome.error_message is not None:
            self.last_error = outcome.error_message

    def read(self, dispatcher_id: str) -> DispatcherMetrics:
        """These numbers at this moment."""
        last = self.last_time
        return DispatcherMetrics(
            dispatcher_id=dispatcher_id,
            execution_count=self.count,
            success_count=self.statuses[DispatchStatus.SUCCESS],
            error_count=sum(self.statuses[status] for status in DispatchStatus if _fails(status)),
            timeout_count=self.statuses[DispatchStatus.TIMEOUT],
            skipped_count=self.statuses[DispatchStatus.SKIPPED],
            last_error_message=self.last_error,
            last_executed_at=None if last is None else datetime.fromtimestamp(last, tz=UTC),
            avg_latency_ms=self.average,
            min_latency_ms=self.lowest,
            max_latency_ms=self.highest,
            latency_histogram=self.histogram(),
        )


@final
class EngineCounts(_Latencies):
    """One engine's numbers.

    One lock, taken once per dispatch and never around a dispatcher: `+=` on an int is not
    atomic between threads, and a lock that nobody holds costs less than finding the
    counters of one's own thread.
    """

    __slots__ = ("_cancelled", "_categories", "_dispatchers", "_lock", "_statuses")

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._statuses = dict.fromkeys(DispatchStatus, 0)
        self._categories = dict.fromkeys(MessageCategory, 0)
        self._dispatchers: dict[str, DispatcherCounts] = {}
        self._cancelled = 0

    def dispatcher(self, dispatcher_id: str) -> DispatcherCounts:
        """The counters of one dispatcher."""
        return self._dispatchers.setdefault(dispatcher_id, DispatcherCounts())

    def record(
        self,
        status: DispatchStatus,
        category: MessageCategory | None,
        milliseconds: float,
        executions: Iterable[tuple[DispatcherCounts, DispatchOutcome]],
        at: float,
    ) -> None:
        """Take one dispatch into account."""
        with self._lock:
            self.add(milliseconds)
            self._statuses[status] += 1
            if category is not None:
                self._categories[category] += 1
            for counts, outcome in executions:
                counts.record(outcome, at)

    def record_cancelled(
        self,
        category: MessageCategory,
        milliseconds: float,
        executions: Iterable[tuple[DispatcherCounts, DispatchOutcome]],
        at: float,
    ) -> None:
        """Take a dispatch into account whose caller went away, and those that had ended."""
        with self._lock:
            self.add(milliseconds)
            self._cancelled += 1
            self._categories[category] += 1
            for counts, outcome in executions:
                counts.record(outcome, at)

    def read_dispatcher(self, dispatcher_id: str) -> DispatcherMetrics | None:
        """One dispatcher's numbers; `None` if there is no such dispatcher."""
        counts = self._dispatchers.get(dispatcher_id)
        if counts is None:
            return None
        with self._lock:
            return counts.read(dispatcher_id)

    def read(self) -> DispatchMetrics:
        """All numbers at one moment."""
        with self._lock:
            dispatchers = {name: counts.read(name) for name, counts in self._dispatchers.items()}
            return DispatchMetrics(
                total_dispatches=self.count,
                status_counts={status.value: count for status, count in self._statuses.items()},
                cancelled_dispatches=self._cancelled,
                dispatcher_executions=sum(one.execution_count for one in dispatchers.values()),
                category_metrics={cat.value: count for cat, count in self._categories.items()},
                dispatcher_metrics=dispatchers,
                avg_latency_ms=self.average,
                min_latency_ms=self.lowest,
                max_latency_ms=self.highest,
                latency_histogram=self.histogram(),
            )
