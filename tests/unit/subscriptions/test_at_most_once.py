"""At most once: acknowledged before it is delivered, and never delivered again."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import pytest

from msgbus.journal import Journal, MemoryJournal, Record, State
from msgbus.runtime.clock import VirtualClock
from msgbus.subscriptions import Delivery, Mode, SubscriptionTuning
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
        tuning = SubscriptionTuning(buffer=window)
        subscription = await s.start(deliver, delivery=Delivery.AT_MOST_ONCE, tuning=tuning)
        await s.until(lambda: len(positions) == 20)

        # It is passed, and no more than the buffer with it: a crash loses no others.
        assert all(offset <= stored < offset + window for offset, stored in positions)
        await subscription.close()


async def test_at_most_once_writes_the_cursor_once_for_a_window() -> None:
    async with stage(memory) as s:
        handler = Handler()
        commits = CommitsOf(s.shared)
        s.shared = commits.journal
        await s.append(*range(1000))
        tuning = SubscriptionTuning(buffer=100)
        subscription = await s.start(handler, delivery=Delivery.AT_MOST_ONCE, tuning=tuning)
        await subscription.caught_up()
        await s.until(lambda: len(handler.handled) == 1000)

        assert handler.handled == list(range(1000))
        assert commits.count < 30


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
        cursors = await s.cursors()
        assert max(cursor.acked for cursor in cursors) == 20

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

        # Each was delivered once, in order; the one in flight at the end is a dead letter.
        assert sorted(first.numbers + second.numbers) == list(range(20))
        for keys in ({0}, {1}) if mode is Mode.KEY_SHARED else ({0, 1},):
            own = [number for number in second.numbers if number % 2 in keys]
            assert own == sorted(own)
        (letter,) = await s.letters()
        assert letter.number == 2
        assert "its process stopped; it is delivered at most once" in letter.error
        assert await s.scheduled() == 0


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
        await s.written()

        assert staying.numbers == []
        (letter,) = await s.letters()
        assert "'receipts' was removed in attempt 1" in letter.error


@pytest.mark.parametrize("mode", list(Mode))
async def test_at_most_once_is_never_retried(make_journal: Make, mode: Mode) -> None:
    async with stage(make_journal) as s:
        handler = Handler()
        handler.failures = {1: -1}
        await s.append(0, 1, 2)
        subscription = await s.start(handler, delivery=Delivery.AT_MOST_ONCE, mode=mode)

        await s.until(lambda: sorted(handler.numbers) == [0, 1, 2])
        await s.until(lambda: subscription.progress().counts.dead_lettered == 1)
        await s.written()

        assert handler.attempts(1) == [1]
        assert [row.state for row in await s.rows()] == [State.DEAD]


@pytest.mark.parametrize("mode", list(Mode))
async def test_at_most_once_is_done_once_it_is_handled(make_journal: Make, mode: Mode) -> None:
    async with stage(make_journal) as s:
        handler = Handler()
        handler.hangs = {1}
        await s.append(0, 1, 2)
        subscription = await s.start(handler, delivery=Delivery.AT_MOST_ONCE, mode=mode)
        await s.until(lambda: 1 in handler.numbers)
        await s.written()

        done: list[int] = []

        async def wait() -> None:
            await subscription.caught_up()
            done.extend(sorted(handler.handled))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            await s.written()
            assert done == []
            handler.release.set()
            await s.until(lambda: done == [0, 1, 2])
