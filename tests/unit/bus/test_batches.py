"""batch=True: handlers that get lists of events."""

from __future__ import annotations

import pytest

from msgbus import (
    BackpressureStrategy,
    BusConfig,
    HandlerSignatureError,
    MessageBus,
    QueueConfig,
)
from msgbus.runtime.clock import VirtualClock
from tests.fakes import Lists, OrderPlaced, conserves, let_others_run


def batches_of(size: int, linger: float = 0.0) -> BusConfig:
    return BusConfig(queue=QueueConfig(batch_size=size, linger=linger), drain_timeout=0)


async def publish(bus: MessageBus, *numbers: int) -> None:
    for number in numbers:
        await bus.publish(OrderPlaced(number=number))


# -- lists -----------------------------------------------------------------------------------


async def test_a_batch_handler_gets_what_is_there_at_once_up_to_batch_size() -> None:
    bus = MessageBus(batches_of(4))
    handler = Lists()
    bus.subscribe(OrderPlaced, handler, batch=True)
    await publish(bus, *range(10))

    async with bus:
        await bus.settled()

    assert handler.lists == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert bus.stats().handlers["Lists"].handled == 10
    conserves(bus)


async def test_a_batch_handler_does_not_wait_for_its_list_to_fill() -> None:
    bus = MessageBus(batches_of(100))
    handler = Lists(hold=True)
    bus.subscribe(OrderPlaced, handler, batch=True)

    async with bus:
        await publish(bus, 0)
        await let_others_run()
        first = list(handler.lists)
        await publish(bus, 1, 2, 3)
        handler.release.set()
        await bus.settled()

    assert first == [[0]]
    assert handler.lists == [[0], [1, 2, 3]]
    conserves(bus)


async def test_a_batch_handler_may_run_several_lists_at_once() -> None:
    bus = MessageBus(batches_of(2))
    handler = Lists(hold=True)
    bus.subscribe(OrderPlaced, handler, batch=True, concurrency=2)

    async with bus:
        await publish(bus, *range(6))
        await let_others_run()
        at_once = list(handler.lists)
        assert bus.stats().handlers["Lists"].running == 4
        conserves(bus)
        handler.release.set()
        await bus.settled()

    assert at_once == [[0, 1], [2, 3]]
    assert sorted(handler.lists) == [[0, 1], [2, 3], [4, 5]]
    conserves(bus)


async def test_taking_a_list_makes_room_for_waiting_publishers() -> None:
    bus = MessageBus(BusConfig(queue=QueueConfig(batch_size=3, max_size=3), drain_timeout=0))
    handler = Lists()
    bus.subscribe(OrderPlaced, handler, batch=True)

    async with bus:
        summary = await bus.publish_many(OrderPlaced(number=number) for number in range(20))
        await bus.settled()

    assert summary.accepted == 20
    assert [number for one in handler.lists for number in one] == list(range(20))
    assert all(len(one) <= 3 for one in handler.lists)
    conserves(bus)


async def test_a_dropped_event_is_in_no_list() -> None:
    bus = MessageBus()
    handler = Lists(hold=True)
    strategy = BackpressureStrategy.DROP_OLDEST
    bus.subscribe(
        OrderPlaced, handler, batch=True, queue=QueueConfig(max_size=2, strategy=strategy)
    )

    async with bus:
        await publish(bus, 0)
        await let_others_run()
        await publish(bus, 1, 2, 3, 4)
        handler.release.set()
        await bus.settled()

    assert handler.lists == [[0], [3, 4]]
    assert bus.stats().handlers["Lists"].dropped == 2
    conserves(bus)


def test_a_batch_handler_must_take_a_list() -> None:
    bus = MessageBus()

    async def take_one(event: OrderPlaced) -> None: ...

    with pytest.raises(HandlerSignatureError, match=r"list\[OrderPlaced\]"):
        bus.register_event_handler(OrderPlaced, take_one, batch=True)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]


# -- linger ----------------------------------------------------------------------------------


async def test_a_lingering_handler_waits_for_its_list_to_fill() -> None:
    clock = VirtualClock()
    bus = MessageBus(batches_of(3, linger=10), clock=clock)
    handler = Lists()
    bus.subscribe(OrderPlaced, handler, batch=True)

    async with bus:
        await publish(bus, 0)
        await clock.advance(4)
        await publish(bus, 1)
        await clock.advance(4)
        assert handler.lists == []
        await publish(bus, 2)
        await let_others_run()

    assert handler.lists == [[0, 1, 2]]
    conserves(bus)


async def test_a_lingering_handler_waits_no_longer_than_told() -> None:
    clock = VirtualClock()
    bus = MessageBus(batches_of(100, linger=10), clock=clock)
    handler = Lists()
    bus.subscribe(OrderPlaced, handler, batch=True)

    async with bus:
        await publish(bus, 0)
        await clock.advance(4)
        await publish(bus, 1)
        await clock.advance(5.9)
        assert handler.lists == []
        conserves(bus)
        await clock.advance(0.1)

        assert handler.lists == [[0, 1]]
    conserves(bus)


async def test_settled_ends_a_linger() -> None:
    bus = MessageBus(batches_of(100, linger=3600), clock=VirtualClock())
    handler = Lists()
    bus.subscribe(OrderPlaced, handler, batch=True)

    async with bus:
        await publish(bus, 0, 1)
        await let_others_run()
        await bus.settled()

        assert handler.lists == [[0, 1]]
    conserves(bus)


async def test_stop_ends_a_linger_and_handles_the_list() -> None:
    bus = MessageBus(batches_of(100, linger=3600), clock=VirtualClock())
    handler = Lists()
    bus.subscribe(OrderPlaced, handler, batch=True)
    await bus.start()
    await publish(bus, 0, 1)
    await let_others_run()

    report = await bus.stop()

    assert handler.lists == [[0, 1]]
    assert (report.handled, report.abandoned) == (2, 0)
    conserves(bus)


async def test_a_paused_handler_takes_no_more_events_while_it_lingers() -> None:
    clock = VirtualClock()
    bus = MessageBus(batches_of(100, linger=10), clock=clock)
    handler = Lists()
    subscription = bus.subscribe(OrderPlaced, handler, batch=True)

    async with bus:
        await publish(bus, 0)
        await let_others_run()
        subscription.pause()
        await publish(bus, 1)
        await clock.advance(60)
        while_paused = list(handler.lists)
        subscription.resume()
        await clock.advance(60)

    assert while_paused == [[0]]
    assert handler.lists == [[0], [1]]
    conserves(bus)
