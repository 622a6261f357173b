"""What becomes of a message that fails: attempts, pauses, dead letters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import anyio
import anyio.lowlevel
import pytest

from msgbus import Refusal, Unhandleable
from msgbus.journal import Journal, MemoryJournal, Record, State
from msgbus.journal.operations import Operation, Put, Reply
from msgbus.resilience import RetryConfig
from msgbus.runtime.clock import VirtualClock
from msgbus.subscriptions import Mode, Poison, Standing, StartAt
from tests.fakes import logged
from tests.stage import Handler, stage

Make = Callable[[VirtualClock], Journal]


def memory(clock: VirtualClock) -> Journal:
    return MemoryJournal(clock=clock)


async def test_a_failed_message_is_retried_after_growing_pauses() -> None:
    async with stage(memory) as s:
        handler = Handler()
        handler.failures = {1: 2}
        handler.now = s.clock.now
        await s.append(1)
        began = s.clock.now()
        await s.start(handler)

        await s.until(lambda: handler.handled == [1])

        assert handler.attempts(1) == [1, 2, 3]
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

        (dead,) = await s.letters()
        assert dead.number == 2
        assert dead.row.attempt == 3
        assert "hunter2" not in dead.error + dead.letter.traceback
        assert "ValueError" in dead.error
        assert handler.attempts(2) == [1, 2, 3]
        assert subscription.progress().counts.dead_lettered == 1
        assert await s.position() == 3
        assert [entry["offset"] for entry in logged(caplog, "subscription_dead_lettered")] == [2]


def is_dead_letter(operation: Operation) -> bool:
    return isinstance(operation, Put) and operation.row.state is State.DEAD


@pytest.mark.parametrize("mode", list(Mode))
async def test_the_dead_letter_and_the_cursor_are_one_transaction(
    make_journal: Make, mode: Mode
) -> None:
    async with stage(make_journal) as s:
        process = s.process()
        handler = Handler()
        handler.failures = {1: -1}
        await s.append(1)

        def die_behind_the_letter(operations: Sequence[Operation]) -> None:
            if any(map(is_dead_letter, operations)):
                process.die()

        process.after_commit = die_behind_the_letter
        retry = RetryConfig(max_retries=0)
        await s.start(handler, process=process, retry=retry, mode=mode)
        await s.until(lambda: process.is_dead)
        again = await s.start(handler, retry=retry, mode=mode)
        await s.until(lambda: again.progress().last_acked == 1)
        await again.caught_up()

        assert handler.attempts(1) == [1]
        assert await s.position() == 1
        assert len(await s.letters()) == 1


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
        assert await s.letters() == []
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
        assert handler.attempts(1) == [1, 2, 3, 4, 5]


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

        assert handler.attempts(1) == [1]
        assert subscription.progress().counts.refused == 1
        assert await s.letters() == []


async def test_errors_to_give_up_on_are_not_retried(make_journal: Make) -> None:
    async with stage(make_journal) as s:
        handler = Handler()
        handler.failures = {1: -1}
        await s.append(1)
        retry = RetryConfig(max_retries=8, give_up_on=(ValueError,))
        subscription = await s.start(handler, retry=retry)

        await s.until(lambda: subscription.progress().counts.dead_lettered == 1)

        assert handler.attempts(1) == [1]


async def test_only_errors_to_retry_on_are_retried(make_journal: Make) -> None:
    async with stage(make_journal) as s:
        handler = Handler()
        handler.failures = {1: -1}
        await s.append(1, 2)
        retry = RetryConfig(max_retries=8, retry_on=(ConnectionError,))
        subscription = await s.start(handler, retry=retry)

        await s.until(lambda: subscription.progress().counts.dead_lettered == 1)

        assert handler.attempts(1) == [1]
        handler.error = ConnectionResetError()
        handler.failures = {3: 1}
        await s.append(3)
        await s.until(lambda: handler.handled == [2, 3])
        assert handler.attempts(3) == [1, 2]


@pytest.mark.parametrize("poison", list(Poison))
async def test_an_unhandleable_message_is_not_retried(make_journal: Make, poison: Poison) -> None:
    async with stage(make_journal) as s:
        handler = Handler()
        handler.failures = {1: -1}
        handler.error = Unhandleable("no such product")
        await s.append(1, 2)
        retry = RetryConfig(max_retries=8, retry_on=(Exception,))
        subscription = await s.start(handler, retry=retry, on_poison=poison)

        if poison is Poison.BLOCK:
            await s.until(lambda: subscription.progress().standing is Standing.BLOCKED)
        else:
            await s.until(lambda: handler.handled == [2])

        await s.written()
        assert handler.attempts(1) == [1]
        letters = await s.letters()
        assert len(letters) == (1 if poison is Poison.DEAD_LETTER else 0)
        assert all("no such product" in letter.error for letter in letters)


async def test_pauses_vary_by_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    async with stage(memory) as s:
        handler = Handler()
        handler.failures = {1: 2}
        handler.now = s.clock.now
        chances = iter([0.0, 0.75])
        monkeypatch.setattr("msgbus.resilience.config.random.random", lambda: next(chances))
        await s.append(1)
        began = s.clock.now()
        await s.start(handler, retry=RetryConfig(initial_delay=1.0))

        await s.until(lambda: handler.handled == [1])

        assert [time - began for time in handler.times] == pytest.approx([0.0, 0.5, 3.0])


async def test_operations_beside_a_dead_letter_are_written_in_its_transaction(
    make_journal: Make,
) -> None:
    async with stage(make_journal) as s:
        process = s.process()
        handler = Handler()
        handler.failures = {2: -1}
        told: list[tuple[int, str, int]] = []

        def reply(record: Record, error: Exception | None, attempts: int) -> list[Operation]:
            told.append((record.json()["number"], repr(error), attempts))
            return [Reply(record.message_id, 1.0, error=str(error))]

        commits: list[Sequence[Operation]] = []
        process.after_commit = commits.append
        await s.append(1, 2, 3)
        await s.start(handler, process=process, source={"on_dead_letter": reply})
        await s.until(lambda: handler.handled == [1, 3])
        await s.written()

        assert told == [(2, "ValueError('no')", 3)]
        (dead,) = await s.letters()
        result = await s.shared.result(dead.record.message_id)
        assert result is not None
        assert result.error == "no"
        (together,) = [each for each in commits if any(map(is_dead_letter, each))]
        assert Reply in {type(one) for one in together}


async def test_if_what_goes_with_a_dead_letter_cannot_be_made_there_is_no_letter(
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
        subscription = await s.start(handler, source={"on_dead_letter": stumble})
        await s.until(lambda: subscription.progress().counts.errors == 1)
        assert await s.letters() == []
        assert handler.handled == []

        await s.until(lambda: handler.handled == [2])
        await s.written()

        assert len(await s.letters()) == 1
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

LONG = RetryConfig(max_retries=2, initial_delay=60, max_delay=600, in_process=10, jitter=False)


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
        await s.until(lambda: subscription.progress().scheduled == 1)  # as last counted
        assert [cursor.acked for cursor in await s.cursors()] == [3]

        await s.until(lambda: handler.handled == [2, 3, 1], within=300)

        assert handler.attempts(1) == [1, 2, 3]
        assert [time - began for time in handler.times[-2:]] == pytest.approx([60, 180], abs=0.1)
        await s.until(lambda: subscription.progress().scheduled == 0)
        await s.clock.advance(1)
        assert await s.scheduled() == 0


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
        assert await s.scheduled() == 0


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

        assert second.attempts(1) == [2]
        assert second.times[0] - began >= 59.9
        assert again.progress().counts.acked == 1
        await again.close()
        assert await s.scheduled() == 0


async def test_a_scheduled_retry_that_fails_for_the_last_time_is_a_dead_letter(
    make_journal: Make,
) -> None:
    async with stage(make_journal) as s:
        handler = Handler()
        handler.failures = {1: -1}
        await s.append(1)
        subscription = await s.start(handler, mode=Mode.SHARED, retry=LONG)

        await s.until(lambda: subscription.progress().counts.dead_lettered == 1, within=400)
        await subscription.close()

        assert handler.attempts(1) == [1, 2, 3]
        (dead,) = await s.letters()
        assert dead.row.attempt == 3
        assert await s.scheduled() == 0


async def test_a_seek_forgets_the_retries_of_what_it_passes(make_journal: Make) -> None:
    async with stage(make_journal) as s:
        handler = Handler()
        handler.failures = {1: -1}
        await s.append(1, 2)
        subscription = await s.start(handler, retry=LONG)
        await s.until(lambda: subscription.progress().scheduled == 1)

        await subscription.seek(2)
        await subscription.caught_up()
        await subscription.close()

        assert handler.handled == [2]
        assert await s.scheduled() == 0


# -- keys ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [Mode.KEY_SHARED, Mode.EXCLUSIVE])
async def test_a_dead_letter_parks_its_key(make_journal: Make, mode: Mode) -> None:
    async with stage(make_journal) as s:
        handler = Handler()
        handler.failures = {1: -1}
        free = [2, 4, 6] if mode is Mode.KEY_SHARED else []
        await s.append_keyed((1, "a"), (2, "b"), (3, "a"), (4, "b"))
        subscription = await s.start(handler, mode=mode, park_key=True)
        await s.until(lambda: subscription.progress().counts.dead_lettered == 1)
        await s.until(lambda: handler.handled == free[:2])
        await s.written()

        assert [letter.number for letter in await s.letters()] == [1]
        assert subscription.progress().parked_keys == 1
        await subscription.close()

        again = await s.start(handler, mode=mode, park_key=True)
        await s.append_keyed((5, "a"), (6, "b"))
        await s.until(lambda: handler.handled == free)
        await s.written()

        assert handler.handled == free
        assert [letter.number for letter in await s.letters()] == [1]
        assert again.progress().parked_keys == 1


# -- attempts that take too long -----------------------------------------------------------


async def test_an_attempt_that_takes_too_long_is_cancelled_and_retried(make_journal: Make) -> None:
    async with stage(make_journal) as s:
        handler = Handler()
        handler.hangs = {1}
        await s.append(1, 2)
        subscription = await s.start(handler, ack_timeout=5.0)
        await s.until(lambda: handler.attempts(1) == [1])
        await s.until(lambda: handler.attempts(1) == [1, 2])
        handler.release.set()
        await subscription.caught_up()

        # The first attempt was ended when the second began: it was not handled twice.
        assert handler.handled == [1, 2]
        assert subscription.progress().counts.timed_out == 1
        assert subscription.progress().counts.redelivered == 1


async def test_a_message_whose_attempts_all_take_too_long_is_a_dead_letter(
    make_journal: Make,
) -> None:
    async with stage(make_journal) as s:
        handler = Handler()
        handler.hangs = {1}
        await s.append(1, 2)
        subscription = await s.start(handler, ack_timeout=2.0)

        await s.until(lambda: handler.handled == [2])

        await s.written()
        assert subscription.progress().counts.dead_lettered == 1
        (dead,) = await s.letters()
        assert dead.letter.error_type == "HandlerTimeoutError"
        assert "2 s" in dead.error


async def test_what_a_consumer_had_in_flight_goes_on_at_once_when_it_leaves() -> None:
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


async def test_an_idempotent_subscription_repeats_nothing_that_it_has_handled(
    make_journal: Make,
) -> None:
    async with stage(make_journal) as s:
        handler = Handler()
        await s.append(*range(5))
        subscription = await s.start(handler, idempotent=True)
        await subscription.caught_up()

        await subscription.seek(StartAt.EARLIEST)
        await subscription.caught_up()

        assert handler.numbers == list(range(5))
        assert subscription.progress().counts.skipped == 5


async def test_the_mark_is_written_with_the_acknowledgement(make_journal: Make) -> None:
    async with stage(make_journal) as s:
        handler = Handler()
        await s.append(1)
        now = s.clock.now()
        await s.start(handler, idempotent=True)
        while not await s.rows(State.KEPT):
            await anyio.lowlevel.checkpoint()

        assert s.clock.now() == now
        assert handler.handled == [1]
