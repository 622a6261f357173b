"""Dead letters of a resilient bus: who gets one, what it says, and how it comes back."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from pathlib import Path

import anyio
import pytest

from msgbus import (
    Command,
    ConfigurationError,
    Context,
    DeadLetteredEvent,
    EventHandlerFailedEvent,
    Query,
    Refusal,
)
from msgbus.resilience import (
    CircuitBreakerConfig,
    DeadLetterQueue,
    LetterStatus,
    MemoryDeadLetterStore,
    Overflow,
    ResilientMessageBus,
    RetryConfig,
    SqliteDeadLetterStore,
)
from msgbus.runtime.clock import VirtualClock
from msgbus.telemetry.prometheus import BusCollector
from tests.fakes import OrderPlaced, conserves, let_others_run

NO_RETRY = RetryConfig(max_retries=0)


class ChargeCard(Command[str]):
    number: int = 0


class FindOrder(Query[str]):
    number: int = 0


class CardDeclined(Refusal):
    pass


class Switch:
    """Something that is down until it is switched on."""

    def __init__(self) -> None:
        self.is_on = False
        self.seen: list[int] = []

    async def charge(self, command: ChargeCard) -> str:
        self.use(command.number)
        return "charged"

    async def note(self, event: OrderPlaced) -> None:
        self.use(event.number)

    def use(self, number: int) -> None:
        if not self.is_on:
            raise ConnectionError("down, password=hunter2")
        self.seen.append(number)


def make_bus(switch: Switch, **options: object) -> ResilientMessageBus:
    given: Mapping[str, object] = {"retry": NO_RETRY, "breaker": None, **options}
    bus = ResilientMessageBus(**given)  # type: ignore[arg-type]
    bus.register_command_handler(ChargeCard, switch.charge, name="charge")
    bus.subscribe(OrderPlaced, switch.note, name="note")
    return bus


async def test_a_failed_command_has_its_letter_in_the_result() -> None:
    async with make_bus(Switch()) as bus:
        result = await bus.execute(ChargeCard(number=7))
        letter = await bus.dead_letters.get(str(result.metadata["dead_letter"]))

    assert letter.message == ChargeCard(number=7)
    assert letter.message_id == result.command_id
    assert letter.handler == "charge"
    assert letter.error == "ConnectionError: down, password=[redacted]"
    assert "hunter2" not in letter.traceback
    assert letter.attempts == result.attempts == 1
    assert letter.answered


async def test_the_letter_says_how_often_it_was_tried_and_why_no_more() -> None:
    clock = VirtualClock()
    retry = RetryConfig(max_retries=2, initial_delay=1.0, jitter=False)
    bus = make_bus(Switch(), retry=retry, clock=clock)

    async with bus:
        await bus.publish(OrderPlaced(number=1))
        await clock.advance(10.0)
        await bus.settled()
        (letter,) = await bus.dead_letters.find()

    assert letter.attempts == 3
    assert letter.reason == "retries exhausted"
    assert (letter.last_attempt - letter.first_attempt).total_seconds() == 3.0
    assert not letter.answered


async def test_an_open_circuit_is_the_reason_of_a_command_that_was_never_called() -> None:
    bus = make_bus(Switch(), breaker=CircuitBreakerConfig(failure_threshold=1))

    async with bus:
        first = await bus.execute(ChargeCard(number=1))
        second = await bus.execute(ChargeCard(number=2))
        letters = await bus.dead_letters.find()

    assert not first.success
    assert second.attempts == 0
    assert [(one.reason, one.attempts) for one in letters] == [
        ("retries exhausted", 1),
        ("circuit open", 0),
    ]


async def test_refusals_and_queries_leave_no_letter() -> None:
    bus = make_bus(Switch())

    async def decline(command: ChargeCard) -> str:
        raise CardDeclined

    async def fail(query: FindOrder) -> str:
        raise ConnectionError

    async def refuse(event: OrderPlaced) -> None:
        raise CardDeclined

    bus.register_command_handler(ChargeCard, decline, replace=True)
    bus.register_command_handler(FindOrder, fail)
    bus.subscribe(OrderPlaced, refuse)
    bus.policy("note", dead_letters=False)

    async with bus:
        declined = await bus.execute(ChargeCard())
        found = await bus.execute(FindOrder())
        await bus.publish(OrderPlaced())
        await bus.settled()

        assert await bus.dead_letters.count() == 0
    assert not declined.success
    assert not found.success
    assert "dead_letter" not in {**declined.metadata, **found.metadata}


async def test_a_handler_of_the_bus_s_own_events_leaves_no_letter() -> None:
    bus = make_bus(Switch())

    @bus.on(EventHandlerFailedEvent)
    async def fail(event: EventHandlerFailedEvent) -> None:
        raise ValueError

    @bus.on(DeadLetteredEvent)
    async def fail_again(event: DeadLetteredEvent) -> None:
        raise ValueError

    async with bus:
        await bus.publish(OrderPlaced())
        await bus.settled()
        letters = await bus.dead_letters.find()

    assert [one.handler for one in letters] == ["note"]


async def test_only_the_handler_that_failed_gets_the_event_back() -> None:
    switch = Switch()
    bus = make_bus(switch)
    others: list[int] = []
    causes: list[str | None] = []

    @bus.on(OrderPlaced)
    async def other(event: OrderPlaced, context: Context) -> None:
        others.append(event.number)
        causes.append(event.message_id)

    async with bus:
        for number in range(3):
            await bus.publish(OrderPlaced(number=number))
        await bus.settled()
        switch.is_on = True
        letters = await bus.dead_letters.find()
        report = await bus.dead_letters.replay_all()
        again = await bus.dead_letters.replay_all()

        assert bus.stats().dead_letters == 0
        conserves(bus)
    assert (report.succeeded, report.failed, again.matched) == (3, 0, 0)
    assert switch.seen == [0, 1, 2]
    assert others == [0, 1, 2]
    assert [one.message_id for one in letters] == causes


async def test_a_replay_that_fails_again_updates_the_same_letter() -> None:
    async with make_bus(Switch()) as bus:
        await bus.publish(OrderPlaced())
        assert not (await bus.execute(ChargeCard())).success
        await bus.settled()
        before = await bus.dead_letters.find()
        report = await bus.dead_letters.replay_all(answered=True)
        after = await bus.dead_letters.find()

        conserves(bus)
    assert (report.succeeded, report.failed) == (0, 2)
    assert [one.letter_id for one in after] == [one.letter_id for one in before]
    assert [one.attempts for one in after] == [2, 2]
    assert [one.answered for one in after] == [one.answered for one in before]


async def test_a_command_whose_caller_saw_the_failure_is_replayed_only_if_asked_for() -> None:
    switch = Switch()
    async with make_bus(switch) as bus:
        result = await bus.execute(ChargeCard(number=1))
        switch.is_on = True
        untouched = await bus.dead_letters.replay_all()
        asked = await bus.dead_letters.replay_all(answered=True)

    assert not result.success
    assert (untouched.succeeded, untouched.skipped) == (0, 1)
    assert asked.succeeded == 1
    assert switch.seen == [1]


async def test_a_failed_result_that_nobody_looked_at_is_no_answer() -> None:
    async with make_bus(Switch()) as bus:
        await bus.execute(ChargeCard(number=1))
        gc.collect()
        await let_others_run()
        (letter,) = await bus.dead_letters.find()

    assert not letter.answered


async def test_an_edited_message_is_handled_in_the_place_of_the_old_one() -> None:
    switch = Switch()
    async with make_bus(switch) as bus:
        await bus.publish(OrderPlaced(number=13))
        await bus.settled()
        switch.is_on = True
        (poison,) = await bus.dead_letters.find()
        mended = await bus.dead_letters.edit(poison, number=12)
        outcome = await bus.dead_letters.replay(mended)
        old = await bus.dead_letters.get(poison)

    assert outcome.succeeded
    assert switch.seen == [12]
    assert mended.message.causation_id == poison.message_id
    assert old.status is LetterStatus.EDITED


async def test_a_letter_whose_handler_is_gone_stays_and_says_so() -> None:
    store = MemoryDeadLetterStore()
    async with make_bus(Switch(), dead_letters=store) as bus:
        await bus.publish(OrderPlaced())
        await bus.settled()

    successor = ResilientMessageBus(dead_letters=store)
    async with successor:
        (letter,) = await successor.dead_letters.find()
        outcome = await successor.dead_letters.replay(letter)

    assert outcome.status == "skipped"
    assert outcome.reason == "no handler named 'note' for OrderPlaced on this bus"
    assert outcome.letter == letter


async def test_letters_survive_the_bus_in_a_file(tmp_path: Path) -> None:
    switch = Switch()
    async with make_bus(switch, dead_letters=SqliteDeadLetterStore(tmp_path / "l.db")) as bus:
        for number in range(10):
            await bus.publish(OrderPlaced(number=number))

    switch.is_on = True
    async with make_bus(switch, dead_letters=SqliteDeadLetterStore(tmp_path / "l.db")) as bus:
        assert bus.stats().dead_letters == 10
        report = await bus.dead_letters.replay_all(OrderPlaced)

    assert report.succeeded == 10
    assert switch.seen == list(range(10))


async def test_a_full_store_never_holds_up_a_command() -> None:
    store = MemoryDeadLetterStore(max_size=2, overflow=Overflow.REJECT)
    async with make_bus(Switch(), dead_letters=store) as bus:
        with anyio.fail_after(5):
            results = [await bus.execute(ChargeCard(number=number)) for number in range(5)]

        assert bus.dead_letters.refused == 3
    assert ["dead_letter" in one.metadata for one in results] == [True, True, False, False, False]
    assert not any(one.success for one in results)


async def test_each_event_of_a_failed_list_has_a_letter_of_its_own() -> None:
    bus = ResilientMessageBus(retry=NO_RETRY, breaker=None)

    @bus.on(OrderPlaced, batch=True)
    async def no_threes(events: list[OrderPlaced]) -> None:
        if any(event.number % 3 == 0 for event in events):
            raise ValueError("three")

    async with bus:
        await bus.publish_many(OrderPlaced(number=number) for number in range(7))
        await bus.settled()
        letters = await bus.dead_letters.find()
        report = await bus.dead_letters.replay_all()

        conserves(bus)
    assert [one.message for one in letters] == [OrderPlaced(number=n) for n in (0, 3, 6)]
    assert report.failed == 3


async def test_who_listens_hears_of_every_letter() -> None:
    bus = make_bus(Switch())
    heard: list[tuple[str, str]] = []

    @bus.on(DeadLetteredEvent)
    async def listen(event: DeadLetteredEvent) -> None:
        heard.append((event.message_type, event.handler))

    async with bus:
        await bus.publish(OrderPlaced())
        await bus.settled()
        await bus.settled()

    assert heard == [("OrderPlaced", "note")]


async def test_the_gauge_shows_how_many_letters_there_are() -> None:
    async with make_bus(Switch()) as bus:
        await bus.publish(OrderPlaced())
        await bus.settled()
        metrics = {metric.name: metric for metric in BusCollector(bus).collect()}

    assert metrics["msgbus_dead_letter_queue_size"].samples[0].value == 1


async def test_a_bus_without_dead_letters_says_so() -> None:
    async with make_bus(Switch(), dead_letters=None) as bus:
        result = await bus.execute(ChargeCard())

        assert bus.stats().dead_letters == 0
        with pytest.raises(ConfigurationError, match="dead_letters=None"):
            _ = bus.dead_letters
    assert "dead_letter" not in result.metadata


def test_a_store_that_is_none_is_refused_with_the_fix() -> None:
    with pytest.raises(ConfigurationError, match=r"SqliteDeadLetterStore\('letters.db'\)"):
        ResilientMessageBus(dead_letters="letters.db")  # type: ignore[arg-type]


def test_a_queue_of_one_s_own_is_taken_as_it_is() -> None:
    letters = DeadLetterQueue()

    assert ResilientMessageBus(dead_letters=letters).dead_letters is letters
