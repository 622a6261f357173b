"""A command that is enqueued, its handlers, and what the journal says of it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, cast

import anyio

from msgbus import Command, Context, MessageBus
from msgbus.journal.memory import MemoryJournal
from tests.durable_shop import DownError, dead_letters
from tests.unit.durable.conftest import Site


class Pack(Command[int], name="packing.Pack"):
    number: int = 0


class PackGift(Pack, name="packing.PackGift"):
    ribbon: str = "red"


QUEUE = "commands:packing.Pack"


class Worker:
    """A handler of `Pack` that notes its attempts, and fails where it is told to."""

    def __init__(self, *, fail: int = 0, error: type[Exception] = DownError) -> None:
        self.attempts: list[tuple[int, int]] = []
        """Number of the command and of the attempt."""
        self.failing = fail
        self.error = error

    async def __call__(self, command: Pack, context: Context) -> int:
        self.attempts.append((command.number, context.attempt))
        if self.failing:
            self.failing -= 1
            raise self.error("password=hunter2")
        return command.number * 10


class Slow:
    """A handler of `Pack` that ends only once `release` is set."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.ended: list[int] = []
        self.started = anyio.Event()
        self.release = anyio.Event()

    async def __call__(self, command: Pack) -> int:
        self.begun.append(command.number)
        self.started.set()
        await self.release.wait()
        self.ended.append(command.number)
        return command.number


def packing(
    site: Site, handler: Callable[..., Coroutine[Any, Any, int]], **options: Any
) -> MessageBus:
    bus = site.bus(**options)
    bus.register_command_handler(Pack, handler)
    return bus


def kill(bus: MessageBus) -> None:
    """Let a bus on a journal in memory write nothing more, and show no sign of life."""
    cast("MemoryJournal", bus.journal).freeze()


async def letters(bus: MessageBus) -> list[tuple[str, int, str | None, str]]:
    """Return the dead letters: id, attempts, error and reason."""
    return [
        (dead.record.message_id, dead.row.attempt, dead.row.error, dead.letter.reason)
        for dead in await dead_letters(bus, QUEUE)
    ]
