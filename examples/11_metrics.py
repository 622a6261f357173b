"""The bus counts by itself; Prometheus, or you, read the numbers when asked for."""

import asyncio

from prometheus_client import CollectorRegistry, generate_latest

from msgbus import BusConfig, Event, MessageBus
from msgbus.telemetry.prometheus import BusCollector


class OrderPlaced(Event):
    """An order was accepted."""

    cents: int


bus = MessageBus(BusConfig(name="shop"))
registry = CollectorRegistry()
BusCollector(bus, registry=registry)  # reads at scrape time; costs nothing in between


@bus.on(OrderPlaced, filter=lambda event: event != OrderPlaced(cents=0))
async def send_invoice(event: OrderPlaced) -> None:
    if event.cents < 0:
        raise ValueError("negative invoice")


async def main() -> None:
    async with bus:
        summary = await bus.publish_many(OrderPlaced(cents=cents) for cents in (400, 0, -1, 900))
        await bus.settled()
    print(summary.published, "published")

    stats = bus.stats().handlers["send_invoice"]
    print(stats.handled, "handled,", stats.failed, "failed,", stats.filtered, "filtered")

    for line in generate_latest(registry).decode().splitlines():
        if line.startswith(("msgbus_events_processed", "msgbus_events_failed")):
            print(line)


asyncio.run(main())
# Output:
# > 4 published
# > 2 handled, 1 failed, 1 filtered
# > msgbus_events_processed_total{bus="shop",handler="send_invoice",message_type="OrderPlaced"} 2.0
# > msgbus_events_failed_total{bus="shop",handler="send_invoice",message_type="OrderPlaced"} 1.0
