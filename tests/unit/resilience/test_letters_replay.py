"""Replaying dead letters: once each, at a rate, and right when things go wrong on the way."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from msgbus.errors import BusStateError, DeadLetterError, StoredMessageError
from msgbus.journal import SqliteJournal
from msgbus.journal.letters import LetterSelection
from msgbus.resilience import (
    DeadLetterEntry,
    DeadLetterQueue,
    LetterStatus,
    MemoryDeadLetterStore,
    SqliteDeadLetterStore,
)
from msgbus.resilience.dead_letters.claims import Claims
from msgbus.resilience.dead_letters.filters import ANY
from msgbus.resilience.dead_letters.journal_letters import JournalLetters
from msgbus.resilience.dead_letters.rows import entry_of
from msgbus.resilience.dead_letters.store import claimed, settled
from msgbus.runtime.clock import VirtualClock
from msgbus.subscriptions.members import this_process
from msgbus.testing.conformance.dead_letters import letter
from tests.unit.resilience.letter_fakes import (
    STORES,
    CardCharged,
    ChargeCard,
    Service,
    bury,
    bury_orders,
    opened_queue,
)

# -- one ---------------------------------------------------------------------------------------


@STORES
async def test_a_replay_hands_the_same_message_to_the_handler_it_died_in(
    kind: str, tmp_path: Path
) -> None:
    async with opened_queue(kind, tmp_path) as (queue, service, _):
        event = CardCharged(order=5)
        letter = bury(queue, event, handler="ship")

        outcome = await queue.replay(letter)

        ((delivered, handler),) = service.seen
        assert (delivered, delivered.message_id, handler) == (event, event.message_id, "ship")
        assert (outcome.status, outcome.letter.status) == ("succeeded", LetterStatus.REPLAYED)
        assert outcome.letter.replays == 1


@STORES
async def test_a_replayed_letter_is_not_replayed_again(kind: str, tmp_path: Path) -> None:
    async with opened_queue(kind, tmp_path) as (queue, service, _):
        letter = bury(queue, CardCharged())
        await queue.replay(letter)

        again = await queue.replay(letter.letter_id)

        assert (again.status, again.reason) == ("skipped", "already replayed")
        assert len(service.seen) == 1


@STORES
async def test_a_failed_replay_updates_the_letter(kind: str, tmp_path: Path) -> None:
    async with opened_queue(kind, tmp_path) as (queue, service, clock):
        letter = bury(queue, CardCharged(order=1))
        service.failing = {1}
        await clock.advance(60)

        outcome = await queue.replay(letter)

        assert outcome.status == "failed"
        assert isinstance(outcome.error, ConnectionError)
        (found,) = await queue.find()
        assert (found.attempts, found.replays) == (4, 1)
        assert found.error == "ConnectionError: order 1 again"
        assert (found.last_attempt - letter.last_attempt).total_seconds() == 60


@STORES
async def test_a_bus_that_adds_the_letter_again_itself_is_counted_once(
    kind: str, tmp_path: Path
) -> None:
    async with opened_queue(kind, tmp_path) as (queue, _, _):
        letter = bury(queue, ChargeCard(), answered=True)

        async def fail_and_add(letter: DeadLetterEntry) -> object:
            error = KeyError("no stock")
            bury(queue, letter.message, handler=letter.handler, error=error, attempts=4)
            raise error

        queue.connect(fail_and_add)
        outcome = await queue.replay(letter)

        (found,) = await queue.find()
        assert outcome.letter == found
        assert (found.attempts, found.replays, found.error_type) == (7, 1, "KeyError")
        assert found.answered


@STORES
async def test_a_letter_added_again_by_a_redelivery_that_raised_nothing_stays_dead(
    kind: str, tmp_path: Path
) -> None:
    async with opened_queue(kind, tmp_path) as (queue, _, _):
        letter = bury(queue, CardCharged())

        async def add(letter: DeadLetterEntry) -> object:
            bury(queue, letter.message, handler=letter.handler)
            return None

        queue.connect(add)

        assert (await queue.replay(letter)).status == "failed"
        assert await queue.count() == 1


@STORES
async def test_a_redelivery_that_raises_is_a_failure(kind: str, tmp_path: Path) -> None:
    async with opened_queue(kind, tmp_path) as (queue, _, _):
        letter = bury(queue, CardCharged())

        async def fail(letter: DeadLetterEntry) -> object:
            raise LookupError("no such handler")

        queue.connect(fail)
        outcome = await queue.replay(letter)

        assert (outcome.status, outcome.letter.error_type) == ("failed", "LookupError")


@STORES
async def test_a_cancelled_replay_gives_the_letter_back_unharmed(kind: str, tmp_path: Path) -> None:
    async with opened_queue(kind, tmp_path) as (queue, _, _):
        letter = bury(queue, CardCharged())

        with anyio.CancelScope() as scope:

            async def hang(letter: DeadLetterEntry) -> object:
                scope.cancel()
                await anyio.sleep_forever()
                return None

            queue.connect(hang)
            await queue.replay(letter)

        (found,) = await queue.find()
        assert (found.status, found.attempts, found.replays) == (LetterStatus.DEAD, 3, 1)
        assert found.error == letter.error


@STORES
async def test_what_was_handled_is_noted_even_if_the_replay_is_cancelled(
    kind: str, tmp_path: Path
) -> None:
    async with opened_queue(kind, tmp_path) as (queue, _, _):
        letter = bury(queue, CardCharged())
        with anyio.CancelScope() as scope:

            async def handle(letter: DeadLetterEntry) -> object:
                scope.cancel()
                return None

            queue.connect(handle)
            await queue.replay(letter)

        assert (await queue.get(letter)).status is LetterStatus.REPLAYED


async def test_without_a_bus_there_is_nobody_to_replay_to() -> None:
    queue = DeadLetterQueue()
    letter = bury(queue, CardCharged())

    with pytest.raises(BusStateError, match=r"belong to no bus.*connect"):
        await queue.replay(letter)
    with pytest.raises(BusStateError, match=r"belong to no bus"):
        await queue.replay_all()
    assert (await queue.replay_all(dry_run=True)).matched == 1


@STORES
async def test_a_letter_is_replayed_by_one_of_two_who_try(kind: str, tmp_path: Path) -> None:
    async with opened_queue(kind, tmp_path) as (queue, _, _):
        letter = bury(queue, CardCharged())
        begun, release = anyio.Event(), anyio.Event()

        async def handle(letter: DeadLetterEntry) -> object:
            begun.set()
            await release.wait()
            return None

        queue.connect(handle)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(queue.replay, letter)
            await begun.wait()

            second = await queue.replay(letter)
            assert (second.status, second.reason) == ("skipped", "being replayed")
            assert (await queue.replay_all()).matched == 0
            with pytest.raises(DeadLetterError, match="cannot be discarded: it is replaying"):
                await queue.discard(letter, "no")
            release.set()

        assert (await queue.get(letter)).status is LetterStatus.REPLAYED


# -- many --------------------------------------------------------------------------------------


@STORES
async def test_replay_all_reports_what_became_of_each(kind: str, tmp_path: Path) -> None:
    async with opened_queue(kind, tmp_path) as (queue, service, _):
        bury_orders(queue, 5)
        bury(queue, ChargeCard(order=9), answered=True)
        service.failing = {1, 3}
        told: list[tuple[int, int]] = []

        report = await queue.replay_all(progress=lambda done, total: told.append((done, total)))

        assert (report.matched, report.succeeded, report.failed, report.skipped) == (6, 3, 2, 1)
        assert (report.errors, report.reasons) == ({"ConnectionError": 2}, {"answered": 1})
        assert service.handled == [0, 2, 4]
        assert told == [(number, 6) for number in range(1, 7)]
        assert await queue.count() == 3


@STORES
async def test_replay_all_tries_each_letter_once_over_many_pages(kind: str, tmp_path: Path) -> None:
    async with opened_queue(kind, tmp_path) as (queue, service, _):
        bury_orders(queue, 230)
        service.failing = set(range(0, 230, 2))

        report = await queue.replay_all()
        tried = len(service.seen)
        service.failing = set()
        rest = await queue.replay_all()

        assert (report.succeeded, report.failed, tried) == (115, 115, 230)
        assert (rest.matched, rest.succeeded) == (115, 115)
        assert sorted(service.handled) == list(range(230))


@STORES
async def test_letters_that_die_meanwhile_are_left_for_the_next_time(
    kind: str, tmp_path: Path
) -> None:
    async with opened_queue(kind, tmp_path) as (queue, _, _):
        bury_orders(queue, 2)

        async def cause_another(letter: DeadLetterEntry) -> object:
            bury(queue, CardCharged(order=100))
            return None

        queue.connect(cause_another)
        report = await queue.replay_all()

        assert report.matched == 2
        assert await queue.count() == 2


@STORES
async def test_answered_commands_are_replayed_only_if_asked_for(kind: str, tmp_path: Path) -> None:
    async with opened_queue(kind, tmp_path) as (queue, service, _):
        bury(queue, ChargeCard(order=1), answered=True)
        marked = bury(queue, ChargeCard(order=2), answered=True)
        await queue.mark_unanswered(marked)

        first = await queue.replay_all()
        second = await queue.replay_all(answered=True)

        assert (first.succeeded, first.skipped) == (1, 1)
        assert (second.succeeded, second.skipped) == (1, 0)
        assert service.handled == [2, 1]


@STORES
async def test_replay_all_takes_only_what_fits(kind: str, tmp_path: Path) -> None:
    async with opened_queue(kind, tmp_path) as (queue, service, clock):
        bury(queue, CardCharged(order=1), error=KeyError("k"))
        bury(queue, CardCharged(order=2))
        bury(queue, ChargeCard(order=3))
        await clock.advance(10)
        late = bury(queue, CardCharged(order=4))

        report = await queue.replay_all(
            CardCharged, error_type="ConnectionError", until=late.last_attempt
        )

        assert (report.matched, service.handled) == (1, [2])


@STORES
async def test_a_dry_run_delivers_nothing_and_finds_what_cannot_be_read(
    kind: str, tmp_path: Path
) -> None:
    async with opened_queue(kind, tmp_path) as (queue, service, _):
        good, bad, answered = (
            bury(queue, CardCharged(order=1)),
            bury(queue, CardCharged(order=2)),
            bury(queue, ChargeCard(order=3), answered=True),
        )
        await unreadable(queue, bad.letter_id)

        dry = await queue.replay_all(dry_run=True)
        real = await queue.replay_all()

        assert dry.dry_run
        assert (dry.matched, dry.succeeded, dry.failed, dry.skipped) == (3, 1, 1, 1)
        assert dry.errors == {"UnreadableLetterError": 1}
        assert (real.succeeded, real.failed, real.skipped) == (1, 1, 1)
        assert service.handled == [1]
        statuses = [(await queue.get(one)).status.value for one in (good, bad, answered)]
        assert statuses == ["replayed", "dead", "dead"]
        outcome = await queue.replay(bad)
        assert isinstance(outcome.error, StoredMessageError)


async def unreadable(queue: DeadLetterQueue, letter_id: str) -> None:
    """Make a letter's message one whose class is gone."""
    await queue.store.change(
        letter_id,
        lambda old: replace(old, message_type="gone.Away", _message=None),
    )


