"""The causation tree: who caused whom, and what became of it."""

from __future__ import annotations

import sys

import anyio

from msgbus import BackpressureStrategy, Command, Context, Event, MessageBus, QueueConfig
from msgbus.testing import VirtualClock, record
from tests.fakes import OrderPlaced, OrderShipped, SlowHandler


class PlaceOrder(Command):
    pass


class ReserveStock(Command):
    pass


class StockReserved(Event):
    pass


class Counted(Event):
    left: int


async def ignore(message: object) -> None:
    pass


async def test_each_message_stands_below_the_one_that_caused_it() -> None:
    bus = MessageBus()

    @bus.handles(PlaceOrder)
    async def place_order(command: PlaceOrder, context: Context) -> None:
        await context.execute(ReserveStock())
        context.emit(OrderPlaced())

    @bus.handles(ReserveStock)
    async def reserve_stock(command: ReserveStock, context: Context) -> None:
        await context.publish(StockReserved())

    @bus.on(OrderPlaced)
    async def ship(event: OrderPlaced, context: Context) -> None:
        await context.publish(OrderShipped())

    @bus.on(OrderPlaced)
    async def send_receipt(event: OrderPlaced) -> None:
        raise OSError("smtp://bob:hunter2@mail refused")

    bus.register_event_handler(OrderShipped, ignore)

    async with record(bus) as recorder:
        await recorder.execute(PlaceOrder())
        await recorder.settled()
        await recorder.publish(StockReserved())

    assert recorder.causation_tree().splitlines() == [
        "PlaceOrder: handled by place_order",
        "├─ ReserveStock: handled by reserve_stock",
        "│  └─ StockReserved: no handlers",
        "└─ OrderPlaced: handled by ship; "
        "failed in send_receipt: OSError: smtp://bob:[redacted]@mail refused",
        "   └─ OrderShipped: handled by ignore",
        "StockReserved: no handlers",
    ]


async def test_ids_are_shown_on_request() -> None:
    event = OrderPlaced()

    async with record(MessageBus()) as recorder:
        await recorder.publish(event)

    assert recorder.causation_tree(ids=True) == f"OrderPlaced {event.message_id}: no handlers"


async def test_a_message_whose_cause_was_not_recorded_stands_at_the_top() -> None:
    bus = MessageBus()
    running, go_on = anyio.Event(), anyio.Event()

    @bus.handles(PlaceOrder)
    async def place_order(command: PlaceOrder, context: Context) -> None:
        running.set()
        await go_on.wait()
        await context.publish(OrderPlaced())

    async with bus, anyio.create_task_group() as tasks:
        tasks.start_soon(bus.execute, PlaceOrder())
        await running.wait()
        async with record(bus) as recorder:
            go_on.set()
            await recorder.settled()

        assert recorder.causation_tree() == "OrderPlaced: no handlers"


async def test_events_that_were_turned_away_dropped_or_left_say_so() -> None:
    def only_small(event: Event) -> bool:
        return getattr(event, "number", 0) < 10

    bus = MessageBus(filters=[only_small])
    slow = SlowHandler()
    queue = QueueConfig(max_size=1, strategy=BackpressureStrategy.DROP_OLDEST)
    bus.register_event_handler(OrderPlaced, slow, name="slow", queue=queue)
    refusing = SlowHandler()
    queue = QueueConfig(max_size=1, strategy=BackpressureStrategy.REJECT_NEW)
    bus.register_event_handler(OrderShipped, refusing, name="refusing", queue=queue)

    async with record(bus) as recorder:
        await recorder.publish(OrderPlaced(number=1))
        await recorder.publish(OrderShipped(number=1))
        await slow.started.wait()
        await refusing.started.wait()
        await recorder.publish(OrderPlaced(number=2))
        await recorder.publish(OrderPlaced(number=3))
        await recorder.publish(OrderPlaced(number=10))
        await recorder.publish(OrderShipped(number=2))
        await recorder.publish(OrderShipped(number=3))
        during = recorder.causation_tree()
        slow.release.set()
        refusing.release.set()
        await recorder.settled()

    assert during.splitlines() == [
        "OrderPlaced: running in slow",
        "OrderShipped: running in refusing",
        "OrderPlaced: dropped for slow",
        "OrderPlaced: not run by 1 of 1 handlers",
        f"OrderPlaced: filtered by {only_small.__qualname__}",
        "OrderShipped: not run by 1 of 1 handlers",
        "OrderShipped: rejected: the queue of refusing is full (1 events)",
    ]
    assert recorder.causation_tree().splitlines()[3] == "OrderPlaced: handled by slow"


async def test_a_delayed_event_waits_for_its_time() -> None:
    clock = VirtualClock()
    bus = MessageBus(clock=clock)
    bus.register_event_handler(OrderPlaced, ignore)

    async with record(bus) as recorder:
        await recorder.publish(OrderPlaced(), delay=5)
        before = recorder.causation_tree()
        await clock.advance(5)
        await recorder.settled()

    assert before == "OrderPlaced: not due yet"
    assert recorder.causation_tree() == "OrderPlaced: handled by ignore"


async def test_a_chain_of_causes_may_be_longer_than_pythons_stack() -> None:
    depth = sys.getrecursionlimit() + 100
    bus = MessageBus()

    @bus.on(Counted)
    async def count_down(event: Counted, context: Context) -> None:
        if event.left:
            await context.publish(Counted(left=event.left - 1))

    async with record(bus) as recorder:
        await recorder.publish(Counted(left=depth))
        await recorder.settled()

    lines = recorder.causation_tree().splitlines()
    assert len(lines) == depth + 1
    assert lines[-1] == "   " * (depth - 1) + "└─ Counted: handled by count_down"
