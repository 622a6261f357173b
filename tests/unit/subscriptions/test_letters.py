"""What subscriptions dead-letter is found, replayed and discarded by the dead-letter queue."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager

import pytest

from msgbus import Event, Message
from msgbus.journal import Journal, State
from msgbus.journal.operations import Operation, Put
from msgbus.resilience import (
    DeadLetterEntry,
    DeadLetterQueue,
    JournalDeadLetterStore,
    LetterStatus,
    RetryConfig,
)
from msgbus.runtime.clock import VirtualClock
from msgbus.subscriptions import Delivery, Mode
from tests.stage import Handler, Stage, stage

Make = Callable[[VirtualClock], Journal]

ONCE = RetryConfig(max_retries=0)


class Numbered(Event, name="test_letters.Numbered"):
    number: int


class Target:
    """Where letters are replayed to."""

    def __init__(self) -> None:
        self.seen: list[tuple[Message, str]] = []
        self.error: Exception | None = None

    async def __call__(self, letter: DeadLetterEntry) -> object:
        self.seen.append((letter.message, letter.handler))
        if self.error is not None:
            raise self.error
        return None


@asynccontextmanager
async def queue_on(s: Stage) -> AsyncGenerator[tuple[DeadLetterQueue, Target]]:
    target = Target()
    queue = DeadLetterQueue(JournalDeadLetterStore(s.shared), clock=s.clock)
    queue.connect(target)
    async with queue:
        yield queue, target


async def dead_letter(s: Stage, *numbers: int, **options: object) -> None:
    """Have the subscription `receipts` dead-letter these."""
    handler = Handler()
    handler.failures = dict.fromkeys(numbers, -1)
    handler.error = ValueError("password=hunter2 was wrong")
    await s.append(*numbers, name="test_letters.Numbered", topic="shop.numbers", session_id="s")
    subscription = await s.start(handler, **{"retry": ONCE, **options})
    await s.until(lambda: subscription.progress().counts.dead_lettered == len(numbers))
    await subscription.close()


async def test_a_poison_message_is_found_with_what_it_died_of(make_journal: Make) -> None:
    async with stage(make_journal) as s, queue_on(s) as (queue, _):
        await dead_letter(s, 7, retry=RetryConfig(max_retries=2))

        (letter,) = await queue.find(Numbered, handler="receipts", session_id="s")

        assert letter.message == Numbered(number=7)
        assert (letter.error_type, letter.attempts) == ("ValueError", 3)
        assert letter.reason == "retries exhausted"
        assert letter.error.startswith("ValueError: ")
        assert "in __call__" in letter.traceback
        assert "hunter2" not in letter.error + letter.traceback
        assert (letter.topic, letter.kind) == ("shop.numbers", "event")
        assert letter.last_attempt.timestamp() == pytest.approx(s.clock.time(), abs=10)
        assert queue.size == 1


async def test_groups_and_counts_are_of_subscriptions_and_of_the_bus(make_journal: Make) -> None:
    async with stage(make_journal) as s, queue_on(s) as (queue, _):
        await dead_letter(s, 1, 2)
        queue.add(
            Numbered(number=3), handler="mail", error=KeyError("k"), attempts=1,
            first_attempt=0.0, reason="not retried",
        )  # fmt: skip

        groups = await queue.groups()

        assert [(one.handler, one.error_type, one.count) for one in groups] == [
            ("receipts", "ValueError", 2),
            ("mail", "KeyError", 1),
        ]
        assert [one.number for one in await s.letters()] == [1, 2]
        assert await queue.count() == 3


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"retry": ONCE}, "not retried"),
        ({"delivery": Delivery.AT_MOST_ONCE}, "not retried"),
        ({"retry": RetryConfig(max_retries=8, give_up_on=(ValueError,))}, "not to be retried"),
    ],
    ids=["one attempt", "at most once", "an error that says so"],
)
async def test_the_reason_says_why_it_was_dead_lettered(
    make_journal: Make, options: dict[str, object], reason: str
) -> None:
    async with stage(make_journal) as s, queue_on(s) as (queue, _):
        await dead_letter(s, 1, **options)

        assert [letter.reason for letter in await queue.find()] == [reason]


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_process_that_dies_leaves_letter_and_cursor_in_step(
    make_journal: Make, when: str
) -> None:
    async with stage(make_journal) as s, queue_on(s) as (queue, _):
        process, handler = s.process(), Handler()
        handler.failures = {1: -1}
        await s.append(1)

        def die(operations: Sequence[Operation]) -> None:
            if any(isinstance(one, Put) and one.row.state is State.DEAD for one in operations):
                process.die()

        if when == "before":
            process.before_commit = die
        else:
            process.after_commit = die
        await s.start(handler, process=process, retry=ONCE)
        await s.until(lambda: process.is_dead)
        assert await queue.count() == (0 if when == "before" else 1)

        second = Handler()
        again = await s.start(second, retry=ONCE)
        await s.until(lambda: again.progress().last_acked == 1)
        await again.caught_up()

        # It is delivered again exactly if there is no letter.
        assert second.numbers == ([1] if when == "before" else [])
        assert second.handled == second.numbers
        assert await queue.count() == (0 if when == "before" else 1)
        assert await s.position() == 1


async def test_a_replayed_letter_goes_to_the_handler_and_is_open_no_more(
    make_journal: Make,
) -> None:
    async with stage(make_journal) as s, queue_on(s) as (queue, target):
        await dead_letter(s, 4)
        (before,) = await s.letters()

        report = await queue.replay_all()

        assert (report.succeeded, report.failed) == (1, 0)
        ((message, handler),) = target.seen
        assert (message, handler) == (Numbered(number=4), "receipts")
        assert (message.message_id, message.session_id) == (before.record.message_id, "s")
        assert (await queue.find(), queue.size, await s.letters()) == ([], 0, [])
        (done,) = await queue.find(status=LetterStatus.REPLAYED)
        assert done.replays == 1
        assert (await queue.replay_all()).matched == 0


async def test_a_replay_that_fails_keeps_everything_but_the_error(make_journal: Make) -> None:
    async with stage(make_journal) as s, queue_on(s) as (queue, target):
        await dead_letter(s, 4)
        (before,) = await s.letters()
        target.error = KeyError("again")

        await queue.replay_all()

        (after,) = await s.letters()
        assert after.record == before.record
        assert after.record.offset == 1
        assert (after.row.attempt, after.letter.error_type) == (2, "KeyError")


async def test_an_edited_letter_is_a_new_message_for_the_same_subscription(
    make_journal: Make,
) -> None:
    async with stage(make_journal) as s, queue_on(s) as (queue, target):
        await dead_letter(s, 4)
        (letter,) = await queue.find()

        new = await queue.edit(letter, number=5)
        await queue.replay_all()

        assert target.seen == [(Numbered(number=5), "receipts")]
        assert new.causation_id == letter.message_id
        assert await s.letters() == []


async def test_a_discarded_letter_parks_its_key_no_more(make_journal: Make) -> None:
    options = {"mode": Mode.KEY_SHARED, "park_key": True, "retry": ONCE}
    async with stage(make_journal) as s, queue_on(s) as (queue, _):
        poison = Handler()
        poison.failures = {1: -1}
        await s.append_keyed((1, "k"), (2, "k"))
        subscription = await s.start(poison, **options)
        await s.until(lambda: subscription.progress().counts.dead_lettered == 1)
        await subscription.close()
        (letter,) = await queue.find()
        assert [row.state for row in await s.rows()] == [State.DEAD, State.PARKED]

        await queue.discard(letter, "the order was cancelled")
        await s.append_keyed((3, "k"))
        handler = Handler()
        await s.start(handler, **options)

        await s.until(lambda: handler.handled == [2, 3])
        assert poison.handled == []
