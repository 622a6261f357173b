"""Letters of durable handlers and of enqueued commands: rows of the journal, replayed in order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from msgbus import Command, Context, Event
from msgbus.errors import StaleError
from msgbus.journal import Journal, MemoryJournal, SqliteJournal
from msgbus.journal.operations import Drop, Put
from msgbus.journal.records import State
from msgbus.resilience import (
    CircuitBreakerConfig,
    JournalDeadLetterStore,
    LetterStatus,
    MemoryDeadLetterStore,
    ResilientMessageBus,
)
from msgbus.resilience.dead_letters.claims import Claims
from msgbus.resilience.dead_letters.journal_letters import JournalLetters
from msgbus.resilience.dead_letters.store import claimed, settled
from msgbus.runtime.clock import VirtualClock
from msgbus.subscriptions import Mode
from msgbus.subscriptions.members import this_process

JOURNALS = pytest.mark.parametrize("kind", ["memory", "sqlite"])
ORDERED = pytest.mark.parametrize("mode", [Mode.EXCLUSIVE, Mode.KEY_SHARED])


class Packed(Event, name="durable_letters.Packed"):
    number: int = 0
    order: str = "k"

    @property
    def key(self) -> str:
        return self.order


class Pack(Command[int], name="durable_letters.Pack"):
    number: int = 0


class Store:
    """A handler that fails on some numbers."""

    def __init__(self, *failing: int) -> None:
        self.failing = set(failing)
        self.seen: list[int] = []
        self.attempts: list[int] = []

    async def note(self, event: Packed, context: Context) -> None:
        self.use(event.number, context)

    async def pack(self, command: Pack, context: Context) -> int:
        self.use(command.number, context)
        return command.number * 10

    def use(self, number: int, context: Context) -> None:
        self.attempts.append(context.attempt)
        if number in self.failing:
            raise ConnectionError(f"no box for {number}")
        self.seen.append(number)


def journal_of(kind: str, folder: Path, **options: Any) -> MemoryJournal | SqliteJournal:
    if kind == "memory":
        return MemoryJournal(**options)
    return SqliteJournal(folder / "journal.db", reserve=0, **options)


def bus_on(journal: Journal, **options: Any) -> ResilientMessageBus:
    options = {"retry": None, "breaker": None, **options}
    return ResilientMessageBus(journal=journal, **options)


async def published(bus: ResilientMessageBus, *numbers: int) -> None:
    for number in numbers:
        await bus.publish(Packed(number=number))
    await bus.settled()


# -- what is parked behind a letter ----------------------------------------------------------------


@JOURNALS
@ORDERED
@pytest.mark.parametrize("how", ["replay", "replay_all", "discard", "edit"])
async def test_what_is_parked_behind_a_letter_goes_on_in_order(
    kind: str, mode: Mode, how: str, tmp_path: Path
) -> None:
    store = Store(1)
    async with journal_of(kind, tmp_path) as journal, bus_on(journal) as bus:
        bus.subscribe(Packed, store.note, durable="notes", mode=mode, park_key=True)
        for number in (0, 1, 2, 3):
            await bus.publish(Packed(number=number))
        await until(journal, lambda counts: counts.get(State.DEAD) == 1)
        (letter,) = await bus.dead_letters.find()
        assert (letter.message, store.seen) == (Packed(number=1), [0])
        store.failing.clear()

        if how == "replay":
            assert (await bus.dead_letters.replay(letter)).succeeded
        elif how == "replay_all":
            assert (await bus.dead_letters.replay_all()).succeeded == 1
        elif how == "discard":
            await bus.dead_letters.discard(letter, "no")
        else:
            await bus.dead_letters.edit(letter, number=7)
        await bus.publish(Packed(number=4))
        await bus.settled()

        assert store.seen == ([0, 1, 2, 3, 4] if how.startswith("replay") else [0, 2, 3, 4])


async def until(journal: Journal, is_so: Callable[[dict[State, int]], bool]) -> None:
    version = -1
    with anyio.fail_after(30):
        while not is_so(await journal.count()):
            version = await journal.changed(version)


@JOURNALS
async def test_a_replay_that_fails_leaves_the_key_parked(kind: str, tmp_path: Path) -> None:
    store = Store(1)
    async with journal_of(kind, tmp_path) as journal, bus_on(journal) as bus:
        bus.subscribe(Packed, store.note, durable="notes", mode=Mode.KEY_SHARED, park_key=True)
        await published_behind(bus, journal, 1, 2)
        (before,) = await bus.dead_letters.find()

        outcome = await bus.dead_letters.replay(before)

        assert (outcome.status, str(outcome.error)) == ("failed", "no box for 1")
        (after,) = await bus.dead_letters.find()
        assert outcome.letter == after
        assert (after.attempts, after.replays, after.offset) == (2, 1, before.offset)
        assert (await journal.count("notes")).get(State.PARKED) == 1
        assert store.attempts == [1, 1]


async def published_behind(bus: ResilientMessageBus, journal: Journal, *numbers: int) -> None:
    """Publish what fails first, and what is parked behind it."""
    for number in numbers:
        await bus.publish(Packed(number=number))
    await until(
        journal,
        lambda counts: (counts.get(State.DEAD), counts.get(State.PARKED)) == (1, len(numbers) - 1),
    )


@JOURNALS
async def test_another_process_discards_what_this_one_waits_for(kind: str, tmp_path: Path) -> None:
    store = Store(1)
    async with journal_of(kind, tmp_path) as journal, bus_on(journal) as bus:
        bus.subscribe(Packed, store.note, durable="notes", park_key=True)
        await bus.publish(Packed(number=1))
        await until(journal, lambda counts: counts.get(State.DEAD) == 1)
        await bus.publish(Packed(number=2))
        other = (
            journal.beside()
            if isinstance(journal, MemoryJournal)
            else SqliteJournal(journal.path, reserve=0)
        )
        async with other, bus_on(other) as elsewhere:
            (letter,) = await elsewhere.dead_letters.find()
            await elsewhere.dead_letters.discard(letter, "no")

        with anyio.fail_after(30):
            while store.seen != [2]:
                await bus.settled()


@JOURNALS
async def test_a_replay_runs_beside_nothing_where_all_is_in_order(
    kind: str, tmp_path: Path
) -> None:
    store, running, most = Store(1), 0, 0
    async with journal_of(kind, tmp_path) as journal, bus_on(journal) as bus:

        @bus.on(Packed, durable="notes")
        async def note(event: Packed, context: Context) -> None:
            nonlocal running, most
            running += 1
            most = max(most, running)
            for _ in range(20):
                await anyio.lowlevel.checkpoint()
            running -= 1
            store.use(event.number, context)

        await published(bus, 1)
        store.failing.clear()
        async with anyio.create_task_group() as tasks:
            for number in range(2, 12):
                await bus.publish(Packed(number=number))
            tasks.start_soon(bus.dead_letters.replay_all)
        await bus.settled()

        assert (most, sorted(store.seen)) == (1, list(range(1, 12)))
        assert [number for number in store.seen if number != 1] == list(range(2, 12))


# -- the letter ------------------------------------------------------------------------------------


@JOURNALS
async def test_a_letter_knows_its_place_in_the_journal(kind: str, tmp_path: Path) -> None:
    store = Store(1)
    async with journal_of(kind, tmp_path) as journal, bus_on(journal) as bus:
        bus.subscribe(Packed, store.note, durable="notes", name="note")
        await published(bus, 0, 1)

        (letter,) = await bus.dead_letters.find(handler="notes")

        assert (letter.handler, letter.subscription, letter.offset) == ("notes", "notes", 2)
        assert (letter.key, letter.depth) == ("k", 0)
        assert letter.target == "durable_letters.Packed"
        assert letter.root_id == letter.message_id
        assert bus.dead_letters.size == bus.stats().dead_letters == 1


@JOURNALS
async def test_a_replayed_letter_stays_as_a_record(kind: str, tmp_path: Path) -> None:
    store = Store(1)
    async with journal_of(kind, tmp_path) as journal, bus_on(journal) as bus:
        bus.subscribe(Packed, store.note, durable="notes")
        await published(bus, 1)
        (letter,) = await bus.dead_letters.find()
        store.failing.clear()

        outcome = await bus.dead_letters.replay(letter)
        again = await bus.dead_letters.replay(letter)

        (found,) = await bus.dead_letters.find(status=None)
        assert outcome.letter == found == again.letter
        assert (found.status, found.replays) == (LetterStatus.REPLAYED, 1)
        assert (again.status, again.reason) == ("skipped", "already replayed")
        assert await journal.count("notes") == {}
        assert bus.dead_letters.size == 0
        assert store.seen == [1]


@JOURNALS
async def test_a_message_that_dies_again_after_a_seek_is_the_same_letter(
    kind: str, tmp_path: Path
) -> None:
    store = Store(1)
    async with journal_of(kind, tmp_path) as journal, bus_on(journal) as bus:
        subscription = bus.subscribe(Packed, store.note, durable="notes")
        await published(bus, 1)
        (first,) = await bus.dead_letters.find()
        await bus.dead_letters.discard(first, "no")

        await subscription.seek(0)
        await until(journal, lambda counts: counts.get(State.DEAD) == 1)

        (letter,) = await bus.dead_letters.find(status=None)
        assert (letter.letter_id, letter.status) == (first.letter_id, LetterStatus.DEAD)
        assert letter.attempts == 2
        assert await bus.dead_letters.get(first) == letter
        store.failing.clear()
        assert (await bus.dead_letters.replay(letter)).succeeded
        (done,) = await bus.dead_letters.find(status=None)
        assert (done.status, done.attempts) == (LetterStatus.REPLAYED, 2)


@JOURNALS
async def test_an_edited_letter_goes_to_the_same_durable_handler(kind: str, tmp_path: Path) -> None:
    store = Store(1)
    async with journal_of(kind, tmp_path) as journal, bus_on(journal) as bus:
        bus.subscribe(Packed, store.note, durable="notes")
        await published(bus, 1)
        (letter,) = await bus.dead_letters.find()

        new = await bus.dead_letters.edit(letter, number=2)
        outcome = await bus.dead_letters.replay(new)

        assert (outcome.status, store.seen) == ("succeeded", [2])
        assert (new.causation_id, new.root_id, new.depth) == (
            letter.message_id,
            letter.root_id,
            letter.depth + 1,
        )
        statuses = [one.status.value for one in await bus.dead_letters.find(status=None)]
        assert sorted(statuses) == ["edited", "replayed"]


# -- reaching the handler --------------------------------------------------------------------------


@JOURNALS
async def test_an_open_circuit_leaves_the_letter_as_it_was(kind: str, tmp_path: Path) -> None:
    breaker = CircuitBreakerConfig(failure_threshold=1, recovery_time=300.0, jitter=0.0)
    store = Store(1)
    async with (
        journal_of(kind, tmp_path) as journal,
        bus_on(journal, breaker=breaker) as bus,
    ):
        bus.register_command_handler(Pack, store.pack, name="pack")
        await bus.enqueue(Pack(number=1))
        await bus.settled()
        (before,) = await bus.dead_letters.find()

        outcome = await bus.dead_letters.replay(before)

        assert (outcome.status, outcome.reason) == ("skipped", "circuit open")
        assert await bus.dead_letters.find() == [before]


@JOURNALS
async def test_a_handler_that_is_not_here_leaves_the_letter_as_it_was(
    kind: str, tmp_path: Path
) -> None:
    async with journal_of(kind, tmp_path) as journal:
        async with bus_on(journal) as bus:
            bus.subscribe(Packed, Store(1).note, durable="notes")
            await published(bus, 1)
            (before,) = await bus.dead_letters.find()
        async with bus_on(journal) as other:
            outcome = await other.dead_letters.replay(before)

            reason = "no handler named 'notes' for durable_letters.Packed on this bus"
            assert (outcome.status, outcome.reason) == ("skipped", reason)
            assert await other.dead_letters.find() == [before]


# -- transactions ----------------------------------------------------------------------------------


@pytest.mark.parametrize("edited", [False, True])
async def test_effect_and_end_of_a_replay_are_one_commit(edited: bool, tmp_path: Path) -> None:
    failing = {1}
    async with SqliteJournal(tmp_path / "journal.db", reserve=0) as journal, bus_on(journal) as bus:
        await journal.transact(lambda connection: connection.execute("CREATE TABLE box (number)"))

        @bus.on(Packed, durable="notes")
        async def note(event: Packed) -> None:
            if event.number in failing:
                raise ConnectionError
            async with bus.transaction() as tx:
                tx.execute("INSERT INTO box VALUES (?)", [event.number])
                tx.acknowledge()
            raise RuntimeError("too late: it is done")

        await published(bus, 1)
        (letter,) = await bus.dead_letters.find()
        if edited:
            letter = await bus.dead_letters.edit(letter, number=2)
        failing.clear()

        outcome = await bus.dead_letters.replay(letter)

        boxes, _ = await journal.transact(
            lambda connection: connection.execute("SELECT number FROM box").fetchall()
        )
        assert boxes == [(letter.message.number,)]  # type: ignore[attr-defined]
        assert await bus.dead_letters.find() == []
        assert outcome.letter.status is LetterStatus.REPLAYED
        assert await bus.dead_letters.get(letter) == outcome.letter


async def test_a_replay_that_others_have_taken_over_writes_nothing(tmp_path: Path) -> None:
    errors: list[BaseException] = []
    failing = {1}
    async with SqliteJournal(tmp_path / "journal.db", reserve=0) as journal, bus_on(journal) as bus:

        @bus.on(Packed, durable="notes")
        async def note(event: Packed) -> None:
            if event.number in failing:
                raise ConnectionError
            for member in await journal.members():
                if "msgbus.letters" in member.serves:
                    await journal.end(member)
            try:
                async with bus.transaction() as tx:
                    tx.acknowledge()
            except StaleError as error:
                errors.append(error)
                raise

        await published(bus, 1)
        (letter,) = await bus.dead_letters.find()
        failing.clear()

        await bus.dead_letters.replay(letter)

        assert errors


# -- enqueued commands -----------------------------------------------------------------------------


@JOURNALS
async def test_the_letter_of_an_enqueued_command_is_replayed_once(
    kind: str, tmp_path: Path
) -> None:
    store = Store(1)
    async with journal_of(kind, tmp_path) as journal, bus_on(journal) as bus:
        bus.register_command_handler(Pack, store.pack, name="pack")
        await bus.enqueue(Pack(number=1))
        await bus.settled()
        (letter,) = await bus.dead_letters.find()
        failed = await bus.dead_letters.replay(letter)
        (again,) = await bus.dead_letters.find(status=None)
        store.failing.clear()

        outcome = await bus.dead_letters.replay(letter)

        assert letter.subscription == "commands:durable_letters.Pack"
        assert (failed.status, again.attempts, again.replays) == ("failed", 2, 1)
        assert (outcome.status, outcome.value) == ("succeeded", 10)
        assert (store.seen, store.attempts) == ([1], [1, 1, 1])
        assert await journal.count(letter.subscription) == {}


@JOURNALS
async def test_a_command_is_not_replayed_beside_another_of_its_unique_key(
    kind: str, tmp_path: Path
) -> None:
    store, clock = Store(1), VirtualClock()
    async with (
        journal_of(kind, tmp_path, clock=clock) as journal,
        bus_on(journal, clock=clock) as bus,
    ):
        bus.register_command_handler(Pack, store.pack, name="pack")
        await bus.enqueue(Pack(number=1), unique="box")
        await bus.settled()
        (before,) = await bus.dead_letters.find()
        await bus.enqueue(Pack(number=2), unique="box", delay=60)

        outcome = await bus.dead_letters.replay(before)

        reason = "another command of its unique key waits or runs"
        assert (outcome.status, outcome.reason) == ("skipped", reason)
        assert await bus.dead_letters.find() == [before]


# -- processes that end ----------------------------------------------------------------------------


@JOURNALS
@pytest.mark.parametrize("is_served", [False, True])
async def test_a_letter_whose_process_ended_in_a_replay_is_dead_again(
    kind: str, is_served: bool, tmp_path: Path
) -> None:
    store = Store(1)
    async with journal_of(kind, tmp_path) as journal:
        async with bus_on(journal) as bus:
            bus.subscribe(Packed, store.note, durable="notes")
            await published(bus, 1)
            (before,) = await bus.dead_letters.find()
        letters = JournalLetters(journal, MemoryDeadLetterStore(None), VirtualClock())
        letters.claims = Claims(journal, f"{this_process()}9")  # its id is another one's now
        await letters.change(before.letter_id, claimed, None)

        async with bus_on(journal) as bus:
            if is_served:
                bus.subscribe(Packed, store.note, durable="notes")
            with anyio.fail_after(30):
                while not (found := await bus.dead_letters.find()):
                    await journal.changed(-1)

        (after,) = found
        assert (after.letter_id, after.replays) == (before.letter_id, 1)
        assert after.status is LetterStatus.DEAD


async def test_a_letter_that_its_subscription_delivers_again_is_left_to_it() -> None:
    async with MemoryJournal() as journal, bus_on(journal) as bus:
        bus.subscribe(Packed, Store(1).note, durable="notes")
        await published(bus, 1)
        (letter,) = await bus.dead_letters.find()
        row = await journal.row("notes", letter.offset)
        assert row is not None
        (member,) = [one for one in await journal.members() if "notes" in one.serves]
        moved = row.moved(State.CLAIMED, time=0.0, owner=member.id)
        stored = await journal.letter(row)
        assert stored is not None
        await journal.commit([Put(moved, stored._replace(status="replaying"))], member)
        store = JournalDeadLetterStore(journal)

        outcome = await bus.dead_letters.replay(letter)
        changed = await store.change(letter.letter_id, lambda old: settled(old, old))

        assert (outcome.status, outcome.reason) == ("skipped", "being replayed")
        assert changed is not None
        assert changed.status is LetterStatus.REPLAYING
        assert await journal.row("notes", letter.offset) == moved
        await journal.commit([Drop(moved)], member)
