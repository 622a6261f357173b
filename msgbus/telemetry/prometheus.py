"""Prometheus metrics, read from the counters of a bus at each scrape.

```python
BusCollector(bus, registry=registry)  # or registry.register(BusCollector(bus))
```

Importing this registers nothing. The same numbers as JSON are `bus.stats().as_dict()`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate
from operator import add
from typing import Any, Final, Protocol, TypeAlias, final
from weakref import WeakKeyDictionary

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

from msgbus.errors import ConfigurationError
from msgbus.telemetry.stats import BOUNDS, BusStats, DurationStats

Labels: TypeAlias = tuple[str, ...]
Rows: TypeAlias = Mapping[str, tuple[str, str]]
"""Metric name -> (attribute of the stats, help)."""

OVERFLOW: Final = "_overflow"
"""The label of all series beyond `max_series`."""

_EVENT_COUNTERS: Final[Rows] = {
    "events_published": ("published", "Events published, whatever the outcome."),
    "events_rejected": ("rejected", "Events rejected, as a queue was full."),
}
_LANE_COUNTERS: Final[Rows] = {
    "events_processed": ("handled", "Events handled."),
    "events_failed": ("failed", "Events that failed."),
    "events_retried": ("retried", "Attempts after the first."),
    "events_filtered": (
        "filtered",
        "Events filtered out; by the bus if no handler.",
    ),
    "events_dropped": ("dropped", "Events dropped from the handler's full queue."),
    "events_abandoned": ("abandoned", "Events abandoned because the bus or session ended."),
}
_LANE_GAUGES: Final[Rows] = {"queue_size": ("queued", "Events in the handler's queue.")}
_LANE_FLAGS: Final[Rows] = {
    "backpressure_active": (
        "backpressure",
        "1 while the handler's queue makes publishers wait, slows them, refuses or drops.",
    ),
}
_COMMAND_COUNTERS: Final[Rows] = {
    "commands_sent": ("sent", "Commands sent to the handler."),
    "commands_processed": ("handled", "Commands handled."),
    "commands_failed": ("failed", "Commands that failed."),
    "commands_retried": ("retried", "Attempts after the first."),
    "commands_cancelled": ("cancelled", "Commands cancelled by their caller."),
}
_BUS_GAUGES: Final[Rows] = {
    "active_sessions": ("active_sessions", "Open sessions."),
    "registered_handlers": ("registered_handlers", "Handlers of the bus and of its sessions."),
    "events_scheduled": ("scheduled", "Events scheduled for later."),
    "dead_letter_queue_size": ("dead_letters", "Dead letters."),
}
_SUBSCRIPTION_GAUGES: Final[Rows] = {
    "subscription_lag": ("lag", "Messages for the handler that are not done, at most."),
    "subscription_oldest_unacked_seconds": (
        "oldest_unacked_age",
        "Age of the oldest unacknowledged message, 0 if there is none.",
    ),
    "subscription_scheduled": ("scheduled", "Messages that wait for a retry in the journal."),
    "subscription_trimmed": ("trimmed", "Messages removed by retention before they were handled."),
    "subscription_damaged": ("damaged", "Messages that cannot be read, set aside in the journal."),
    "subscription_active": ("is_active", "1 while it delivers in this process."),
}
_SUBSCRIPTION_SUMS: Final[Rows] = {
    "subscription_in_flight": ("in_flight", "Messages in flight in the handler."),
    "subscription_waiting": ("waiting", "Messages in memory that wait for a retry."),
}
_SUBSCRIPTION_COUNTERS: Final[Rows] = {
    "subscription_delivered": ("delivered", "Attempts begun."),
    "subscription_acked": ("acked", "Messages acknowledged."),
    "subscription_skipped": (
        "skipped",
        "Messages not delivered again, as they were handled before.",
    ),
    "subscription_failed": ("failed", "Attempts that failed, timeouts included."),
    "subscription_timed_out": ("timed_out", "Attempts that timed out."),
    "subscription_redelivered": (
        "redelivered",
        "Attempts after the first in this process.",
    ),
    "subscription_dead_lettered": ("dead_lettered", "Messages dead-lettered."),
    "subscription_dropped": ("dropped", "Messages dropped by Poison.DROP."),
    "subscription_stalls": ("stalls", "Times that messages were found which nobody had begun."),
    "subscription_errors": ("errors", "Times that the journal could not be read or written."),
}
_JOURNAL_GAUGES: Final[Rows] = {
    "journal_backlog": ("backlog", "Commands and deliveries that wait to be recorded."),
}
_JOURNAL_COUNTERS: Final[Rows] = {
    "journal_write_failures": ("write_failures", "Times that these could not be written."),
    "outbox_relayed": ("relayed", "Events published from outboxes."),
    "outbox_failures": ("relay_failures", "Times that an outbox could not be read or written."),
}
_EVENT_SECONDS: Final = "event_processing_duration_seconds"
_COMMAND_SECONDS: Final = "command_processing_duration_seconds"
_CIRCUITS: Final = "circuit_breaker_state"
_CIRCUIT_STATES: Final = {"closed": 0, "half_open": 1, "open": 2}

_BOUND_NAMES: Final = (*map(str, BOUNDS), "+Inf")


class SamplingConfig(Protocol):
    """The part of a bus's configuration that a collector needs."""

    @property
    def histogram_every(self) -> int:
        """Every how many calls one duration is in the histogram."""
        ...


