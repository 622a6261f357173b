"""Events: any number of handlers, each with a lane of its own."""

from __future__ import annotations

import anyio
import anyio.lowlevel
import pytest

from msgbus import (
    BusClosedError,
    BusConfig,
    Command,
    ConfigurationError,
    Event,
    EventHandlerFailedEvent,
    MessageBus,
    PublishStatus,
    QueueConfig,
    SystemEvent,
)
from msgbus.errors import WrongMessageTypeError
from tests.fakes import (
    OrderEvent,
    OrderPlaced,
    OrderShipped,
    Recorder,
    SlowHandler,
    conserves,
    let_others_run,
)


class Database:
    pass


class CancelOrder(Command):
    pass


async def fail(event: OrderEvent) -> None:
    raise ValueError(event.number)


# -- who gets what ---------------------------------------------------------------------------


async def test_every_handler_gets_every_event() -> None:
    bus = MessageBus()
    handlers = [Recorder() for _ in range(10)]
    for handler in handlers:
        bus.subscribe(OrderPlaced, handler)

    async with bus:
        for number in range(20):
            receipt = await bus.publish(OrderPlaced(number=number))
            assert receipt.status is PublishStatus.ACCEPTED
            assert receipt.handlers == 10
        await bus.settled()

    assert [handler.numbers for handler in handlers] == [list(range(20))] * 10
    conserves(bus)


async def test_an_event_without_handlers_is_accepted_and_counted() -> None:
    bus = MessageBus()

    async with bus:
        receipt = await bus.publish(OrderPlaced())

    assert receipt.accepted
    assert receipt.handlers == 0
    assert bus.stats().events["OrderPlaced"].admitted == 1
    conserves(bus)


async def test_a_handler_of_a_base_class_gets_subclasses_and_not_the_reverse() -> None:
    bus = MessageBus()
    of_orders, of_placed = Recorder(), Recorder()
    bus.subscribe(OrderEvent, of_orders)
    bus.subscribe(OrderPlaced, of_placed)

    async with bus:
        await bus.publish(OrderEvent(number=1))
        await bus.publish(OrderPlaced(number=2))
        await bus.publish(OrderShipped(number=3))
        await bus.settled()

    assert of_orders.numbers == [1, 2, 3]
    assert of_placed.numbers == [2]


async def test_system_events_reach_only_who_names_them() -> None:
    bus = MessageBus()
    seen_by_all: list[Event] = []
    seen_by_name: list[Event] = []

    @bus.on(Event)
    async def see_all(event: Event) -> None:
        seen_by_all.append(event)

    @bus.on(EventHandlerFailedEvent)
    async def see_failures(event: EventHandlerFailedEvent) -> None:
        seen_by_name.append(event)

    bus.subscribe(OrderPlaced, fail)
    order = OrderPlaced()

    async with bus:
        await bus.publish(order)
        await bus.settled()

    assert seen_by_all == [order]
    assert len(seen_by_name) == 1


async def test_a_handler_of_all_system_events_is_a_fault_at_start() -> None:
    bus = MessageBus()

    @bus.on(SystemEvent)
    async def never_called(event: SystemEvent) -> None: ...

    with pytest.raises(ConfigurationError, match="never_called"):
        await bus.start()


async def test_a_handler_registered_while_running_gets_later_events() -> None:
    bus = MessageBus()
    early, late = Recorder(), Recorder()
    bus.subscribe(OrderPlaced, early)

    async with bus:
        await bus.publish(OrderPlaced(number=1))
        bus.subscribe(OrderPlaced, late)
        await bus.publish(OrderPlaced(number=2))
        await bus.settled()

    assert early.numbers == [1, 2]
    assert late.numbers == [2]
    conserves(bus)


async def test_a_handler_whose_dependency_is_missing_is_refused_while_running() -> None:
    bus = MessageBus()

    async def store(event: OrderPlaced, database: Database) -> None: ...

    async with bus:
        with pytest.raises(ConfigurationError, match="Database"):
            bus.subscribe(OrderPlaced, store)

        assert (await bus.publish(OrderPlaced())).handlers == 0
        await bus.settled()
    conserves(bus)


@pytest.mark.parametrize("wrong", [CancelOrder(), OrderPlaced, "OrderPlaced", None])
async def test_publish_refuses_what_is_no_event(wrong: Event) -> None:
    async with MessageBus() as bus:
        with pytest.raises(WrongMessageTypeError):
            await bus.publish(wrong)
        assert bus.stats().events == {}


