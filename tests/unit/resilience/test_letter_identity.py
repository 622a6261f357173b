"""A letter goes to the handler it is of, or nowhere, and a replay never spoils it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from msgbus import Command, Event
from msgbus.journal import MemoryJournal, SqliteJournal
from msgbus.journal.letters import LetterSelection
from msgbus.journal.operations import Append, Put
from msgbus.journal.records import Letter, State
from msgbus.resilience import (
    CircuitBreakerConfig,
    DeadLetterEntry,
    DeadLetterQueue,
    JournalDeadLetterStore,
    LetterStatus,
    ResilientMessageBus,
    RetryConfig,
    SqliteDeadLetterStore,
)
from msgbus.runtime.clock import VirtualClock
from msgbus.testing.conformance.journal import make_record
from tests.unit.resilience.letter_fakes import STORES, CardCharged, opened_queue

NO_RETRY = RetryConfig(max_retries=0)


class Charge(Command[str], name="identity.Charge"):
    amount: int = 0


class Placed(Event, name="identity.Placed", topic="shop.placed"):
    number: int = 0


class GoldPlaced(Placed, name="identity.GoldPlaced", topic="shop.placed.gold"):
    pass


class World:
    """What handlers reach: it is down until it is up."""

    def __init__(self) -> None:
        self.is_up = False
        self.seen: list[tuple[str, object]] = []

    def use(self, handler: str, message: object) -> str:
        if not self.is_up:
            raise ConnectionError("down")
        self.seen.append((handler, message))
        return handler


def handler_of(world: World, text: str) -> Callable[[Any], Any]:
    async def handle(message: Any) -> str:
        return world.use(text, message)

    return handle


def letters_of(kind: str, folder: Path) -> dict[str, Any]:
    """A bus that keeps its letters in a store of this kind."""
    if kind == "sqlite":
        return {"dead_letters": SqliteDeadLetterStore(folder / "letters.db")}
    if kind == "journal":
        return {"journal": f"sqlite:///{folder / 'journal.db'}?reserve=0"}
    return {}


@asynccontextmanager
async def failing_bus(
    kind: str, folder: Path, **options: Any
) -> AsyncGenerator[tuple[ResilientMessageBus, World]]:
    given: dict[str, Any] = {"retry": NO_RETRY, "breaker": None, **letters_of(kind, folder)}
    bus = ResilientMessageBus(**{**given, **options})
    async with bus:
        yield bus, World()


def as_it_was(letter: DeadLetterEntry) -> dict[str, Any]:
    return letter.data()


# -- 4. scope ------------------------------------------------------------------------------------


@STORES
async def test_a_letter_of_a_session_s_dry_run_is_not_replayed_by_the_bus_s_handler(
    kind: str, tmp_path: Path
) -> None:
    """Point 4: the bus's real handler would have made a real charge."""
    async with failing_bus(kind, tmp_path) as (bus, world):
        bus.register_command_handler(Charge, handler_of(world, "real"), name="charge")
        async with bus.session("trial") as session:
            session.register_command_handler(Charge, handler_of(world, "dry run"), name="charge")
            assert not (await session.execute(Charge(amount=5))).success
        world.is_up = True
        (before,) = await bus.dead_letters.find()
        report = await bus.dead_letters.replay_all(answered=True)
        outcome = await bus.dead_letters.replay(before)
        (after,) = await bus.dead_letters.find()

    assert (before.scope, before.handler, before.target) == ("trial", "charge", "identity.Charge")
    assert world.seen == []
    assert (report.skipped, report.reasons) == (1, {"its session is not live": 1})
    assert (outcome.status, outcome.reason) == ("skipped", "its session is not live")
    assert as_it_was(after) == as_it_was(before)


@STORES
async def test_it_is_replayed_inside_a_live_session_that_has_the_handler(
    kind: str, tmp_path: Path
) -> None:
    """Point 4: the scope is the session's id, not the session's life."""
    async with failing_bus(kind, tmp_path) as (bus, world):
        bus.register_command_handler(Charge, handler_of(world, "real"), name="charge")
        async with bus.session("trial") as session:
            session.register_command_handler(Charge, handler_of(world, "dry run"), name="charge")
            assert not (await session.execute(Charge(amount=5))).success
        world.is_up = True
        async with bus.session("trial") as session:
            skipped = await bus.dead_letters.replay_all(answered=True)
            session.register_command_handler(Charge, handler_of(world, "dry run"), name="charge")
            replayed = await bus.dead_letters.replay_all(answered=True)

    assert skipped.reasons == {"no handler named 'charge' for identity.Charge in its session": 1}
    assert replayed.succeeded == 1
    assert world.seen == [("dry run", Charge(amount=5))]


