"""Events on a resilient bus: each handler alone is retried, and waits for its circuit."""

from __future__ import annotations

import random
from typing import Any

import anyio
import pytest

from msgbus import BusConfig, BusSession, Context, EventHandlerFailedEvent
from msgbus.resilience import CircuitBreakerConfig, ResilientMessageBus
from msgbus.runtime.clock import VirtualClock
from tests.fakes import conserves, let_others_run
from tests.unit.resilience.flaky import Down, Flaky, Paid, quick

TWO = CircuitBreakerConfig(failure_threshold=2, recovery_time=10, jitter=0)


class Post:
    """A resilient bus in virtual time, with handlers of `Paid`."""

    def __init__(self, **options: Any) -> None:
        self.clock = VirtualClock()
        options.setdefault("retry", quick())
        options.setdefault("breaker", None)
        self.bus = ResilientMessageBus(clock=self.clock, **options)

    async def publish(self, count: int = 1) -> None:
        for number in range(count):
            await self.bus.publish(Paid(number=number))
        await self.clock.advance(0)

    def counts(self, handler: str) -> tuple[int, int]:
        stats = self.bus.stats().handlers[handler]
        return stats.handled, stats.failed


# -- retry -----------------------------------------------------------------------------------


async def test_only_the_handler_that_failed_is_retried() -> None:
    post = Post()
    flaky, fine = Flaky(2), Flaky()
    post.bus.subscribe(Paid, flaky, name="flaky")
    post.bus.subscribe(Paid, fine, name="fine")

    async with post.bus:
        await post.publish()
        assert fine.calls == [0]
        await post.clock.advance(3)
        await post.bus.settled()

    assert flaky.calls == [0, 0, 0]
    assert fine.calls == [0]
    assert post.counts("flaky") == (1, 0)
    conserves(post.bus)


async def test_an_event_that_fails_for_good_fails_once() -> None:
    post = Post(retry=quick(2))
    told: list[EventHandlerFailedEvent] = []
    post.bus.subscribe(Paid, Flaky(9), name="flaky")

    @post.bus.on(EventHandlerFailedEvent)
    async def note(event: EventHandlerFailedEvent) -> None:
        told.append(event)

    async with post.bus:
        await post.publish()
        await post.clock.advance(3)
        await post.bus.settled()

    assert post.counts("flaky") == (0, 1)
    assert [event.error for event in told] == ["Down: no 2"]
    conserves(post.bus)


async def test_the_handler_sees_its_attempt_and_order_is_kept() -> None:
    post = Post()
    seen: list[tuple[int, int]] = []

    @post.bus.on(Paid)
    async def note(event: Paid, context: Context) -> None:
        seen.append((event.number, context.attempt))
        if event.number == 1 and context.attempt < 3:
            raise Down

    async with post.bus:
        await post.publish(3)
        await post.clock.advance(3)
        await post.bus.settled()

    assert seen == [(0, 1), (1, 1), (1, 2), (1, 3), (2, 1)]


# -- circuits --------------------------------------------------------------------------------


async def test_a_backlog_survives_an_outage() -> None:
    post = Post(retry=quick(99), breaker=TWO)
    handled: list[int] = []
    is_down = [True]

    @post.bus.on(Paid, name="mailer")
    async def mailer(event: Paid) -> None:
        if is_down[0]:
            raise Down
        handled.append(event.number)

    async with post.bus:
        await post.publish(50)
        await post.clock.advance(500)
        assert not post.bus.circuits["mailer"].is_closed
        is_down[0] = False
        await post.clock.advance(300)
        await post.bus.settled()

    assert handled == list(range(50))
    assert post.counts("mailer") == (50, 0)
    conserves(post.bus)


