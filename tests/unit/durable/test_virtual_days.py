"""A day of virtual time: nothing due costs nearly nothing, and what is due keeps its time."""

from __future__ import annotations

from itertools import pairwise
from time import perf_counter

import pytest

from msgbus import BusConfig, Event, MessageBus
from msgbus.resilience.config import RetryConfig
from msgbus.runtime.clock import VirtualClock
from tests.fakes import Recorder
from tests.unit.durable.conftest import Site
from tests.unit.durable.places import OrderPlaced, journal_of

DAY = 86_400.0
HANDLERS = 4


class CountingClock(VirtualClock):
    """Counts the times at which it stops."""

    steps = 0

    async def _let_tasks_run(self) -> None:
        self.steps += 1
        await super()._let_tasks_run()


class OldClock(CountingClock):
    """The control: each look for news is a timer like any other."""

    def _call_at(self, due: float, callback: object, *, is_look: bool = False) -> None:
        del is_look
        super()._call_at(due, callback)  # type: ignore[arg-type]


def bus_of_four(site: Site, clock: VirtualClock) -> MessageBus:
    site.clock = clock
    bus = MessageBus(clock=clock, journal=site.journal if site.has_tables else "memory:")
    for number in range(HANDLERS):
        bus.subscribe(OrderPlaced, Recorder(), name=f"handler {number}", durable=f"own {number}")
    return bus


async def counted(bus: MessageBus, clock: CountingClock, seconds: float) -> tuple[int, int]:
    """The steps of the clock, and the commits, while time passes."""
    journal = journal_of(bus)
    steps, commits = clock.steps, await journal.changed(-1)
    await clock.advance(seconds)
    return clock.steps - steps, await journal.changed(-1) - commits


async def test_a_day_with_nothing_due_takes_less_than_half_a_second(site: Site) -> None:
    taken: list[float] = []
    clock = CountingClock()
    async with bus_of_four(site, clock) as bus:
        await bus.publish(OrderPlaced(number=1))
        await bus.settled()
        for _ in range(3):
            began = perf_counter()
            await clock.advance(DAY)
            taken.append(perf_counter() - began)

    assert min(taken) < 0.5


async def test_a_day_with_nothing_due_has_few_steps_and_hardly_a_commit(site: Site) -> None:
    clock = CountingClock()
    async with bus_of_four(site, clock) as bus:
        await bus.publish(OrderPlaced(number=1))
        await bus.settled()
        steps, commits = await counted(bus, clock, DAY)

    assert steps < 500
    assert commits <= 2  # the rest of the history; a file's renewals go by real time


async def test_without_that_a_hundredth_of_the_day_takes_many_steps(memory: Site) -> None:
    clock = OldClock()
    async with bus_of_four(memory, clock) as bus:
        steps, _ = await counted(bus, clock, DAY / 100)

    assert steps > 5000


class Due(Event, name="days.Due"):
    number: int


async def test_what_is_due_every_hour_comes_at_its_time(site: Site) -> None:
    hours = [float(3600 * hour) for hour in range(1, 25)]
    clock = CountingClock()
    site.clock = clock
    bus = MessageBus(clock=clock, journal=site.journal if site.has_tables else "memory:")
    came: list[tuple[int, float]] = []
    began = clock.now()

    async def note(event: Due) -> None:
        came.append((event.number, clock.now() - began))

    bus.subscribe(Due, note, durable="own")
    async with bus:
        for number, delay in reversed(list(enumerate(hours))):
            await bus.publish(Due(number=number), delay=delay)
        for _ in hours:
            await clock.advance(3600)
            await bus.settled()

    assert [number for number, _ in came] == list(range(24))
    assert [at for _, at in came] == pytest.approx(hours, abs=0.001)


async def test_retries_keep_their_times_in_one_long_advance(memory: Site) -> None:
    clock = CountingClock()
    memory.clock = clock
    bus = MessageBus(BusConfig(), clock=clock, journal="memory:")
    tried: list[float] = []
    began = clock.now()
    retry = RetryConfig(max_retries=4, initial_delay=600, max_delay=40_000, jitter=False)

    @bus.on(OrderPlaced, durable="failing", retry=retry)
    async def failing(event: OrderPlaced) -> None:
        del event
        tried.append(clock.now() - began)
        raise ConnectionError("again")

    async with bus:
        await bus.publish(OrderPlaced(number=1))
        await clock.advance(DAY)

    gaps = [after - before for before, after in pairwise(tried)]
    assert gaps == pytest.approx([600, 1200, 2400, 4800], abs=0.001)
    assert clock.steps < 3000
