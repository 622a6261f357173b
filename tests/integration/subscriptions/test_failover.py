"""Two processes on one file, one of them active: the other follows, and the first is fenced."""

from __future__ import annotations

import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path

import anyio
import pytest

from msgbus.journal import SqliteJournal
from msgbus.testing.conformance.journal import make_record
from tests.integration.subscriptions.nursery import Child, Nursery, nursery

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120), pytest.mark.asyncio_only("one is enough")]


class Pair:
    def __init__(self, home: Nursery, path: Path, journal: SqliteJournal) -> None:
        self.journal = journal
        self._numbers = iter(range(1_000_000))
        self.holder = home.start("follow", path, "first")
        self.holder.until(lambda _: self.holder.says("standing", "active"))
        self.standby = home.start("follow", path, "second")
        self.standby.until(lambda _: self.standby.says("standing", "standby"))

    async def append(self, count: int) -> int:
        """More messages; gives the last offset."""
        acks = await self.journal.append([make_record(next(self._numbers)) for _ in range(count)])
        return acks[-1].offset

    async def passed(self, offset: int) -> None:
        """Wait until everything up to here is done, and written."""
        with anyio.fail_after(30):
            while True:
                cursor = await self.journal.cursor("followed")
                if cursor is not None and cursor.offset >= offset:
                    return
                await self.journal.changed(await self.journal.changed(-1), timeout=0.05)


@asynccontextmanager
async def pair(path: Path) -> AsyncGenerator[Pair]:
    async with SqliteJournal(path, reserve=0) as journal:
        with nursery() as home:
            yield Pair(home, path, journal)


def handled(child: Child) -> list[tuple[int, int]]:
    """Epoch and offset of what it has handled."""
    return [(int(words[1]), int(words[2])) for words in child.lines() if words[0] == "handled"]


async def test_the_standby_follows_a_holder_that_was_killed(tmp_path: Path) -> None:
    async with pair(tmp_path / "journal.db") as both:
        await both.append(200)
        both.holder.until(lambda _: len(handled(both.holder)) > 20)
        both.holder.kill()
        await both.passed(await both.append(5))

        first, second = handled(both.holder), handled(both.standby)
        assert {offset for _, offset in first + second} == set(range(1, 206))
        assert all(a[1] < b[1] for a, b in pairwise(second))
        assert {epoch for epoch, _ in first}.isdisjoint({epoch for epoch, _ in second})


async def test_a_holder_that_was_stopped_is_fenced_when_it_goes_on(tmp_path: Path) -> None:
    async with pair(tmp_path / "journal.db") as both:
        await both.append(200)
        both.holder.until(lambda _: len(handled(both.holder)) > 20)
        both.holder.signal(signal.SIGSTOP)
        await both.passed(await both.append(5))
        (epoch,) = {epoch for epoch, _ in handled(both.standby)}
        before = await both.journal.cursor("followed")

        both.holder.signal(signal.SIGCONT)
        both.holder.until(lambda _: both.holder.says("standing", "standby"))
        after = await both.journal.cursor("followed")
        last = await both.append(50)
        await both.passed(last)

        assert before is not None
        assert after is not None
        assert (after.offset, after.epoch) == (before.offset, epoch)
        # What it had in hand it may have finished; of what came later it got nothing.
        first = [offset for _, offset in handled(both.holder)]
        assert max(first) < 205
        second = [offset for _, offset in handled(both.standby)]
        assert second == sorted(set(second))
        assert set(first) | set(second) == set(range(1, last + 1))

        both.standby.kill()
        await both.passed(await both.append(5))
        assert max(offset for _, offset in handled(both.holder)) == last + 5
