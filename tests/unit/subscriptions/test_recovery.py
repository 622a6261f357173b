"""After a crash: nothing acknowledged is lost, nobody works twice at once, killers are found."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from msgbus.errors import CursorError
from msgbus.journal import Journal, MemoryJournal, Record, State
from msgbus.journal.operations import Remove
from msgbus.resilience import RetryConfig
from msgbus.runtime.clock import VirtualClock
from msgbus.subscriptions import (
    DurableSubscription,
    Mode,
    Standing,
    StartAt,
    SubscriptionTuning,
)
from msgbus.testing.simulation.processes import Process
from tests.fakes import logged
from tests.stage import Disk, Handler, stage

Make = Callable[[VirtualClock], Journal]
TTL = 5.0


def memory(clock: VirtualClock) -> Journal:
    return MemoryJournal(clock=clock)


@pytest.mark.parametrize("mode", list(Mode))
async def test_what_was_not_acked_at_a_crash_is_delivered_again(
    make_journal: Make, mode: Mode
) -> None:
    async with stage(make_journal) as s:
        first, second = Handler(), Handler()
        first.hangs = {7}
        process = s.process()
        await s.append_keyed(*((number, "k") for number in range(20)))
        await s.start(first, process=process, mode=mode)
        await s.until(lambda: 7 in first.numbers)
        await s.written()
        assert await s.position() == 7
        process.die()

        again = await s.start(second, process=s.process(), mode=mode)
        if mode is not Mode.SHARED:
            assert again.progress().standing is Standing.STANDBY
        await s.until(lambda: len(second.handled) == 13)
        await again.caught_up()

        assert set(first.handled) | set(second.handled) == set(range(20))
        assert second.handled == list(range(7, 20))
        assert await s.rows() == []


async def test_after_an_unclean_end_messages_go_one_by_one_until_what_was_in_flight_is_passed(
    make_journal: Make, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "msgbus")
    async with stage(make_journal) as s:
        process = s.process()
        first = Handler()
        first.hangs = set(range(100))
        await s.append(*range(10))
        tuning = SubscriptionTuning(buffer=6)
        await s.start(first, process=process, mode=Mode.SHARED, max_in_flight=4, tuning=tuning)
        await s.until(lambda: len(first.numbers) == 4)
        process.die()
        most: list[int] = []
        second = Handler()

        async def consume(record: Record, attempt: int) -> None:
            progress = again.progress()
            if record.offset <= 6:
                assert progress.is_recovering
                most.append(progress.in_flight)
            await second(record, attempt)

        again = s.make(consume, process=s.process(), mode=Mode.SHARED, max_in_flight=4)
        await again.start()
        await s.until(lambda: len(second.handled) == 10)
        await s.written()

        assert most == [1] * 6
        assert not again.progress().is_recovering
        (recovered,) = logged(caplog, "subscription_recovered")
        assert (recovered["offset"], recovered["in_flight_until"]) == (0, 6)


def _is_over(process: Process, subscription: DurableSubscription) -> bool:
    return process.is_dead or subscription.progress().counts.dead_lettered == 1


@pytest.mark.parametrize("mode", list(Mode))
async def test_a_message_that_kills_its_process_is_found_and_dead_lettered(
    make_journal: Make, mode: Mode
) -> None:
    async with stage(make_journal) as s:
        await s.append_keyed(*((number, "k") for number in range(8)))
        handled: list[int] = []
        deaths = 0
        for _ in range(10):
            process = s.process()

            async def consume(record: Record, attempt: int, process: Process = process) -> None:
                number = record.json()["number"]
                if number == 3:
                    process.die()
                    return
                handled.append(number)

            subscription = await s.start(consume, process=process, mode=mode)
            await s.until(partial(_is_over, process, subscription))
            if not process.is_dead:
                break
            deaths += 1
        await s.until(lambda: len(set(handled)) == 7)
        await s.written()

        # Three attempts that are counted, after one of which nothing is known but its place.
        assert deaths == 4
        (dead,) = await s.letters()
        assert dead.number == 3
        assert dead.row.attempt == 3
        assert "process ended while the message was being handled, 3 times" in dead.error
        assert dead.letter.reason == "its process ended in every attempt"
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


# -- standby -------------------------------------------------------------------------------


async def test_a_standby_follows_when_the_owner_stops_renewing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "msgbus")
    async with stage(memory) as s:
        first, second = s.process(), s.process()
        a, b = Handler(), Handler()
        await s.start(a, process=first)
        standby = await s.start(b, process=second)
        await s.append(1)
        await s.clock.advance(60)
        assert (a.numbers, b.numbers) == ([1], [])
        assert standby.progress().standing is Standing.STANDBY
        assert standby.progress().owner is not None
        assert len(logged(caplog, "subscription_standby")) == 1, "said once"
        first.die()
        died = s.clock.now()

        await s.until(lambda: standby.progress().standing is Standing.ACTIVE)
        took = s.clock.now() - died
        await s.append(2)
        await s.until(lambda: b.numbers == [2])

        assert TTL - TTL / 4 <= took <= TTL + 0.6
        assert standby.progress().owner is None
        assert [one["epoch"] for one in logged(caplog, "subscription_active")] == [1, 2]


async def test_a_standby_follows_at_once_when_the_owner_closes() -> None:
    async with stage(memory) as s:
        owner = await s.start(Handler(), process=s.process())
        standby = await s.start(Handler(), process=s.process())
        await owner.close()
        await s.clock.advance(1.0)

        assert standby.progress().standing is Standing.ACTIVE


async def test_a_standby_reports_lag_and_can_be_waited_for(make_journal: Make) -> None:
    async with stage(make_journal) as s:
        owner = await s.start(Handler(), process=s.process())
        standby = await s.start(Handler(), process=s.process())
        await s.append(1, 2, 3)
        await s.until(lambda: standby.progress().last_acked == 3)
        await standby.caught_up()

        assert standby.progress().lag == 0
        owner.pause()
        await s.append(4)
        await s.until(lambda: standby.progress().lag == 1)
        assert await standby.close() == 0


@pytest.mark.parametrize("mode", list(Mode))
async def test_what_a_former_owner_writes_is_refused(make_journal: Make, mode: Mode) -> None:
    async with stage(make_journal) as s:
        old, new = Handler(), Handler()
        old.hangs = new.hangs = {1}
        await s.append(1)
        silent = s.process()
        loser = await s.start(old, process=silent, mode=mode)
        await s.until(lambda: old.numbers == [1])
        owner = await s.start(new, process=s.process(), mode=mode)
        silent.freeze()
        await s.until(lambda: new.numbers == [1])

        (claimed,) = await s.rows()
        old.release.set()
        await s.until(lambda: loser.progress().in_flight == 0)
        await s.written()

        assert old.handled == [1], "it was not told in time"
        assert await s.position() == 0
        assert await s.rows(State.CLAIMED) == [claimed]
        new.release.set()
        await owner.caught_up()
        assert await s.position() == 1
        assert (old.numbers, new.numbers) == ([1], [1])


@pytest.mark.parametrize("mode", list(Mode))
async def test_a_process_that_was_ended_is_cut_off(make_journal: Make, mode: Mode) -> None:
    async with stage(make_journal) as s:
        old = Handler()
        old.hangs = {1}
        await s.append(1)
        loser = await s.start(old, process=s.process(), mode=mode)
        await s.until(lambda: old.numbers == [1])
        (member,) = await s.shared.members()
        assert await s.shared.end(member)

        await s.until(lambda: old.seen == [(1, 1), (1, 1)])  # it has joined anew
        old.release.set()
        await loser.caught_up()

        assert old.handled == [1]


async def test_a_cursor_that_cannot_be_read_is_an_error(make_journal: Make) -> None:
    async with stage(make_journal) as s:
        await s.append(1, 2)
        process = s.process()
        handler = Handler()

        async def unreadable(name: str, *_: object) -> None:
            raise CursorError(name, "is damaged: its checksum does not fit.")

        process.replace("open", unreadable)
        with pytest.raises(CursorError, match="damaged"):
            await s.start(handler, process=process, start=StartAt.LATEST)

        await s.clock.advance(30)
        assert handler.numbers == []
        assert await s.shared.members() == []
        assert await s.shared.cursors("receipts") == []


# -- a journal that fails ------------------------------------------------------------------


@pytest.mark.parametrize("mode", list(Mode))
async def test_a_full_disk_holds_up_but_loses_nothing(make_journal: Make, mode: Mode) -> None:
    async with stage(make_journal) as s:
        disk = Disk()
        handler = Handler()
        handler.hangs = {3}
        await s.append_keyed(*((number, "k") for number in (1, 2, 3)))
        subscription = await s.start(handler, process=s.process(disk), mode=mode)
        await s.until(lambda: handler.numbers == [1, 2, 3])
        await s.written()
        disk.is_full = True
        handler.release.set()
        await s.until(lambda: subscription.progress().counts.errors >= 3)
        assert await s.position() < 3
        assert "No space left" in (subscription.progress().last_error or "")

        disk.is_full = False
        await s.until(lambda: not subscription.progress().buffered)
        await s.clock.advance(1)
        await s.written()
        assert await s.position() == 3
        assert handler.handled == [1, 2, 3]


async def test_a_journal_that_fails_is_asked_once_a_beat(caplog: pytest.LogCaptureFixture) -> None:
    async with stage(memory) as s:
        disk = Disk()
        process = s.process(disk)
        handler = Handler()
        handler.failures = {1: 1}
        await s.append(1)
        await s.start(handler, process=process, mode=Mode.SHARED)
        await s.until(lambda: handler.numbers == [1])
        disk.is_full = True
        await s.clock.advance(10)

        assert 15 <= len(logged(caplog, "subscription_failed")) <= 21
        disk.is_full = False
        await s.until(lambda: handler.handled == [1])


# -- what is known after a crash -----------------------------------------------------------


async def test_a_subscription_that_is_removed_begins_anew(make_journal: Make) -> None:
    async with stage(make_journal) as s:
        handler = Handler()
        await s.append(1)
        subscription = await s.start(handler)
        await subscription.caught_up()
        await subscription.close()
        await s.shared.commit([Remove("receipts")])

        again = await s.start(handler, start=StartAt.EARLIEST)
        await again.caught_up()

        assert handler.numbers == [1, 1]


async def test_attempts_in_process_are_not_charged_after_a_crash(make_journal: Make) -> None:
    async with stage(make_journal) as s:
        process = s.process()
        first, second = Handler(), Handler()
        first.failures = {1: 1}
        await s.append(1)

        async def die_at_the_second_attempt(record: Record, attempt: int) -> None:
            if attempt == 2:
                process.die()
            await first(record, attempt)

        retry = RetryConfig(max_retries=4)
        await s.start(die_at_the_second_attempt, process=process, retry=retry)
        await s.until(lambda: process.is_dead)
        again = await s.start(second, process=s.process(), retry=retry)
        await s.until(lambda: second.handled == [1])
        await again.caught_up()

        assert second.attempts(1) == [1]


# -- rows that must run alone --------------------------------------------------------------


@pytest.mark.parametrize("mode", [Mode.SHARED, Mode.KEY_SHARED])
async def test_a_message_waits_a_while_to_run_alone_and_then_runs_beside_others(
    mode: Mode, caplog: pytest.LogCaptureFixture
) -> None:
    async with stage(memory) as s:
        dying, living = s.process(), s.process()
        first, slow, second = Handler(), Handler(), Handler()
        in_doubt: dict[str, Any] = {"name": "in doubt", "source": {"topic": "shop.*"}}
        first.hangs = {1, 2}
        slow.hangs = {0}
        await s.append_keyed((1, "a"), (2, "b"))
        await s.start(first, process=dying, mode=mode, max_in_flight=2, **in_doubt)
        await s.until(lambda: sorted(first.numbers) == [1, 2])
        await s.start(slow, process=living, name="slow", ack_timeout=None, start=StartAt.LATEST)
        await s.append(0, topic="slow")
        await s.until(lambda: slow.numbers == [0])
        dying.die()
        second.now = s.clock.now

        again = await s.start(
            second, process=living, mode=mode, max_in_flight=2, ack_timeout=10.0, **in_doubt
        )
        await s.until(lambda: again.progress().is_recovering)
        began = s.clock.now()
        await s.append_keyed((3, "c"))
        assert second.numbers == []
        await s.until(lambda: len(second.handled) == 3)
        await s.written()

        assert second.times[0] - began == pytest.approx(10.0, abs=0.5)
        assert second.times[2] - began == pytest.approx(10.0, abs=0.5), "both waited once"
        assert {attempt for _, attempt in second.seen} == {1}
        assert again.progress().counts.not_alone == 2
        assert not again.progress().is_recovering
        assert len(logged(caplog, "subscription_not_alone")) == 1


async def test_messages_of_all_partitions_wait_to_run_alone_at_the_same_time() -> None:
    async with stage(memory) as s:
        dying, living = s.process(), s.process()
        first, slow, second = Handler(), Handler(), Handler()
        in_doubt: dict[str, Any] = {
            "name": "in doubt",
            "source": {"topic": "shop.*"},
            "mode": Mode.KEY_SHARED,
            "max_in_flight": 8,
        }
        first.hangs = {*range(1, 9)}
        slow.hangs = {0}
        await s.append_keyed(*((number, f"k{number}") for number in range(1, 9)))
        await s.start(first, process=dying, **in_doubt)
        await s.until(lambda: len(first.numbers) == 8)
        await s.start(slow, process=living, name="slow", ack_timeout=None, start=StartAt.LATEST)
        await s.append(0, topic="slow")
        await s.until(lambda: slow.numbers == [0])
        dying.die()
        second.now = s.clock.now

        again = await s.start(second, process=living, ack_timeout=10.0, **in_doubt)
        await s.until(lambda: again.progress().is_recovering)
        began = s.clock.now()
        await s.until(lambda: len(second.handled) == 8)

        # Its partitions are acquired one after the other, the first rows are found meanwhile.
        assert [time - began for time in second.times] == pytest.approx([10.0] * 8, abs=0.5)
        assert again.progress().counts.not_alone == 8


async def test_a_message_that_runs_beside_others_is_not_charged() -> None:
    async with stage(memory) as s:
        dying, living = s.process(), s.process()
        first, slow, second, third = Handler(), Handler(), Handler(), Handler()
        first.hangs = second.hangs = {1}
        slow.hangs = {0}
        await s.append(1)
        await s.start(first, process=dying, name="in doubt")
        await s.until(lambda: first.numbers == [1])
        await s.start(slow, process=living, name="slow", ack_timeout=None, start=StartAt.LATEST)
        await s.append(0)
        await s.until(lambda: slow.numbers == [0])
        dying.die()
        again = await s.start(second, process=living, name="in doubt", ack_timeout=60.0)
        await s.until(lambda: second.numbers == [1])
        assert again.progress().is_recovering, "it runs beside others"
        living.die()

        await s.start(third, process=s.process(), name="in doubt")
        await s.until(lambda: 1 in third.handled)

        assert third.attempts(1) == [1]


async def test_one_that_runs_alone_without_a_limit_lets_others_go_on_after_a_while() -> None:
    async with stage(memory) as s:
        dying, living = s.process(), s.process()
        first, second, other = Handler(), Handler(), Handler()
        first.hangs = second.hangs = {1}
        await s.append(1)
        await s.start(first, process=dying, ack_timeout=None)
        await s.until(lambda: first.numbers == [1])
        dying.die()
        await s.start(other, process=living, name="other", start=StartAt.LATEST)
        await s.start(second, process=living, ack_timeout=None)
        await s.until(lambda: second.numbers == [1])
        await s.append(2)
        await s.clock.advance(20)
        assert other.numbers == []

        await s.until(lambda: other.handled == [2], within=12)

        second.release.set()
        await s.until(lambda: second.handled == [1, 2])
