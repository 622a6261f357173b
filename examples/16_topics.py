"""Topics: handlers for patterns of topics, and a router of your own."""

import asyncio

from msgbus import Event, MessageBus, topic_of
from msgbus.routing import PatternRouter


class OrderPlaced(Event, topic="shop.orders.placed"):
    """A customer has placed an order."""

    sku: str


class StockLow(Event, topic="shop.stock.low"):
    """The stock of an item is low."""

    sku: str


bus = MessageBus()


@bus.on("shop.**", priority=10)
async def audit(event: Event) -> None:
    print("audit ", topic_of(event))


@bus.on("shop.orders.*")
async def follow_orders(event: Event) -> None:
    print("orders", type(event).__name__)


@bus.on("shop.eu.**")
async def follow_europe(event: OrderPlaced) -> None:
    print("europe", event.sku)


async def main() -> None:
    async with bus:
        await bus.publish(OrderPlaced(sku="tea"))
        await bus.settled()
        await bus.publish(StockLow(sku="mug"))
        await bus.publish(OrderPlaced(sku="pot"), topic="shop.eu.orders")

    router = PatternRouter()
    router.register_route("shop.orders.*", "orders-service")
    router.register_route("**.placed", "archive", priority=1)
    print([route.endpoint_id for route in router.find_all_routes("shop.orders.placed")])


asyncio.run(main())
# Output:
# > audit  shop.orders.placed
# > orders OrderPlaced
# > audit  shop.stock.low
# > audit  shop.eu.orders
# > europe pot
# > ['archive', 'orders-service']
