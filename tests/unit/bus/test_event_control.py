"""Subscriptions in the hand of their owner: close, pause, resume; and what stop does."""

from __future__ import annotations

import anyio
import pytest

from msgbus import (
    BusClosedError,
    DrainReport,
    MessageBus,
    PublishReceipt,
    QueueConfig,
    Subscription,
)
from msgbus.runtime.clock import VirtualClock
from tests.fakes import (
    OrderPlaced,
    OrderShipped,
    Recorder,
    SlowHandler,
    conserves,
    let_others_run,
)

# -- close -----------------------------------------------------------------------------------


async def test_closing_a_subscription_finishes_what_is_queued_and_takes_no_more() -> None:
    bus = MessageBus()
    handler = SlowHandler()
    subscription = bus.subscribe(OrderPlaced, handler)

    async with bus:
        for number in range(3):
            await bus.publish(OrderPlaced(number=number))
        await handler.started.wait()
        assert subscription.pending == 3
        left: list[int] = []

        async def close() -> None:
            left.append(await subscription.close())

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(close)
            await let_others_run()
            receipt = await bus.publish(OrderPlaced(number=3))
            assert receipt.handlers == 0
            handler.release.set()

        assert handler.ended == [0, 1, 2]
        assert left == [0]
        assert subscription.pending == 0
        assert bus.stats().registered_handlers == 0
        conserves(bus)


async def test_closing_with_a_deadline_abandons_and_counts_the_rest() -> None:
    clock = VirtualClock()
    bus = MessageBus(clock=clock)
    handler = SlowHandler()
    subscription = bus.subscribe(OrderPlaced, handler)
    left: list[int] = []

    async def close() -> None:
        left.append(await subscription.close(timeout=5))

    async with bus, anyio.create_task_group() as tasks:
        for number in range(3):
            await bus.publish(OrderPlaced(number=number))
        await handler.started.wait()
        tasks.start_soon(close)
        await clock.advance(4.9)
        assert left == []
        await clock.advance(0.1)

        assert left == [3]
        assert handler.ended == []
        assert bus.stats().handlers["SlowHandler"].abandoned == 3
        conserves(bus)


async def test_a_handler_that_closes_its_own_subscription_is_still_waited_for() -> None:
    bus = MessageBus()
    closed, release = anyio.Event(), anyio.Event()
    subscription: Subscription
    handled: list[int] = []
    settled = False

    async def handle_once(event: OrderPlaced) -> None:
        await subscription.close()
        closed.set()
        await release.wait()
        handled.append(event.number)

    subscription = bus.subscribe(OrderPlaced, handle_once)

    async def settle() -> None:
        nonlocal settled
        await bus.settled()
        settled = True

    async with bus, anyio.create_task_group() as tasks:
        await bus.publish(OrderPlaced(number=1))
        await closed.wait()
        conserves(bus)
        tasks.start_soon(settle)
        await let_others_run()
        assert not settled
        release.set()
        await let_others_run()

    assert handled == [1]
    conserves(bus)


async def test_stop_waits_for_a_handler_that_closed_its_own_subscription() -> None:
    bus = MessageBus()
    closed, release = anyio.Event(), anyio.Event()
    subscription: Subscription
    handled: list[int] = []
    reports: list[DrainReport] = []

    async def handle_once(event: OrderPlaced) -> None:
        await subscription.close()
        closed.set()
        await release.wait()
        handled.append(event.number)

    subscription = bus.subscribe(OrderPlaced, handle_once)

    async def stop() -> None:
        reports.append(await bus.stop())

    await bus.start()
    await bus.publish(OrderPlaced(number=1))
    await closed.wait()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(stop)
        await let_others_run()
        assert reports == []
        release.set()
        await let_others_run()

    assert handled == [1]
    assert reports[0].handled == 1


async def test_a_publisher_that_waits_for_a_handler_that_goes_reaches_the_others() -> None:
    bus = MessageBus()
    slow, other = SlowHandler(), Recorder()
    subscription = bus.subscribe(OrderPlaced, slow, queue=QueueConfig(max_size=1))
    bus.subscribe(OrderPlaced, other)
    receipts: list[PublishReceipt] = []

    async def publish(number: int) -> None:
        receipts.append(await bus.publish(OrderPlaced(number=number)))

    async with bus, anyio.create_task_group() as tasks:
        await publish(0)
        await slow.started.wait()
        await publish(1)
        tasks.start_soon(publish, 2)
        await let_others_run()
        assert len(receipts) == 2
        await subscription.close(timeout=0)
        await bus.settled()

        assert [receipt.handlers for receipt in receipts] == [2, 2, 1]
        assert other.numbers == [0, 1, 2]
        conserves(bus)


# -- pause -----------------------------------------------------------------------------------


