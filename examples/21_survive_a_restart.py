"""A till that survives a restart: rows and events in one commit, and a handler that goes on."""

import asyncio
import tempfile

from msgbus import Command, Event, MessageBus


class Sell(Command[int]):
    """Sell one of an article; the reply is how many are left."""

    sku: str


class Sold(Event, key="sku"):
    """One of an article was sold."""

    sku: str


def till(url: str) -> MessageBus:
    bus = MessageBus(journal=url)

    @bus.handles(Sell)
    async def sell(command: Sell) -> int:
        async with bus.transaction() as tx:  # the row and the event, or neither
            tx.execute("CREATE TABLE IF NOT EXISTS stock (sku TEXT PRIMARY KEY, gone INTEGER)")
            one_more = "INSERT INTO stock VALUES (?, 1) ON CONFLICT DO UPDATE SET gone = gone + 1"
            tx.execute(one_more, [command.sku])
            await bus.publish(Sold(sku=command.sku))
        query = "SELECT 10 - gone FROM stock WHERE sku = ?"
        row = await bus.transact(lambda db: db.execute(query, [command.sku]).fetchone())
        return int(row[0])

    return bus


async def main(url: str) -> None:
    async with till(url) as bus:
        for _ in range(2):
            left = await bus.call(Sell(sku="tea"))
            print("tea left:", left)

    later = MessageBus(journal=url)  # another day, another process

    @later.on(Sold, durable="statistics")
    async def count(event: Sold) -> None:
        print("sold:", event.sku)

    async with later:
        await later.settled()


with tempfile.TemporaryDirectory() as folder:
    asyncio.run(main(f"sqlite:///{folder}/till.db"))
# Output:
# > tea left: 9
# > tea left: 8
# > sold: tea
# > sold: tea
