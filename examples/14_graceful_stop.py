"""Stopping: queued work is finished, and what is not finished is handed back."""

import asyncio

from msgbus import BusClosedError, Event, MessageBus


class MailQueued(Event):
    """A mail is to be sent."""

    to: str


async def finish_everything() -> None:
    bus = MessageBus()

    @bus.on(MailQueued)
    async def send(event: MailQueued) -> None:
        await asyncio.sleep(len(event.to) / 1000)

    await bus.start()
    await bus.publish_many(MailQueued(to=name) for name in ("ann", "bob", "cid"))
    report = await bus.stop(timeout=10)
    print("handled", report.handled, "abandoned", report.abandoned)
    try:
        await bus.publish(MailQueued(to="dora"))
    except BusClosedError as error:
        print(error)


async def give_up_in_time() -> None:
    bus = MessageBus()

    @bus.on(MailQueued)
    async def send_to_dead_server(event: MailQueued) -> None:
        await asyncio.sleep(3600 * len(event.to))

    await bus.start()
    await bus.publish_many(MailQueued(to=name) for name in ("ann", "bob", "cid"))
    await bus.publish(MailQueued(to="dora"), delay=3600)
    report = await bus.stop(timeout=0.05)
    print("handled", report.handled, "abandoned", report.abandoned)
    print("still queued:", [left.event for left in report.leftovers])
    print("not yet due:", list(report.scheduled))


async def main() -> None:
    await finish_everything()
    await give_up_in_time()


asyncio.run(main())
# Output:
# > handled 3 abandoned 0
# > Cannot publish on this bus: it has stopped. Start it again with `await bus.start()`.
# > handled 0 abandoned 3
# > still queued: [MailQueued(to='bob'), MailQueued(to='cid')]
# > not yet due: [MailQueued(to='dora')]
