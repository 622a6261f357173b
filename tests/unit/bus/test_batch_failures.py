"""Lists that fail: retried whole, then singly, with exact counts all the way."""

from __future__ import annotations

import anyio
import pytest

from msgbus import CallNext, Context, Event, MessageBus
from tests.fakes import Lists, OrderEvent, OrderPlaced, OrderShipped, conserves, let_others_run


class Attempts:
    """A batch handler that fails on event `bad`, and notes its attempts."""

    def __init__(self, bad: int, *, times: int = 100) -> None:
        self.bad = bad
        self.times = times
        self.calls: list[tuple[int, list[int]]] = []

    async def __call__(self, events: list[OrderPlaced], context: Context) -> None:
        numbers = [event.number for event in events]
        self.calls.append((context.attempt, numbers))
        if self.bad in numbers and self.times > 0:
            self.times -= 1
            raise ValueError(self.bad)


async def publish(bus: MessageBus, *numbers: int) -> None:
    for number in numbers:
        await bus.publish(OrderPlaced(number=number))


async def test_a_failed_list_is_retried_whole_then_singly_and_only_the_bad_event_fails() -> None:
    bus = MessageBus()
    handler = Attempts(bad=1)
    bus.subscribe(OrderPlaced, handler, batch=True)
    await publish(bus, 0, 1, 2)

    async with bus:
        await bus.settled()

    assert handler.calls == [(1, [0, 1, 2]), (2, [0, 1, 2]), (3, [0]), (3, [1]), (3, [2])]
    stats = bus.stats().handlers["Attempts"]
    assert (stats.handled, stats.failed) == (2, 1)
    conserves(bus)


async def test_a_list_that_succeeds_the_second_time_is_not_split() -> None:
    bus = MessageBus()
    handler = Attempts(bad=1, times=1)
    bus.subscribe(OrderPlaced, handler, batch=True)
    await publish(bus, 0, 1, 2)

    async with bus:
        await bus.settled()

    assert handler.calls == [(1, [0, 1, 2]), (2, [0, 1, 2])]
    assert bus.stats().handlers["Attempts"].handled == 3
    conserves(bus)


async def test_a_failed_list_of_one_is_retried_too() -> None:
    bus = MessageBus()
    handler = Attempts(bad=0, times=1)
    bus.subscribe(OrderPlaced, handler, batch=True)
    await publish(bus, 0)

    async with bus:
        await bus.settled()

    assert handler.calls == [(1, [0]), (2, [0])]
    assert bus.stats().handlers["Attempts"].handled == 1
    conserves(bus)


async def test_what_a_failed_attempt_emitted_is_forgotten() -> None:
    bus = MessageBus()
    shipped: list[int] = []

    @bus.on(OrderPlaced, batch=True)
    async def ship(events: list[OrderPlaced], context: Context) -> None:
        for event in events:
            context.emit(OrderShipped(number=event.number))
        if context.attempt == 1:
            raise ValueError

    @bus.on(OrderShipped)
    async def note(event: OrderShipped) -> None:
        shipped.append(event.number)

    await publish(bus, 0, 1)
    async with bus:
        await bus.settled()

    assert shipped == [0, 1]
    conserves(bus)


@pytest.mark.parametrize("cut_off", [False, True])
async def test_counts_are_exact_while_a_list_is_tried_singly(cut_off: bool) -> None:
    bus = MessageBus()
    release, hanging = anyio.Event(), anyio.Event()

    @bus.on(OrderPlaced, batch=True)
    async def store(events: list[OrderPlaced]) -> None:
        if len(events) > 1 or events[0].number == 0:
            raise ValueError
        hanging.set()
        await release.wait()

    await publish(bus, 0, 1, 2)
    await bus.start()
    await hanging.wait()
    conserves(bus)
    if not cut_off:
        release.set()
    await bus.stop(timeout=0 if cut_off else None)

    stats = bus.stats().handlers["store"]
    assert (stats.handled, stats.failed, stats.abandoned) == ((0, 1, 2) if cut_off else (2, 1, 0))
    conserves(bus)


@pytest.mark.parametrize("cut_off", [False, True])
async def test_counts_are_exact_while_a_filtered_list_runs(cut_off: bool) -> None:
    bus = MessageBus()
    handler = Lists(hold=True)

    def is_positive(event: Event) -> bool:
        return isinstance(event, OrderEvent) and event.number > 0

    bus.subscribe(OrderPlaced, handler, batch=True, filter=is_positive)
    await publish(bus, 0, 1, 2)
    await bus.start()
    await let_others_run()
    conserves(bus)
    if not cut_off:
        handler.release.set()
    await bus.stop(timeout=0 if cut_off else None)

    assert handler.lists == [[1, 2]]
    stats = bus.stats().handlers["Lists"]
    assert (stats.handled, stats.filtered) == (0 if cut_off else 2, 1)
    assert stats.abandoned == (2 if cut_off else 0)
    conserves(bus)


async def test_a_filter_that_raises_fails_its_event_and_spares_the_list() -> None:
    bus = MessageBus()
    handler = Lists()

    def raise_on_one(event: Event) -> bool:
        if isinstance(event, OrderEvent) and event.number == 1:
            raise LookupError
        return True

    bus.subscribe(OrderPlaced, handler, batch=True, filter=raise_on_one)
    await publish(bus, 0, 1, 2)

    async with bus:
        await bus.settled()

    assert handler.lists == [[0, 2]]
    stats = bus.stats().handlers["Lists"]
    assert (stats.handled, stats.failed) == (2, 1)
    conserves(bus)


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
async def test_a_middleware_that_forgets_to_await_fails_the_list() -> None:
    class Forgetful:
        batch = True

        async def __call__(self, message: object, call_next: CallNext) -> object:
            return call_next(message)

    bus = MessageBus(middleware=[Forgetful()])
    handler = Lists()
    bus.subscribe(OrderPlaced, handler, batch=True)
    await publish(bus, 0)

    async with bus:
        await bus.settled()

    assert handler.lists == []
    stats = bus.stats().handlers["Lists"]
    assert (stats.handled, stats.failed) == (0, 1)


async def test_a_handler_may_empty_the_list_it_was_given() -> None:
    bus = MessageBus()
    handled: list[int] = []
    shared: list[str] = []

    @bus.on(OrderPlaced, batch=True)
    async def work_off(events: list[OrderPlaced], context: Context) -> None:
        while events:
            handled.append(events.pop(0).number)
        if context.attempt == 1:
            raise ConnectionError
        context.emit(OrderShipped())
        shared.append("emitted")

    async with bus:
        await bus.publish_many(OrderPlaced(number=number) for number in range(3))
        await bus.settled()

        assert handled == [0, 1, 2, 0, 1, 2]
        assert shared == ["emitted"]
        assert bus.stats().handlers["work_off"].handled == 3
        conserves(bus)
