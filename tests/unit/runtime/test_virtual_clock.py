"""`VirtualClock`: timers keep their times; looks for news become rarer while nothing is due."""

from __future__ import annotations

from itertools import pairwise

import anyio
import pytest

from msgbus.runtime.clock import SystemClock, VirtualClock, look_after

DAY = 86_400.0


class Looker:
    """Looks every quarter of a second; notes when."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.began = clock.now()
        self.seen: list[float] = []

    async def run(self) -> None:
        while True:
            with look_after(0.25, self.clock):
                await anyio.sleep_forever()
            self.seen.append(self.clock.now() - self.began)


async def test_looks_keep_their_times_in_the_first_ten_seconds() -> None:
    clock = VirtualClock()
    looker = Looker(clock)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(looker.run)
        await clock.advance(10)
        tasks.cancel_scope.cancel()

    assert looker.seen == [0.25 * number for number in range(1, 41)]


async def test_looks_become_rarer_in_a_quiet_day_and_one_is_taken_at_its_end() -> None:
    clock = VirtualClock()
    looker = Looker(clock)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(looker.run)
        await clock.advance(DAY)
        tasks.cancel_scope.cancel()

    assert len(looker.seen) < 100
    assert looker.seen[-1] == DAY
    late = [after - before for before, after in pairwise(looker.seen)]
    for gap, quiet in zip(late, looker.seen, strict=False):
        assert gap <= max(0.25, quiet / 4) + 1e-6


async def test_a_timer_is_never_late_because_of_a_look() -> None:
    clock = VirtualClock()
    began, woken = clock.now(), list[float]()
    looker = Looker(clock)

    async def sleep(seconds: float) -> None:
        await clock.sleep(seconds)
        woken.append(clock.now() - began)

    dues = [3.0, 20.125, 20.25, 1000.0, 1000.0, 50_000.5, DAY]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(looker.run)
        for due in reversed(dues):
            tasks.start_soon(sleep, due)
        await clock.advance(DAY)
        tasks.cancel_scope.cancel()

    assert woken == pytest.approx(dues)


async def test_looks_keep_their_times_again_after_a_timer() -> None:
    clock = VirtualClock()
    looker = Looker(clock)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(looker.run)
        tasks.start_soon(clock.sleep, 5000.0)
        await clock.advance(5005)
        tasks.cancel_scope.cancel()

    assert [one for one in looker.seen if one >= 5000] == [5000 + n / 4 for n in range(21)]


async def test_what_a_look_finds_runs_before_what_is_due_at_the_same_time() -> None:
    clock = VirtualClock()
    order: list[str] = []

    async def look() -> None:
        with look_after(600, clock):
            await anyio.sleep_forever()
        order.append("look")

    async def sleep() -> None:
        await clock.sleep(700)
        order.append("timer")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(look)
        tasks.start_soon(sleep)
        await clock.advance(700)

    assert order == ["look", "timer"]


@pytest.mark.parametrize("steps", [10, 1000])
async def test_many_small_steps_look_as_often_as_before(steps: int) -> None:
    clock = VirtualClock()
    looker = Looker(clock)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(looker.run)
        for _ in range(steps):
            await clock.advance(0.5)
        tasks.cancel_scope.cancel()

    assert len(looker.seen) == 2 * steps


async def test_on_another_clock_a_look_is_a_plain_time_limit() -> None:
    with look_after(0.0, SystemClock()) as scope:
        await anyio.sleep_forever()

    assert scope.cancelled_caught
