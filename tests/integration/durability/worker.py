"""A process with a bus on a journal, and what it has done, line by line, until it is killed.

`python -m tests.integration.durability.worker FILE WHAT`, where WHAT is `work` (handle what is
enqueued, and what is delayed, until killed), `once` (the same until all is done) or `deliver`
(enqueue and delay, and say what was acknowledged, until killed).
"""

from __future__ import annotations

import asyncio
import os
import sys

from typing_extensions import override

from msgbus import BusConfig, Command, Context, Event, MessageBus
from msgbus.bus.assembly import Assembly
from msgbus.resilience import RetryConfig
from tests.integration.durability.unfinished import unfinished

TTL = 0.5
ATTEMPTS = 4


class Pack(Command[int], name="kill.Pack"):
    number: int
    seconds: float = 0.0
    """How long it takes; a negative number ends the process."""


class Reminded(Event, name="kill.Reminded"):
    number: int


class QuickRetries(Assembly):
    """Retries of enqueued commands after ten milliseconds."""

    @override
    def durable_retry(self, registration: object) -> RetryConfig:
        return RetryConfig(max_retries=ATTEMPTS - 1, initial_delay=0.01)


class Bus(MessageBus):
    @override
    def _make_assembly(self) -> Assembly:
        return QuickRetries(self._state)


def say(*words: object) -> None:
    """One line, written at once: it survives the end of the process."""
    os.write(1, f"{' '.join(map(str, words))}\n".encode())


def make_bus(path: str) -> MessageBus:
    return Bus(BusConfig(member_ttl=TTL, command_workers=4), journal=f"sqlite:///{path}")


def working(path: str) -> MessageBus:
    bus = make_bus(path)

    @bus.handles(Pack)
    async def pack(command: Pack, context: Context) -> int:
        say("begun", command.number, context.attempt)
        if command.seconds < 0:
            os._exit(7)
        await asyncio.sleep(command.seconds)
        say("ended", command.number)
        return command.number * 10

    @bus.on(Reminded, durable="reminders")
    async def remind(event: Reminded) -> None:
        say("reminded", event.number)

    return bus


async def work(path: str) -> None:
    async with working(path):
        say("started")
        await asyncio.sleep(1000)


async def once(path: str) -> None:
    async with working(path) as bus:
        say("started")
        assert bus.journal is not None
        seen = -1
        await bus.settled()
        while await unfinished(bus.journal):
            seen = await bus.journal.changed(seen, timeout=0.1)
            await bus.settled()


async def deliver(path: str) -> None:
    async with make_bus(path) as bus:
        say("started")
        for number in range(1_000_000):
            await bus.enqueue(Pack(number=number))
            say("enqueued", number)
            await bus.publish(Reminded(number=number), delay=0.2)
            say("delayed", number)


if __name__ == "__main__":
    asyncio.run({"work": work, "once": once, "deliver": deliver}[sys.argv[2]](sys.argv[1]))
