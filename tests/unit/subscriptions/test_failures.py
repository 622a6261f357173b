"""What becomes of a message that fails: tries, pauses, dates, and the last resort."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import pytest

from msgbus import Refusal, Unhandleable
from msgbus.journal import Journal, MemoryJournal, Record, TicketState
from msgbus.journal.operations import (
    AddDeadLetter,
    CloseTicket,
    Fence,
    MoveCursor,
    Operation,
)
from msgbus.runtime.clock import VirtualClock
from msgbus.subscriptions import Mode, Poison, RetryTiers, Standing, StartAt
from msgbus.testing.conformance.journal import make_record
from tests.fakes import logged
from tests.stage import CommitsOf, Handler, stage

Make = Callable[[VirtualClock], Journal]


def memory(clock: VirtualClock) -> Journal:
    return MemoryJournal(clock=clock)


async def test_a_failed_message_is_tried_again_after_growing_pauses() -> None:
    async with stage(memory) as s:
        handler = Handler()
        handler.failures = {1: 2}
        handler.now = s.clock.now
        await s.append(1)
        began = s.clock.now()
        await s.start(handler)

        await s.until(lambda: handler.handled == [1])

        assert handler.tries(1) == [1, 2, 3]
        assert [time - began for time in handler.times] == pytest.approx([0.0, 0.1, 0.3])


async def test_the_last_failure_ends_in_a_dead_letter(
    make_journal: Make, caplog: pytest.LogCaptureFixture
) -> None:
    async with stage(make_journal) as s:
        handler = Handler()
        handler.failures = {2: -1}
        handler.error = ValueError("password=hunter2 was wrong")
        await s.append(1, 2, 3)
        subscription = await s.start(handler)

        await s.until(lambda: handler.handled == [1, 3])
        await subscription.caught_up()

        (letter,) = await s.shared.dead_letters("receipts")
        assert letter.record.json() == {"number": 2}
        assert letter.attempts == 3
        assert letter.error is not None
        assert "hunter2" not in letter.error
        assert "ValueError" in letter.error
        assert handler.tries(2) == [1, 2, 3]
        assert subscription.progress().counts.dead_lettered == 1
        assert await s.position() == 3
        assert [entry["offset"] for entry in logged(caplog, "subscription_dead_lettered")] == [2]


async def test_the_dead_letter_and_the_cursor_are_one_transaction(make_journal: Make) -> None:
    async with stage(make_journal) as s:
        process = s.process()
        handler = Handler()
        handler.failures = {1: -1}
        await s.append(1)

        def die_behind_the_letter(operations: object) -> None:
            if "AddDeadLetter" in repr(operations):
                process.die()

        process.after_commit = die_behind_the_letter
        await s.start(handler, process=process, retry=RetryTiers(max_attempts=1))
        await s.until(lambda: process.is_dead)

        assert await s.position() == 1
        assert len(await s.shared.dead_letters("receipts")) == 1


async def test_drop_passes_it_and_says_so(
    make_journal: Make, caplog: pytest.LogCaptureFixture
) -> None:
    async with stage(make_journal) as s:
        handler = Handler()
        handler.failures = {1: -1}
        await s.append(1, 2)
        subscription = await s.start(handler, on_poison=Poison.DROP)

        await s.until(lambda: handler.handled == [2])

        assert subscription.progress().counts.dropped == 1
        assert await s.shared.dead_letters() == []
        assert len(logged(caplog, "subscription_dropped_message")) == 1


async def test_block_stops_until_resumed(make_journal: Make) -> None:
    async with stage(make_journal) as s:
        handler = Handler()
        handler.failures = {1: 4}
        await s.append(1, 2)
        subscription = await s.start(handler, on_poison=Poison.BLOCK)
        await s.until(lambda: subscription.progress().standing is Standing.BLOCKED)
        await s.clock.advance(60)
        assert handler.numbers == [1, 1, 1]
        assert subscription.progress().blocked_at == 1
        assert await s.position() == 0

        subscription.resume()
        await s.until(lambda: handler.numbers == [1, 1, 1, 1])
        await s.until(lambda: subscription.progress().standing is Standing.BLOCKED)
        subscription.resume()
        await subscription.caught_up()

        assert handler.handled == [1, 2]
        assert handler.tries(1) == [1, 2, 3, 4, 5]


async def test_seek_leads_past_a_block(make_journal: Make) -> None:
    async with stage(make_journal) as s:
        handler = Handler()
        handler.failures = {1: -1}
        await s.append(1, 2)
        subscription = await s.start(handler, on_poison=Poison.BLOCK)
        await s.until(lambda: subscription.progress().standing is Standing.BLOCKED)

        await subscription.seek(2)
        await subscription.caught_up()

        assert handler.handled == [2]


async def test_a_refusal_is_an_answer(make_journal: Make) -> None:
    async with stage(make_journal) as s:
        handler = Handler()
        handler.failures = {1: -1}
        handler.error = Refusal("sold out")
        await s.append(1)
        subscription = await s.start(handler)

        await subscription.caught_up()

        assert handler.tries(1) == [1]
        assert subscription.progress().counts.refused == 1
        assert await s.shared.dead_letters() == []


async def test_errors_to_give_up_on_are_not_tried_again(make_journal: Make) -> None:
    async with stage(make_journal) as s:
        handler = Handler()
        handler.failures = {1: -1}
        await s.append(1)
        retry = RetryTiers(max_attempts=9, give_up_on=(ValueError,))
        subscription = await s.start(handler, retry=retry)

        await s.until(lambda: subscription.progress().counts.dead_lettered == 1)

        assert handler.tries(1) == [1]


async def test_only_errors_to_retry_on_are_tried_again(make_journal: Make) -> None:
    async with stage(make_journal) as s:
        handler = Handler()
        handler.failures = {1: -1}
        await s.append(1, 2)
        retry = RetryTiers(max_attempts=9, retry_on=(ConnectionError,))
        subscription = await s.start(handler, retry=retry)

        await s.until(lambda: subscription.progress().counts.dead_lettered == 1)

        assert handler.tries(1) == [1]
        handler.error = ConnectionResetError()
        handler.failures = {3: 1}
        await s.append(3)
        await s.until(lambda: handler.handled == [2, 3])
        assert handler.tries(3) == [1, 2]


@pytest.mark.parametrize("poison", list(Poison))
async def test_what_is_unhandleable_is_given_up_at_once(make_journal: Make, poison: Poison) -> None:
    async with stage(make_journal) as s:
        handler = Handler()
        handler.failures = {1: -1}
        handler.error = Unhandleable("no such product")
        await s.append(1, 2)
        retry = RetryTiers(max_attempts=9, retry_on=(Exception,))
        subscription = await s.start(handler, retry=retry, on_poison=poison)

        if poison is Poison.BLOCK:
            await s.until(lambda: subscription.progress().standing is Standing.BLOCKED)
        else:
            await s.until(lambda: handler.handled == [2])

        assert handler.tries(1) == [1]
        letters = await s.shared.dead_letters("receipts")
        assert len(letters) == (1 if poison is Poison.DEAD_LETTER else 0)
        assert all("no such product" in (letter.error or "") for letter in letters)


async def test_pauses_vary_by_the_chance_that_is_given() -> None:
    async with stage(memory) as s:
        handler = Handler()
        handler.failures = {1: 2}
        handler.now = s.clock.now
        chances = iter([0.0, 0.75])
        await s.append(1)
        began = s.clock.now()
        retry = RetryTiers(initial_delay=1.0)
        await s.start(handler, retry=retry, chance=lambda: next(chances))

        await s.until(lambda: handler.handled == [1])

        assert [time - began for time in handler.times] == pytest.approx([0.0, 0.5, 3.0])


async def test_what_goes_with_a_dead_letter_is_written_in_its_transaction(
    make_journal: Make,
) -> None:
    async with stage(make_journal) as s:
        handler = Handler()
        handler.failures = {2: -1}
        told: list[tuple[int, str, int]] = []

        def close_ticket(
            record: Record, error: BaseException | None, attempts: int
        ) -> list[Operation]:
            told.append((record.json()["number"], repr(error), attempts))
            return [CloseTicket(record.message_id, 1.0, error=str(error))]

        await s.append(1, 2, 3)
        commits = CommitsOf(s.shared)
        s.shared = commits.journal
        await s.start(handler, on_dead_letter=close_ticket)
        await s.until(lambda: handler.handled == [1, 3])

        assert told == [(2, "ValueError('no')", 3)]
        (letter,) = await s.shared.dead_letters("receipts")
        ticket = await s.shared.ticket(letter.record.message_id)
        assert ticket is not None
        assert (ticket.state, ticket.error) == (TicketState.FAILED, "no")
        (together,) = [each for each in commits.kinds if AddDeadLetter in each]
        assert {CloseTicket, MoveCursor, Fence} <= together


async def test_if_what_goes_with_a_dead_letter_cannot_be_written_neither_is_the_letter(
    make_journal: Make,
) -> None:
    async with stage(make_journal) as s:
        handler = Handler()
        handler.failures = {1: -1}
        troubles = [KeyError("no ticket"), KeyError("no ticket")]

        def stumble(*_: object) -> list[Operation]:
            if troubles:
                raise troubles.pop()
            return []

        await s.append(1, 2)
        subscription = await s.start(handler, on_dead_letter=stumble)
        await s.until(lambda: subscription.progress().counts.errors == 1)
        assert await s.shared.dead_letters() == []
        assert handler.handled == []

        await s.until(lambda: handler.handled == [2])

        assert len(await s.shared.dead_letters("receipts")) == 1
        assert subscription.progress().counts.errors == 2


async def test_a_handler_that_cancels_itself_has_failed(make_journal: Make) -> None:
    async with stage(make_journal) as s:
        tries: list[int] = []

        async def deliver(record: Record, attempt: int) -> None:
            tries.append(attempt)
            if attempt == 1:
                caught: list[BaseException] = []
                with anyio.CancelScope() as scope:
                    scope.cancel()
                    try:
                        await anyio.lowlevel.checkpoint()
                    except anyio.get_cancelled_exc_class() as error:
                        caught.append(error)
                        raise
                raise caught[0]

        await s.append(1)
        subscription = await s.start(deliver)
        await s.until(lambda: tries == [1, 2])

        await subscription.caught_up()
        assert subscription.progress().counts.failed == 1


# -- long pauses ---------------------------------------------------------------------------

LONG = RetryTiers(max_attempts=3, initial_delay=60, exponential_base=2, in_process=10, jitter=False)


async def test_a_long_pause_in_shared_mode_holds_up_nobody() -> None:
    async with stage(memory) as s:
        handler = Handler()
        handler.failures = {1: 2}
        handler.now = s.clock.now
        await s.append(1, 2, 3)
        subscription = await s.start(handler, mode=Mode.SHARED, retry=LONG)
        began = s.clock.now()
        await subscription.caught_up()
        assert handler.numbers == [1, 2, 3]
        assert subscription.progress().scheduled == 1
        assert await s.position() == 3

        await s.until(lambda: handler.handled == [2, 3, 1], within=300)

        assert handler.tries(1) == [1, 2, 3]
        assert [time - began for time in handler.times[-2:]] == pytest.approx([60, 180], abs=0.1)
        await s.until(lambda: subscription.progress().scheduled == 0)
        await s.clock.advance(1)
        assert await s.shared.next_due(subscription="receipts") is None


@pytest.mark.parametrize("mode", [Mode.EXCLUSIVE, Mode.KEY_SHARED])
async def test_a_long_pause_keeps_its_place_where_order_is_promised(mode: Mode) -> None:
    async with stage(memory) as s:
        handler = Handler()
        handler.failures = {1: 1}
        await s.append_keyed((1, "a"), (2, "a"), (3, "b"))
        await s.start(handler, mode=mode, retry=LONG, max_in_flight=1)
        await s.clock.advance(30)
        assert handler.numbers == ([1] if mode is Mode.EXCLUSIVE else [1, 3])

        await s.until(lambda: len(handler.handled) == 3)

        assert [number for number in handler.handled if number < 3] == [1, 2]
        await s.clock.advance(6)
        assert await s.shared.next_due(subscription="receipts") is None


@pytest.mark.parametrize("mode", list(Mode))
async def test_a_restart_keeps_long_pauses(make_journal: Make, mode: Mode) -> None:
    async with stage(make_journal) as s:
        first, second = Handler(), Handler()
        second.now = s.clock.time
        first.failures = {1: 1}
        await s.append_keyed((1, "a"))
        subscription = await s.start(first, mode=mode, retry=LONG)
        await s.until(lambda: first.numbers == [1])
        began = s.clock.time()
        await s.clock.advance(20)
        await subscription.close()

        again = await s.start(second, mode=mode, retry=LONG)
        await s.until(lambda: second.handled == [1])

        assert second.tries(1) == [2]
        assert second.times[0] - began >= 59.9
        assert again.progress().counts.acked == 1
        await again.close()
        assert await s.shared.next_due(subscription="receipts") is None


async def test_a_scheduled_retry_that_fails_for_the_last_time_is_buried(make_journal: Make) -> None:
    async with stage(make_journal) as s:
        handler = Handler()
        handler.failures = {1: -1}
        await s.append(1)
        subscription = await s.start(handler, mode=Mode.SHARED, retry=LONG)

        await s.until(lambda: subscription.progress().counts.dead_lettered == 1, within=400)
        await subscription.close()

        assert handler.tries(1) == [1, 2, 3]
        (letter,) = await s.shared.dead_letters("receipts")
        assert letter.attempts == 3
        assert await s.shared.next_due(subscription="receipts") is None


async def test_a_seek_forgets_the_dates_of_what_it_passes(make_journal: Make) -> None:
    async with stage(make_journal) as s:
        handler = Handler()
        handler.failures = {1: -1}
        await s.append(1, 2)
        subscription = await s.start(handler, retry=LONG)
        await s.until(lambda: subscription.progress().waiting == 1)
        await s.clock.advance(1)

        await subscription.seek(2)
        await subscription.caught_up()
        await subscription.close()

        assert handler.handled == [2]
        assert await s.shared.next_due(subscription="receipts") is None


# -- keys ----------------------------------------------------------------------------------


async def test_a_dead_letter_parks_its_key(make_journal: Make) -> None:
    async with stage(make_journal) as s:
        handler = Handler()
        handler.failures = {1: -1}
        await s.append_keyed((1, "a"), (2, "b"), (3, "a"), (4, "b"))
        subscription = await s.start(handler, mode=Mode.KEY_SHARED, park_key=True)
        await s.until(lambda: subscription.progress().last_acked == 4)

        assert sorted(handler.handled) == [2, 4]
        letters = await s.shared.dead_letters("receipts")
        assert [letter.record.json()["number"] for letter in letters] == [1, 3]
        assert letters[1].error is not None
        assert "An earlier message of its key" in letters[1].error
        await subscription.close()

        again = await s.start(handler, mode=Mode.KEY_SHARED, park_key=True)
        await s.append_keyed((5, "a"), (6, "b"))
        await again.caught_up()
        assert sorted(handler.handled) == [2, 4, 6]
        assert again.progress().parked_keys == 1


# -- answers that come late ----------------------------------------------------------------


async def test_a_message_that_is_not_answered_in_time_is_tried_again(make_journal: Make) -> None:
    async with stage(make_journal) as s:
        handler = Handler()
        handler.hangs = {1}
        await s.append(1, 2)
        subscription = await s.start(handler, ack_timeout=5.0)
        await s.until(lambda: handler.tries(1) == [1])
        await s.until(lambda: handler.tries(1) == [1, 2])
        handler.release.set()
        await subscription.caught_up()

        # The first try was ended when the second began: it was not handled twice.
        assert handler.handled == [1, 2]
        assert subscription.progress().counts.timed_out == 1
        assert subscription.progress().counts.redelivered == 1


async def test_a_late_ack_counts_if_the_message_did_not_go_out_again() -> None:
    async with stage(memory) as s:
        handler = Handler()
        handler.hangs = {1}
        await s.append(1)
        retry = RetryTiers(initial_delay=8.0, jitter=False)
        subscription = await s.start(handler, ack_timeout=5.0, retry=retry)
        await s.clock.advance(7)
        assert subscription.progress().counts.timed_out == 1

        handler.release.set()
        await s.clock.advance(60)

        assert handler.tries(1) == [1]
        assert subscription.progress().counts.late_acks == 1
        assert await s.position() == 1


async def test_a_message_that_never_answers_is_buried(make_journal: Make) -> None:
    async with stage(make_journal) as s:
        handler = Handler()
        handler.hangs = {1}
        await s.append(1, 2)
        subscription = await s.start(handler, ack_timeout=2.0)

        await s.until(lambda: handler.handled == [2])

        assert subscription.progress().counts.dead_lettered == 1
        (letter,) = await s.shared.dead_letters("receipts")
        assert letter.error is not None
        assert "No answer within 2 s." in letter.error


async def test_what_a_consumer_had_in_hand_goes_on_at_once_when_it_leaves() -> None:
    async with stage(memory) as s:
        leaving, staying = Handler(), Handler()
        leaving.hangs = {1}
        subscription = s.make(leaving, mode=Mode.SHARED)
        await s.append(1)
        await subscription.start()
        await s.clock.advance(1)
        assert leaving.numbers == [1]

        subscription.add_consumer("staying", staying)
        subscription.remove_consumer("receipts")
        await s.clock.advance(0)

        assert staying.seen == [(1, 1)]
        await subscription.caught_up()


# -- idempotency ---------------------------------------------------------------------------


async def test_an_idempotent_subscription_repeats_nothing_it_has_marked(make_journal: Make) -> None:
    async with stage(make_journal) as s:
        handler = Handler()
        await s.append(*range(5))
        subscription = await s.start(handler, idempotent=True)
        await subscription.caught_up()

        await subscription.seek(StartAt.EARLIEST)
        await subscription.caught_up()

        assert handler.numbers == list(range(5))
        assert subscription.progress().counts.skipped == 5


async def test_the_marker_is_written_with_the_ack_not_with_the_next_flush(
    make_journal: Make,
) -> None:
    async with stage(make_journal) as s:
        handler = Handler()
        record = make_record(1)
        await s.shared.append([record])
        subscription = await s.start(handler, idempotent=True, flush_idle=1000, flush_interval=1000)
        await s.until(lambda: subscription.progress().persisted == 1)

        assert await s.shared.marked("receipts", [record.message_id]) == {record.message_id}