async def test_publish_after_stop_raises() -> None:
    bus = MessageBus()
    bus.subscribe(OrderPlaced, Recorder())
    async with bus:
        await bus.publish(OrderPlaced())

    with pytest.raises(BusClosedError):
        await bus.publish(OrderPlaced())
    conserves(bus)


# -- lanes -----------------------------------------------------------------------------------


async def test_a_handler_sees_events_one_by_one_in_publish_order() -> None:
    bus = MessageBus(BusConfig(queue=QueueConfig(batch_size=7)))
    order: list[str] = []

    @bus.on(OrderPlaced)
    async def slow_and_steady(event: OrderPlaced) -> None:
        order.append(f"begin {event.number}")
        await anyio.lowlevel.checkpoint()
        order.append(f"end {event.number}")

    async with bus:
        for number in range(50):
            await bus.publish(OrderPlaced(number=number))
        await bus.settled()

    assert order == [f"{step} {number}" for number in range(50) for step in ("begin", "end")]


async def test_concurrency_runs_so_many_at_once_and_no_more() -> None:
    bus = MessageBus()
    handler = SlowHandler()
    bus.subscribe(OrderPlaced, handler, concurrency=3)

    async with bus:
        for number in range(10):
            await bus.publish(OrderPlaced(number=number))
        await let_others_run()

        assert handler.begun == [0, 1, 2]
        assert bus.stats().handlers["SlowHandler"].running == 3
        assert bus.stats().handlers["SlowHandler"].queued == 7
        conserves(bus)

        handler.release.set()
        await bus.settled()

    assert sorted(handler.ended) == list(range(10))
    conserves(bus)


async def test_a_handler_that_hangs_delays_none_of_its_neighbours() -> None:
    bus = MessageBus()
    hanging, quick = SlowHandler(), Recorder()
    bus.subscribe(OrderPlaced, hanging)
    bus.subscribe(OrderPlaced, quick)
    all_seen = anyio.Event()

    @bus.on(OrderPlaced)
    async def watch(event: OrderPlaced) -> None:
        if event.number == 999:
            all_seen.set()

    async with bus:
        for number in range(1000):
            await bus.publish(OrderPlaced(number=number))
        await all_seen.wait()
        await let_others_run()

        assert hanging.begun == [0]
        assert quick.numbers == list(range(1000))

        hanging.release.set()
        await bus.settled()

    assert hanging.ended == list(range(1000))
    conserves(bus)


async def test_a_handler_may_have_a_queue_of_its_own() -> None:
    bus = MessageBus(BusConfig(queue=QueueConfig(max_size=1)))
    roomy, narrow = SlowHandler(), SlowHandler()
    bus.subscribe(OrderPlaced, roomy, queue=QueueConfig(max_size=100))
    bus.subscribe(OrderShipped, narrow)

    async with bus:
        for number in range(50):
            await bus.publish(OrderPlaced(number=number))
        await bus.publish(OrderShipped(number=0))
        await narrow.started.wait()
        await bus.publish(OrderShipped(number=1))
        with anyio.CancelScope() as waiting:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(bus.publish, OrderShipped(number=2))
                await let_others_run()
                waiting.cancel()

        assert bus.stats().events["OrderShipped"].rejected == 1
        roomy.release.set()
        narrow.release.set()
        await bus.settled()

    assert roomy.ended == list(range(50))
    assert narrow.ended == [0, 1]
    conserves(bus)


async def test_events_published_before_start_are_delivered() -> None:
    bus = MessageBus()
    handler = Recorder()
    bus.subscribe(OrderPlaced, handler)
    for number in range(3):
        await bus.publish(OrderPlaced(number=number))
    assert handler.numbers == []
    conserves(bus)

    async with bus:
        await bus.settled()

    assert handler.numbers == [0, 1, 2]
    conserves(bus)


async def test_a_handler_that_feeds_itself_starves_nobody_and_ends_with_stop() -> None:
    bus = MessageBus()
    neighbour = Recorder()
    bus.subscribe(OrderShipped, neighbour)

    @bus.on(OrderPlaced)
    async def again(event: OrderPlaced) -> None:
        await bus.publish(OrderPlaced(number=event.number + 1))

    await bus.start()
    await bus.publish(OrderPlaced())
    for number in range(10):
        await bus.publish(OrderShipped(number=number))
    while len(neighbour.numbers) < 10 or not bus.stats().handlers["again"].handled:
        await anyio.lowlevel.checkpoint()

    report = await bus.stop(timeout=0)

    assert report.abandoned == 1
    assert [left.handler for left in report.leftovers] == ["again"]
    stats = bus.stats().handlers["again"]
    assert stats.handled > 0
    assert stats.queued == stats.running == 0
    conserves(bus)