async def test_a_rate_is_kept_by_the_clock() -> None:
    clock = VirtualClock()
    queue = DeadLetterQueue(clock=clock)
    bury_orders(queue, 6)
    times: list[float] = []
    start = clock.now()

    async def handle(letter: DeadLetterEntry) -> object:
        times.append(clock.now() - start)
        return None

    queue.connect(handle)
    async with anyio.create_task_group() as tasks:

        async def run() -> None:
            await queue.replay_all(rate=2)

        tasks.start_soon(run)
        await clock.advance(3)

    assert times == [0.0, 0.5, 1.0, 1.5, 2.0, 2.5]


async def test_a_rate_is_not_caught_up_after_a_slow_handler() -> None:
    clock = VirtualClock()
    queue = DeadLetterQueue(clock=clock)
    bury_orders(queue, 4)
    times: list[float] = []
    start = clock.now()

    async def handle(letter: DeadLetterEntry) -> object:
        times.append(clock.now() - start)
        if len(times) == 1:
            await clock.sleep(10)
        return None

    queue.connect(handle)
    async with anyio.create_task_group() as tasks:

        async def run() -> None:
            await queue.replay_all(rate=1)

        tasks.start_soon(run)
        await clock.advance(20)

    assert times == [0.0, 10.0, 11.0, 12.0]