async def test_while_the_circuit_is_open_no_event_is_burned() -> None:
    # Without retry the events that opened it are lost; those behind them wait.
    post = Post(retry=None, breaker=TWO)
    flaky = Flaky(2)
    post.bus.subscribe(Paid, flaky, name="flaky")

    async with post.bus:
        await post.publish(20)
        assert flaky.calls == [0, 1]
        await post.clock.advance(9)
        assert flaky.calls == [0, 1]
        await post.clock.advance(1)
        await post.bus.settled()

    assert flaky.calls == list(range(20))
    assert post.counts("flaky") == (18, 2)
    conserves(post.bus)


async def test_an_open_circuit_holds_up_no_other_handler() -> None:
    post = Post(breaker=TWO)
    fine = Flaky()
    post.bus.subscribe(Paid, Flaky(), name="held")
    post.bus.subscribe(Paid, fine, name="fine")
    post.bus.circuit("held").force_open()

    async with post.bus:
        await post.publish(5)
        await let_others_run()
        assert fine.calls == [0, 1, 2, 3, 4]
        post.bus.circuit("held").reset()
        await post.bus.settled()

    assert post.counts("held") == (5, 0)


@pytest.mark.parametrize("where", ["circuit", "pause"])
async def test_what_waits_when_the_bus_stops_is_handed_back(where: str) -> None:
    post = Post(breaker=TWO if where == "circuit" else None)
    post.bus.subscribe(Paid, Flaky(9), name="flaky")
    if where == "circuit":
        post.bus.circuit("flaky").force_open()

    await post.bus.start()
    await post.publish(3)
    await let_others_run()
    report = await post.bus.stop(timeout=0)

    assert report.abandoned == 3
    assert [one.event.number for one in report.leftovers if isinstance(one.event, Paid)] == [
        0,
        1,
        2,
    ]
    assert post.counts("flaky") == (0, 0)
    conserves(post.bus)


async def test_a_cancelled_bus_feeds_no_circuit() -> None:
    post = Post(breaker=TWO)
    started = anyio.Event()

    @post.bus.on(Paid, name="hang")
    async def hang(event: Paid) -> None:
        started.set()
        await anyio.sleep_forever()

    await post.bus.start()
    await post.bus.publish(Paid())
    await started.wait()
    report = await post.bus.stop(timeout=0)

    assert report.abandoned == 1
    assert post.bus.circuits["hang"].failures == 0


# -- lists -----------------------------------------------------------------------------------


class Lists:
    """A batch handler that fails on lists with a bad number, or so many times."""

    def __init__(self, fails: int = 0, bad: int | None = None) -> None:
        self.fails = fails
        self.bad = bad
        self.calls: list[list[int]] = []
        self.attempts: list[int] = []

    async def __call__(self, events: list[Paid], context: Context) -> None:
        numbers = [event.number for event in events]
        self.calls.append(numbers)
        self.attempts.append(context.attempt)
        if self.fails:
            self.fails -= 1
            raise Down
        if self.bad in numbers:
            raise Down


async def test_a_list_is_retried_whole() -> None:
    post = Post()
    lists = Lists(fails=2)
    post.bus.subscribe(Paid, lists, batch=True, name="lists")
    for number in range(3):
        await post.bus.publish(Paid(number=number))

    async with post.bus:
        await post.clock.advance(3)
        await post.bus.settled()

    assert lists.calls == [[0, 1, 2]] * 3
    assert lists.attempts == [1, 2, 3]
    assert post.counts("lists") == (3, 0)
    conserves(post.bus)


async def test_a_handler_may_empty_its_list_and_be_retried() -> None:
    post = Post()
    seen: list[int] = []

    async def work_off(events: list[Paid], context: Context) -> None:
        while events:
            seen.append(events.pop(0).number)
        if context.attempt == 1:
            raise Down

    post.bus.subscribe(Paid, work_off, batch=True, name="lists")
    for number in range(3):
        await post.bus.publish(Paid(number=number))

    async with post.bus:
        await post.clock.advance(1)
        await post.bus.settled()

    assert seen == [0, 1, 2, 0, 1, 2]
    assert post.counts("lists") == (3, 0)


