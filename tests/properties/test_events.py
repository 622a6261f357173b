"""Random handlers, queues, failures and publishers: nothing is lost, doubled or reordered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given, settings, strategies as st

from msgbus import (
    BackpressureStrategy,
    BusClosedError,
    DrainReport,
    Event,
    MessageBus,
    PublishReceipt,
    PublishStatus,
    QueueConfig,
)
from msgbus.runtime.clock import VirtualClock
from tests.fakes import OrderEvent, OrderPlaced, OrderShipped, conserves, let_others_run

Outcome = Literal["ok", "fail", "hang", "unwanted"]
OUTCOMES: tuple[Outcome, ...] = ("ok", "ok", "fail", "hang", "unwanted")
TYPES = (OrderEvent, OrderPlaced, OrderShipped)
TIMEOUT = 1.0


@dataclass(frozen=True)
class HandlerPlan:
    """One random handler."""

    event_type: type[OrderEvent]
    outcomes: tuple[Outcome, ...]
    """What it does with an event, by the event's number."""
    turns: int
    """How often it gives way to others while it handles an event."""
    republishes: bool
    """Whether it publishes one more event for each OrderPlaced."""
    priority: int
    concurrency: int
    batch: bool
    queue: QueueConfig

    def outcome(self, event: Event) -> Outcome:
        assert isinstance(event, OrderEvent)
        return self.outcomes[event.number % len(self.outcomes)]


@dataclass(frozen=True)
class PublishPlan:
    """One random publish."""

    event_type: type[OrderEvent]
    give_up_after: int | None
    """After so many turns of the loop it is cancelled."""


queues = st.builds(
    QueueConfig,
    max_size=st.integers(1, 4),
    batch_size=st.integers(1, 3),
    linger=st.sampled_from([0.0, 0.5]),
    strategy=st.sampled_from(BackpressureStrategy),
)
handler_plans = st.builds(
    HandlerPlan,
    event_type=st.sampled_from(TYPES),
    outcomes=st.tuples(*[st.sampled_from(OUTCOMES)] * 5),
    turns=st.integers(0, 3),
    republishes=st.booleans(),
    priority=st.integers(0, 2),
    concurrency=st.integers(1, 3),
    batch=st.booleans(),
    queue=queues,
)
publish_plans = st.builds(
    PublishPlan,
    event_type=st.sampled_from(TYPES),
    give_up_after=st.none() | st.integers(0, 5),
)


class Handler:
    """Does what its plan says, and notes when it began and ended each event."""

    def __init__(self, name: str, plan: HandlerPlan, run: Run) -> None:
        self.name = name
        self.plan = plan
        self._run = run
        self.begun: dict[int, int] = {}
        """When it first began an event, by number."""
        self.ended: dict[int, int] = {}
        """When it last ended an event, by number."""
        self.calls: Counter[int] = Counter()

    def register(self) -> None:
        options: dict[str, Any] = {
            "name": self.name,
            "priority": self.plan.priority,
            "concurrency": self.plan.concurrency,
            "timeout": TIMEOUT,
            "filter": lambda event: self.plan.outcome(event) != "unwanted",  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
            "queue": self.plan.queue,
        }
        if self.plan.batch:
            self._run.bus.subscribe(self.plan.event_type, self._handle_list, batch=True, **options)
        else:
            self._run.bus.subscribe(self.plan.event_type, self._handle, **options)

    async def _handle(self, event: OrderEvent) -> None:
        if self.plan.republishes and type(event) is OrderPlaced:
            await self._run.publish(OrderShipped(number=next(self._run.numbers)))
        await self._handle_list([event])

    async def _handle_list(self, events: list[OrderEvent]) -> None:
        outcomes = {self.plan.outcome(event) for event in events}
        for event in events:
            self.begun.setdefault(event.number, next(self._run.ticks))
            self.calls[event.number] += 1
        try:
            for _ in range(self.plan.turns):
                await anyio.lowlevel.checkpoint()
            if "hang" in outcomes:
                await self._run.clock.sleep(1000 * TIMEOUT)
            if "fail" in outcomes:
                raise ValueError
        finally:
            for event in events:
                self.ended[event.number] = next(self._run.ticks)

    @property
    def expected(self) -> list[int]:
        """What it must have seen: all that was admitted for it, unfiltered and undropped."""
        return [
            event.number
            for event in self._run.admitted
            if isinstance(event, self.plan.event_type)
            and self.plan.outcome(event) != "unwanted"
            and (event.number, self.name) not in self._run.dropped
        ]