@STORES
async def test_a_letter_of_the_bus_s_handler_stays_the_bus_s_whoever_sent_the_message(
    kind: str, tmp_path: Path
) -> None:
    """Point 4: the message's session is not the handler's scope."""
    async with failing_bus(kind, tmp_path) as (bus, world):
        bus.register_command_handler(Charge, handler_of(world, "real"), name="charge")
        async with bus.session("job") as session:
            assert not (await session.execute(Charge(amount=5))).success
        world.is_up = True
        (letter,) = await bus.dead_letters.find()
        async with bus.session("job") as session:
            session.register_command_handler(Charge, handler_of(world, "dry run"), name="charge")
            outcome = await bus.dead_letters.replay(letter)

    assert (letter.session_id, letter.scope) == ("job", None)
    assert outcome.succeeded
    assert world.seen == [("real", Charge(amount=5))]


@STORES
async def test_events_of_the_bus_and_of_a_session_have_letters_of_their_own(
    kind: str, tmp_path: Path
) -> None:
    """Point 4: one message, two handlers of one name in two scopes."""
    async with failing_bus(kind, tmp_path) as (bus, world):
        bus.subscribe(Placed, handler_of(world, "bus"), name="note", durable=False)
        async with bus.session("job") as session:
            session.subscribe(Placed, handler_of(world, "session"), name="note")
            await session.publish(Placed(number=1))
            await bus.settled()
            letters = await bus.dead_letters.find()
            world.is_up = True
            report = await bus.dead_letters.replay_all()

    assert {one.scope for one in letters} == {None, "job"}
    assert report.succeeded == 2
    assert sorted(name for name, _ in world.seen) == ["bus", "session"]


# -- 4. target and name --------------------------------------------------------------------------


@STORES
async def test_one_function_for_several_types_has_a_letter_for_each(
    kind: str, tmp_path: Path
) -> None:
    """Point 4: an event that reaches it in three ways died three times."""
    async with failing_bus(kind, tmp_path) as (bus, world):
        note = handler_of(world, "note")
        for target in (Placed, GoldPlaced, "shop.**"):
            bus.subscribe(target, note, name="note", durable=False)
        await bus.publish(GoldPlaced(number=1))
        await bus.publish(GoldPlaced(number=2), topic="shop.other")
        await bus.settled()
        letters = await bus.dead_letters.find()
        world.is_up = True
        report = await bus.dead_letters.replay_all()

    targets = ["identity.GoldPlaced", "identity.Placed", "topic:shop.**"]
    assert sorted(one.target for one in letters) == sorted(targets * 2)
    assert len({one.letter_id for one in letters}) == 6
    assert report.succeeded == 6
    assert len(world.seen) == 6


@STORES
async def test_lambdas_of_one_event_get_their_own_letters_back(kind: str, tmp_path: Path) -> None:
    """Point 4: they are told apart by number, so nothing is mixed up."""
    async with failing_bus(kind, tmp_path) as (bus, world):
        bus.subscribe(Placed, lambda event: world.use("first", event))
        bus.subscribe(Placed, lambda event: world.use("second", event))
        await bus.publish(Placed(number=1))
        await bus.settled()
        letters = {one.handler: one for one in await bus.dead_letters.find()}
        world.is_up = True
        await bus.dead_letters.replay(letters["<lambda>#2"])

    assert world.seen == [("second", Placed(number=1))]


@STORES
@pytest.mark.parametrize("change", ["name", "target"])
async def test_a_handler_of_another_name_or_target_does_not_get_it(
    kind: str, change: str, tmp_path: Path
) -> None:
    """Point 4: the handler of today may be another one."""
    async with failing_bus(kind, tmp_path) as (bus, world):
        note = handler_of(world, "note")
        subscription = bus.subscribe(GoldPlaced, note, name="note", durable=False)
        bus.register_command_handler(Charge, note, name="charge")
        await bus.publish(GoldPlaced(number=1))
        assert not (await bus.execute(Charge())).success
        await bus.settled()
        before = await bus.dead_letters.find()
        world.is_up = True
        await subscription.close()
        bus.unregister_command_handler(Charge)
        if change == "name":
            bus.subscribe(GoldPlaced, note, name="other", durable=False)
            bus.register_command_handler(Charge, note, name="another")
        else:
            bus.subscribe(Placed, note, name="note", durable=False)
        report = await bus.dead_letters.replay_all(answered=True)
        after = await bus.dead_letters.find()

    assert report.reasons == {
        "no handler named 'note' for identity.GoldPlaced on this bus": 1,
        "no handler named 'charge' for identity.Charge on this bus": 1,
    }
    assert world.seen == []
    assert [as_it_was(one) for one in after] == [as_it_was(one) for one in before]


