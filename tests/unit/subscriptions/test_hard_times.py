"""Consumers that are far slower than others, and clocks that jump."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import pytest

from msgbus.journal import Journal, MemoryJournal, Record, State
from msgbus.journal.operations import Append
from msgbus.resilience import RetryConfig
from msgbus.runtime.clock import VirtualClock
from msgbus.subscriptions import (
    DurableSubscription,
    Mode,
    SubscriptionConfig,
    SubscriptionTuning,
)
from msgbus.testing.conformance.journal.kit import make_record
from tests.stage import Handler, Stage, stage


def memory(clock: VirtualClock) -> Journal:
    return MemoryJournal(clock=clock)


# -- a consumer a hundred times slower than the rest ---------------------------------------


class Paced:
    """Takes its time with each message."""

    def __init__(self, clock: VirtualClock, pace: float) -> None:
        self._clock = clock
        self._pace = pace
        self.handled = 0
        self.done_at = 0.0

    async def __call__(self, record: Record, attempt: int) -> None:
        await self._clock.sleep(self._pace)
        self.handled += 1
        self.done_at = self._clock.now()


async def run_fast_ones(s: Stage, watch: Callable[[], None]) -> float:
    """Seconds until three fast subscriptions are done with 500 messages."""
    fast = [Paced(s.clock, 0.001) for _ in range(3)]
    for place, handler in enumerate(fast):
        await s.start(handler, name=f"fast-{place}")
    began = s.clock.now()
    await s.append(*range(500))
    while any(handler.handled < 500 for handler in fast):
        await s.clock.advance(0.01)
        watch()
    return max(handler.done_at for handler in fast) - began


async def test_a_slow_subscription_delays_no_other() -> None:
    async with stage(memory) as s:
        alone = await run_fast_ones(s, lambda: None)
    async with stage(memory) as s:
        slow = Paced(s.clock, 0.1)
        subscription = await s.start(slow, name="slow", tuning=SubscriptionTuning(buffer=50))
        buffered: list[int] = []

        took = await run_fast_ones(s, lambda: buffered.append(subscription.progress().buffered))

        assert took == pytest.approx(alone, rel=0.05)
        assert max(buffered) <= 50
        assert slow.handled < 20
        assert subscription.progress().lag > 480
        await s.until(lambda: slow.handled == 500)


async def test_a_slow_consumer_gets_little_and_delays_no_other_of_its_subscription() -> None:
    async with stage(memory) as s:
        slow, fast = Paced(s.clock, 0.1), Paced(s.clock, 0.001)
        subscription = s.make(slow, mode=Mode.SHARED)
        subscription.add_consumer("fast", fast)
        await subscription.start()
        began = s.clock.now()
        await s.append(*range(1000))

        await s.until(lambda: slow.handled + fast.handled == 1000)

        assert slow.handled <= 20
        assert fast.done_at - began < 1.2


async def test_what_lies_behind_a_slow_consumer_is_not_in_memory() -> None:
    async with stage(memory) as s:
        slow = Paced(s.clock, 10.0)
        payload = b'{"number":0,"text":"%s"}' % (b"x" * 10_000)
        records = [make_record(payload=payload) for _ in range(1000)]
        for start in range(0, 1000, 100):
            await s.shared.commit([Append(one) for one in records[start : start + 100]])
        del records
        tracemalloc.start()
        try:
            subscription = await s.start(slow, tuning=SubscriptionTuning(buffer=50))
            await s.clock.advance(100)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()

        assert slow.handled == 10
        assert subscription.progress().lag == 990
        # Ten million bytes lie in the journal; a buffer and a page of them are in memory.
        assert peak < 3 * 75 * 10_000


# -- clocks that jump ----------------------------------------------------------------------


class JumpingClock(VirtualClock):
    """A wall clock that somebody sets; the monotonic one does not care."""

    offset = 0.0

    def time(self) -> float:
        return super().time() + self.offset


@pytest.mark.parametrize("jump", [3600.0, -3600.0])
@pytest.mark.parametrize("mode", list(Mode))
async def test_a_jump_of_the_wall_clock_loses_and_doubles_nothing(mode: Mode, jump: float) -> None:
    clock = JumpingClock(1_000_000.0)
    async with MemoryJournal(clock=clock) as journal:
        handler = Handler()
        handler.failures = {1: 1, 5: 2, 8: -1}
        handler.hangs = {9}
        retry = RetryConfig(max_retries=2, initial_delay=5.0, in_process=7.0, jitter=False)
        config = SubscriptionConfig(mode=mode, retry=retry, ack_timeout=20.0, rate_limit=50.0)
        subscription = DurableSubscription(journal, "receipts", handler, config, clock=clock)
        records = [make_record(number, key=f"k{number % 3}") for number in range(30)]
        await journal.commit([Append(one) for one in records])
        await subscription.start()
        epochs = [cursor.epoch for cursor in await journal.cursors("receipts")]

        for _ in range(40):
            await clock.advance(1.0)
            clock.offset += jump
            jump = -jump
        handler.release.set()
        clock.offset = 0.0
        for _ in range(200):
            await clock.advance(1.0)

        # One is poison; the one that hung was handled once, when it was let go.
        assert sorted(handler.handled) == [number for number in range(30) if number != 8]
        assert (await journal.count("receipts")) == {State.DEAD: 1}
        assert subscription.progress().counts.timed_out <= 3
        assert [one.epoch for one in await journal.cursors("receipts")] == epochs, (
            "nothing was lost"
        )
        await subscription.close()
