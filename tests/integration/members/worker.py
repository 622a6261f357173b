"""Processes that share a durable handler, or a queue of commands, on one journal.

Each message has an effect: a row in a table of the same file, written in the transaction that
acknowledges the message.
"""

from __future__ import annotations

import logging
import os
import random
import signal
from collections.abc import Awaitable, Callable
from functools import partial
from time import monotonic
from typing import Any

import anyio

from msgbus import BusConfig, Command, Context, Event, MessageBus
from msgbus.journal.records import State
from msgbus.resilience import RetryConfig
from msgbus.subscriptions import Mode
from tests.integration.members.forks import serve, write

NAME = "work"
OPEN = (State.WAITING, State.CLAIMED, State.PARKED)
INSERT = "INSERT INTO effects (number, pid, began, ended) VALUES (?, ?, ?, ?)"
RETRY = RetryConfig(max_retries=3, initial_delay=0.02, exponential_base=10.0, in_process=0.05)


class Message(Event, name="members.Message", key="group"):
    number: int
    group: str


class Job(Command[int], name="members.Job"):
    number: int


class Printer(logging.Handler):
    """Writes when this process has noticed that its membership was lost."""

    def emit(self, record: logging.LogRecord) -> None:
        if "member_lost" in record.getMessage():
            write("lost", monotonic())


Handle = Callable[[MessageBus, int, Context], Awaitable[None]]


async def effect(bus: MessageBus, number: int, *, acknowledge: bool, began: float) -> None:
    async with bus.transaction() as tx:
        tx.execute(INSERT, [number, os.getpid(), began, monotonic()])
        if acknowledge:
            tx.acknowledge()


async def work(bus: MessageBus, number: int, context: Context, *, fenced: bool) -> None:
    """Take a moment, fail now and then, and have one effect."""
    began = monotonic()
    await anyio.sleep(random.choice([0.0, 0.001, 0.01]))
    if random.random() < 0.02 and context.attempt == 1:
        raise ValueError("fails once")
    if fenced:
        await effect(bus, number, acknowledge=isinstance(context.message, Message), began=began)
    else:
        # A control: the effect is not part of the acknowledgement.
        await bus.transact(lambda tx: tx.execute(INSERT, [number, os.getpid(), began, monotonic()]))


async def brief(bus: MessageBus, number: int, context: Context) -> None:
    """Take a moment, and write nothing to the journal that others would have to wait for."""
    del bus, context
    await anyio.sleep(random.choice([0.0, 0.001, 0.01]))
    write("handled", number)


async def deadly(bus: MessageBus, number: int, context: Context) -> None:
    """End the process at number 3; take a moment with the others, so that some are in flight."""
    write("begun", number, context.attempt)
    if number == 3:
        await anyio.sleep(0.003)
        os._exit(7)
    await anyio.sleep(0.005)
    is_event = isinstance(context.message, Message)
    await effect(bus, number, acknowledge=is_event, began=monotonic())


async def slow(bus: MessageBus, number: int, context: Context) -> None:
    """Write that it is alive every few milliseconds, and when it was cut off."""
    write("begun", number)
    try:
        for _ in range(200):
            await anyio.sleep(0.005)
            write("alive", number, monotonic())
    except BaseException:
        write("cancelled", number, monotonic())
        raise
    await effect(bus, number, acknowledge=True, began=monotonic())


HANDLERS: dict[str, Handle] = {
    "work": partial(work, fenced=True),
    "unfenced": partial(work, fenced=False),
    "brief": brief,
    "deadly": deadly,
    "slow": slow,
}


def make_bus(path: str, mode: str, handler: str, ttl: float, in_flight: int) -> MessageBus:
    """Make a bus with one durable handler in this mode, or with a handler of commands."""
    config = BusConfig(member_ttl=ttl, command_workers=in_flight)
    bus = MessageBus(config, journal=f"sqlite:///{path}")
    handle = HANDLERS[handler]

    async def on_message(event: Message, context: Context) -> None:
        await handle(bus, event.number, context)

    async def on_job(command: Job, context: Context) -> int:
        await handle(bus, command.number, context)
        return command.number

    if mode == "queue":
        bus.register_command_handler(Job, on_job)
    else:
        limit = 1 if mode == Mode.EXCLUSIVE else in_flight
        bus.subscribe(
            Message, on_message, durable=NAME, mode=Mode(mode), max_in_flight=limit, retry=RETRY
        )
    return bus


def handle_for_ever(**options: Any) -> None:
    """Handle messages until the process is ended; SIGTERM lets it leave in good order."""
    logging.getLogger("msgbus").addHandler(Printer())

    async def run() -> None:
        async with make_bus(**options):
            with anyio.open_signal_receiver(signal.SIGTERM) as signals:
                write("started")
                async for _ in signals:
                    break

    anyio.run(run)


def handle_all(**options: Any) -> None:
    """Handle messages until all are done, then end."""
    logging.getLogger("msgbus").addHandler(Printer())

    async def run() -> None:
        async with make_bus(**options) as bus:
            write("started")
            assert bus.journal is not None
            is_done = False
            while not is_done:
                await bus.settled()
                counts = await bus.journal.count()
                is_done = not any(counts.get(state) for state in OPEN)  # retries wait there

    anyio.run(run)


if __name__ == "__main__":
    serve({"handle": handle_for_ever, "finish": handle_all})
