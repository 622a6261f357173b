"""Messages that one test publishes, and the effects that its processes have had."""

from __future__ import annotations

import sqlite3
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager, closing
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import anyio

from msgbus import MessageBus
from msgbus.journal import Journal
from tests.integration.members.worker import Job, Message

MODES = ["exclusive", "key_shared", "shared", "queue"]
EVENT_MODES = MODES[:3]
GROUPS = 5


class Effect(NamedTuple):
    """What one handler has written in the transaction that acknowledged its message."""

    number: int
    pid: int
    began: float
    ended: float


class Site:
    """One journal, a bus that publishes on it and handles nothing, and the effects of others."""

    def __init__(self, path: Path, mode: str, bus: MessageBus) -> None:
        self.path = path
        self.mode = mode
        self.bus = bus
        self.published = 0

    @property
    def journal(self) -> Journal:
        assert self.bus.journal is not None
        return self.bus.journal

    async def publish(self, count: int) -> None:
        """Publish so many more, one after the other."""
        for number in range(self.published, self.published + count):
            await self._publish(number)
        self.published += count

    async def publish_at_once(self, count: int) -> None:
        """Publish so many more, in whichever order."""
        async with anyio.create_task_group() as tasks:
            for number in range(self.published, self.published + count):
                tasks.start_soon(self._publish, number)
        self.published += count

    async def _publish(self, number: int) -> None:
        if self.mode == "queue":
            await self.bus.enqueue(Job(number=number))
        else:
            await self.bus.publish(Message(number=number, group=f"g{number % GROUPS}"))

    async def until_members_have_met(self) -> None:
        """Wait until each member had the time to look at the others."""
        before = {one.id: one.renewals for one in await self.journal.members()}
        version = -1
        while any(one.renewals < before[one.id] + 3 for one in await self.journal.members()):
            version = await self.journal.changed(version, 0.2)

    def effects(self) -> list[Effect]:
        """Return all effects in the order of their commits."""
        query = "SELECT number, pid, began, ended FROM effects ORDER BY rowid"
        with closing(sqlite3.connect(self.path, timeout=30)) as connection:
            return [Effect(*row) for row in connection.execute(query)]

    async def until_all_have_effects(self, within: float = 60.0) -> list[Effect]:
        return await self.until_have_effects(range(self.published), within)

    async def until_have_effects(
        self, numbers: Iterable[int], within: float = 60.0
    ) -> list[Effect]:
        """Wait until each of these has had an effect."""
        wanted, effects = set(numbers), self.effects()
        version = await self.journal.changed(-1)
        with anyio.move_on_after(within):
            while not wanted <= {one.number for one in effects}:
                version = await self.journal.changed(version, 0.2)
                effects = self.effects()
            return effects
        missing = sorted(wanted - {one.number for one in effects})
        message = (
            f"{len(missing)} of {len(wanted)} have no effect after {within:g} s: {missing[:9]}"
        )
        raise AssertionError(message)


@asynccontextmanager
async def site(path: Path, mode: str) -> AsyncGenerator[Site]:
    table = "CREATE TABLE effects (number INT, pid INT, began REAL, ended REAL)"
    async with MessageBus(journal=f"sqlite:///{path}") as bus:
        await bus.transact(lambda connection: connection.execute(table))
        yield Site(path, mode, bus)


def repeated(effects: Iterable[Effect]) -> int:
    """Count the messages that have had more than one effect."""
    return sum(count > 1 for count in Counter(one.number for one in effects).values())


def orders(effects: Iterable[Effect], mode: str) -> list[list[Effect]]:
    """Return the effects of each order that the mode promises: one, one per key, or none."""
    if mode not in {"exclusive", "key_shared"}:
        return []
    found: defaultdict[int, list[Effect]] = defaultdict(list)
    for one in effects:
        found[0 if mode == "exclusive" else one.number % GROUPS].append(one)
    return list(found.values())


def disorder(effects: Iterable[Effect], mode: str) -> int:
    """Count effects that came before that of an earlier message of their order."""
    return sum(
        later.number < earlier.number
        for several in orders(effects, mode)
        for earlier, later in pairwise(several)
    )


def overlaps(effects: Iterable[Effect], mode: str) -> int:
    """Count handlers that began before that of the message before them had its effect."""
    return sum(
        later.began < earlier.ended
        for several in orders(effects, mode)
        for earlier, later in pairwise(several)
    )