@pytest.mark.parametrize("rate", [0, -1.0])
async def test_a_rate_that_makes_no_sense_is_refused(rate: float) -> None:
    with pytest.raises(DeadLetterError, match="rate is"):
        await DeadLetterQueue().replay_all(rate=rate, dry_run=True)


async def test_a_cancelled_replay_of_many_goes_on_where_it_was() -> None:
    queue = DeadLetterQueue()
    bury_orders(queue, 5)
    service = Service()
    with anyio.CancelScope() as scope:

        async def handle(letter: DeadLetterEntry) -> object:
            if len(service.handled) == 2:
                scope.cancel()
                await anyio.lowlevel.checkpoint()
            return await service.redeliver(letter)

        queue.connect(handle)
        await queue.replay_all()
    assert service.handled == [0, 1]

    queue.connect(service.redeliver)
    report = await queue.replay_all()

    assert (report.succeeded, service.handled) == (3, [0, 1, 2, 3, 4])


# -- claims ------------------------------------------------------------------------------------


@asynccontextmanager
async def claimed_by(process: str, path: Path) -> AsyncGenerator[SqliteJournal]:
    """A file with one letter, which a process has claimed."""
    async with SqliteJournal(path, reserve=0) as journal:
        letters = JournalLetters(journal, MemoryDeadLetterStore(None), VirtualClock())
        letters.claims = Claims(journal, process)
        given = letter(1)
        await letters.add([given])
        await letters.change(given.letter_id, claimed, None)
        yield journal


