"""Waiting for what other processes write: often while they do, seldom when they do not."""

from __future__ import annotations

import anyio
import anyio.lowlevel

from msgbus.journal.watch import BUSY, IDLE, Watch
from msgbus.runtime.clock import VirtualClock


class File:
    """Stands for a file that another process may write to; notes when it is looked at."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self.head: int | None = None
        self.looks: list[float] = []

    def look(self) -> int | None:
        self.looks.append(self._clock.now())
        head, self.head = self.head, None
        return head


async def test_looks_become_rarer_while_nothing_happens() -> None:
    clock = VirtualClock()
    file = File(clock)
    watch = Watch(clock, file.look)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch.until, lambda: watch.head > 0, None)
        await clock.advance(5.0)
        tasks.cancel_scope.cancel()

    pauses = [b - a for a, b in zip(file.looks, file.looks[1:], strict=False)]
    assert abs(pauses[0] - BUSY) < 0.005
    assert abs(pauses[-1] - IDLE) < 0.005
    assert pauses == sorted(pauses)
    assert len(pauses) < 20


async def test_news_make_looks_frequent_again() -> None:
    clock = VirtualClock()
    file = File(clock)
    watch = Watch(clock, file.look)
    heads: list[int] = []

    async def follow() -> None:
        while True:
            await watch.until(lambda: watch.head > max(heads, default=0), None)
            heads.append(watch.head)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(follow)
        await clock.advance(5.0)
        file.head = 7
        while not heads:
            await clock.advance(BUSY / 10)
        file.head = 8
        await clock.advance(2 * BUSY)
        assert heads == [7, 8]
        tasks.cancel_scope.cancel()


async def test_many_who_wait_look_no_more_often_than_one() -> None:
    clock = VirtualClock()
    file = File(clock)
    watch = Watch(clock, file.look)

    async with anyio.create_task_group() as tasks:
        for _ in range(50):
            tasks.start_soon(watch.until, lambda: watch.head > 0, None)
        await clock.advance(0.0)
        file.looks.clear()
        await clock.advance(5.0)
        tasks.cancel_scope.cancel()

    assert len(file.looks) < 20


async def test_without_a_file_only_what_is_told_is_news() -> None:
    watch = Watch(VirtualClock())
    ended: list[int] = []

    async def wait() -> None:
        await watch.until(lambda: watch.head >= 3, None)
        ended.append(watch.head)

    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(wait)
        await anyio.lowlevel.checkpoint()
        watch.tell(2)
        await anyio.lowlevel.checkpoint()
        assert ended == []
        watch.tell(3)

    assert ended == [3, 3, 3]
