"""Tests that ask what went through a bus, with time that moves when told to."""

import asyncio

from msgbus import Command, Context, Event, HandlerRegistry, MessageBus
from msgbus.testing import VirtualClock, record


class PlaceOrder(Command):
    """Place an order."""

    sku: str


class OrderPlaced(Event):
    """An order was accepted."""

    sku: str


class PaymentDue(Event):
    """An hour has passed without payment."""


handlers = HandlerRegistry()


@handlers.handles(PlaceOrder)
async def place_order(command: PlaceOrder, context: Context) -> None:
    context.emit(OrderPlaced(sku=command.sku))
    await context.publish(PaymentDue(), delay=3600)


@handlers.on(OrderPlaced)
async def send_receipt(event: OrderPlaced) -> None:
    raise OSError(f"no mail server for {event.sku}")


async def test_an_order_is_placed_and_payment_falls_due_after_an_hour() -> None:
    clock = VirtualClock()
    async with record(MessageBus(registries=[handlers], clock=clock)) as recorder:
        await recorder.call(PlaceOrder(sku="tea"))
        recorder.assert_published(OrderPlaced, sku="tea")
        recorder.assert_not_published(PaymentDue)

        await clock.advance(3600)
        recorder.assert_published(PaymentDue)

        await recorder.settled()
        print(recorder.causation_tree())


asyncio.run(test_an_order_is_placed_and_payment_falls_due_after_an_hour())  # else: pytest
# Output:
# > PlaceOrder: handled by place_order
# > ├─ PaymentDue: no handlers
# > └─ OrderPlaced: failed in send_receipt: OSError: no mail server for tea
