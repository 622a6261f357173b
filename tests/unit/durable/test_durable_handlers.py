"""Handlers that read the journal: which are, what they get, and what becomes of failures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest

from msgbus import (
    ConfigurationError,
    Context,
    DuplicateHandlerError,
    Event,
    MessageBus,
    Refusal,
    SessionEndEvent,
)
from msgbus.errors import BusStateError
from msgbus.handlers.delivery import Delivery, Mode, Poison, StartAt
from msgbus.journal.operations import Append
from msgbus.journal.records import Record
from msgbus.resilience.config import RetryConfig
from msgbus.testing import VirtualClock
from tests.durable_shop import (
    DownError,
    Placed,
    PlacedOnline,
    Seen,
    Shipped,
    dead_letters,
    journal_of,
    outcomes,
    records,
    url_of,
)
from tests.fakes import conserves, logged

AT_ONCE = RetryConfig(max_retries=2, initial_delay=0)


async def handle(event: Placed) -> None: ...


async def test_named_handlers_of_the_bus_are_durable_and_others_are_not() -> None:
    bus = MessageBus(journal="memory:")

    assert bus.subscribe(Placed, handle).is_durable
    assert bus.subscribe("shop.**", handle, durable="shop").is_durable
    assert bus.subscribe(Placed, lambda _: None, name="named").is_durable
    assert not bus.subscribe(Placed, lambda _: None).is_durable
    assert not bus.subscribe(Placed, handle, name="out", durable=False).is_durable
    assert not bus.subscribe(SessionEndEvent, lambda _: None, name="ends").is_durable
    async with bus, bus.session() as session:
        assert not session.subscribe(Placed, handle).is_durable


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"priority": 5}, "priority orders handlers in memory"),
        ({"durable": False, "mode": Mode.SHARED}, "not durable=False"),
        ({"max_in_flight": 0}, "max_in_flight: Input should be"),
        ({"colour": "red"}, "no option 'colour'. There are: ack_timeout"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        MessageBus(journal="memory:").subscribe(Placed, handle, **options)


async def test_handlers_of_a_session_cannot_be_durable() -> None:
    async with MessageBus(journal="memory:") as bus, bus.session() as session:
        with pytest.raises(ConfigurationError, match="end with it"):
            session.subscribe(Placed, handle, durable="receipts")


def test_two_of_one_name_are_refused() -> None:
    bus = MessageBus(journal="memory:")
    bus.subscribe(Placed, handle, durable="receipts")
    with pytest.raises(DuplicateHandlerError, match="receipts"):
        bus.subscribe(Shipped, lambda _: None, name="other", durable="receipts")


async def test_subclasses_come_too_even_those_defined_later() -> None:
    bus = MessageBus(journal="memory:")
    seen = Seen()
    bus.subscribe(Placed, seen)

    async with bus:
        await bus.publish(PlacedOnline(number=1))
        await bus.settled()

        class PlacedByPhone(Placed):
            pass

        await bus.publish(Shipped(number=7))
        await bus.publish(PlacedByPhone(number=2))
        await bus.settled()

    assert seen.numbers == [1, 2]


async def test_a_handler_of_topics_reads_the_journal_too() -> None:
    bus = MessageBus(journal="memory:")
    topics: list[str] = []

    @bus.on("shop.orders.*")
    async def listen(event: Event, context: Context) -> None:
        topics.append(context.topic)

    async with bus:
        await bus.publish(Shipped())
        await bus.publish(Placed(), topic="shop.orders.special")
        await bus.publish(Placed())
        await bus.settled()

    assert topics == ["shop.orders.shipped", "shop.orders.special"]


async def test_a_failed_try_is_repeated_and_each_is_recorded() -> None:
    bus = MessageBus(journal="memory:")
    attempts: list[int] = []

    @bus.on(Placed, retry=AT_ONCE)
    async def shaky(event: Placed, context: Context) -> None:
        attempts.append(context.attempt)
        if len(attempts) < 3:
            raise DownError

    async with bus:
        event = Placed()
        await bus.publish(event)
        await bus.settled()

        assert attempts == [1, 2, 3]
        assert await outcomes(bus, event.message_id) == [
            ("shaky", 1, "failed"),
            ("shaky", 2, "failed"),
            ("shaky", 3, "ok"),
        ]
        conserves(bus)


async def test_poison_becomes_a_dead_letter_and_holds_up_nobody() -> None:
    bus = MessageBus(journal="memory:")
    seen = Seen(fail={1: 99})
    bus.subscribe(Placed, seen, retry=AT_ONCE, durable="seen")

    async with bus:
        for number in range(3):
            await bus.publish(Placed(number=number))
        await bus.settled()

        assert seen.numbers == [0, 2]
        (dead,) = await dead_letters(bus, "seen")
        assert dead.record.json()["number"] == 1
        assert dead.row.attempt == 3
        conserves(bus)


async def test_an_error_that_no_file_can_hold_is_a_failure_like_any(tmp_path: Path) -> None:
    bus = MessageBus(journal=url_of(tmp_path))

    @bus.on(Placed, durable="seen", retry=AT_ONCE)
    async def fail(event: Placed) -> None:
        raise LookupError("half a character: \udcff")

    async with bus:
        await bus.publish(Placed(number=1))
        await bus.settled()

        (dead,) = await dead_letters(bus, "seen")
        assert dead.row.error == "LookupError: half a character: \\udcff"


async def test_a_refusal_is_an_answer_and_not_tried_again() -> None:
    bus = MessageBus(journal="memory:")
    tries: list[int] = []

    @bus.on(Placed, durable="refusing")
    async def refuse(event: Placed) -> None:
        tries.append(event.number)
        raise Refusal("no")

    async with bus:
        await bus.publish(Placed(number=1))
        await bus.settled()

        assert tries == [1]
        assert await dead_letters(bus, "refusing") == []


@pytest.mark.parametrize("limit", ["ack_timeout", "timeout"])
async def test_a_handler_that_takes_too_long_is_cut_off_and_tried_again(limit: str) -> None:
    clock = VirtualClock()
    bus = MessageBus(journal="memory:", clock=clock)
    begun: list[int] = []
    first = anyio.Event()

    options: Any = {limit: 5}

    async def slow(event: Placed) -> None:
        begun.append(event.number)
        first.set()
        if len(begun) == 1:
            await anyio.sleep_forever()

    bus.subscribe(Placed, slow, retry=AT_ONCE, durable="slow", **options)
    async with bus:
        event = Placed(number=1)
        await bus.publish(event)
        await first.wait()
        await clock.advance(6)
        await bus.settled()

        assert begun == [1, 1]
        assert await outcomes(bus, event.message_id) == [
            ("slow", 1, "timed_out"),
            ("slow", 2, "ok"),
        ]


@pytest.mark.parametrize("limit", ["max_in_flight", "concurrency"])
async def test_a_durable_handler_handles_as_many_at_once_as_said(limit: str) -> None:
    bus = MessageBus(journal="memory:")
    options: Any = {limit: 3}
    begun: list[int] = []
    all_begun = anyio.Event()

    async def slow(event: Placed) -> None:
        begun.append(event.number)
        if len(begun) == 3:
            all_begun.set()
        await all_begun.wait()

    bus.subscribe(Placed, slow, durable="slow", mode=Mode.SHARED, **options)
    async with bus:
        for number in range(3):
            await bus.publish(Placed(number=number))
        await bus.settled()

    assert sorted(begun) == [0, 1, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"concurrency": 1, "max_in_flight": 3},
            "concurrency=1 and max_in_flight=3 are the same option",
        ),
        (
            {"timeout": 2.0, "ack_timeout": None},
            r"timeout=2\.0 and ack_timeout=None are the same option",
        ),
    ],
)
def test_two_names_for_one_limit_are_refused(options: Any, message: str) -> None:
    bus = MessageBus(journal="memory:")

    with pytest.raises(ConfigurationError, match=f"{message} of a durable handler. Give one of"):
        bus.subscribe(Placed, print, **options)

    assert bus.handlers() == ()


async def test_a_batch_handler_reads_lists_from_the_journal() -> None:
    bus = MessageBus(journal="memory:")
    lists: list[list[int]] = []

    @bus.on(Placed, batch=True)
    async def take(events: list[Placed]) -> None:
        lists.append([one.number for one in events])

    for number in range(10):
        await bus.publish(Placed(number=number))
    async with bus:
        await bus.settled()

        assert [number for one in lists for number in one] == list(range(10))
        assert len(lists) < 10
        conserves(bus)


async def test_several_at_once_in_a_shared_subscription() -> None:
    bus = MessageBus(journal="memory:")
    begun: list[int] = []
    all_here = anyio.Event()

    @bus.on(Placed, mode=Mode.SHARED, max_in_flight=3)
    async def wait_for_all(event: Placed) -> None:
        begun.append(event.number)
        if len(begun) == 3:
            all_here.set()
        await all_here.wait()

    async with bus:
        for number in range(3):
            await bus.publish(Placed(number=number))
        await bus.settled()

    assert sorted(begun) == [0, 1, 2]


async def test_at_most_once_is_not_tried_again() -> None:
    bus = MessageBus(journal="memory:")
    seen = Seen(fail={0: 1})
    bus.subscribe(
        Placed,
        seen,
        delivery=Delivery.AT_MOST_ONCE,
        on_poison=Poison.DROP,
        retry=RetryConfig(max_retries=0),
    )

    async with bus:
        await bus.publish(Placed(number=0))
        await bus.publish(Placed(number=1))
        await bus.settled()

    assert seen.numbers == [1]


async def test_a_new_handler_may_begin_at_the_end() -> None:
    bus = MessageBus(journal="memory:")
    seen = Seen()
    bus.subscribe(Placed, seen, start=StartAt.LATEST)
    await bus.publish(Placed(number=1))

    async with bus:
        await bus.publish(Placed(number=2))
        await bus.settled()

    assert seen.numbers == [2]


async def test_the_handle_steers_it() -> None:
    bus = MessageBus(journal="memory:")
    seen = Seen()
    subscription = bus.subscribe(Placed, seen)
    with pytest.raises(BusStateError, match="once the bus is started"):
        subscription.progress()

    async with bus:
        subscription.pause()
        await bus.publish(Placed(number=1))
        assert subscription.progress().standing == "paused"
        subscription.resume()
        assert await subscription.caught_up() == 1
        assert subscription.progress().lag == 0
        await subscription.seek(1)
        await subscription.caught_up()
        assert seen.numbers == [1, 1]
        await subscription.close()
        await bus.publish(Placed(number=2))
        await bus.settled()

    assert seen.numbers == [1, 1]


async def test_handlers_in_memory_have_no_place_in_the_journal() -> None:
    subscription = MessageBus().subscribe(Placed, handle)
    with pytest.raises(BusStateError, match="not durable"):
        await subscription.seek(1)


async def test_a_handler_that_comes_later_reads_from_the_beginning() -> None:
    bus = MessageBus(journal="memory:")
    seen = Seen()

    async with bus:
        await bus.publish(Placed(number=1))
        late = bus.subscribe(Placed, seen)
        await bus.settled()
        assert late.is_durable

    assert seen.numbers == [1]


async def test_an_event_that_can_no_longer_be_decoded_is_kept_as_a_dead_letter(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bus = MessageBus(journal="memory:")
    seen: list[Event] = []

    @bus.on("shop.**", durable="all")
    async def listen(event: Event) -> None:
        seen.append(event)

    async with bus:
        (record,) = await _record_of(Shipped())
        await journal_of(bus).commit([Append(record._replace(name="Gone", topic="shop.gone"))])
        await bus.settled()

        (dead,) = await dead_letters(bus, "all")
        assert "no event class of that name" in str(dead.row.error)
        assert seen == []
        assert logged(caplog, "handler_failed") == []


async def _record_of(event: Event) -> list[Record]:
    async with MessageBus(journal="memory:") as other:
        await other.publish(event)
        return await records(other)
