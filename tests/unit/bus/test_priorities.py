"""Priorities: higher runs first, and lower waits until all higher ones are done."""

from __future__ import annotations

import anyio
import pytest

from msgbus import BackpressureStrategy, BusConfig, MessageBus, QueueConfig
from msgbus.runtime.clock import VirtualClock
from tests.fakes import (
    OrderEvent,
    OrderPlaced,
    OrderShipped,
    Recorder,
    SlowHandler,
    conserves,
    let_others_run,
    queue,
)

DROP_OLDEST = BackpressureStrategy.DROP_OLDEST


async def test_higher_priorities_run_first() -> None:
    bus = MessageBus()
    order: list[int] = []

    def register(priority: int) -> None:
        async def note(event: OrderPlaced) -> None:
            order.append(priority)

        bus.subscribe(OrderPlaced, note, name=f"priority {priority}", priority=priority)

    for priority in (10, -5, 100, 0):
        register(priority)
    async with bus:
        for _ in range(3):
            await bus.publish(OrderPlaced())
            await bus.settled()

    assert order == [100, 10, 0, -5] * 3
    conserves(bus)


async def test_a_lower_handler_waits_until_every_higher_one_is_done() -> None:
    bus = MessageBus()
    quick, slow, low = Recorder(), SlowHandler(), Recorder()
    bus.subscribe(OrderPlaced, quick, priority=1)
    bus.subscribe(OrderPlaced, slow, priority=1)
    bus.subscribe(OrderPlaced, low, priority=0)

    async with bus:
        await bus.publish(OrderPlaced(number=1))
        await let_others_run()

        assert quick.numbers == [1]
        assert slow.begun == [1]
        assert low.numbers == []
        conserves(bus)

        slow.release.set()
        await bus.settled()

    assert low.numbers == [1]
    conserves(bus)


async def test_handlers_of_one_priority_run_concurrently() -> None:
    bus = MessageBus()
    first, second, low = SlowHandler(), SlowHandler(), Recorder()
    bus.subscribe(OrderPlaced, first, priority=5)
    bus.subscribe(OrderPlaced, second, priority=5)
    bus.subscribe(OrderPlaced, low)

    async with bus:
        await bus.publish(OrderPlaced(number=1))
        await let_others_run()
        assert first.begun == second.begun == [1]
        first.release.set()
        second.release.set()
        await bus.settled()

    assert low.numbers == [1]


async def test_a_lower_lane_keeps_publish_order_even_if_later_events_are_ready() -> None:
    bus = MessageBus()
    low = Recorder()
    release = anyio.Event()
    done: list[int] = []
    bus.subscribe(OrderPlaced, low, priority=0)

    @bus.on(OrderPlaced, priority=1, concurrency=3)
    async def hang_on_first(event: OrderPlaced) -> None:
        if event.number == 0:
            await release.wait()
        done.append(event.number)

    async with bus:
        for number in range(3):
            await bus.publish(OrderPlaced(number=number))
        await let_others_run()
        assert done == [1, 2]
        assert low.numbers == []
        release.set()
        await bus.settled()

    assert low.numbers == [0, 1, 2]
    conserves(bus)


async def test_a_slow_higher_handler_delays_lower_ones_only_for_its_own_events() -> None:
    bus = MessageBus()
    slow, low, other = SlowHandler(), Recorder(), Recorder()
    bus.subscribe(OrderPlaced, slow, priority=1)
    bus.subscribe(OrderPlaced, low, priority=0)
    bus.subscribe(OrderShipped, other, priority=0)

    async with bus:
        await bus.publish(OrderPlaced(number=1))
        await bus.publish(OrderShipped(number=2))
        await let_others_run()
        assert low.numbers == []
        assert other.numbers == [2]
        slow.release.set()
        await bus.settled()


async def test_priorities_hold_between_handlers_of_a_base_class_and_of_a_session() -> None:
    bus = MessageBus()
    slow, of_base, of_session = SlowHandler(), Recorder(), Recorder()
    bus.subscribe(OrderPlaced, slow, priority=2)
    bus.subscribe(OrderEvent, of_base, priority=1)

    async with bus, bus.session() as session:
        session.subscribe(OrderPlaced, of_session, priority=0)
        await session.publish(OrderPlaced(number=1))
        await let_others_run()
        assert of_base.numbers == of_session.numbers == []
        slow.release.set()
        await bus.settled()

        assert of_base.numbers == of_session.numbers == [1]


# -- what opens the gate ---------------------------------------------------------------------


async def test_a_failure_opens_the_gate() -> None:
    bus = MessageBus()
    low = Recorder()
    bus.subscribe(OrderPlaced, low, priority=0)

    @bus.on(OrderPlaced, priority=1)
    async def fail(event: OrderPlaced) -> None:
        raise ValueError

    async with bus:
        await bus.publish(OrderPlaced(number=1))
        await bus.settled()

    assert low.numbers == [1]
    conserves(bus)


async def test_a_timeout_opens_the_gate() -> None:
    clock = VirtualClock()
    bus = MessageBus(clock=clock)
    hanging, low = SlowHandler(), Recorder()
    bus.subscribe(OrderPlaced, hanging, priority=1, timeout=5)
    bus.subscribe(OrderPlaced, low, priority=0)

    async with bus:
        await bus.publish(OrderPlaced(number=1))
        await clock.advance(4.9)
        assert low.numbers == []
        await clock.advance(0.1)
        await bus.settled()

    assert low.numbers == [1]
    conserves(bus)


