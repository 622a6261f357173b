"""The history of a simulated run, and the promises that it breaks."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple, final

from msgbus.handlers.delivery import Delivery, Mode
from msgbus.testing.simulation.scenarios import Scenario


class SimulatedAttempt(NamedTuple):
    """One delivery to a consumer."""

    run: int
    """Which run of which process."""
    epoch: int
    number: int
    attempt: int
    time: float
    """When it was delivered."""


@final
@dataclass(slots=True)
class SimulationHistory:
    """What happened, in order."""

    published: dict[int, str | None] = field(default_factory=dict[int, str | None])
    """Numbers and keys of all messages."""
    begun: list[SimulatedAttempt] = field(default_factory=list[SimulatedAttempt])
    handled: list[SimulatedAttempt] = field(default_factory=list[SimulatedAttempt])
    dead_lettered: set[int] = field(default_factory=set[int])
    dropped: int = 0
    deaths: int = 0
    freezes: int = 0
    closes: int = 0
    """Times that a process ended cleanly."""
    left: int = 0
    """Messages still in flight when their process closed."""
    timeouts: int = 0
    positions: list[int] = field(default_factory=list[int])
    """Sampled positions of the cursor."""
    head: int = 0
    is_settled: bool = False
    errors: list[str] = field(default_factory=list[str])

    def digest(self) -> tuple[object, ...]:
        """Get what two runs of one seed must have in common."""
        return (tuple(self.begun), tuple(self.handled), tuple(self.positions), self.deaths)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Violations:
    """How often each promise was broken; all zero if none was."""

    lost: int = 0
    """Neither handled nor dead-lettered."""
    duplicated: int = 0
    """Handled again without a reason, or more often than the reasons allow."""
    reordered: int = 0
    """Handled before an earlier one of the same order."""
    stuck: int = 0
    """Not passed by the cursor in time."""
    moved_back: int = 0
    """Times that the cursor went backwards."""
    too_fast: int = 0
    """Attempts beyond the rate limit."""
    shared_epochs: int = 0
    """Epochs under which two processes have delivered."""

    @property
    def is_clean(self) -> bool:
        """Whether nothing was broken."""
        return not any(
            (
                self.lost,
                self.duplicated,
                self.reordered,
                self.stuck,
                self.moved_back,
                self.too_fast,
                self.shared_epochs,
            )
        )


def check(scenario: Scenario, history: SimulationHistory) -> Violations:
    """Check a history against the promises of its scenario."""
    return Violations(
        lost=_lost(scenario, history),
        duplicated=_duplicated(scenario, history),
        reordered=_reordered(scenario, history) if scenario.is_ordered else 0,
        stuck=0 if history.is_settled else max(history.head - history.positions[-1], 1),
        moved_back=sum(b < a for a, b in pairwise(history.positions)),
        too_fast=_too_fast(scenario, history),
        shared_epochs=_shared_epochs(history),
    )


def _slots(scenario: Scenario) -> int:
    return scenario.config.max_in_flight * scenario.consumers


def _lost(scenario: Scenario, history: SimulationHistory) -> int:
    handled = {one.number for one in history.handled}
    missing = set(history.published) - handled - history.dead_lettered
    allowed = history.dropped
    if scenario.config.delivery is Delivery.AT_MOST_ONCE:
        # What the cursor had passed in advance at a crash, and nothing else.
        window = max(scenario.config.loss_window, _slots(scenario))
        allowed += (history.deaths + history.freezes) * window + history.left
    return max(len(missing) - allowed, 0)


def _duplicated(scenario: Scenario, history: SimulationHistory) -> int:
    config = scenario.config
    if config.delivery is Delivery.AT_MOST_ONCE:
        begun = Counter(one.number for one in history.begun)
        return sum(count - 1 for count in begun.values())
    handled = Counter(one.number for one in history.handled)
    again = sum(count - 1 for count in handled.values())
    # After a crash: what was handled and not yet written. A marker is written at once,
    # beside what comes to an end while it is.
    ahead, ends = config.max_buffered, history.deaths + history.freezes
    if config.mode is not Mode.EXCLUSIVE:
        ahead = max(ahead, config.max_ahead)
        # What was done behind something that was not is done again after a clean end, too.
        ends += 0 if config.idempotent else history.closes
    window = 2 * _slots(scenario) if config.idempotent else ahead + config.flush_acks
    allowed = ends * window + history.timeouts
    return max(again - allowed, 0)


def _reordered(scenario: Scenario, history: SimulationHistory) -> int:
    """Count messages handled out of order within one run."""
    is_by_key = scenario.config.mode is Mode.KEY_SHARED
    orders: defaultdict[tuple[int, int, str | None], list[int]] = defaultdict(list)
    for one in history.handled:
        key = history.published[one.number] if is_by_key else "all"
        if key is not None:
            orders[one.run, one.epoch, key].append(one.number)
    return sum(b <= a for numbers in orders.values() for a, b in pairwise(numbers))


def _too_fast(scenario: Scenario, history: SimulationHistory) -> int:
    """Count deliveries for which a token bucket of `burst` tokens had none."""
    rate, burst = scenario.config.rate_limit, scenario.config.burst
    if rate is None:
        return 0
    runs: defaultdict[int, list[float]] = defaultdict(list)
    for one in history.begun:
        runs[one.run].append(one.time)
    found = 0
    for times in runs.values():
        tokens, last = float(burst), float("-inf")
        for time in sorted(times):
            tokens = min(tokens + (time - last) * rate, burst)
            last = time
            if tokens < 1 - 1e-6:
                found += 1
            else:
                tokens -= 1
    return found


def _shared_epochs(history: SimulationHistory) -> int:
    runs: defaultdict[int, set[int]] = defaultdict(set)
    for one in history.begun:
        runs[one.epoch].add(one.run)
    return sum(len(each) > 1 for each in runs.values())
