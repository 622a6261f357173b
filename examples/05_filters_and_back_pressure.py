"""Who gets an event, and what a publish does when a handler cannot keep up."""

import asyncio

from msgbus import BackpressureStrategy, Event, MessageBus, QueueConfig


class Measured(Event):
    """A sensor has sent a value."""

    celsius: int


def is_plausible(event: Event) -> bool:
    return isinstance(event, Measured) and -50 <= event.celsius <= 60


def is_hot(event: Event) -> bool:
    return isinstance(event, Measured) and event.celsius > 30


bus = MessageBus(filters=[is_plausible])  # for every event of the bus
drawing, paper = asyncio.Event(), asyncio.Event()


@bus.on(Measured, filter=is_hot)  # for this handler alone
async def raise_alarm(event: Measured) -> None:
    assert event.celsius == 40


@bus.on(Measured, queue=QueueConfig(max_size=2, strategy=BackpressureStrategy.DROP_OLDEST))
async def draw(event: Measured) -> None:
    drawing.set()
    await paper.wait()
    print("drawn:", event.celsius)


async def main() -> None:
    async with bus:
        for celsius in (20, 40, 99, 21, 22):
            receipt = await bus.publish(Measured(celsius=celsius))
            await drawing.wait()  # the first event is in hand; the others must queue
            print(celsius, receipt.status.value, receipt.reason or receipt.dropped)
        paper.set()
        await bus.settled()
        print("alarms:", bus.stats().handlers["raise_alarm"].handled)


asyncio.run(main())
# Output:
# > 20 accepted ()
# > 40 accepted ()
# > 99 filtered is_plausible
# > 21 accepted ()
# > 22 dropped (Undelivered(event=Measured(celsius=40), handler='draw'),)
# > drawn: 20
# > drawn: 21
# > drawn: 22
# > alarms: 1