async def test_a_list_that_fails_for_good_is_tried_one_by_one() -> None:
    post = Post(retry=quick(1))
    lists = Lists(bad=1)
    post.bus.subscribe(Paid, lists, batch=True, name="lists")
    for number in range(3):
        await post.bus.publish(Paid(number=number))

    async with post.bus:
        await post.clock.advance(3)
        await post.bus.settled()

    assert lists.calls == [[0, 1, 2], [0, 1, 2], [0], [1], [1], [2]]
    assert post.counts("lists") == (2, 1)
    conserves(post.bus)


async def test_without_a_policy_the_worker_attempts_the_list_twice() -> None:
    post = Post()
    lists = Lists(bad=1)
    post.bus.subscribe(Paid, lists, batch=True, name="lists")
    for number in range(2):
        await post.bus.publish(Paid(number=number))
    post.bus.policy(Paid, retry=None)  # after the lane was made

    async with post.bus:
        await post.bus.settled()

    assert lists.calls == [[0, 1], [0, 1], [0], [1]]


async def test_a_list_that_waits_is_handed_back_whole() -> None:
    post = Post(breaker=TWO)
    post.bus.subscribe(Paid, Lists(), batch=True, name="lists")
    for number in range(3):
        await post.bus.publish(Paid(number=number))
    post.bus.circuit("lists").force_open()

    await post.bus.start()
    await let_others_run()
    report = await post.bus.stop(timeout=0)

    assert report.abandoned == 3
    assert len(report.leftovers) == 3
    conserves(post.bus)


async def test_what_waits_for_an_open_circuit_when_a_session_ends_is_handed_back() -> None:
    """Point 8: not only counted; as `bus.stop()` does it."""
    post = Post(breaker="mail", config=BusConfig(session_timeout=5))
    post.bus.circuit("mail").force_open()
    sessions: list[BusSession] = []

    async with post.bus, anyio.create_task_group() as tasks:

        async def job() -> None:
            async with post.bus.session("job") as session:
                session.subscribe(Paid, Flaky(), name="flaky")
                for number in range(3):
                    await session.publish(Paid(number=number))
            sessions.append(session)

        tasks.start_soon(job)
        await let_others_run()
        await post.clock.advance(6)

    (session,) = sessions
    assert session.report is not None
    assert session.report.abandoned == 3
    left = [one.event for one in session.report.leftovers]
    assert left == [Paid(number=number) for number in range(3)]
    conserves(post.bus)


# -- conservation ----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
async def test_nothing_is_lost_or_counted_twice_under_random_failures(seed: int) -> None:
    chance = random.Random(seed)
    post = Post(retry=quick(2), breaker=CircuitBreakerConfig(failure_threshold=4, recovery_time=5))

    async def flaky(event: Paid, context: Context) -> None:
        if chance.random() < 0.3:
            raise Down
        context.emit(Paid(number=-1)) if event.number >= 0 and chance.random() < 0.1 else None

    async def flaky_list(events: list[Paid]) -> None:
        if chance.random() < 0.2:
            raise Down

    recorder = Flaky()
    post.bus.subscribe(Paid, flaky, name="flaky")
    post.bus.subscribe(Paid, flaky, name="flaky too", concurrency=3)
    post.bus.subscribe(Paid, flaky_list, batch=True, name="lists")
    post.bus.subscribe(Paid, recorder, name="recorder")

    async with post.bus:
        await post.publish(100)
        for _ in range(60):
            await post.clock.advance(20)
            conserves(post.bus)
        await post.bus.settled()

    conserves(post.bus)
    stats = post.bus.stats()
    published = stats.events["Paid"].published
    assert published == len(recorder.calls) >= 100
    for name in ("flaky", "flaky too", "lists"):
        handler = stats.handlers[name]
        assert handler.handled + handler.failed == published
