"""What messages sent by a batch handler come from: no one event, unless it says which."""

from __future__ import annotations

import anyio
import anyio.lowlevel
import pytest

from msgbus import Command, Context, Event, MessageBus
from tests.fakes import OrderPlaced, OrderShipped, conserves


class ShipOrder(Command):
    number: int = 0


class Parcels:
    """A bus whose batch handler of OrderPlaced sends OrderShipped; `shipped` by number."""

    def __init__(self) -> None:
        self.bus = MessageBus()
        self.shipped: dict[int, OrderShipped] = {}
        self.bus.subscribe(OrderShipped, self._note)

    async def _note(self, event: OrderShipped) -> None:
        self.shipped[event.number] = event

    async def publish(self, *events: Event) -> None:
        """Publish before the start, so that the handler gets all in one list."""
        for event in events:
            await self.bus.publish(event)
        async with self.bus:
            await self.bus.settled()
        conserves(self.bus)


class ShipTogether:
    """A batch handler that sends one OrderShipped for the whole list."""

    def __init__(self, bus: MessageBus) -> None:
        self._bus = bus

    async def __call__(self, events: list[OrderPlaced]) -> None:
        await self._bus.publish(OrderShipped(number=len(events)))


async def test_what_a_batch_handler_sends_has_no_cause() -> None:
    parcels = Parcels()

    @parcels.bus.on(OrderPlaced, batch=True)
    async def ship(events: list[OrderPlaced], context: Context) -> None:
        await context.publish(OrderShipped(number=1))
        context.emit(OrderShipped(number=2))

    await parcels.publish(OrderPlaced(number=0), OrderPlaced(number=1))

    for event in parcels.shipped.values():
        assert event.causation_id is None
        assert event.correlation_id == event.message_id
        assert event.session_id is None
    assert set(parcels.shipped) == {1, 2}


async def test_inside_handling_the_cause_is_that_one_event() -> None:
    parcels = Parcels()

    @parcels.bus.handles(ShipOrder)
    async def ship_one(command: ShipOrder, context: Context) -> None:
        context.emit(OrderShipped(number=command.number + 200))

    @parcels.bus.on(OrderPlaced, batch=True)
    async def ship(events: list[OrderPlaced], context: Context) -> None:
        for event in events:
            with context.handling(event):
                await parcels.bus.publish(OrderShipped(number=event.number))
                context.emit(OrderShipped(number=event.number + 100))
                await context.call(ShipOrder(number=event.number))

    orders = [OrderPlaced(number=number) for number in range(3)]
    for order in orders:
        await parcels.bus.publish(order, headers={"tenant": str(order.number)})
    await parcels.publish()

    for order in orders:
        for number in (order.number, order.number + 100):
            assert parcels.shipped[number].causation_id == order.message_id
        for number in (order.number, order.number + 100, order.number + 200):
            event = parcels.shipped[number]
            assert event.correlation_id == order.message_id
            assert event.headers == {"tenant": str(order.number)}
    assert len(parcels.shipped) == 9


async def test_after_handling_there_is_no_one_cause_again() -> None:
    parcels = Parcels()

    @parcels.bus.on(OrderPlaced, batch=True)
    async def ship(events: list[OrderPlaced], context: Context) -> None:
        with context.handling(events[0]):
            pass
        await context.publish(OrderShipped(number=1))
        context.emit(OrderShipped(number=2))

    await parcels.publish(OrderPlaced(number=0), OrderPlaced(number=1))

    assert [event.causation_id for event in parcels.shipped.values()] == [None, None]


async def test_tasks_that_handle_events_side_by_side_keep_their_causes_apart() -> None:
    parcels = Parcels()

    @parcels.bus.on(OrderPlaced, batch=True)
    async def ship(events: list[OrderPlaced], context: Context) -> None:
        first_is_in, second_has_emitted = anyio.Event(), anyio.Event()

        async def ship_first() -> None:
            with context.handling(events[0]):
                first_is_in.set()
                await second_has_emitted.wait()
                context.emit(OrderShipped(number=0))

        async def ship_second() -> None:
            await first_is_in.wait()
            with context.handling(events[1]):
                context.emit(OrderShipped(number=1))
                second_has_emitted.set()
                for _ in range(5):
                    await anyio.lowlevel.checkpoint()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ship_first)
            tasks.start_soon(ship_second)

    orders = [OrderPlaced(number=0), OrderPlaced(number=1)]
    await parcels.publish(*orders)

    for order in orders:
        assert parcels.shipped[order.number].causation_id == order.message_id


async def test_correlation_and_headers_are_shared_where_all_events_agree() -> None:
    parcels = Parcels()

    @parcels.bus.on(OrderPlaced, batch=True)
    async def ship(events: list[OrderPlaced], context: Context) -> None:
        await context.publish(OrderShipped(number=len(events)))

    class OrdersImported(Event):
        pass

    @parcels.bus.on(OrdersImported)
    async def place_all(event: OrdersImported, context: Context) -> None:
        for number in range(3):
            await context.publish(OrderPlaced(number=number))

    imported = OrdersImported()
    async with parcels.bus:
        await parcels.bus.publish(imported, headers={"tenant": "acme"})
        await parcels.bus.settled()

    shipped = parcels.shipped[3]
    assert shipped.correlation_id == imported.message_id
    assert shipped.headers == {"tenant": "acme"}
    assert shipped.causation_id is None


@pytest.mark.parametrize("same", [True, False])
async def test_the_session_is_shared_only_where_all_events_agree(same: bool) -> None:
    parcels = Parcels()
    subscription = parcels.bus.subscribe(OrderPlaced, ShipTogether(parcels.bus), batch=True)

    async with parcels.bus:
        subscription.pause()
        async with parcels.bus.session("a") as a, parcels.bus.session("b") as b:
            await a.publish(OrderPlaced(number=0))
            await (a if same else b).publish(OrderPlaced(number=1))
            subscription.resume()
            await parcels.bus.settled()

    assert parcels.shipped[2].session_id == ("a" if same else None)
    conserves(parcels.bus)
