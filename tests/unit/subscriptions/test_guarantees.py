"""Ways in which dispatchers are known to lose, skip, repeat or hang: none of them here."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import pytest

from msgbus.errors import JournalFullError
from msgbus.journal import Journal, MemoryJournal
from msgbus.runtime.clock import VirtualClock
from msgbus.subscriptions import Delivery, Mode, Progress, StartAt, SubscriptionTuning
from tests.fakes import logged
from tests.stage import Handler, stage

Make = Callable[[VirtualClock], Journal]


def memory(clock: VirtualClock) -> Journal:
    return MemoryJournal(clock=clock)


# -- the rate limit ------------------------------------------------------------------------


@pytest.mark.parametrize("delivery", list(Delivery))
@pytest.mark.parametrize("mode", list(Mode))
async def test_under_a_rate_limit_all_are_delivered_and_the_cursor_ends_at_the_head(
    mode: Mode, delivery: Delivery
) -> None:
    async with stage(memory) as s:
        handler = Handler()
        handler.now = s.clock.now
        subscription = await s.start(
            handler, mode=mode, delivery=delivery, rate_limit=5, max_in_flight=4
        )
        await s.append(*range(100))
        began = s.clock.now()

        await s.until(lambda: len(handler.handled) == 100)
        await subscription.caught_up()

        assert sorted(handler.handled) == list(range(100))
        assert await s.position() == 100
        assert s.clock.now() - began == pytest.approx(99 / 5, abs=0.2)
        pauses = [b - a for a, b in zip(handler.times, handler.times[1:], strict=False)]
        # Evenly, not a burst at each full second; one token for a message, not two.
        assert max(pauses) == pytest.approx(0.2, abs=0.01)
        assert min(pauses) == pytest.approx(0.2, abs=0.01)
        assert subscription.progress().counts.stalls == 0


async def test_a_burst_may_go_out_after_a_quiet_time() -> None:
    async with stage(memory) as s:
        handler = Handler()
        await s.start(handler, rate_limit=1, tuning=SubscriptionTuning(burst=5))
        await s.append(*range(10))

        await s.clock.advance(0)
        assert len(handler.numbers) == 5
        await s.clock.advance(2)
        assert len(handler.numbers) == 7


async def test_a_rate_limit_on_a_file_loses_nothing(make_journal: Make) -> None:
    async with stage(make_journal) as s:
        handler = Handler()
        handler.failures = {3: 1, 11: 1}
        subscription = await s.start(handler, mode=Mode.SHARED, rate_limit=20, max_in_flight=2)
        await s.append(*range(40))

        await s.until(lambda: len(handler.handled) == 40)
        await subscription.caught_up()

        assert sorted(handler.handled) == list(range(40))
        assert await s.position() == 40


# -- the first cursor ----------------------------------------------------------------------


async def test_the_first_cursor_is_written_when_it_subscribes(make_journal: Make) -> None:
    async with stage(make_journal) as s:
        await s.append(1, 2)
        process = s.process()
        await s.start(Handler(), process=process, start=StartAt.LATEST)
        assert [cursor.acked for cursor in await s.cursors()] == [2]
        process.die()
        await s.append(3)
        handler = Handler()

        again = await s.start(handler, start=StartAt.LATEST)
        await s.until(lambda: again.progress().last_acked == 3)

        assert handler.numbers == [3]


# -- flushes -------------------------------------------------------------------------------


async def test_an_idle_subscription_writes_its_cursor_by_itself() -> None:
    async with stage(memory) as s:
        await s.start(Handler())
        await s.append(1, 2, 3)
        await s.clock.advance(1.1)

        assert await s.position() == 3


@pytest.mark.parametrize("mode", [Mode.EXCLUSIVE, Mode.SHARED])
async def test_a_busy_subscription_writes_what_is_done(mode: Mode) -> None:
    async with stage(memory) as s:
        handler = Handler()
        handler.hangs = {50}
        await s.start(handler, mode=mode, ack_timeout=None)
        await s.append(*range(51))
        await s.until(lambda: 50 in handler.numbers, within=1.0)
        await s.written()

        assert handler.handled == list(range(50))
        assert await s.position() == 50


@pytest.mark.parametrize("mode", list(Mode))
async def test_a_close_writes_the_cursor(make_journal: Make, mode: Mode) -> None:
    async with stage(make_journal) as s:
        handler = Handler()
        await s.append(1, 2)
        subscription = await s.start(handler, mode=mode)
        await s.until(lambda: sorted(handler.numbers) == [1, 2])

        await subscription.close()

        assert await s.position() == 2
        cursors = await s.cursors()
        assert all(cursor.acked == cursor.fetched for cursor in cursors)
        assert {cursor.owner for cursor in cursors} == {None}
        assert await s.rows() == []
        assert await s.shared.members() == []


async def test_a_write_that_fails_leaves_the_cursor_dirty() -> None:
    async with stage(memory) as s:
        process = s.process()
        refusals = 0

        def refuse_twice(_: object) -> None:
            nonlocal refusals
            if handler.handled and refusals < 2:
                refusals += 1
                message = "No space left."
                raise JournalFullError(message)

        handler = Handler()
        process.before_commit = refuse_twice
        subscription = await s.start(handler, process=process)
        await s.append(1)
        await s.clock.advance(0.6)
        assert refusals >= 1
        assert subscription.progress().acked == 0

        await s.clock.advance(3.0)

        assert refusals == 2
        assert subscription.progress().acked == 1
        assert subscription.progress().counts.errors == 2


# -- lag -----------------------------------------------------------------------------------


async def test_lag_and_age_are_told_without_consumers_and_before_the_first_ack(
    make_journal: Make,
) -> None:
    async with stage(make_journal) as s:
        subscription = s.make(Handler())
        subscription.remove_consumer("receipts")
        await s.append(1, 2, 3)
        await subscription.start()
        await s.clock.advance(10)
        await s.until(lambda: subscription.progress().oldest_unacked_age > 0)

        progress = subscription.progress()
        assert (progress.lag, progress.last_acked, progress.head) == (3, 0, 3)
        assert progress.oldest_unacked_age >= 9
        assert progress.consumers == 0

        subscription.add_consumer("late", Handler())
        await subscription.caught_up()
        assert subscription.progress().lag == 0
        assert subscription.progress().oldest_unacked_age == 0


async def test_the_age_is_that_of_the_oldest_message_in_flight() -> None:
    async with stage(memory) as s:
        handler = Handler()
        handler.hangs = {1}
        subscription = await s.start(handler, ack_timeout=None)
        await s.append(1)
        await s.clock.advance(7)

        assert subscription.progress().oldest_unacked_age == pytest.approx(7)
        assert subscription.progress().in_flight == 1
        assert subscription.engine.lag == 1


# -- stalls --------------------------------------------------------------------------------


async def hear_nothing(since: int, timeout: float | None = None, *, others: bool = False) -> int:
    await anyio.sleep_forever()
    return since


async def test_a_stall_is_found_within_a_second_and_healed(
    make_journal: Make, caplog: pytest.LogCaptureFixture
) -> None:
    async with stage(make_journal) as s:
        process = s.process()
        told: list[Progress] = []

        process.replace("changed", hear_nothing)
        handler = Handler()
        subscription = await s.start(handler, process=process, source={"on_stall": told.append})
        await s.quiet()  # it has looked for messages, and found none
        await s.append(1, 2)

        await s.until(lambda: handler.numbers == [1, 2])

        assert subscription.progress().counts.stalls == 1
        assert [progress.lag for progress in told] == [2]
        assert [entry["lag"] for entry in logged(caplog, "subscription_stalled")] == [2]


async def test_a_stall_takes_at_most_a_second() -> None:
    async with stage(memory) as s:
        process = s.process()

        process.replace("changed", hear_nothing)
        handler = Handler()
        await s.start(handler, process=process)
        await s.clock.advance(0.7)
        await s.append(1)

        await s.clock.advance(1.01)

        assert handler.numbers == [1]


async def test_rate_limits_pauses_and_busy_consumers_are_no_stalls() -> None:
    async with stage(memory) as s:
        limited, busy, paused = Handler(), Handler(), Handler()
        busy.hangs = {0}
        subscriptions = [
            await s.start(limited, name="limited", rate_limit=0.1),
            await s.start(busy, name="busy", ack_timeout=None),
            await s.start(paused, name="paused"),
        ]
        subscriptions[2].pause()
        await s.append(0, 1, 2)

        await s.clock.advance(25)

        assert [each.progress().counts.stalls for each in subscriptions] == [0, 0, 0]
        assert (limited.numbers, busy.numbers, paused.numbers) == ([0, 1, 2], [0], [])


# -- memory --------------------------------------------------------------------------------


async def test_a_slow_consumer_has_bounded_memory_and_holds_up_no_other_subscription(
    make_journal: Make,
) -> None:
    async with stage(make_journal) as s:
        slow, quick = Handler(), Handler()
        slow.hangs = set(range(5000))
        one = await s.start(
            slow, name="slow", ack_timeout=None, tuning=SubscriptionTuning(buffer=50)
        )
        two = await s.start(quick, name="quick")
        await s.append(*range(2000))

        await two.caught_up()

        assert len(quick.handled) == 2000
        assert one.progress().buffered <= 50
        assert one.progress().lag == 2000


async def test_gaps_in_the_journal_do_not_stop_the_cursor(make_journal: Make) -> None:
    async with stage(make_journal) as s:
        handler = Handler()
        handler.failures = {4: 1}
        for number in range(10):
            await s.append(number, topic="mine" if number % 2 == 0 else "other")
        subscription = await s.start(
            handler, mode=Mode.SHARED, max_in_flight=3, source={"topic": "mine"}
        )

        await s.until(lambda: len(handler.handled) == 5)
        await subscription.caught_up()

        assert await s.position() == 10
