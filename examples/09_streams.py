"""Events as an iterator, for code that would rather loop than be called."""

import asyncio

from msgbus import Event, MessageBus


class PriceChanged(Event):
    """A price has moved."""

    sku: str
    cents: int


bus = MessageBus()


async def wait_for_bargain(limit: int) -> str:
    async with bus.stream(PriceChanged) as prices:
        ready.set()
        async for price in prices:
            if price.cents < limit:
                return f"{price.sku} for {price.cents}"
    return "the bus stopped before there was one"


async def watch_slowly() -> str:
    # A reader that is too slow misses the oldest events instead of holding up the bus.
    async with bus.stream(PriceChanged, buffer=2) as prices:
        await done.wait()
        seen = [price.cents async for price in prices]  # ends when the bus stops
    return f"saw {seen}, missed {prices.missed}"


ready, done = asyncio.Event(), asyncio.Event()


async def main() -> None:
    async with bus:
        bargain = asyncio.create_task(wait_for_bargain(100))
        watch = asyncio.create_task(watch_slowly())
        await ready.wait()
        for cents in (130, 110, 90, 70):
            await bus.publish(PriceChanged(sku="tea", cents=cents))
        print(await bargain)
        await bus.settled()
        done.set()
    print(await watch)


asyncio.run(main())
# Output:
# > tea for 90
# > saw [90, 70], missed 2
