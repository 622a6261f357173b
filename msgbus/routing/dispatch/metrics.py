"""Metrics of a dispatch engine: exact counts from any number of threads, read as snapshots."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Final, final

from msgbus.routing.dispatch.results import DispatchOutcome, DispatchStatus
from msgbus.routing.envelope import MessageCategory
from msgbus.telemetry.redaction import redact

LATENCY_HISTOGRAM_BUCKETS: Final = (1, 5, 10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10000)
"""Upper bounds of the latency buckets, in milliseconds; the last bucket has no bound."""

BUCKET_NAMES: Final = (
    *(f"le_{bound}ms" for bound in LATENCY_HISTOGRAM_BUCKETS),
    f"gt_{LATENCY_HISTOGRAM_BUCKETS[-1]}ms",
)


def _zeros(names: Iterable[str]) -> Callable[[], Mapping[str, int]]:
    return lambda: dict.fromkeys(names, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyMetrics:
    """Durations in milliseconds, at one moment."""

    total_latency_ms: float = 0.0
    min_latency_ms: float = 0.0
    max_latency_ms: float = 0.0
    latency_histogram: Mapping[str, int] = field(default_factory=_zeros(BUCKET_NAMES))
    """Counts by bucket name: `le_1ms` to `gt_10000ms`."""

    @property
    def avg_latency_ms(self) -> float:
        """The mean duration."""
        count = sum(self.latency_histogram.values())
        return self.total_latency_ms / count if count else 0.0

    def _latency_with(self, duration_ms: float) -> dict[str, Any]:
        """Return the fields of this class after one more duration."""
        is_first = not any(self.latency_histogram.values())
        bucket = bisect_left(LATENCY_HISTOGRAM_BUCKETS, duration_ms)
        lowest = duration_ms if is_first else min(self.min_latency_ms, duration_ms)
        return {
            "total_latency_ms": self.total_latency_ms + duration_ms,
            "min_latency_ms": lowest,
            "max_latency_ms": max(self.max_latency_ms, duration_ms),
            "latency_histogram": _plus_one(self.latency_histogram, BUCKET_NAMES[bucket]),
        }


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DispatcherMetrics(LatencyMetrics):
    """Metrics of one dispatcher at one moment."""

    dispatcher_id: str
    execution_count: int = 0
    """Executions that have ended, except by cancellation."""

    success_count: int = 0
    error_count: int = 0
    """Executions that failed, including timeouts."""

    timeout_count: int = 0
    skipped_count: int = 0
    last_error_message: str | None = None
    last_executed_at: datetime | None = None
    last_topic: str | None = None
    """The topic of the last message."""

    def record_execution(
        self,
        *,
        duration_ms: float,
        success: bool,
        topic: str | None = None,
        error_message: str | None = None,
    ) -> DispatcherMetrics:
        """Return these metrics with one more execution. `error_message` is redacted."""
        return replace(
            self,
            execution_count=self.execution_count + 1,
            success_count=self.success_count + success,
            error_count=self.error_count + (not success),
            last_error_message=(
                self.last_error_message if error_message is None else redact(error_message)
            ),
            last_executed_at=datetime.now(UTC),
            last_topic=self.last_topic if topic is None else topic,
            **self._latency_with(duration_ms),
        )

    @property
    def success_rate(self) -> float:
        """The share of successful executions, 0 to 1."""
        return _share(self.success_count, self.execution_count)

    @property
    def error_rate(self) -> float:
        """The share of failed executions, 0 to 1."""
        return _share(self.error_count, self.execution_count)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchMetrics(LatencyMetrics):
    """Metrics of an engine at one moment, or of calls of `record_dispatch`."""

    total_dispatches: int = 0
    """Dispatches that have ended: the sum of `status_counts` and `cancelled_dispatches`."""

    status_counts: Mapping[str, int] = field(
        default_factory=_zeros([status.value for status in DispatchStatus])
    )
    """Dispatches by the value of their status."""

    cancelled_dispatches: int = 0
    """Dispatches whose caller was cancelled."""

    dispatcher_executions: int = 0
    """Executions of all dispatchers."""

    category_metrics: Mapping[str, int] = field(
        default_factory=_zeros([category.value for category in MessageCategory])
    )
    """Messages by the value of their category."""

    dispatcher_metrics: Mapping[str, DispatcherMetrics] = field(
        default_factory=dict[str, DispatcherMetrics]
    )
    """By dispatcher id."""

    def record_dispatch(
        self,
        *,
        duration_ms: float,
        success: bool,
        category: MessageCategory | None = None,
        dispatcher_id: str | None = None,
        topic: str | None = None,
        error_message: str | None = None,
    ) -> DispatchMetrics:
        """Return these metrics with one more dispatch, for dispatching without an engine.

        A failure counts as `HANDLER_ERROR`. With a `dispatcher_id` it also counts as an execution
        of that dispatcher, with `topic` and the redacted `error_message`.
        """
        status = DispatchStatus.SUCCESS if success else DispatchStatus.HANDLER_ERROR
        categories, dispatchers = self.category_metrics, self.dispatcher_metrics
        if category is not None:
            categories = _plus_one(categories, category.value)
        if dispatcher_id is not None:
            one = dispatchers.get(dispatcher_id) or DispatcherMetrics(dispatcher_id=dispatcher_id)
            one = one.record_execution(
                duration_ms=duration_ms, success=success, topic=topic, error_message=error_message
            )
            dispatchers = {**dispatchers, dispatcher_id: one}
        return replace(
            self,
            total_dispatches=self.total_dispatches + 1,
            status_counts=_plus_one(self.status_counts, status.value),
            category_metrics=categories,
            dispatcher_metrics=dispatchers,
            dispatcher_executions=self.dispatcher_executions + (dispatcher_id is not None),
            **self._latency_with(duration_ms),
        )

    def get_dispatcher_metrics(self, dispatcher_id: str) -> DispatcherMetrics | None:
        """Return the metrics of one dispatcher, or `None`."""
        return self.dispatcher_metrics.get(dispatcher_id)

    @property
    def successful_dispatches(self) -> int:
        """Dispatches with status `SUCCESS`."""
        return self.status_counts[DispatchStatus.SUCCESS.value]

    @property
    def partial_dispatches(self) -> int:
        """Dispatches with status `PARTIAL`."""
        return self.status_counts[DispatchStatus.PARTIAL.value]

    @property
    def failed_dispatches(self) -> int:
        """Dispatches that failed, without partial failures."""
        errors = sum(self.status_counts[one.value] for one in DispatchStatus if one.is_error())
        return errors - self.partial_dispatches

    @property
    def no_dispatcher_count(self) -> int:
        """Dispatches with status `NO_DISPATCHER`."""
        return self.status_counts[DispatchStatus.NO_DISPATCHER.value]

    @property
    def success_rate(self) -> float:
        """The share of successful dispatches, 0 to 1."""
        return _share(self.successful_dispatches, self.total_dispatches)

    @property
    def error_rate(self) -> float:
        """The share of dispatches with an error, 0 to 1."""
        return _share(self.failed_dispatches + self.partial_dispatches, self.total_dispatches)


def _plus_one(counts: Mapping[str, int], name: str) -> Mapping[str, int]:
    return {**counts, name: counts[name] + 1}


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
        if milliseconds > self.highest:  # noqa: PLR1730 (max would be a call)
            self.highest = milliseconds
        self.count += 1
        self.total += milliseconds
        if milliseconds <= 1:
            self.buckets[0] += 1  # the common case, without a search
        else:
            self.buckets[bisect_left(LATENCY_HISTOGRAM_BUCKETS, milliseconds)] += 1

    def latency(self) -> dict[str, Any]:
        """Return the fields of `LatencyMetrics`."""
        return {
            "total_latency_ms": self.total,
            "min_latency_ms": self.lowest,
            "max_latency_ms": self.highest,
            "latency_histogram": dict(zip(BUCKET_NAMES, self.buckets, strict=True)),
        }


@final
class DispatcherCounts(_Latencies):
    """Counters of one dispatcher, written under the engine's lock."""

    __slots__ = ("last_error", "last_time", "last_topic", "statuses")

    def __init__(self) -> None:
        super().__init__()
        self.statuses = dict.fromkeys(DispatchStatus, 0)
        self.last_error: str | None = None
        self.last_time: float | None = None
        self.last_topic: str | None = None

    def record(self, outcome: DispatchOutcome, topic: str, at: float) -> None:
        """Count one execution."""
        self.add(outcome.duration_ms)
        self.statuses[outcome.status] += 1
        self.last_time = at
        self.last_topic = topic
        if outcome.error_message is not None:
            self.last_error = outcome.error_message

    def read(self, dispatcher_id: str) -> DispatcherMetrics:
        """Return a snapshot."""
        last = self.last_time
        return DispatcherMetrics(
            dispatcher_id=dispatcher_id,
            execution_count=self.count,
            success_count=self.statuses[DispatchStatus.SUCCESS],
            error_count=sum(count for status, count in self.statuses.items() if status.is_error()),
            timeout_count=self.statuses[DispatchStatus.TIMEOUT],
            skipped_count=self.statuses[DispatchStatus.SKIPPED],
            last_error_message=self.last_error,
            last_executed_at=None if last is None else datetime.fromtimestamp(last, tz=UTC),
            last_topic=self.last_topic,
            **self.latency(),
        )