class StatsSource(Protocol):
    """The part of a bus that a collector needs."""

    @property
    def config(self) -> SamplingConfig:
        """The configuration."""
        ...

    def stats(self) -> BusStats:
        """Snapshot of all counters."""
        ...


@final
class BusCollector:
    """A Prometheus collector over one or more buses.

    Buses of one name are counted together, as handlers of one name are. Prometheus takes
    each metric from one collector only, so several buses on one registry share one:
    `BusCollector(orders, billing)`. A second collector for the same registry adds its buses
    to the first.

    A series is a set of labels (bus, handler, message type). Beyond `max_series`, new ones
    are summed under `handler="_overflow"`, so that handlers made in a loop cannot flood the
    metrics server.

    Args:
        *buses: Buses to read.
        registry: Registry to register with; none unless given.
        max_series: Maximum number of label sets.

    Raises:
        ConfigurationError: No bus was given, or `max_series` is below 1, or Prometheus runs
            in multi-process mode, which cannot use collectors.
    """

    def __init__(
        self,
        *buses: StatsSource,
        registry: CollectorRegistry | None = None,
        max_series: int = 1000,
    ) -> None:
        _refuse_multiprocess()
        if not buses or any(isinstance(bus, CollectorRegistry) for bus in buses):
            message = (
                "BusCollector takes one bus or more, and the registry by name: "
                "BusCollector(bus, registry=registry)."
            )
            raise ConfigurationError(message)
        if max_series < 1:
            message = f"max_series must be at least 1, not {max_series}."
            raise ConfigurationError(message)
        self._buses: list[StatsSource] = []
        self.add(*buses)
        self._max_series = max_series
        # A series that has its own labels once keeps them in later scrapes.
        self._named: set[Labels] = set()
        if registry is not None:
            first = _collectors.setdefault(registry, self)
            first.add(*buses)
            registry.register(first)  # again: it may have been unregistered

    def add(self, *buses: StatsSource) -> None:
        """Read these buses too; each bus is read once."""
        for bus in buses:
            if bus not in self._buses:
                self._buses.append(bus)

    def describe(self) -> Iterable[Metric]:
        """Nothing: otherwise registering would collect, perhaps before the bus is ready."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Collect all metrics."""
        scrape = _Scrape(self._labels)
        for bus in list(self._buses):
            scrape.add(_read(bus), every=bus.config.histogram_every)
        return scrape.metrics()

    def _labels(self, bus: str, handler: str, message_type: str) -> Labels:
        """The labels of a series; those of the overflow beyond `max_series`."""
        labels = (bus, handler, message_type)
        if labels not in self._named:
            if len(self._named) >= self._max_series:
                return (bus, handler and OVERFLOW, message_type and OVERFLOW)
            self._named.add(labels)
        return labels