async def test_a_durable_handler_gets_its_letters_only_for_what_it_is_registered_for() -> None:
    """Point 4: the journal knows a durable handler by its name there, and what it reads."""
    journal = MemoryJournal()
    world = World()
    for target, expected in ((Placed, 0), (GoldPlaced, 0), (Placed, 1)):
        bus = ResilientMessageBus(retry=NO_RETRY, breaker=None, journal=journal)
        bus.subscribe(target, handler_of(world, "note"), durable="notes")
        async with bus:
            if not world.is_up:
                await bus.publish(GoldPlaced(number=1))
                await bus.settled()
                (letter,) = await bus.dead_letters.find()
                assert (letter.handler, letter.target) == ("notes", "identity.Placed")
                world.is_up = True
            else:
                assert (await bus.dead_letters.replay_all()).succeeded == expected
    assert len(world.seen) == 1
    await journal.close()


@STORES
async def test_scope_handler_and_target_survive_in_every_store(kind: str, tmp_path: Path) -> None:
    """Point 4: also through an edit, a file, and another store."""
    async with opened_queue(kind, tmp_path) as (queue, _, clock):
        event = CardCharged(order=1)
        scopes = [(None, "a"), ("s", "a"), (None, "b"), ("s", "b")]
        for scope, target in scopes:
            queue.add(
                event,
                handler="note",
                error=ConnectionError("down"),
                attempts=1,
                first_attempt=clock.time(),
                reason="retries exhausted",
                scope=scope,
                target=target,
            )
        letters = await queue.find()
        edited = await queue.edit(letters[1], order=2)
        path = tmp_path / "letters.jsonl"
        await queue.export(path)
        known = await queue.import_(path)

        assert [(one.scope, one.target) for one in letters] == scopes
        assert (edited.scope, edited.handler, edited.target) == ("s", "note", "a")
        assert (known.imported, known.known) == (0, 5)
        async with opened_queue("memory", tmp_path) as (other, _, _):
            assert (await other.import_(path)).imported == 5
            assert [one.data() for one in await other.find()] == [
                one.data() for one in await queue.find()
            ]


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
async def test_a_journal_s_own_letters_have_scope_handler_and_target(
    kind: str, tmp_path: Path
) -> None:
    """Point 4: the shape that subscriptions and enqueued commands write."""
    journal = MemoryJournal() if kind == "memory" else SqliteJournal(tmp_path / "j.db", reserve=0)
    async with journal:
        await journal.commit([Append(make_record(1), queue="commands:x")])
        row = await journal.row("commands:x", 1)
        assert row is not None
        letter = Letter("ValueError", "no", 7.0, 8.0, handler="charge", scope="s", target="t")
        await journal.commit([Put(row.moved(State.DEAD, time=8.0, attempt=2), letter)])

        (found,) = await journal.find_letters(LetterSelection(handler="charge"))
        (entry,) = await DeadLetterQueue(JournalDeadLetterStore(journal)).find()

        assert found.letter == letter
        assert (entry.handler, entry.scope, entry.target) == ("charge", "s", "t")
        assert (entry.subscription, entry.offset, entry.attempts) == ("commands:x", 1, 2)
        assert await journal.find_letters(LetterSelection(handler="commands:x")) == []


# -- 5. a replay never destroys a diagnosis ------------------------------------------------------


@STORES
async def test_a_letter_whose_handler_is_not_here_is_skipped_and_stays_as_it_is(
    kind: str, tmp_path: Path
) -> None:
    """Point 5: error, traceback, attempts and replays tell what happened to the message."""
    async with failing_bus(kind, tmp_path) as (bus, world):
        bus.subscribe(Placed, handler_of(world, "note"), name="note", durable=False)
        await bus.publish(Placed())
        await bus.settled()
        (before,) = await bus.dead_letters.find()
        file = tmp_path / "letters.jsonl"
        await bus.dead_letters.export(file)

    (tmp_path / "other").mkdir()
    async with failing_bus(kind, tmp_path / "other") as (other, _):
        await other.dead_letters.import_(file)
        outcome = await other.dead_letters.replay(before)
        (after,) = await other.dead_letters.find()

    assert (outcome.status, outcome.error) == ("skipped", None)
    assert outcome.reason == "no handler named 'note' for identity.Placed on this bus"
    assert "ConnectionError: down" in before.traceback
    assert as_it_was(after) == as_it_was(before) == as_it_was(outcome.letter)