@final
class EngineCounts(_Latencies):
    """Counters of one engine.

    One lock, taken once per dispatch and never while a dispatcher runs: `+=` on an int is not
    atomic between threads, and an uncontended lock costs less than counters per thread.
    """

    __slots__ = ("_cancelled", "_categories", "_dispatchers", "_lock", "_statuses")

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._statuses = dict.fromkeys(DispatchStatus, 0)
        self._categories = dict.fromkeys(MessageCategory, 0)
        self._dispatchers: dict[str, DispatcherCounts] = {}
        self._cancelled = 0

    def add_dispatcher(self, dispatcher_id: str, counts: DispatcherCounts) -> None:
        """Add the counters of a dispatcher to the snapshots."""
        self._dispatchers[dispatcher_id] = counts

    def record(
        self,
        status: DispatchStatus | None,
        category: MessageCategory | None,
        milliseconds: float,
        executions: Iterable[tuple[DispatcherCounts, DispatchOutcome]],
        topic: str,
        at: float,
    ) -> None:
        """Count one dispatch and its executions; without a status its caller was cancelled."""
        with self._lock:
            self.add(milliseconds)
            if status is None:
                self._cancelled += 1
            else:
                self._statuses[status] += 1
            if category is not None:
                self._categories[category] += 1
            for counts, outcome in executions:
                counts.record(outcome, topic, at)

    def read_dispatcher(self, dispatcher_id: str) -> DispatcherMetrics | None:
        """Return a snapshot of one dispatcher, or `None`."""
        counts = self._dispatchers.get(dispatcher_id)
        if counts is None:
            return None
        with self._lock:
            return counts.read(dispatcher_id)

    def read(self) -> DispatchMetrics:
        """Return a snapshot of all counters."""
        with self._lock:
            dispatchers = {name: counts.read(name) for name, counts in self._dispatchers.items()}
            return DispatchMetrics(
                total_dispatches=self.count,
                status_counts={status.value: count for status, count in self._statuses.items()},
                cancelled_dispatches=self._cancelled,
                dispatcher_executions=sum(one.execution_count for one in dispatchers.values()),
                category_metrics={cat.value: count for cat, count in self._categories.items()},
                dispatcher_metrics=dispatchers,
                **self.latency(),
            )
