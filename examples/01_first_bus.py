"""A command, the event it causes, and a handler for each."""

import asyncio

from msgbus import Command, Context, Event, MessageBus


class PlaceOrder(Command[str]):
    """Place an order; the reply is its number."""

    sku: str
    quantity: int = 1


class OrderPlaced(Event):
    """An order was accepted."""

    order_id: str


bus = MessageBus()


@bus.handles(PlaceOrder)
async def place_order(command: PlaceOrder, context: Context) -> str:
    order_id = f"{command.sku}-{command.quantity}"
    # Emitted, not published: if this handler failed later on, nobody would hear of it.
    context.emit(OrderPlaced(order_id=order_id))
    return order_id


@bus.on(OrderPlaced)
async def send_receipt(event: OrderPlaced) -> None:
    print("receipt for", event.order_id)


@bus.on(OrderPlaced)
async def pack_parcel(event: OrderPlaced) -> None:
    print("parcel for", event.order_id)


async def main() -> None:
    async with bus:  # starts it; on the way out, finishes what is queued
        order_id = await bus.call(PlaceOrder(sku="tea", quantity=2))
        print("placed", order_id)


asyncio.run(main())
# Output:
# > placed tea-2
# > receipt for tea-2
# > parcel for tea-2