class Run:
    """A bus with random handlers, driven by random publishers on virtual time."""

    def __init__(self, plans: Sequence[HandlerPlan]) -> None:
        self.clock = VirtualClock()
        self.bus = MessageBus(clock=self.clock)
        self.ticks = count()
        self.numbers = count()
        self.admitted: list[OrderEvent] = []
        self.dropped: set[tuple[int, str]] = set()
        self.rejected = 0
        self.cancelled = 0
        self.refused = 0
        self.handlers = [Handler(f"h{place}", plan, self) for place, plan in enumerate(plans)]
        for handler in self.handlers:
            handler.register()

    async def publish(self, event: OrderEvent) -> None:
        receipt: PublishReceipt = await self.bus.publish(event)
        if receipt.status is PublishStatus.REJECTED:
            self.rejected += 1
            return
        self.admitted.append(event)
        for one in receipt.dropped:
            assert isinstance(one.event, OrderEvent)
            self.dropped.add((one.event.number, one.handler))

    async def publish_planned(self, plans: Sequence[PublishPlan]) -> None:
        for plan in plans:
            event = plan.event_type(number=next(self.numbers))
            async with anyio.create_task_group() as tasks:
                with anyio.CancelScope() as scope:
                    if plan.give_up_after is not None:
                        tasks.start_soon(cancel_later, scope, plan.give_up_after)
                    try:
                        await self.publish(event)
                    except BusClosedError:
                        self.refused += 1
                self.cancelled += scope.cancelled_caught
                tasks.cancel_scope.cancel()

    async def publish_all(self, plans: Sequence[PublishPlan], publishers: int) -> None:
        async with anyio.create_task_group() as tasks:
            for publisher in range(publishers):
                tasks.start_soon(self.publish_planned, plans[publisher::publishers])

    async def while_time_passes(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Let `work` end, moving the clock on for whatever waits for it."""
        done = anyio.Event()

        async def do_work() -> None:
            await work()
            done.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(do_work)
            while not done.is_set():
                await self.clock.advance(TIMEOUT / 2)


async def cancel_later(scope: anyio.CancelScope, turns: int) -> None:
    for _ in range(turns):
        await anyio.lowlevel.checkpoint()
    scope.cancel()


async def run_to_the_end(
    handlers: Sequence[HandlerPlan], publishes: Sequence[PublishPlan], publishers: int
) -> Run:
    run = Run(handlers)

    async def publish_and_settle() -> None:
        await run.publish_all(publishes, publishers)
        conserves(run.bus)
        await run.bus.settled()

    async with run.bus:
        await run.while_time_passes(publish_and_settle)
    conserves(run.bus)
    return run


async def run_and_stop(
    handlers: Sequence[HandlerPlan], publishes: Sequence[PublishPlan], turns: int
) -> tuple[Run, DrainReport]:
    run = Run(handlers)
    await run.bus.start()
    reports: list[DrainReport] = []

    async def stop() -> None:
        for _ in range(turns):
            await anyio.lowlevel.checkpoint()
        reports.append(await run.bus.stop(timeout=0))

    async def publish_and_stop() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run.publish_all, publishes, 2)
            tasks.start_soon(stop)

    await run.while_time_passes(publish_and_stop)
    await let_others_run()
    return run, reports[0]


def on_both_backends(test: Callable[..., None]) -> Callable[..., None]:
    limited = settings(max_examples=60)(test)
    on_both: Callable[..., None] = pytest.mark.parametrize("library", ["asyncio", "trio"])(limited)
    return on_both


@on_both_backends
@given(
    handlers=st.lists(handler_plans, min_size=1, max_size=4),
    publishes=st.lists(publish_plans, max_size=15),
    publishers=st.integers(1, 3),
)
def test_every_event_has_exactly_one_outcome_at_every_handler(
    library: str, handlers: list[HandlerPlan], publishes: list[PublishPlan], publishers: int
) -> None:
    run = anyio.run(run_to_the_end, handlers, publishes, publishers, backend=library)

    stats = run.bus.stats()
    published = sum(event.published for event in stats.events.values())
    assert published == len(run.admitted) + run.rejected + run.cancelled
    assert sum(event.rejected for event in stats.events.values()) == run.rejected + run.cancelled
    for handler in run.handlers:
        assert sorted(handler.calls) == sorted(handler.expected)
        if not handler.plan.batch:
            assert max(handler.calls.values(), default=1) == 1
        if handler.name not in stats.handlers:
            assert handler.expected == []
            continue
        counts = stats.handlers[handler.name]
        bad = [n for n in handler.expected if handler.plan.outcomes[n % 5] in {"fail", "hang"}]
        assert counts.failed == len(bad)
        assert counts.handled == len(handler.expected) - len(bad)
        assert counts.dropped == len([1 for _, name in run.dropped if name == handler.name])
        assert counts.abandoned == counts.queued == counts.running == 0


@on_both_backends
@given(
    handlers=st.lists(handler_plans, min_size=1, max_size=4),
    publishes=st.lists(publish_plans, max_size=15),
    publishers=st.integers(1, 3),
)
def test_a_handler_sees_events_in_the_order_of_their_admission(
    library: str, handlers: list[HandlerPlan], publishes: list[PublishPlan], publishers: int
) -> None:
    run = anyio.run(run_to_the_end, handlers, publishes, publishers, backend=library)

    for handler in run.handlers:
        seen = sorted(handler.begun, key=lambda number: handler.begun[number])
        if handler.plan.concurrency == 1:
            assert seen == handler.expected


@on_both_backends
@given(
    handlers=st.lists(handler_plans, min_size=2, max_size=4),
    publishes=st.lists(publish_plans, min_size=1, max_size=12),
)
def test_no_handler_begins_an_event_before_all_of_higher_priority_are_done(
    library: str, handlers: list[HandlerPlan], publishes: list[PublishPlan]
) -> None:
    run = anyio.run(run_to_the_end, handlers, publishes, 2, backend=library)

    for lower in run.handlers:
        for higher in run.handlers:
            if higher.plan.priority > lower.plan.priority:
                for number in lower.begun.keys() & higher.ended.keys():
                    assert higher.ended[number] < lower.begun[number]


@on_both_backends
@given(
    handlers=st.lists(handler_plans, min_size=1, max_size=4),
    publishes=st.lists(publish_plans, max_size=15),
    turns=st.integers(0, 30),
)
def test_stop_at_any_moment_accounts_for_everything(
    library: str, handlers: list[HandlerPlan], publishes: list[PublishPlan], turns: int
) -> None:
    run, report = anyio.run(run_and_stop, handlers, publishes, turns, backend=library)

    stats = run.bus.stats()
    conserves(run.bus)
    assert stats.total("queued") == stats.total("running") == 0
    assert report.abandoned == stats.total("abandoned") >= len(report.leftovers)
    assert sum(event.admitted for event in stats.events.values()) == len(run.admitted)
