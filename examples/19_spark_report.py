"""The journal as tables: count, look at failures, write a report (needs msgbus[spark])."""

import asyncio
import tempfile
from pathlib import Path

from msgbus import Event, MessageBus, pipeline
from msgbus.resilience import RetryConfig


class OrderPlaced(Event, name="shop.OrderPlaced", key="customer"):
    """A customer has ordered."""

    customer: str
    cents: int


async def send_receipt(event: OrderPlaced) -> None:
    if event.customer == "bo":  # attempted three times, and then dead-lettered
        raise ConnectionError("the mail server hung up")


async def work(url: str) -> None:
    async with MessageBus(journal=url) as bus:
        bus.subscribe(OrderPlaced, send_receipt, retry=RetryConfig(max_retries=2))
        for customer, cents in [("ann", 500), ("bo", 900), ("ann", 250)]:
            await bus.publish(OrderPlaced(customer=customer, cents=cents))
        await bus.settled()


def main(folder: Path) -> None:
    url = f"sqlite:///{folder / 'shop.db'}"
    asyncio.run(work(url))

    pipe = pipeline.open(url)  # finds a Java and starts Spark: some seconds
    orders = pipe.events(OrderPlaced).groupBy("customer").sum("cents").orderBy("customer")
    for row in orders.collect():
        print(row["customer"], row["sum(cents)"])
    for row in pipe.deliveries().groupBy("outcome").count().orderBy("outcome").collect():
        print(row["outcome"], row["count"])
    pipe.report(str(folder / "report.html"))
    print((folder / "report.html").read_text(encoding="utf-8")[:15])
    pipe.spark.stop()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        main(Path(name))
# Output:
# > ann 750
# > bo 900
# > dead_lettered 1
# > failed 3
# > ok 2
# > <!DOCTYPE html>