async def test_a_paused_handler_takes_nothing_and_loses_nothing() -> None:
    bus = MessageBus()
    paused, neighbour = Recorder(), Recorder()
    subscription = bus.subscribe(OrderPlaced, paused)
    bus.subscribe(OrderPlaced, neighbour)

    async with bus:
        await bus.publish(OrderPlaced(number=0))
        await bus.settled()
        subscription.pause()
        await bus.publish(OrderPlaced(number=1))
        await bus.publish(OrderPlaced(number=2))
        await let_others_run()

        assert paused.numbers == [0]
        assert neighbour.numbers == [0, 1, 2]
        assert subscription.pending == 2
        conserves(bus)

        subscription.resume()
        await bus.settled()

    assert paused.numbers == [0, 1, 2]
    conserves(bus)


async def test_pausing_lets_the_event_in_hand_finish() -> None:
    bus = MessageBus()
    handler = SlowHandler()
    subscription = bus.subscribe(OrderPlaced, handler)

    async with bus:
        await bus.publish(OrderPlaced(number=0))
        await bus.publish(OrderPlaced(number=1))
        await handler.started.wait()
        subscription.pause()
        handler.release.set()
        await let_others_run()

        assert handler.ended == [0]
        subscription.resume()
        await bus.settled()

    assert handler.ended == [0, 1]


async def test_a_handler_may_be_paused_before_the_bus_starts() -> None:
    bus = MessageBus()
    handler = Recorder()
    subscription = bus.subscribe(OrderPlaced, handler)
    subscription.pause()
    await bus.publish(OrderPlaced(number=0))

    async with bus:
        await let_others_run()
        assert handler.numbers == []
        subscription.resume()
        await bus.settled()

    assert handler.numbers == [0]


@pytest.mark.parametrize("seen_before", [0, 1, 3])
async def test_resume_brings_back_the_whole_concurrency(seen_before: int) -> None:
    bus = MessageBus()
    handler = SlowHandler()
    subscription = bus.subscribe(OrderPlaced, handler, concurrency=3)
    handler.release.set()

    async with bus:
        for number in range(seen_before):
            await bus.publish(OrderPlaced(number=number))
        await bus.settled()
        handler.begun.clear()
        handler.release = anyio.Event()
        subscription.pause()
        for number in range(5):
            await bus.publish(OrderPlaced(number=number))
        subscription.resume()
        await let_others_run()
        begun_at_once = list(handler.begun)
        handler.release.set()
        await bus.settled()

    assert begun_at_once == [0, 1, 2]
    conserves(bus)


# -- stop ------------------------------------------------------------------------------------


async def test_what_handlers_publish_while_the_bus_drains_is_handled_and_counted() -> None:
    bus = MessageBus()
    shipped, release = Recorder(), anyio.Event()
    bus.subscribe(OrderShipped, shipped)

    @bus.on(OrderPlaced)
    async def ship(event: OrderPlaced) -> None:
        await release.wait()
        await bus.publish(OrderShipped(number=event.number))

    await bus.start()
    await bus.publish(OrderPlaced(number=5))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(bus.stop)
        await let_others_run()
        release.set()

    assert shipped.numbers == [5]
    assert bus.stats().events["OrderShipped"].admitted == 1
    conserves(bus)


@pytest.mark.parametrize("lane_exists", [True, False])
async def test_what_a_cancelled_handler_publishes_after_the_deadline_is_not_lost(
    lane_exists: bool,
) -> None:
    bus = MessageBus()
    shipped, started = Recorder(), anyio.Event()
    bus.subscribe(OrderShipped, shipped)
    outcomes: list[bool] = []

    @bus.on(OrderPlaced)
    async def clean_up(event: OrderPlaced) -> None:
        started.set()
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                try:
                    outcomes.append((await bus.publish(OrderShipped(number=1))).accepted)
                except BusClosedError:
                    outcomes.append(False)

    await bus.start()
    if lane_exists:
        await bus.publish(OrderShipped(number=0))
        await bus.settled()
    await bus.publish(OrderPlaced())
    await started.wait()

    report = await bus.stop(timeout=0)

    # Refused, handled, or handed back: anything but accepted and forgotten.
    was_handled = 1 in shipped.numbers
    was_handed_back = any(isinstance(left.event, OrderShipped) for left in report.leftovers)
    assert outcomes == [was_handled or was_handed_back]
    assert bus.stats().total("queued") == 0
    await let_others_run()
    assert (1 in shipped.numbers) == was_handled, "handled after the bus had stopped"
    conserves(bus)


async def test_a_publisher_that_waits_at_the_deadline_is_told() -> None:
    bus = MessageBus()
    slow = SlowHandler()
    bus.subscribe(OrderPlaced, slow, queue=QueueConfig(max_size=1))
    refused: list[int] = []

    async def publish(number: int) -> None:
        try:
            await bus.publish(OrderPlaced(number=number))
        except BusClosedError:
            refused.append(number)

    await bus.start()
    await publish(0)
    await slow.started.wait()
    await publish(1)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(publish, 2)
        await let_others_run()
        report = await bus.stop(timeout=0)
        assert report.abandoned == 2
        assert [left.event for left in report.leftovers] == [OrderPlaced(number=1)]

    assert refused == [2]
    assert bus.stats().events["OrderPlaced"].rejected == 1
    conserves(bus)