@STORES
async def test_a_command_that_meets_an_open_circuit_keeps_its_cause(
    kind: str, tmp_path: Path
) -> None:
    """Point 5: its handler was not called, so there is nothing to tell of."""
    breaker = CircuitBreakerConfig(failure_threshold=1, recovery_time=30.0, jitter=0.0)
    clock = VirtualClock()
    async with failing_bus(kind, tmp_path, breaker=breaker, clock=clock) as (bus, world):
        bus.register_command_handler(Charge, handler_of(world, "real"), name="charge")
        assert not (await bus.execute(Charge(amount=5))).success
        (before,) = await bus.dead_letters.find()
        outcome = await bus.dead_letters.replay(before)
        (after,) = await bus.dead_letters.find()
        added = bus.dead_letters.added
        world.is_up = True
        await clock.advance(31)
        again = await bus.dead_letters.replay(before)

    assert (outcome.status, outcome.reason) == ("skipped", "circuit open")
    assert as_it_was(after) == as_it_was(before)
    assert added == 1
    assert again.succeeded


@STORES
async def test_a_replay_that_fails_says_what_happened_this_time(kind: str, tmp_path: Path) -> None:
    """Point 5: a handler that was called has something to tell."""
    retry = RetryConfig(max_retries=1, initial_delay=0.001, jitter=False)
    async with failing_bus(kind, tmp_path, retry=retry) as (bus, world):
        bus.register_command_handler(Charge, handler_of(world, "real"), name="charge")
        assert not (await bus.execute(Charge(amount=5))).success
        (letter,) = await bus.dead_letters.find()
        outcome = await bus.dead_letters.replay(letter)
        (after,) = await bus.dead_letters.find()

    assert isinstance(outcome.error, ConnectionError)
    assert (after.attempts, after.replays, after.answered) == (4, 1, True)


async def test_a_bus_that_does_not_run_leaves_its_letters_alone() -> None:
    """Point 5: a replay after the stop is skipped with the reason."""
    async with failing_bus("memory", Path()) as (bus, world):
        bus.subscribe(Placed, handler_of(world, "note"), name="note")
        await bus.publish(Placed())
        await bus.settled()
        (before,) = await bus.dead_letters.find()

    outcome = await bus.dead_letters.replay(before)

    assert (outcome.status, outcome.reason) == ("skipped", "the bus does not run")
    assert as_it_was(outcome.letter) == as_it_was(before)


async def test_a_replay_that_the_stop_cuts_off_leaves_the_letter_as_it_was() -> None:
    """Point 5: nobody knows how it would have ended."""
    world = World()
    bus = ResilientMessageBus(retry=NO_RETRY, breaker=None)
    begun = anyio.Event()

    async def note(event: Placed) -> None:
        if world.is_up:
            begun.set()
            await anyio.sleep_forever()
        world.use("note", event)

    bus.subscribe(Placed, note)
    outcomes: list[Any] = []
    await bus.start()
    await bus.publish(Placed())
    await bus.settled()
    (before,) = await bus.dead_letters.find()
    world.is_up = True

    async def replay() -> None:
        outcomes.append(await bus.dead_letters.replay(before))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(replay)
        await begun.wait()
        await bus.stop(0)

    (outcome,) = outcomes
    assert outcome.status == "skipped"
    assert outcome.letter.status is LetterStatus.DEAD
    assert as_it_was(outcome.letter) == as_it_was(before)


# -- g. what a replayed command replied ----------------------------------------------------------


@STORES
async def test_the_outcome_of_a_replayed_command_has_its_value(kind: str, tmp_path: Path) -> None:
    """List g: whoever replays may want the answer that the caller never got."""
    async with failing_bus(kind, tmp_path) as (bus, world):
        bus.register_command_handler(Charge, handler_of(world, "charged"), name="charge")
        assert not (await bus.execute(Charge())).success
        (letter,) = await bus.dead_letters.find()
        failed = await bus.dead_letters.replay(letter)
        world.is_up = True
        outcome = await bus.dead_letters.replay(letter)

    assert (failed.status, failed.value) == ("failed", None)
    assert (outcome.status, outcome.value) == ("succeeded", "charged")


# -- 6. letters of enqueued commands -------------------------------------------------------------


async def test_a_letter_of_an_enqueued_command_names_its_handler() -> None:
    """Point 6: and goes to it, and to no other."""
    journal = MemoryJournal()
    world = World()
    bus = ResilientMessageBus(retry=NO_RETRY, breaker=None, journal=journal)
    bus.register_command_handler(Charge, handler_of(world, "charge"), name="charge")
    async with bus:
        await bus.enqueue(Charge(amount=3))
        await bus.settled()
        (letter,) = await bus.dead_letters.find()
        (stored,) = await journal.find_letters(LetterSelection())
        deliveries = await journal.deliveries(letter.message_id)
        world.is_up = True
        outcome = await bus.dead_letters.replay(letter)

    assert (letter.handler, letter.target, letter.scope) == ("charge", "identity.Charge", None)
    assert stored.letter is not None
    assert stored.row.subscription == letter.subscription == "commands:identity.Charge"
    assert stored.letter.handler == "charge"
    assert {one.handler for one in deliveries} == {"charge"}
    assert outcome.value == "charge"
    await journal.close()