async def statuses(journal: SqliteJournal) -> list[str]:
    page = await JournalLetters(journal, MemoryDeadLetterStore(None), VirtualClock()).page(
        ANY, None, 10
    )
    return [one.status.value for one in page.letters]


async def test_letters_left_by_a_process_that_is_gone_are_dead_when_the_store_is_opened(
    tmp_path: Path,
) -> None:
    path = tmp_path / "letters.db"
    reused = f"{this_process()}9"  # the same id, and another time of its start
    async with claimed_by(reused, path) as journal:
        assert await statuses(journal) == ["replaying"]

        async with DeadLetterQueue(SqliteDeadLetterStore(path)) as queue:
            (found,) = await queue.find()
            assert (found.replays, found.attempts, found.note) == (1, 3, None)
            assert queue.size == 1
        assert await journal.members() == []


async def test_a_letter_that_another_process_replays_is_left_to_it(tmp_path: Path) -> None:
    path = tmp_path / "letters.db"
    async with claimed_by(this_process(), path) as journal:
        async with DeadLetterQueue(SqliteDeadLetterStore(path)) as queue:
            queue.connect(Service().redeliver)
            (found,) = await queue.find(status=LetterStatus.REPLAYING)
            outcome = await queue.replay(found)

        assert (outcome.status, outcome.reason) == ("skipped", "being replayed")
        assert await statuses(journal) == ["replaying"]


async def test_a_claim_from_another_machine_holds_until_it_is_silent(tmp_path: Path) -> None:
    async with claimed_by("elsewhere:1:1:1", tmp_path / "letters.db") as journal:
        (member,) = await journal.members()
        now = 0.0
        letters = JournalLetters(journal, MemoryDeadLetterStore(None), VirtualClock())
        letters.claims = Claims(journal, now=lambda: now)

        async def released_at(seconds: float) -> int:
            nonlocal now
            now = seconds
            return await letters.release()

        assert [await released_at(at) for at in (0.0, 4.9)] == [0, 0]
        member = await journal.renew(member)
        assert [await released_at(at) for at in (5.0, 9.9)] == [0, 0]
        assert await released_at(10.0) == 1
        assert await statuses(journal) == ["dead"]


async def test_a_process_that_was_taken_for_dead_settles_nothing(tmp_path: Path) -> None:
    async with claimed_by(this_process(), tmp_path / "letters.db") as journal:
        (stored,) = await journal.find_letters(LetterSelection())
        own = JournalLetters(journal, MemoryDeadLetterStore(None), VirtualClock())
        claim = entry_of(stored)
        for member in await journal.members():
            await journal.end(member)
        assert await own.release() == 1

        found, _ = await own.change(claim.letter_id, lambda old: settled(old, claim), None)

        assert found is not None
        assert found.status is LetterStatus.DEAD
        again, _ = await own.change(claim.letter_id, claimed, None)
        assert again is not None
        assert again.replays == 2


@STORES
async def test_a_store_that_is_closed_has_no_member_left(kind: str, tmp_path: Path) -> None:
    async with opened_queue(kind, tmp_path) as (queue, _, _):
        await queue.replay(bury(queue, CardCharged()))
        store = queue.store
    if isinstance(store, SqliteDeadLetterStore):
        async with SqliteJournal(store.path, reserve=0) as journal:
            assert await journal.members() == []
