"""The bus from other threads, and handlers that block."""

import asyncio
import threading
import time

from msgbus import Command, Event, MessageBus


class Reverse(Command[str]):
    """Something slow that is not async."""

    text: str


class Reversed(Event):
    """It is done."""

    text: str


bus = MessageBus()
main_thread = threading.get_ident()


def where() -> str:
    return "main thread" if threading.get_ident() == main_thread else "worker thread"


@bus.handles(Reverse)
def reverse(command: Reverse) -> str:  # no `async`: runs in a worker thread
    time.sleep(0.01)
    return f"{command.text[::-1]} by a {where()}"


@bus.on(Reversed, inline=True)  # a trivial one may stay on the event loop
def count(event: Reversed) -> None:
    print(event.text, "was counted by the", where())


async def main() -> None:
    async with bus:
        portal = bus.portal()  # the same bus, with blocking calls, for any thread

        def legacy_job() -> str:
            value = portal.call(Reverse(text="abc"))
            portal.publish(Reversed(text="abc"))
            return value

        value = await asyncio.to_thread(legacy_job)
        await bus.settled()
        print(value)


asyncio.run(main())
# Output:
# > abc was counted by the main thread
# > cba by a worker thread
