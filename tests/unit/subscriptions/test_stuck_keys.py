"""A key that is stuck, or parked: others go on, memory is bounded, and it is let go again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from msgbus.journal import Journal, MemoryJournal, State
from msgbus.journal.operations import Drop
from msgbus.journal.ports import KeyRows
from msgbus.resilience import RetryConfig
from msgbus.runtime.clock import VirtualClock
from msgbus.subscriptions import Mode, SubscriptionTuning
from tests.stage import Handler, Stage, stage

Make = Callable[[VirtualClock], Journal]

SLOW = RetryConfig(
    max_retries=2, initial_delay=60, exponential_base=1, max_delay=60, in_process=10, jitter=False
)
FEW = SubscriptionTuning(buffer=20)


def memory(clock: VirtualClock) -> Journal:
    return MemoryJournal(clock=clock)


async def fill(s: Stage, count: int, stuck: int = 1) -> list[int]:
    """A message of each stuck key, many behind them, and a few of other keys at the end."""
    keys = [f"stuck-{number}" for number in range(stuck)]
    pairs = [(number, keys[number % stuck]) for number in range(count)]
    others = list(range(count, count + 5))
    await s.append_keyed(*pairs, *((number, f"free-{number}") for number in others))
    return others


async def test_a_stuck_key_holds_up_no_other() -> None:
    async with stage(memory) as s:
        handler = Handler()
        handler.failures = {0: 1}
        others = await fill(s, 300)
        subscription = await s.start(handler, mode=Mode.KEY_SHARED, tuning=FEW, retry=SLOW)
        most = 0
        while not set(others) <= set(handler.handled):
            await s.clock.advance(0.05)
            most = max(most, subscription.progress().buffered)

        assert [number for number in handler.numbers if number < 300] == [0]
        assert most <= 20
        assert subscription.progress().parked_keys == 1
        await s.written()
        assert len(await s.rows(State.PARKED)) == 299

        await s.until(lambda: len(handler.handled) == 305)

        assert [number for number in handler.handled if number < 300] == list(range(300))
        assert [len(handler.attempts(number)) for number in (0, 1, 299)] == [2, 1, 1]
        await subscription.caught_up()
        assert subscription.progress().parked_keys == 0
        assert await s.rows() == []


async def test_a_key_that_waits_in_memory_keeps_it_bounded() -> None:
    async with stage(memory) as s:
        handler = Handler()
        handler.failures = {0: 1}
        others = await fill(s, 300)
        retry = SLOW.model_copy(update={"in_process": 100.0})
        subscription = await s.start(handler, mode=Mode.KEY_SHARED, tuning=FEW, retry=retry)
        most = 0
        while len(handler.handled) < 305:
            await s.clock.advance(0.05)
            most = max(most, subscription.progress().buffered)

        assert most <= 20
        assert [number for number in handler.handled if number < 300] == list(range(300))
        assert [len(handler.attempts(number)) for number in (0, 1, 299)] == [2, 1, 1]
        assert set(others) <= set(handler.handled)
        await subscription.caught_up()
        assert await s.rows() == []


async def test_many_stuck_keys_keep_their_order_and_hold_up_no_other() -> None:
    async with stage(memory) as s:
        handler = Handler()
        handler.failures = dict.fromkeys(range(15), 1)
        others = await fill(s, 300, stuck=15)
        subscription = await s.start(handler, mode=Mode.KEY_SHARED, tuning=FEW, retry=SLOW)
        subscription.add_consumer("second", handler)
        await s.until(lambda: set(others) <= set(handler.handled), within=30)
        assert len(handler.handled) == 5

        await s.until(lambda: len(handler.handled) == 305)

        for key in range(15):
            mine = [number for number in handler.handled if number < 300 and number % 15 == key]
            assert mine == sorted(mine)


async def test_a_crash_with_parked_messages_loses_nothing_and_keeps_the_order() -> None:
    async with stage(memory) as s:
        first, second = Handler(), Handler()
        first.failures = {0: -1}
        second.failures = {0: 1}
        others = await fill(s, 60)
        options = {
            "mode": Mode.KEY_SHARED,
            "tuning": SubscriptionTuning(buffer=10),
            "retry": SLOW,
        }
        process = s.process()
        await s.start(first, process=process, **options)
        await s.until(lambda: set(others) <= set(first.handled))
        process.die()

        again = await s.start(second, process=s.process(), **options)
        await s.clock.advance(30)
        assert second.attempts(0) == []
        await s.until(lambda: {*range(60)} <= set(second.handled), within=400)

        assert [number for number in second.handled if number < 60] == list(range(60))
        assert second.attempts(0) == [2, 3]
        assert again.progress().counts.dead_lettered == 0
        await again.caught_up()
        assert await s.rows() == []


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
            if 0 not in handler.handled and handler.attempts(0).count(3) == 0:
                await s.until(lambda life=life: len(handler.attempts(0)) > life)  # type: ignore[misc]
                process.die()

        await s.until(lambda: len(set(handler.handled)) == 12)
        await s.written()

        (letter,) = await s.letters()
        assert letter.number == 0
        assert [number for number in handler.handled if number < 8] == list(range(1, 8))


async def test_messages_behind_a_short_pause_are_handled_in_order(make_journal: Make) -> None:
    async with stage(make_journal) as s:
        handler = Handler()
        handler.failures = {0: 2}
        await fill(s, 100)
        tuning = SubscriptionTuning(buffer=10)
        subscription = await s.start(handler, mode=Mode.KEY_SHARED, tuning=tuning)

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
        handler, other = Handler(), s.process().journal
        await park(s, handler)
        subscription = await s.start(handler, mode=Mode.KEY_SHARED, park_key=True)
        await s.until(lambda: subscription.progress().last_acked == 3)
        await subscription.caught_up()
        (one,) = await s.letters()
        await s.append_keyed((4, "a"))
        await subscription.caught_up()
        assert handler.handled == [3]
        assert [row.state for row in await s.rows()] == [State.DEAD, State.PARKED, State.PARKED]
        assert subscription.progress().parked_keys == 1

        handler.failures = {2: -1}
        await other.commit([Drop(one.row)])
        await s.until(lambda: subscription.progress().counts.dead_lettered == 2)
        await s.written()
        (two,) = await s.letters()
        assert (two.number, handler.handled) == (2, [3])
        assert subscription.progress().parked_keys == 1

        await other.commit([Drop(two.row)])
        await s.append_keyed((5, "a"), (6, "a"))
        await s.until(lambda: handler.handled == [3, 4, 5, 6])
        await s.until(lambda: subscription.progress().parked_keys == 0, within=1)
        await s.written()

        assert await s.rows() == []


class CountsOf:
    """A journal that counts how often the rows of a key are counted."""

    def __init__(self, inner: Journal) -> None:
        self._inner = inner
        self.count = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    @property
    def journal(self) -> Journal:
        return cast("Journal", self)

    async def key_rows(self, *args: Any) -> KeyRows:
        self.count += 1
        return await self._inner.key_rows(*args)


async def test_many_messages_of_a_parked_key_do_not_count_its_rows_each_time() -> None:
    async with stage(memory) as s:
        handler = Handler()
        await park(s, handler)
        s.shared = (counts := CountsOf(s.shared)).journal
        subscription = await s.start(handler, mode=Mode.KEY_SHARED, park_key=True)
        await s.until(lambda: subscription.progress().last_acked == 3)
        for number in range(4, 54):
            await s.append_keyed((number, "a"))
            await subscription.caught_up()

        assert len(await s.rows(State.PARKED)) == 51
        assert counts.count <= 4, "when it was parked"


async def test_resume_lets_parked_keys_go(make_journal: Make) -> None:
    async with stage(make_journal) as s:
        handler = Handler()
        await park(s, handler)
        subscription = await s.start(handler, mode=Mode.KEY_SHARED, park_key=True)
        await s.until(lambda: subscription.progress().last_acked == 3)
        await subscription.caught_up()
        assert subscription.progress().parked_keys == 1

        subscription.resume()
        await s.append_keyed((4, "a"))
        await s.until(lambda: handler.handled == [3, 2, 4])
        await s.until(lambda: subscription.progress().parked_keys == 0, within=1)

        assert [letter.number for letter in await s.letters()] == [1]
