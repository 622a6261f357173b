"""At most once: passed before it is delivered, and never delivered again."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import pytest

from msgbus.journal import Journal, MemoryJournal, Record
from msgbus.runtime.clock import VirtualClock
from msgbus.subscriptions import Delivery, Mode
from tests.stage import CommitsOf, Handler, stage

Make = Callable[[VirtualClock], Journal]


def memory(clock: VirtualClock) -> Journal:
    return MemoryJournal(clock=clock)


@pytest.mark.parametrize("window", [1, 4, 100])
async def test_at_most_once_moves_the_cursor_before_the_delivery(
    make_journal: Make, window: int
) -> None:
    async with stage(make_journal) as s:
        positions: list[tuple[int, int]] = []

        async def deliver(record: Record, attempt: int) -> None:
            positions.append((record.offset, await s.position()))

        await s.append(*range(20))
        subscription = await s.start(
            deliver, delivery=Delivery.AT_MOST_ONCE, loss_window=window, fetch_size=7
        )
        await s.until(lambda: len(positions) == 20)

        # It is passed, and no more than the window with it: a crash loses no others.
        assert all(offset <= stored < offset + window for offset, stored in positions)
        await subscription.close()


async def test_at_most_once_writes_the_cursor_once_for_a_window() -> None:
    async with stage(memory) as s:
        handler = Handler()
        commits = CommitsOf(s.shared)
        s.shared = commits.journal
        await s.append(*range(1000))
        subscription = await s.start(handler, delivery=Delivery.AT_MOST_ONCE, loss_window=100)
        await subscription.caught_up()
        await s.until(lambda: len(handler.handled) == 1000)

        assert handler.handled == list(range(1000))
        assert len(commits.kinds) < 30


@pytest.mark.parametrize("mode", list(Mode))
async def test_at_most_once_hands_back_what_was_passed_and_not_begun(
    make_journal: Make, mode: Mode
) -> None:
    async with stage(make_journal) as s:
        first, second = Handler(), Handler()
        first.hangs = {2}
        await s.append_keyed(*((number, "ab"[number % 2]) for number in range(20)))
        subscription = await s.start(first, delivery=Delivery.AT_MOST_ONCE, mode=mode)
        await s.until(lambda: 2 in first.numbers)
        assert await s.position() == 20

        leaving = anyio.Event()

        async def leave() -> None:
            assert await subscription.close(timeout=1.0) == 1
            leaving.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(leave)
            await s.until(leaving.is_set)
        again = await s.start(second, delivery=Delivery.AT_MOST_ONCE, mode=mode)
        await s.until(lambda: len(first.numbers) + len(second.numbers) == 20)
        await again.close()

        # Each was delivered once, in order; the one in hand at the end is a dead letter.
        assert sorted(first.numbers + second.numbers) == list(range(20))
        assert second.numbers == sorted(second.numbers)
        (letter,) = await s.shared.dead_letters("receipts")
        assert letter.record.json() == {"number": 2}
        assert await s.shared.count_scheduled(subscription="receipts") == 0


async def test_at_most_once_repeats_nothing_when_a_consumer_leaves(make_journal: Make) -> None:
    async with stage(make_journal) as s:
        leaving, staying = Handler(), Handler()
        leaving.hangs = {1}
        subscription = s.make(leaving, mode=Mode.SHARED, delivery=Delivery.AT_MOST_ONCE)
        await s.append(1)
        await subscription.start()
        await s.until(lambda: leaving.numbers == [1])

        subscription.add_consumer("staying", staying)
        subscription.remove_consumer("receipts")
        await s.until(lambda: subscription.progress().counts.dead_lettered == 1)

        assert staying.numbers == []
        (letter,) = await s.shared.dead_letters("receipts")
        assert "left while it had it in hand" in (letter.error or "")


async def test_at_most_once_never_tries_again(make_journal: Make) -> None:
    async with stage(make_journal) as s:
        handler = Handler()
        handler.failures = {1: -1}
        await s.append(0, 1, 2)
        subscription = await s.start(handler, delivery=Delivery.AT_MOST_ONCE)

        await s.until(lambda: handler.numbers == [0, 1, 2])
        await s.until(lambda: subscription.progress().counts.dead_lettered == 1)

        assert handler.tries(1) == [1]
        assert len(await s.shared.dead_letters("receipts")) == 1