# Prometheus refuses two collectors with the same metrics on one registry.
_collectors: Final[WeakKeyDictionary[CollectorRegistry, BusCollector]] = WeakKeyDictionary()


def expose(*buses: StatsSource) -> str:
    """The metrics of these buses in Prometheus' text format, without a registry.

    Raises:
        ConfigurationError: As of `BusCollector`.
    """
    return generate_latest(BusCollector(*buses)).decode()


def _refuse_multiprocess() -> None:
    for name in ("PROMETHEUS_MULTIPROC_DIR", "prometheus_multiproc_dir"):
        if os.environ.get(name):
            message = (
                f"{name} is set: in multi-process mode prometheus_client ignores custom "
                f"collectors, so the metrics of the bus would be missing. "
                f"Unset it and let Prometheus scrape each process at a port of its own."
            )
            raise ConfigurationError(message)


def _read(bus: StatsSource) -> BusStats:
    # A metrics server reads from its own thread, and the event loop may add a counter
    # meanwhile. The next attempt succeeds.
    for _ in range(100):
        try:
            return bus.stats()
        except RuntimeError:
            continue
    return bus.stats()


@final
class _Family:
    """One metric with all its series; values of the same labels are merged."""

    def __init__(
        self,
        metric: CounterMetricFamily | GaugeMetricFamily,
        merge: Callable[[float, float], float] = add,
    ) -> None:
        self._metric = metric
        self._merge = merge
        self._values: dict[Labels, float] = {}

    def add(self, labels: Labels, value: float) -> None:
        """Add one value."""
        known = self._values.get(labels)
        self._values[labels] = value if known is None else self._merge(known, value)

    def metric(self) -> Metric:
        """The metric, for the registry."""
        for labels, value in self._values.items():
            self._metric.add_metric(labels, value)
        return self._metric


@final
class _Histogram:
    """One histogram with all its series; durations of the same labels are merged."""

    def __init__(self, metric: HistogramMetricFamily) -> None:
        self._metric = metric
        self._values: dict[Labels, tuple[list[int], float]] = {}

    def add(self, labels: Labels, stats: DurationStats, every: int) -> None:
        """Add one handler; with sampling, each duration counts `every` times."""
        known, seconds = self._values.get(labels, ([0] * len(_BOUND_NAMES), 0.0))
        merged = [old + new * every for old, new in zip(known, stats.buckets, strict=True)]
        self._values[labels] = merged, seconds + stats.seconds

    def metric(self) -> Metric:
        """The metric, for the registry."""
        for labels, (buckets, seconds) in self._values.items():
            cumulative = zip(_BOUND_NAMES, accumulate(buckets), strict=True)
            self._metric.add_metric(labels, list(cumulative), seconds)
        return self._metric


