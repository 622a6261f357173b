"""Retries in the journal's schedule: as many as there are, few of them in memory."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, cast

from msgbus.journal import Journal, MemoryJournal, Scheduled, operations as op
from msgbus.runtime.clock import VirtualClock
from msgbus.subscriptions import Mode, RetryTiers
from msgbus.testing.conformance.journal import make_record
from tests.stage import Handler, Stage, stage

Make = Callable[[VirtualClock], Journal]

LONG = RetryTiers(max_attempts=3, initial_delay=60, in_process=10, jitter=False)


def memory(clock: VirtualClock) -> Journal:
    return MemoryJournal(clock=clock)


class Listening:
    """A journal that notes how much of the schedule was read."""

    def __init__(self, inner: Journal) -> None:
        self._inner = inner
        self.sizes: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    @property
    def journal(self) -> Journal:
        return cast("Journal", self)

    async def due(
        self,
        time: float,
        limit: int = 100,
        *,
        subscription: str | None = None,
        names: Collection[str] | None = None,
    ) -> list[Scheduled]:
        found = await self._inner.due(time, limit, subscription=subscription, names=names)
        self.sizes.append(len(found))
        return found


async def schedule(s: Stage, dues: dict[int, float], who: str | None = "receipts") -> None:
    """Retries of messages that the cursor of `who` has passed."""
    records = [make_record(number) for number in dues]
    acks = await s.shared.append(records)
    entries = [
        Scheduled(
            f"{who}/{record.message_id}",
            s.clock.time() + due,
            record._replace(offset=ack.offset),
            who,
            2,
        )
        for record, ack, due in zip(records, acks, dues.values(), strict=True)
    ]
    operations: list[op.Operation] = [op.Schedule(entry) for entry in entries]
    if who is not None:
        operations.append(op.CreateCursor(who, await s.shared.head()))
    await s.shared.commit(operations)


async def test_a_start_reads_no_more_of_the_schedule_than_it_needs(make_journal: Make) -> None:
    async with stage(make_journal) as s:
        handler = Handler()
        await schedule(s, {number: 20.0 - number / 20 for number in range(300)})
        s.shared = (listening := Listening(s.shared)).journal
        subscription = await s.start(handler, mode=Mode.SHARED, fetch_size=10)
        await s.until(lambda: bool(listening.sizes))

        assert subscription.progress().scheduled == 300
        assert listening.sizes == [10]

        await s.until(lambda: len(handler.handled) == 300, within=600)

        assert sorted(handler.handled) == list(range(300))
        assert {attempt for _, attempt in handler.seen} == {2}
        assert max(listening.sizes) <= 40
        assert subscription.progress().scheduled == 0
        await subscription.close()
        assert await s.shared.count_scheduled(subscription="receipts") == 0


async def test_many_new_retries_are_left_to_the_journal_and_all_come_back() -> None:
    async with stage(memory) as s:
        handler = Handler()
        handler.failures = dict.fromkeys(range(200), 2)
        await s.append(*range(200))
        s.shared = (listening := Listening(s.shared)).journal
        subscription = await s.start(handler, mode=Mode.SHARED, retry=LONG, fetch_size=5)
        await subscription.caught_up()
        assert subscription.progress().scheduled == 200
        assert sum(listening.sizes) == 0

        await s.until(lambda: len(handler.handled) == 200, within=600)

        assert all(handler.tries(number) == [1, 2, 3] for number in range(200))
        assert subscription.progress().scheduled == 0
        await subscription.close()
        assert await s.shared.count_scheduled(subscription="receipts") == 0


async def test_they_come_in_the_order_of_their_dates_new_ones_among_them() -> None:
    async with stage(memory) as s:
        handler = Handler()
        handler.failures = {100: 1}
        await schedule(s, {number: 200.0 - number for number in range(20)})
        await s.append(100)
        await s.start(handler, mode=Mode.SHARED, retry=LONG, fetch_size=3)

        await s.until(lambda: len(handler.handled) == 21, within=600)

        assert handler.handled == [100, *reversed(range(20))]


async def test_what_others_have_in_the_schedule_is_left_alone(make_journal: Make) -> None:
    async with stage(make_journal) as s:
        handler = Handler()
        await schedule(s, {1: 0.0, 2: 0.0}, None)
        await schedule(s, {3: 0.0, 4: 0.0}, "others")
        subscription = await s.start(handler, mode=Mode.SHARED)
        await subscription.caught_up()
        await s.clock.advance(60)

        assert handler.tries(3) == [1]
        assert subscription.progress().scheduled == 0
        assert await s.shared.count_scheduled() == 2
        assert await s.shared.count_scheduled(subscription="others") == 2


async def test_more_retries_than_the_window_holds_are_tried_one_window_after_the_other() -> None:
    async with stage(memory) as s:
        handler = Handler()
        await schedule(s, dict.fromkeys(range(50), 1.0))
        subscription = await s.start(handler, mode=Mode.SHARED, fetch_size=4, max_buffered=4)
        most = 0
        while len(handler.handled) < 50:
            await s.clock.advance(0.01)
            most = max(most, subscription.progress().buffered)

        assert most <= 4
        assert sorted(handler.handled) == list(range(50))
        assert {attempt for _, attempt in handler.seen} == {2}


async def test_a_seek_back_keeps_the_date_of_a_retry_and_tries_it_once(make_journal: Make) -> None:
    async with stage(make_journal) as s:
        handler = Handler()
        handler.failures = {1: 1}
        handler.now = s.clock.now
        await s.append(1, 2)
        subscription = await s.start(handler, mode=Mode.SHARED, retry=LONG)
        began = s.clock.now()
        await subscription.caught_up()
        assert subscription.progress().scheduled == 1

        await subscription.seek(0)
        await s.until(lambda: handler.handled == [2, 2, 1])
        await s.clock.advance(300)

        assert handler.tries(1) == [1, 2]
        assert handler.times[-1] - began >= 59.9
        assert subscription.progress().scheduled == 0
        await subscription.close()
        assert await s.shared.count_scheduled(subscription="receipts") == 0


async def test_a_crash_during_a_scheduled_retry_counts_it_and_loses_nothing(
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

        assert second.seen == [(1, 3)]
        await again.close()
        assert await s.shared.count_scheduled(subscription="receipts") == 0
