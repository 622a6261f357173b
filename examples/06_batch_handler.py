"""A handler that takes a list of events at a time, as a bulk insert wants them."""

import asyncio

from msgbus import Context, Event, MessageBus, QueueConfig


class Clicked(Event):
    """Somebody clicked."""

    page: str


class PageStored(Event):
    """A click is in the database."""

    page: str


bus = MessageBus()


@bus.on(Clicked, batch=True, queue=QueueConfig(batch_size=4))
async def store(events: list[Clicked], context: Context) -> None:
    pages = [event.page for event in events]
    if "bad" in pages:
        # A list that fails is tried once more, then event by event to find the culprit.
        print("cannot store", pages)
        raise ValueError("bad page")
    print("stored", pages)
    for event in events:
        with context.handling(event):  # says which of the events is the cause
            context.emit(PageStored(page=event.page))


async def main() -> None:
    async with bus:
        summary = await bus.publish_many(Clicked(page=page) for page in "abcdef")
        print(summary.accepted, "accepted")
        await bus.settled()

        await bus.publish_many(Clicked(page=page) for page in ("g", "bad"))
        await bus.settled()
        stats = bus.stats().handlers["store"]
        print(stats.handled, "handled,", stats.failed, "failed")


asyncio.run(main())
# Output:
# > 6 accepted
# > stored ['a', 'b', 'c', 'd']
# > stored ['e', 'f']
# > cannot store ['g', 'bad']
# > cannot store ['g', 'bad']
# > stored ['g']
# > cannot store ['bad']
# > 7 handled, 1 failed
