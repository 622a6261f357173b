"""A process that publishes and handles until it is killed; run by `test_bus_kills`.

Every line of the diary is one fact, written in one piece: `acked 17` when the bus has said that
event 17 is durable, `NAME 17` when handler NAME has handled it.
"""

from __future__ import annotations

import argparse
import os

import anyio

from msgbus import BusConfig, Context, Event, MessageBus
from msgbus.resilience import RetryConfig
from msgbus.subscriptions import Mode
from tests.integration.durability.unfinished import unfinished

KEYS = 5
TTL = 0.3  # so that a new process follows a killed one soon
SOON = RetryConfig(max_retries=19, initial_delay=0.001, max_delay=0.05, in_process=0.01)


class Step(Event, key="lane"):
    number: int
    lane: str


class ShakyError(Exception):
    pass


class Diary:
    """Facts that outlive the process, in the order they happened."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def note(self, who: str, number: int) -> None:
        os.write(self._file, f"{who} {number}\n".encode())
        os.write(1, b"\n")  # whoever waits for it counts lines


def make_bus(url: str, diary: Diary) -> MessageBus:
    bus = MessageBus(BusConfig(member_ttl=TTL), journal=url)

    @bus.on(Step, durable="exclusive", retry=SOON)
    async def exclusive(event: Step) -> None:
        diary.note("exclusive", event.number)

    @bus.on(Step, durable="shared", mode=Mode.SHARED, max_in_flight=4, retry=SOON)
    async def shared(event: Step, context: Context) -> None:
        # The first attempts of some fail: retried in this process, and by rows of the journal.
        if event.number % 7 == 0 and context.attempt < 6:
            raise ShakyError
        diary.note("shared", event.number)

    @bus.on(Step, durable="by_key", mode=Mode.KEY_SHARED, max_in_flight=4, retry=SOON)
    async def by_key(event: Step) -> None:
        await anyio.lowlevel.checkpoint()
        diary.note("by_key", event.number)

    return bus


async def publish(bus: MessageBus, diary: Diary, first: int, ahead: int) -> None:
    """Publish for ever; every tenth by schedule. `ahead`: acknowledge before it is true."""
    number = first
    while True:
        event = Step(number=number, lane=str(number % KEYS))
        if ahead:
            diary.note("acked", number + ahead)
        if number % 10 == 9:
            await bus.publish(event, delay=0.02)
        else:
            await bus.publish(event)
        if not ahead:
            diary.note("acked", number)
        number += 1


async def finish(bus: MessageBus) -> None:
    """Wait until nothing waits any more, be it an event or a retry, and all is done."""
    journal = bus.journal
    assert journal is not None
    seen = -1
    await bus.settled()
    while await unfinished(journal):
        seen = await journal.changed(seen, timeout=0.1)
        await bus.settled()


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("diary")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--ahead", type=int, default=0)
    parser.add_argument("--finish", action="store_true")
    options = parser.parse_args()
    diary = Diary(options.diary)
    bus = make_bus(options.url, diary)
    async with bus:
        if not options.finish:
            await publish(bus, diary, options.first, options.ahead)
        await finish(bus)


if __name__ == "__main__":
    anyio.run(main)
