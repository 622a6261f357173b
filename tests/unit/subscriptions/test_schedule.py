"""Retries that wait in the journal: as many as there are, few of them in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from msgbus.journal import Journal, MemoryJournal, Order, Selection, State
from msgbus.journal.operations import Append, Put
from msgbus.journal.ports import Claim
from msgbus.journal.records import DELAYED
from msgbus.resilience import RetryConfig
from msgbus.runtime.clock import VirtualClock
from msgbus.subscriptions import Mode, SubscriptionTuning
from msgbus.testing.conformance.journal.kit import make_record, make_row
from tests.stage import Handler, Stage, stage

Make = Callable[[VirtualClock], Journal]

LONG = RetryConfig(max_retries=2, initial_delay=60, max_delay=600, in_process=10, jitter=False)


def memory(clock: VirtualClock) -> Journal:
    return MemoryJournal(clock=clock)


def tuned(buffer: int) -> SubscriptionTuning:
    return SubscriptionTuning(buffer=buffer)


class Listening:
    """A journal that notes how many rows were claimed at a time."""

    def __init__(self, inner: Journal) -> None:
        self._inner = inner
        self.sizes: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    @property
    def journal(self) -> Journal:
        return cast("Journal", self)

    async def claim(self, *args: Any, **options: Any) -> Sequence[Claim]:
        found = await self._inner.claim(*args, **options)
        self.sizes.append(len(found))
        return found


async def schedule(s: Stage, dues: dict[int, float], who: str = "receipts") -> None:
    """Retries of messages that the cursor of `who` has passed."""
    now = s.clock.time()
    appended = await s.shared.commit([Append(make_record(number)) for number in dues])
    (cursor,) = await s.shared.open(who, Selection(order=Order.NONE), appended[-1].offset)
    assert cursor.acked == cursor.fetched == appended[-1].offset
    rows = [
        make_row(who, one.offset, attempt=1, due=now + due)
        for one, due in zip(appended, dues.values(), strict=True)
    ]
    await s.shared.commit([*map(Put, rows)])


async def test_a_start_reads_no_more_of_the_schedule_than_it_needs(make_journal: Make) -> None:
    async with stage(make_journal) as s:
        handler = Handler()
        await schedule(s, {number: 20.0 - number / 20 for number in range(300)})
        s.shared = (listening := Listening(s.shared)).journal
        subscription = await s.start(handler, mode=Mode.SHARED, tuning=tuned(10))
        await s.until(lambda: subscription.progress().scheduled == 300)
        assert sum(listening.sizes) == 0

        await s.until(lambda: len(handler.handled) == 300, within=600)

        assert sorted(handler.handled) == list(range(300))
        assert {attempt for _, attempt in handler.seen} == {2}
        assert max(listening.sizes) <= 10
        await s.until(lambda: subscription.progress().scheduled == 0)
        await subscription.close()
        assert await s.scheduled() == 0


async def test_many_new_retries_are_left_to_the_journal_and_all_come_back() -> None:
    async with stage(memory) as s:
        handler = Handler()
        handler.failures = dict.fromkeys(range(200), 2)
        await s.append(*range(200))
        subscription = await s.start(handler, mode=Mode.SHARED, retry=LONG, tuning=tuned(5))
        await subscription.caught_up()
        await s.until(lambda: subscription.progress().scheduled == 200, within=2)
        assert subscription.progress().buffered == 0

        await s.until(lambda: len(handler.handled) == 200, within=600)

        assert all(handler.attempts(number) == [1, 2, 3] for number in range(200))
        await s.until(lambda: subscription.progress().scheduled == 0)
        await subscription.close()
        assert await s.scheduled() == 0


async def test_they_come_in_the_order_of_their_dates_new_ones_among_them() -> None:
    async with stage(memory) as s:
        handler = Handler()
        handler.failures = {100: 1}
        await schedule(s, {number: 200.0 - number for number in range(20)})
        await s.append(100)
        await s.start(handler, mode=Mode.SHARED, retry=LONG, tuning=tuned(3))

        await s.until(lambda: len(handler.handled) == 21, within=600)

        assert handler.handled == [100, *reversed(range(20))]


async def test_what_others_have_in_the_schedule_is_left_alone(make_journal: Make) -> None:
    async with stage(make_journal) as s:
        handler = Handler()
        delayed = [Append(make_record(number), DELAYED, s.clock.time()) for number in (1, 2)]
        await s.shared.commit(delayed)
        await schedule(s, {3: 0.0, 4: 0.0}, "others")
        subscription = await s.start(handler, mode=Mode.SHARED)
        await subscription.caught_up()
        await s.clock.advance(60)

        assert handler.seen == [(3, 1), (4, 1)]
        assert subscription.progress().scheduled == 0
        for name in (DELAYED, "others"):
            rows = await s.rows(name=name)
            assert [(row.state, row.version) for row in rows] == [(State.WAITING, 1)] * 2


async def test_more_retries_than_the_window_holds_are_tried_one_window_after_the_other() -> None:
    async with stage(memory) as s:
        handler = Handler()
        await schedule(s, dict.fromkeys(range(50), 1.0))
        subscription = await s.start(handler, mode=Mode.SHARED, tuning=tuned(4))
        most = 0
        while len(handler.handled) < 50:
            await s.clock.advance(0.01)
            most = max(most, subscription.progress().buffered)

        assert most <= 4
        assert sorted(handler.handled) == list(range(50))
        assert {attempt for _, attempt in handler.seen} == {2}


async def test_a_seek_back_forgets_the_date_of_a_retry_and_delivers_it_once(
    make_journal: Make,
) -> None:
    async with stage(make_journal) as s:
        handler = Handler()
        handler.failures = {1: 1}
        await s.append(1, 2)
        subscription = await s.start(handler, mode=Mode.SHARED, retry=LONG)
        await subscription.caught_up()
        await s.until(lambda: subscription.progress().scheduled == 1, within=2)

        await subscription.seek(0)
        await s.until(lambda: handler.handled == [2, 1, 2])
        await s.clock.advance(300)

        assert handler.attempts(1) == [1, 1]
        assert subscription.progress().scheduled == 0
        await subscription.close()
        assert await s.rows() == []


async def test_a_crash_during_a_scheduled_retry_counts_it_once_and_loses_nothing(
    make_journal: Make,
) -> None:
    async with stage(make_journal) as s:
        first, second = Handler(), Handler()
        await schedule(s, {1: 5.0})
        process = s.process()
        first.hangs = {1}
        await s.start(first, process=process, mode=Mode.SHARED, retry=LONG)
        await s.until(lambda: first.seen == [(1, 2)])
        process.die()

        again = await s.start(second, process=s.process(), mode=Mode.SHARED, retry=LONG)
        await s.until(lambda: second.handled == [1])

        # Nothing was counted, as it did not run alone; now it does.
        assert second.seen == [(1, 2)]
        await again.close()
        assert await s.rows() == []