@final
class _Scrape:
    """The metrics of one scrape."""

    def __init__(self, labels: Callable[[str, str, str], Labels]) -> None:
        self._labels = labels
        self._families: dict[str, _Family] = {}
        self._histograms: dict[str, _Histogram] = {}
        by_handler = ("bus", "handler", "message_type")
        self._counters(_EVENT_COUNTERS, ("bus", "message_type"))
        self._counters(_LANE_COUNTERS, by_handler)
        self._counters(_COMMAND_COUNTERS, by_handler)
        for metric in (_EVENT_SECONDS, _COMMAND_SECONDS):
            help_text = "Duration of the handler, with all middleware around it."
            family = HistogramMetricFamily(f"msgbus_{metric}", help_text, labels=by_handler)
            self._histograms[metric] = _Histogram(family)
        self._gauges(_LANE_GAUGES, by_handler)
        self._gauges(_BUS_GAUGES, ("bus",))
        # Of several the worst, not the sum.
        self._gauges(_LANE_FLAGS, by_handler, max)
        states = ", ".join(f"{number} {state}" for state, number in _CIRCUIT_STATES.items())
        by_subscription = ("bus", "subscription")
        self._gauges(_SUBSCRIPTION_GAUGES, by_subscription, max)
        self._gauges(_SUBSCRIPTION_SUMS, by_subscription)
        self._counters(_SUBSCRIPTION_COUNTERS, by_subscription)
        self._gauges(_JOURNAL_GAUGES, ("bus",))
        self._counters(_JOURNAL_COUNTERS, ("bus",))
        self._gauges({_CIRCUITS: ("", f"State: {states}, -1 other.")}, ("bus", "handler"), max)

    def _counters(self, rows: Rows, labels: Labels) -> None:
        for metric, (_, help_text) in rows.items():
            family = CounterMetricFamily(f"msgbus_{metric}", help_text, labels=labels)
            self._families[metric] = _Family(family)

    def _gauges(
        self, rows: Rows, labels: Labels, merge: Callable[[float, float], float] = add
    ) -> None:
        for metric, (_, help_text) in rows.items():
            family = GaugeMetricFamily(f"msgbus_{metric}", help_text, labels=labels)
            self._families[metric] = _Family(family, merge)

    def _fill(self, rows: Rows, labels: Labels, stats: Any) -> None:
        for metric, (attribute, _) in rows.items():
            self._families[metric].add(labels, float(getattr(stats, attribute)))

    def add(self, stats: BusStats, *, every: int) -> None:
        """Add one bus."""
        for event in stats.events.values():
            labels = self._labels(stats.name, "", event.message_type)
            self._fill(_EVENT_COUNTERS, (labels[0], labels[2]), event)
            if event.filtered:
                self._families["events_filtered"].add(labels, event.filtered)
        for lane in stats.handlers.values():
            labels = self._labels(stats.name, lane.handler, lane.message_type)
            self._fill(_LANE_COUNTERS, labels, lane)
            self._fill({**_LANE_GAUGES, **_LANE_FLAGS}, labels, lane)
            self._histograms[_EVENT_SECONDS].add(labels, lane, every)
        for command in stats.commands.values():
            labels = self._labels(stats.name, command.handler, command.message_type)
            self._fill(_COMMAND_COUNTERS, labels, command)
            self._histograms[_COMMAND_SECONDS].add(labels, command, every)
        for circuit, state in stats.circuits.items():
            labels = self._labels(stats.name, circuit, "")
            self._families[_CIRCUITS].add(labels[:2], _CIRCUIT_STATES.get(state, -1))
        self._fill(_BUS_GAUGES, (stats.name,), stats)
        self._add_durable(stats)

    def _add_durable(self, stats: BusStats) -> None:
        for subscription in stats.subscriptions.values():
            labels = self._labels(stats.name, subscription.name, "")[:2]
            for rows in (_SUBSCRIPTION_GAUGES, _SUBSCRIPTION_SUMS, _SUBSCRIPTION_COUNTERS):
                self._fill(rows, labels, subscription)
        if stats.journal is not None:
            self._fill({**_JOURNAL_GAUGES, **_JOURNAL_COUNTERS}, (stats.name,), stats.journal)

    def metrics(self) -> Iterator[Metric]:
        """All families, for the registry."""
        yield from (family.metric() for family in self._families.values())
        yield from (histogram.metric() for histogram in self._histograms.values())
        build = {"version": _version()}
        yield InfoMetricFamily("msgbus_build", "Version of msgbus.", value=build)


@cache
def _version() -> str:
    try:
        return version("msgbus")
    except PackageNotFoundError:  # run from source, not installed
        return "unknown"
