"""Publishers that cannot wait, because they run on a lane: they overflow, up to a bound."""

from __future__ import annotations

import anyio
import pytest

from msgbus import (
    BackpressureStrategy,
    BusConfig,
    Command,
    Context,
    EventHandlerFailedEvent,
    MessageBus,
    QueueConfig,
    QueueFullError,
)
from tests.fakes import (
    FullLane,
    OrderPlaced,
    OrderShipped,
    Recorder,
    conserves,
    let_others_run,
    logged,
    queue,
)

REJECT_NEW = BackpressureStrategy.REJECT_NEW
DROP_OLDEST = BackpressureStrategy.DROP_OLDEST


class PlaceOrder(Command):
    number: int = 0


# -- publishers on a lane --------------------------------------------------------------------


async def test_a_handler_that_publishes_to_its_own_full_queue_overflows_instead_of_waiting() -> (
    None
):
    bus = MessageBus(BusConfig(queue=queue(2)))
    handled: list[int] = []

    @bus.on(OrderPlaced)
    async def again(event: OrderPlaced) -> None:
        handled.append(event.number)
        if event.number == 0:
            for number in range(1, 6):
                await bus.publish(OrderPlaced(number=number))

    async with bus:
        await bus.publish(OrderPlaced(number=0))
        await bus.settled()

    assert handled == [0, 1, 2, 3, 4, 5]
    stats = bus.stats().handlers["again"]
    assert (stats.handled, stats.overflowed) == (6, 3)
    conserves(bus)


async def test_beyond_max_overflow_the_publishing_handler_fails() -> None:
    bus = MessageBus(BusConfig(queue=QueueConfig(max_size=2, max_overflow=3)))
    errors: list[QueueFullError] = []
    shipped = Recorder()
    bus.subscribe(OrderShipped, shipped, name="shipped")

    @bus.on(OrderPlaced)
    async def ship(event: OrderPlaced) -> None:
        try:
            for number in range(10):
                await bus.publish(OrderShipped(number=number))
        except QueueFullError as error:
            errors.append(error)
            raise

    async with bus:
        await bus.publish(OrderPlaced())
        await bus.settled()

    assert [error.handler for error in errors] == ["shipped"]
    assert shipped.numbers == [0, 1, 2, 3, 4]
    stats = bus.stats()
    assert stats.handlers["ship"].failed == 1
    assert stats.handlers["shipped"].overflowed == 3
    assert (stats.events["OrderShipped"].admitted, stats.events["OrderShipped"].rejected) == (5, 1)
    conserves(bus)


async def test_emitted_events_that_do_not_fit_are_all_accounted_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bus = MessageBus(BusConfig(queue=QueueConfig(max_size=1, max_overflow=1)))
    shipped = Recorder()
    bus.subscribe(OrderShipped, shipped)

    @bus.on(OrderPlaced)
    async def ship(event: OrderPlaced, context: Context) -> None:
        for number in range(5):
            context.emit(OrderShipped(number=number))

    async with bus:
        await bus.publish(OrderPlaced())
        await bus.settled()

    assert shipped.numbers == [0, 1]
    events = bus.stats().events["OrderShipped"]
    assert (events.published, events.admitted, events.rejected) == (5, 2, 3)
    assert bus.stats().handlers["ship"].failed + len(logged(caplog, "emitted_event_refused")) > 0
    conserves(bus)


async def test_strategies_that_never_wait_hold_on_a_lane_too() -> None:
    bus = MessageBus()
    dropping, refusing = Recorder(), Recorder()
    statuses: list[str] = []
    bus.subscribe(OrderShipped, dropping, name="dropping", queue=queue(1, DROP_OLDEST))
    bus.subscribe(OrderShipped, refusing, name="refusing", queue=queue(3, REJECT_NEW))

    @bus.on(OrderPlaced)
    async def ship(event: OrderPlaced) -> None:
        for number in range(1, 6):
            receipt = await bus.publish(OrderShipped(number=number))
            statuses.append(receipt.status.value)

    async with bus:
        await bus.publish(OrderPlaced())
        await bus.settled()

    assert statuses == ["accepted", "dropped", "dropped", "rejected", "rejected"]
    assert dropping.numbers == [3]
    assert refusing.numbers == [1, 2, 3]
    assert bus.stats().total("overflowed") == 0
    conserves(bus)


async def test_a_command_handler_called_from_outside_waits_for_room() -> None:
    lane = FullLane(1)
    done: list[int] = []

    @lane.bus.handles(PlaceOrder)
    async def place(command: PlaceOrder) -> None:
        await lane.bus.publish(OrderPlaced(number=command.number))
        done.append(command.number)

    async with lane.bus, anyio.create_task_group() as tasks:
        await lane.fill()
        tasks.start_soon(lane.bus.execute, PlaceOrder(number=2))
        await let_others_run()
        assert done == []
        lane.slow.release.set()
        await let_others_run()
        await lane.finish()

    assert done == [2]
    assert lane.slow.ended == [0, 1, 2]
    assert lane.handler.overflowed == 0
    conserves(lane.bus)


async def test_a_command_executed_by_an_event_handler_does_not_wait() -> None:
    lane = FullLane(1)
    done: list[int] = []

    @lane.bus.handles(PlaceOrder)
    async def place(command: PlaceOrder) -> None:
        await lane.bus.publish(OrderPlaced(number=command.number))
        done.append(command.number)

    @lane.bus.on(OrderShipped)
    async def reorder(event: OrderShipped) -> None:
        await lane.bus.call(PlaceOrder(number=event.number))

    async with lane.bus:
        await lane.fill()
        await lane.bus.publish(OrderShipped(number=2))
        await let_others_run()
        done_at_once = list(done)
        await lane.finish()

    assert done_at_once == [2]
    assert lane.handler.overflowed == 1
    conserves(lane.bus)


async def test_a_task_that_a_handler_starts_does_not_wait_either() -> None:
    lane = FullLane(1)
    done = anyio.Event()

    @lane.bus.on(OrderShipped)
    async def reorder(event: OrderShipped) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lane.bus.publish, OrderPlaced(number=2))
        done.set()

    async with lane.bus:
        await lane.fill()
        await lane.bus.publish(OrderShipped())
        await let_others_run()
        was_done = done.is_set()
        await lane.finish()

    assert was_done
    conserves(lane.bus)


async def test_a_lifecycle_event_is_refused_by_a_full_queue_that_refuses(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bus = MessageBus()
    started, release = anyio.Event(), anyio.Event()

    @bus.on(EventHandlerFailedEvent, queue=queue(1, REJECT_NEW))
    async def slow_alarm(event: EventHandlerFailedEvent) -> None:
        started.set()
        await release.wait()

    @bus.on(OrderPlaced)
    async def fail(event: OrderPlaced) -> None:
        raise ValueError

    async with bus:
        await bus.publish(OrderPlaced())
        await started.wait()
        for _ in range(4):
            await bus.publish(OrderPlaced())
        await let_others_run()
        queued = bus.stats().handlers["slow_alarm"].queued
        release.set()
        await bus.settled()

    assert queued == 1
    assert bus.stats().events["EventHandlerFailedEvent"].rejected == 3
    assert len(logged(caplog, "lifecycle_event_refused")) == 3
    conserves(bus)