async def test_the_higher_handlers_filter_opens_the_gate() -> None:
    bus = MessageBus()
    high, low = Recorder(), Recorder()
    bus.subscribe(OrderPlaced, high, priority=1, filter=lambda event: False)
    bus.subscribe(OrderPlaced, low, priority=0)

    async with bus:
        await bus.publish(OrderPlaced(number=1))
        await bus.settled()

    assert high.numbers == []
    assert low.numbers == [1]
    conserves(bus)


async def test_a_drop_opens_the_gate() -> None:
    bus = MessageBus()
    high, low = SlowHandler(), Recorder()
    bus.subscribe(OrderPlaced, high, priority=1, queue=queue(1, DROP_OLDEST))
    bus.subscribe(OrderPlaced, low, priority=0)

    async with bus:
        await bus.publish(OrderPlaced(number=0))
        await high.started.wait()
        await bus.publish(OrderPlaced(number=1))
        receipt = await bus.publish(OrderPlaced(number=2))
        assert [one.event for one in receipt.dropped] == [OrderPlaced(number=1)]
        high.release.set()
        await bus.settled()

    assert high.ended == [0, 2]
    assert low.numbers == [0, 1, 2]
    conserves(bus)


async def test_a_drop_in_the_middle_lets_nobody_overtake_the_top() -> None:
    bus = MessageBus()
    top, middle, bottom = SlowHandler(), SlowHandler(), SlowHandler()
    bus.subscribe(OrderPlaced, top, priority=2, concurrency=3)
    bus.subscribe(OrderPlaced, middle, priority=1, queue=queue(1, DROP_OLDEST))
    bus.subscribe(OrderPlaced, bottom, priority=0, concurrency=3)

    async with bus:
        for number in range(3):
            await bus.publish(OrderPlaced(number=number))
            await let_others_run()
        bottom_before = list(bottom.begun)
        for handler in (bottom, middle, top):
            handler.release.set()
        await bus.settled()

    assert bottom_before == []
    assert middle.ended == [0, 2]
    assert sorted(bottom.ended) == [0, 1, 2]
    conserves(bus)


async def test_closing_the_higher_subscription_opens_the_gate() -> None:
    bus = MessageBus()
    high, low = SlowHandler(), Recorder()
    subscription = bus.subscribe(OrderPlaced, high, priority=1)
    bus.subscribe(OrderPlaced, low, priority=0)

    async with bus:
        for number in range(3):
            await bus.publish(OrderPlaced(number=number))
        await high.started.wait()
        abandoned = await subscription.close(timeout=0)
        await bus.settled()

    assert abandoned == 3
    assert low.numbers == [0, 1, 2]
    conserves(bus)


async def test_a_higher_handler_that_closes_a_lower_subscription_does_not_wait_for_itself() -> None:
    clock = VirtualClock()
    bus = MessageBus(BusConfig(drain_timeout=0), clock=clock)
    low = Recorder()
    subscription = bus.subscribe(OrderPlaced, low, priority=0)
    closed: list[int] = []

    @bus.on(OrderPlaced, priority=1)
    async def close_the_lower_one(event: OrderPlaced) -> None:
        closed.append(await subscription.close())

    async with bus:
        await bus.publish(OrderPlaced(number=1))
        await let_others_run()
        closed_at_once = len(closed)
        await clock.advance(60)
        await bus.settled()

    assert closed_at_once == 1
    conserves(bus)


async def test_stop_ends_handlers_on_both_sides_of_a_gate() -> None:
    bus = MessageBus()
    high, low = SlowHandler(), Recorder()
    bus.subscribe(OrderPlaced, high, name="high", priority=1)
    bus.subscribe(OrderPlaced, low, name="low", priority=0)
    await bus.start()
    await bus.publish(OrderPlaced(number=0))
    await bus.publish(OrderPlaced(number=1))
    await high.started.wait()
    await let_others_run()

    report = await bus.stop(timeout=0)

    assert report.abandoned == 4
    assert low.numbers == []
    stats = bus.stats().handlers
    assert (stats["high"].abandoned, stats["low"].abandoned) == (2, 2)
    conserves(bus)


# -- with lists ------------------------------------------------------------------------------


async def test_a_lower_batch_handler_gets_only_events_whose_gate_is_open() -> None:
    bus = MessageBus()
    lists: list[list[int]] = []
    release = anyio.Event()

    @bus.on(OrderPlaced, priority=0, batch=True)
    async def collect(events: list[OrderPlaced]) -> None:
        lists.append([event.number for event in events])

    @bus.on(OrderPlaced, priority=1)
    async def hang_on_two(event: OrderPlaced) -> None:
        if event.number == 2:
            await release.wait()

    async with bus:
        for number in range(4):
            await bus.publish(OrderPlaced(number=number))
        await let_others_run()
        seen_before = [number for one in lists for number in one]
        release.set()
        await bus.settled()

    assert seen_before == [0, 1]
    assert [number for one in lists for number in one] == [0, 1, 2, 3]
    conserves(bus)


@pytest.mark.parametrize("fails", [False, True])
async def test_a_higher_batch_handler_opens_the_gate_once_its_list_is_done(fails: bool) -> None:
    bus = MessageBus(BusConfig(queue=QueueConfig(batch_size=2)))
    low = Recorder()
    begun: list[int] = []
    release = anyio.Event()
    bus.subscribe(OrderPlaced, low, priority=0)

    @bus.on(OrderPlaced, priority=1, batch=True)
    async def store(events: list[OrderPlaced]) -> None:
        begun.extend(event.number for event in events)
        await release.wait()
        if fails:
            raise ValueError

    async with bus:
        for number in range(3):
            await bus.publish(OrderPlaced(number=number))
        await let_others_run()
        begun_before, low_before = list(begun), list(low.numbers)
        release.set()
        await bus.settled()

    assert begun_before == [0, 1]
    assert low_before == []
    assert low.numbers == [0, 1, 2]
    conserves(bus)
