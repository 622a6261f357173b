"""`record(bus)` on a bus with a journal: each message once, with every handler (19, point 15)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import pytest

from msgbus import Command, Context, Event, MessageBus, PublishStatus, Refusal
from msgbus.errors import JournalFullError
from msgbus.handlers.delivery import Mode, Poison
from msgbus.journal.records import Record
from msgbus.resilience import ResilientMessageBus, RetryConfig
from msgbus.testing import Recorder, record
from tests.durable_shop import outcomes
from tests.unit.durable.conftest import Site
from tests.unit.durable.places import watch_appends

AT_ONCE = RetryConfig(max_retries=2, initial_delay=0)
IN_A_MINUTE = RetryConfig(max_retries=2, initial_delay=60, jitter=False)


class Placed(Event, name="record.Placed"):
    number: int = 0


class Shipped(Event, name="record.Shipped"):
    number: int = 0


class Place(Command[int], name="record.Place"):
    number: int = 0


class OutOfStockError(Refusal):
    pass


@pytest.fixture(params=["plain", "resilient"])
def bus(request: pytest.FixtureRequest, site: Site) -> MessageBus:
    if request.param == "plain":
        return site.bus()
    return ResilientMessageBus(
        retry=RetryConfig(max_retries=2, initial_delay=0, jitter=False),
        journal=site.journal,
        clock=site.clock,
    )


class Failing:
    """A handler that fails the first `times`."""

    def __init__(self, times: int = 1, error: type[Exception] = OSError) -> None:
        self._left = times
        self._error = error

    async def __call__(self, event: Placed) -> None:
        if self._left:
            self._left -= 1
            raise self._error("down")


async def ignore(event: Event) -> None: ...


async def ignore_list(events: list[Placed]) -> None: ...


def handled(recorder: Recorder) -> list[tuple[str, str, int]]:
    """What was handled, by whom, at which attempt; in no order, as handlers are concurrent."""
    return sorted(
        (type(one.message).__name__, one.handler, one.attempts) for one in recorder.handled()
    )


async def test_one_publish_is_recorded_once_with_all_its_handlers(bus: MessageBus) -> None:
    bus.subscribe(Placed, ignore, name="durable")
    bus.subscribe(Placed, ignore, name="other")
    bus.subscribe(Placed, ignore, name="memory", durable=False)
    bus.subscribe(Placed, ignore_list, name="list", batch=True)
    event = Placed(number=1)

    async with record(bus) as recorder:
        await bus.publish(event)
        await bus.settled()

    assert recorder.published() == [event]
    assert recorder.published(status=PublishStatus.DURABLE) == [event]
    names = ["durable", "list", "memory", "other"]
    assert handled(recorder) == [("Placed", name, 1) for name in names]
    assert recorder.causation_tree() == f"Placed: handled by {', '.join(names)}"


async def test_what_handlers_send_stands_below_what_they_handled(bus: MessageBus) -> None:
    @bus.handles(Place)
    async def place(command: Place, context: Context) -> int:
        context.emit(Placed(number=command.number))
        return command.number

    @bus.on(Placed)
    async def ship(event: Placed, context: Context) -> None:
        await context.publish(Shipped(number=event.number))

    bus.subscribe(Shipped, ignore, name="memory", durable=False)

    async with record(bus) as recorder:
        await bus.execute(Place(number=7))
        await bus.settled()

    assert recorder.executed() == [Place(number=7)]
    assert recorder.published() == [Placed(number=7), Shipped(number=7)]
    assert recorder.causation_tree().splitlines() == [
        "Place: handled by place",
        "└─ Placed: handled by ship",
        "   └─ Shipped: handled by memory",
    ]


async def test_many_events_of_one_commit_are_recorded_one_by_one(bus: MessageBus) -> None:
    bus.subscribe(Placed, ignore, name="durable")
    bus.subscribe(Placed, ignore, name="memory", durable=False)
    bus.add_filter(lambda event: not isinstance(event, Placed) or event.number != 2)

    async with record(bus) as recorder:
        await bus.publish_many(Placed(number=number) for number in range(4))
        await bus.settled()

    assert [event.number for event in recorder.published(Placed)] == [2, 0, 1, 3]
    assert recorder.published(status=PublishStatus.FILTERED) == [Placed(number=2)]
    assert len(recorder.handled()) == 6


async def test_a_durable_handler_that_is_tried_again_is_one_delivery(bus: MessageBus) -> None:
    bus.subscribe(Placed, Failing(2), name="twice", retry=AT_ONCE)
    bus.subscribe(Placed, ignore, name="at once")

    async with record(bus) as recorder:
        await bus.publish(Placed())
        await bus.settled()

    assert handled(recorder) == [("Placed", "at once", 1), ("Placed", "twice", 3)]
    assert recorder.failed() == []
    assert recorder.causation_tree() == "Placed: handled by at once, twice"


async def test_a_durable_handler_whose_retry_is_due_later_has_not_failed(
    bus: MessageBus, site: Site
) -> None:
    bus.subscribe(Placed, Failing(), name="later", retry=IN_A_MINUTE, mode=Mode.SHARED)

    async with record(bus) as recorder:
        await bus.publish(Placed())
        await bus.settled()
        before = recorder.causation_tree(), recorder.failed()
        await site.clock.advance(60)
        await bus.settled()

    assert before == ("Placed: backing off in later", [])
    assert handled(recorder) == [("Placed", "later", 2)]


async def test_a_dead_letter_is_a_failure_after_all_its_attempts(bus: MessageBus) -> None:
    bus.subscribe(Placed, Failing(99), name="poison", retry=AT_ONCE)

    async with record(bus) as recorder:
        await bus.publish(Placed())
        await bus.settled()

    [failure] = recorder.failed(Placed)
    assert (failure.handler, failure.attempts, type(failure.error)) == ("poison", 3, OSError)
    assert recorder.causation_tree() == "Placed: failed in poison: OSError: down"


@pytest.mark.parametrize("retry", [AT_ONCE, RetryConfig(max_retries=0)], ids=["tried", "once"])
async def test_a_refusal_and_a_dropped_message_are_failures_too(
    bus: MessageBus, retry: RetryConfig
) -> None:
    bus.subscribe(Placed, Failing(9, OutOfStockError), name="refuses", retry=retry)
    bus.subscribe(Placed, Failing(9), name="drops", retry=retry, on_poison=Poison.DROP)

    async with record(bus) as recorder:
        await bus.publish(Placed())
        await bus.settled()

    found = {one.handler: one.attempts for one in recorder.failed()}
    assert found == {"refuses": 1, "drops": retry.max_retries + 1}
    assert recorder.handled() == []


async def test_attempts_of_handlers_in_memory_and_of_lists_are_counted(site: Site) -> None:
    bus = ResilientMessageBus(
        retry=RetryConfig(max_retries=2, initial_delay=0, jitter=False),
        journal=site.journal,
        clock=site.clock,
    )
    bus.subscribe(Placed, Failing(2), name="memory", durable=False)
    fails = Failing(1)

    @bus.on(Placed, batch=True, retry=AT_ONCE)
    async def lists(events: list[Placed]) -> None:
        await fails(events[0])

    async with record(bus) as recorder:
        await bus.publish(Placed())
        await bus.settled()

    assert handled(recorder) == [("Placed", "lists", 2), ("Placed", "memory", 3)]


async def test_an_enqueued_command_is_one_message_from_sender_to_handler(
    bus: MessageBus, site: Site
) -> None:
    fails = Failing(1)

    @bus.handles(Place)
    async def place(command: Place, context: Context) -> int:
        await fails(Placed())
        context.emit(Placed(number=command.number))
        return command.number

    @bus.on(Shipped)
    async def order_again(event: Shipped, context: Context) -> None:
        await context.enqueue(Place(number=event.number), delay=60)

    async with record(bus) as recorder:
        await bus.publish(Shipped(number=7))
        await bus.settled()
        waiting = recorder.causation_tree().splitlines()
        for _ in range(2):
            await site.clock.advance(60)
            await bus.settled()

    assert waiting == ["Shipped: handled by order_again", "└─ Place: enqueued"]
    assert recorder.executed() == [Place(number=7)]
    assert ("Place", "place", 2) in handled(recorder)
    assert recorder.causation_tree().splitlines() == [
        "Shipped: handled by order_again",
        "└─ Place: handled by place",
        "   └─ Placed: no handlers",
    ]


async def test_an_enqueued_command_that_is_given_up_or_taken_back_says_so(
    bus: MessageBus, site: Site
) -> None:
    @bus.handles(Place)
    async def place(command: Place) -> int:
        raise OutOfStockError("none left") if command.number else ValueError("broken")

    async with record(bus) as recorder:
        await bus.enqueue(Place(number=1))
        await bus.enqueue(Place(number=0))
        taken_back = Place(number=2)
        await bus.enqueue(taken_back, delay=60)
        assert await bus.unschedule(taken_back)
        for _ in range(3):
            await site.clock.advance(10)
            await bus.settled()

    assert [type(one.error) for one in recorder.failed()] == [OutOfStockError, ValueError]
    assert recorder.causation_tree().splitlines() == [
        "Place: failed in place: OutOfStockError: none left",
        "Place: failed in place: ValueError: broken",
        "Place: cancelled before it was due",
    ]


async def test_a_delayed_event_is_recorded_once_when_it_is_due(bus: MessageBus, site: Site) -> None:
    bus.subscribe(Placed, ignore, name="durable")
    bus.subscribe(Placed, ignore, name="memory", durable=False)
    taken_back = Placed(number=2)

    async with record(bus) as recorder:
        await bus.publish(Placed(number=1), delay=60)
        await bus.publish(taken_back, delay=60)
        await bus.unschedule(taken_back)
        before = recorder.published(), recorder.causation_tree().splitlines()
        await site.clock.advance(60)
        await bus.settled()

    assert before == ([], ["Placed: not due yet", "Placed: cancelled before it was due"])
    assert recorder.published() == [Placed(number=1)]
    assert recorder.causation_tree().splitlines() == [
        "Placed: handled by durable, memory",
        "Placed: cancelled before it was due",
    ]


async def test_an_event_of_a_transaction_is_published_when_it_is_committed(
    bus: MessageBus,
) -> None:
    bus.subscribe(Placed, ignore, name="durable")

    async with record(bus) as recorder:
        async with bus.transaction():
            await bus.publish(Placed(number=1))
            inside = recorder.published(), recorder.causation_tree()
        with suppress(ZeroDivisionError):
            async with bus.transaction():
                await bus.publish(Placed(number=2))
                raise ZeroDivisionError
        await bus.settled()

    assert inside == ([], "Placed: being published")
    assert recorder.published() == [Placed(number=1)]
    assert recorder.causation_tree().splitlines() == [
        "Placed: handled by durable",
        "Placed: not published: ZeroDivisionError",
    ]


async def test_what_the_journal_refuses_was_not_published(
    memory: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = memory.bus()

    def refuse(appended: Sequence[Record]) -> None:
        if appended:
            raise JournalFullError("full")

    async with record(bus) as recorder:
        watch_appends(bus, monkeypatch, refuse)
        with pytest.raises(JournalFullError):
            await bus.publish(Placed(number=1))
        with pytest.raises(JournalFullError):
            await bus.publish_many([Placed(number=2), Placed(number=3)])

    assert recorder.published() == []
    assert (
        recorder.causation_tree().splitlines()
        == ["Placed: not published: JournalFullError: full"] * 3
    )


async def test_a_duplicate_of_an_event_says_so(bus: MessageBus) -> None:
    bus.subscribe(Placed, ignore, name="durable")
    event = Placed()

    async with record(bus) as recorder:
        await bus.publish(event)
        await bus.publish(event)
        await bus.settled()

    assert recorder.published() == [event, event]
    assert recorder.causation_tree() == "Placed: already published; handled by durable"


async def test_a_recording_of_a_running_bus_ends_without_a_trace(bus: MessageBus) -> None:
    bus.subscribe(Placed, ignore, name="durable")
    bus.subscribe(Placed, ignore, name="memory", durable=False)

    async with bus:
        await bus.publish(Placed(number=1))
        await bus.settled()
        async with record(bus) as recorder:
            await bus.publish(Placed(number=2))
            await bus.settled()
        await bus.publish(Placed(number=3))
        await bus.settled()

    assert recorder.published() == [Placed(number=2)]
    assert handled(recorder) == [("Placed", "durable", 1), ("Placed", "memory", 1)]


async def test_the_journal_records_the_same_whoever_else_observes(bus: MessageBus) -> None:
    bus.subscribe(Placed, Failing(1), name="again", retry=AT_ONCE)
    event = Placed()

    async with record(bus) as recorder:
        await bus.publish(event)
        await bus.settled()
        found = await outcomes(bus, event.message_id)

    assert found == [("again", 1, "failed"), ("again", 2, "ok")]
    assert handled(recorder) == [("Placed", "again", 2)]
