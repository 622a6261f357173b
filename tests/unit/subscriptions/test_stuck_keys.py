"""A key that is stuck, or parked: others go on, memory is bounded, and it is let go again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from msgbus.journal import DeadLetter, Journal, MemoryJournal
from msgbus.journal.operations import DropDeadLetter
from msgbus.runtime.clock import VirtualClock
from msgbus.subscriptions import Mode, RetryTiers
from tests.stage import Handler, Stage, stage

Make = Callable[[VirtualClock], Journal]

SLOW = RetryTiers(max_attempts=3, initial_delay=60, exponential_base=1, in_process=10, jitter=False)


def memory(clock: VirtualClock) -> Journal:
    return MemoryJournal(clock=clock)


async def fill(s: Stage, count: int, stuck: int = 1) -> list[int]:
    """A message of each stuck key, many behind them, and a few of other keys at the end."""
    keys = [f"stuck-{number}" for number in range(stuck)]
    pairs = [(number, keys[number % stuck]) for number in range(count)]
    others = list(range(count, count + 5))
    await s.append_keyed(*pairs, *((number, f"free-{number}") for number in others))
    return others


@pytest.mark.parametrize("retry", [SLOW, SLOW.model_copy(update={"in_process": 100.0})])
async def test_a_stuck_key_holds_up_no_other(retry: RetryTiers) -> None:
    async with stage(memory) as s:
        handler = Handler()
        handler.failures = {0: 1}
        others = await fill(s, 300)
        subscription = await s.start(
            handler, mode=Mode.KEY_SHARED, max_buffered=20, fetch_size=10, retry=retry
        )
        most = 0
        while not set(others) <= set(handler.handled):
            await s.clock.advance(0.05)
            most = max(most, subscription.progress().buffered)

        assert [number for number in handler.numbers if number < 300] == [0]
        assert most <= 20
        assert subscription.progress().shelved >= 280

        await s.until(lambda: len(handler.handled) == 305)

        assert [number for number in handler.handled if number < 300] == list(range(300))
        assert [len(handler.tries(number)) for number in (0, 1, 299)] == [2, 1, 1]
        assert subscription.progress().shelved == 0
        await subscription.caught_up()


async def test_many_stuck_keys_keep_their_order_and_hold_up_no_other() -> None:
    async with stage(memory) as s:
        handler = Handler()
        handler.failures = dict.fromkeys(range(15), 1)
        others = await fill(s, 300, stuck=15)
        subscription = await s.start(
            handler, mode=Mode.KEY_SHARED, max_buffered=20, fetch_size=5, retry=SLOW
        )
        subscription.add_consumer("second", handler)
        await s.until(lambda: set(others) <= set(handler.handled), within=30)
        assert len(handler.handled) == 5

        await s.until(lambda: len(handler.handled) == 305)

        for key in range(15):
            mine = [number for number in handler.handled if number < 300 and number % 15 == key]
            assert mine == sorted(mine)


async def test_no_more_is_read_ahead_of_a_stuck_message_than_is_allowed() -> None:
    async with stage(memory) as s:
        handler = Handler()
        handler.failures = {0: 1}
        await s.append_keyed((0, "stuck"), *((number, "b") for number in range(1, 100)))
        subscription = await s.start(
            handler, mode=Mode.KEY_SHARED, max_ahead=30, fetch_size=10, retry=SLOW
        )
        await s.until(lambda: len(handler.handled) == 29, within=30)
        await s.clock.advance(10)

        assert handler.handled == list(range(1, 30))
        await s.until(lambda: len(handler.handled) == 100)
        assert handler.handled[29] == 0
        await subscription.caught_up()


async def test_a_crash_with_a_shelf_loses_nothing_and_keeps_the_order() -> None:
    async with stage(memory) as s:
        first, second = Handler(), Handler()
        first.failures = {0: -1}
        second.failures = {0: 1}
        others = await fill(s, 60)
        options = {"mode": Mode.KEY_SHARED, "max_buffered": 10, "fetch_size": 5, "retry": SLOW}
        process = s.process()
        await s.start(first, process=process, **options)
        await s.until(lambda: set(others) <= set(first.handled))
        process.die()

        again = await s.start(second, process=s.process(), **options)
        await s.until(lambda: set(others) <= set(second.handled), within=30)
        assert second.tries(0) == []
        await s.until(lambda: len(second.handled) == 65, within=400)

        assert [number for number in second.handled if number < 60] == list(range(60))
        assert again.progress().counts.dead_lettered == 0
        await again.caught_up()


async def test_those_behind_a_message_that_kills_its_process_are_not_blamed(
    make_journal: Make,
) -> None:
    async with stage(make_journal) as s:
        handler = Handler()
        handler.hangs = {0}
        await fill(s, 8)
        for life in range(6):
            process = s.process()
            await s.start(handler, process=process, mode=Mode.KEY_SHARED, max_in_flight=4)
            if 0 not in handler.handled and handler.tries(0).count(3) == 0:
                await s.until(lambda life=life: len(handler.tries(0)) > life)  # type: ignore[misc]
                process.die()

        await s.until(lambda: len(set(handler.handled)) == 12)

        (letter,) = await s.shared.dead_letters("receipts")
        assert letter.record.json() == {"number": 0}
        assert [number for number in handler.handled if number < 8] == list(range(1, 8))


async def test_a_shelf_on_disk_is_read_again_in_order(make_journal: Make) -> None:
    async with stage(make_journal) as s:
        handler = Handler()
        handler.failures = {0: 2}
        await fill(s, 100)
        subscription = await s.start(handler, mode=Mode.KEY_SHARED, max_buffered=10, fetch_size=5)

        await s.until(lambda: len(handler.handled) == 105)

        assert [number for number in handler.handled if number < 100] == list(range(100))
        await subscription.close()
        assert await s.position() == 105


# -- parked keys ---------------------------------------------------------------------------


async def park(s: Stage, handler: Handler) -> None:
    handler.failures = {1: -1}
    await s.append_keyed((1, "a"), (2, "a"), (3, "b"))


async def test_a_parked_key_goes_on_when_its_dead_letters_are_gone(make_journal: Make) -> None:
    async with stage(make_journal) as s:
        handler = Handler()
        await park(s, handler)
        subscription = await s.start(handler, mode=Mode.KEY_SHARED, park_key=True)
        await s.until(lambda: subscription.progress().last_acked == 3)
        one, two = await s.shared.dead_letters("receipts")

        await s.shared.commit([DropDeadLetter(one.id)])
        await s.append_keyed((4, "a"))
        await subscription.caught_up()
        assert handler.handled == [3]
        (_, four) = await s.shared.dead_letters("receipts")
        assert subscription.progress().parked_keys == 1

        await s.shared.commit([DropDeadLetter(two.id), DropDeadLetter(four.id)])
        await s.append_keyed((5, "a"), (6, "a"))
        await subscription.caught_up()

        assert handler.handled == [3, 5, 6]
        assert subscription.progress().parked_keys == 0


class LettersOf:
    """A journal that notes how many dead letters were read at a time."""

    def __init__(self, inner: Journal) -> None:
        self._inner = inner
        self.limits: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    @property
    def journal(self) -> Journal:
        return cast("Journal", self)

    async def dead_letters(
        self, subscription: str | None = None, *, after: int = 0, limit: int = 100
    ) -> list[DeadLetter]:
        self.limits.append(limit)
        return await self._inner.dead_letters(subscription, after=after, limit=limit)


async def test_many_messages_of_a_parked_key_do_not_read_all_letters_each_time() -> None:
    async with stage(memory) as s:
        handler = Handler()
        await park(s, handler)
        s.shared = (letters := LettersOf(s.shared)).journal
        subscription = await s.start(handler, mode=Mode.KEY_SHARED, park_key=True)
        await s.until(lambda: subscription.progress().last_acked == 3)
        for number in range(4, 54):
            await s.append_keyed((number, "a"))
            await subscription.caught_up()

        assert subscription.progress().counts.dead_lettered == 52
        assert letters.limits.count(100) <= 4, "pages of letters, at the start and once later"
        assert letters.limits.count(1) >= 50, "single letters"


async def test_resume_lets_parked_keys_go(make_journal: Make) -> None:
    async with stage(make_journal) as s:
        handler = Handler()
        await park(s, handler)
        subscription = await s.start(handler, mode=Mode.KEY_SHARED, park_key=True)
        await s.until(lambda: subscription.progress().last_acked == 3)
        assert subscription.progress().parked_keys == 1

        subscription.resume()
        await s.append_keyed((4, "a"))
        await subscription.caught_up()

        assert handler.handled == [3, 4]
        assert len(await s.shared.dead_letters("receipts")) == 2
