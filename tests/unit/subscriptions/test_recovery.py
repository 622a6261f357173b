"""After a crash: nothing acked is lost, nobody works twice at once, killers are found."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from msgbus.errors import CursorError, JournalFullError
from msgbus.journal import Journal, MemoryJournal, Record
from msgbus.journal.operations import DropCursor, MoveCursor, Operation
from msgbus.runtime.clock import VirtualClock
from msgbus.subscriptions import Mode, RetryTiers, Standing, StartAt
from msgbus.testing.simulation.processes import Process
from tests.fakes import logged
from tests.stage import Handler, Stage, stage

Make = Callable[[VirtualClock], Journal]


def memory(clock: VirtualClock) -> Journal:
    return MemoryJournal(clock=clock)


async def take_lease(s: Stage) -> None:
    """Take it from a living holder, between two of its renewals."""
    while True:
        seen = await s.shared.lease("receipts")
        taken = await s.shared.acquire("receipts", "somebody else", seen=seen)
        if taken.holder == "somebody else":
            return


@pytest.mark.parametrize("mode", list(Mode))
async def test_what_was_not_acked_at_a_crash_is_delivered_again(
    make_journal: Make, mode: Mode
) -> None:
    async with stage(make_journal) as s:
        first, second = Handler(), Handler()
        first.hangs = {7}
        process = s.process()
        await s.append(*range(20))
        dying = await s.start(first, process=process, mode=mode)
        await s.until(lambda: 7 in first.numbers)
        await s.until(lambda: dying.progress().persisted == 7)
        process.die()

        again = await s.start(second, mode=mode)
        assert again.progress().standing is Standing.STANDBY
        await s.until(lambda: again.progress().last_acked == 20)

        assert set(first.handled) | set(second.handled) == set(range(20))
        assert second.handled == list(range(7, 20))
        assert again.engine.epoch == 2


async def test_after_an_unclean_end_messages_go_one_by_one_until_the_old_window_is_passed(
    make_journal: Make, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "msgbus")
    async with stage(make_journal) as s:
        process = s.process()
        first = Handler()
        first.hangs = set(range(100))
        await s.append(*range(10))
        window = {"max_in_flight": 4, "max_buffered": 6}
        await s.start(first, process=process, mode=Mode.SHARED, **window)
        await s.until(lambda: len(first.numbers) == 4)
        process.die()
        most: list[int] = []
        second = Handler()

        async def deliver(record: Record, attempt: int) -> None:
            progress = again.progress()
            most.append(progress.in_flight if progress.is_recovering else 0)
            await second(record, attempt)

        again = s.make(deliver, mode=Mode.SHARED, max_in_flight=4)
        await again.start()
        await s.until(lambda: len(second.handled) == 10)

        assert most[:6] == [1] * 6
        assert most[6:] == [0] * 4
        assert not again.progress().is_recovering
        (recovered,) = logged(caplog, "subscription_recovered")
        assert (recovered["offset"], recovered["in_flight_until"]) == (0, 6)


async def test_a_message_that_kills_its_process_is_found_and_buried(make_journal: Make) -> None:
    async with stage(make_journal) as s:
        await s.append(*range(8))
        handled: list[int] = []
        deaths = 0
        for _ in range(10):
            process = s.process()

            async def deliver(record: Record, attempt: int, process: Process = process) -> None:
                number = record.json()["number"]
                if number == 3:
                    process.die()
                    return
                handled.append(number)

            subscription = await s.start(deliver, process=process)
            await s.until(
                lambda process=process, subscription=subscription: (  # type: ignore[misc]
                    process.is_dead or subscription.progress().last_acked == 8
                )
            )
            if not process.is_dead:
                break
            deaths += 1

        # Three tries that are known, after one of which only the window is known.
        assert deaths == 4
        (letter,) = await s.shared.dead_letters("receipts")
        assert letter.record.json() == {"number": 3}
        assert letter.attempts == 3
        assert letter.error is not None
        assert "process ended while it was being handled, 3 times" in letter.error
        assert set(handled) == set(range(8)) - {3}


async def test_a_clean_end_needs_no_recovery(make_journal: Make) -> None:
    async with stage(make_journal) as s:
        await s.append(*range(5))
        subscription = await s.start(Handler())
        await subscription.caught_up()
        await subscription.close()

        again = await s.start(Handler())

        assert not again.progress().is_recovering
        assert again.progress().standing is Standing.ACTIVE


async def test_a_standby_follows_when_the_holder_stops_renewing() -> None:
    async with stage(memory) as s:
        first, second = s.process(), s.process()
        a, b = Handler(), Handler()
        await s.start(a, process=first)
        standby = await s.start(b, process=second)
        await s.append(1)
        await s.clock.advance(60)
        assert (a.numbers, b.numbers) == ([1], [])
        assert standby.progress().standing is Standing.STANDBY
        first.die()
        died = s.clock.now()

        await s.until(lambda: standby.progress().standing is Standing.ACTIVE)
        took = s.clock.now() - died
        await s.append(2)
        await standby.caught_up()

        assert b.numbers == [2]
        assert 5.0 - 5.0 / 3 <= took <= 7.0


async def test_a_standby_follows_at_once_when_the_holder_closes() -> None:
    async with stage(memory) as s:
        holder = await s.start(Handler(), process=s.process())
        standby = await s.start(Handler(), process=s.process())
        await holder.close()
        await s.clock.advance(1.0)

        assert standby.progress().standing is Standing.ACTIVE


async def test_a_standby_reports_lag_and_can_be_waited_for(make_journal: Make) -> None:
    async with stage(make_journal) as s:
        holder = await s.start(Handler(), process=s.process())
        standby = await s.start(Handler(), process=s.process())
        await s.append(1, 2, 3)
        await holder.caught_up()
        await s.until(lambda: standby.progress().last_acked == 3)

        assert standby.progress().lag == 0
        holder.pause()
        await s.append(4)
        await s.until(lambda: standby.progress().lag == 1)
        assert await standby.close() == 0


async def test_what_an_engine_writes_after_its_lease_is_gone_is_refused(make_journal: Make) -> None:
    async with stage(make_journal) as s:
        old = Handler()
        old.hangs = {1}
        await s.append(1, 2)
        loser = await s.start(old)
        await s.until(lambda: old.numbers == [1])
        await take_lease(s)

        old.release.set()
        await s.until(lambda: loser.progress().standing is Standing.STANDBY)

        assert await s.position() == 0
        assert loser.progress().in_flight == 0
        assert loser.engine.epoch == 0


async def test_the_loser_of_a_lease_ends_what_it_has_in_hand(make_journal: Make) -> None:
    async with stage(make_journal) as s:
        old = Handler()
        old.hangs = {1}
        await s.append(1)
        loser = await s.start(old, process=s.process())
        await s.until(lambda: old.numbers == [1])
        await take_lease(s)
        await s.until(lambda: loser.progress().standing is Standing.STANDBY)

        old.release.set()
        await s.clock.advance(1)

        assert old.handled == []


async def test_a_cursor_that_cannot_be_read_is_an_error(make_journal: Make) -> None:
    async with stage(make_journal) as s:
        await s.append(1, 2)
        process = s.process()
        handler = Handler()

        async def unreadable(name: str) -> None:
            raise CursorError(name, "is damaged: its checksum does not fit.")

        process.replace("cursor", unreadable)
        with pytest.raises(CursorError, match="damaged"):
            await s.start(handler, process=process, start=StartAt.LATEST)

        await s.clock.advance(30)
        assert handler.numbers == []
        lease = await s.shared.lease("receipts")
        assert lease is not None
        assert lease.holder is None


async def test_a_full_disk_holds_up_but_loses_nothing(make_journal: Make) -> None:
    async with stage(make_journal) as s:
        process = s.process()
        is_full = True

        def refuse(operations: Sequence[Operation]) -> None:
            if is_full and any(isinstance(operation, MoveCursor) for operation in operations):
                message = "No space left."
                raise JournalFullError(message)

        process.before_commit = refuse
        handler = Handler()
        await s.append(1, 2, 3)
        subscription = await s.start(handler, process=process)
        await s.until(lambda: handler.numbers == [1, 2, 3])
        await s.until(lambda: subscription.progress().counts.errors >= 3)
        progress = subscription.progress()
        assert (progress.last_acked, progress.persisted) == (3, 0)
        assert await s.position() == 0

        is_full = False
        await s.until(lambda: subscription.progress().persisted == 3)
        assert await s.position() == 3


async def test_a_subscription_that_is_forgotten_begins_anew(make_journal: Make) -> None:
    async with stage(make_journal) as s:
        handler = Handler()
        await s.append(1)
        subscription = await s.start(handler)
        await subscription.caught_up()
        await subscription.close()
        await s.shared.commit([DropCursor("receipts")])

        again = await s.start(handler, start=StartAt.EARLIEST)
        await again.caught_up()

        assert handler.numbers == [1, 1]


async def test_tries_in_memory_survive_a_crash_once_they_have_begun(make_journal: Make) -> None:
    async with stage(make_journal) as s:
        process = s.process()
        first, second = Handler(), Handler()
        first.failures = {1: 1}
        await s.append(1)

        async def die_at_the_second_try(record: Record, attempt: int) -> None:
            if attempt == 2:
                process.die()
            await first(record, attempt)

        retry = RetryTiers(max_attempts=5)
        await s.start(die_at_the_second_try, process=process, retry=retry)
        await s.until(lambda: process.is_dead)
        again = await s.start(second, retry=retry)
        await s.until(lambda: again.progress().last_acked == 1)

        assert second.tries(1) == [3]


async def test_a_journal_that_fails_is_asked_once_a_beat(caplog: pytest.LogCaptureFixture) -> None:
    async with stage(memory) as s:
        process = s.process()
        is_full = False

        def refuse(operations: Sequence[Operation]) -> None:
            if is_full:
                message = "No space left."
                raise JournalFullError(message)

        process.before_commit = refuse
        handler = Handler()
        handler.failures = {1: 1}
        await s.append(1)
        await s.start(handler, process=process, mode=Mode.SHARED)
        await s.until(lambda: handler.numbers == [1])
        is_full = True
        await s.clock.advance(10)

        assert 15 <= len(logged(caplog, "subscription_failed")) <= 21
        is_full = False
        await s.until(lambda: handler.handled == [1])
