"""publish_many on a bus with a journal: many events to a commit, and every one accounted for."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from msgbus import BackpressureStrategy, Context, Event, MessageBus, PublishStatus
from msgbus.errors import JournalError, StoredMessageError, WrongMessageTypeError
from msgbus.journal.records import Record
from tests.durable_shop import records
from tests.fakes import Recorder, SlowHandler, conserves, queue
from tests.unit.durable.places import (
    OrderPlaced,
    Place,
    count_appends,
    orders,
    stored,
    watch_appends,
)


class Unwritable(Event):
    what: Any


class Begun(Event):
    pass


async def test_events_are_committed_together_and_handled_in_the_order_of_the_journal(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = MessageBus(journal=place())
    durable, in_memory = Recorder(), Recorder()
    bus.subscribe(OrderPlaced, durable, durable="durable")
    bus.subscribe(OrderPlaced, in_memory, name="in memory", durable=False)
    async with bus:
        sizes = count_appends(bus, monkeypatch)

        summary = await bus.publish_many(orders(2_500))
        await bus.settled()

        assert (summary.published, summary.accepted, summary.rejected) == (2_500, 2_500, 0)
        assert sizes == [1_000, 1_000, 500]
        assert await stored(bus) == list(range(2_500))
    assert durable.numbers == in_memory.numbers == list(range(2_500))
    conserves(bus)


async def test_a_chunk_bounds_a_commit_and_a_thousand_bounds_a_chunk(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with MessageBus(journal=place()) as bus:
        sizes = count_appends(bus, monkeypatch)

        await bus.publish_many(orders(10), chunk=4)
        await bus.publish_many(orders(1_001), chunk=5_000)

        assert sizes == [4, 4, 2, 1_000, 1]


async def test_a_source_that_waits_holds_up_nothing_that_it_has_given(place: Place) -> None:
    bus = MessageBus(journal=place())
    handler = Recorder()
    bus.subscribe(OrderPlaced, handler, name="in memory", durable=False)

    async def slowly() -> AsyncGenerator[OrderPlaced]:
        for number in range(3):
            yield OrderPlaced(number=number)
            # It goes on only once the handler has seen what it has given.
            while handler.numbers != list(range(number + 1)):
                await anyio.lowlevel.checkpoint()

    async with bus:
        summary = await bus.publish_many(slowly())

        assert summary.accepted == 3
        assert await stored(bus) == [0, 1, 2]


async def test_what_is_placed_is_committed_before_an_event_waits_for_room(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = MessageBus(journal=place())
    handler = Recorder()
    bus.subscribe(OrderPlaced, handler, name="small", durable=False, queue=queue(3))
    async with bus:
        sizes = count_appends(bus, monkeypatch)

        with anyio.fail_after(20):
            summary = await bus.publish_many(orders(50))
            await bus.settled()

        assert summary.accepted == 50
        assert sum(sizes) == 50
        assert max(sizes) <= 4
    assert handler.numbers == list(range(50))
    conserves(bus)


async def test_a_full_queue_that_drops_or_rejects_is_told_of_exactly(place: Place) -> None:
    bus = MessageBus(journal=place())
    dropping, rejecting = SlowHandler(), SlowHandler()
    drops = queue(2, BackpressureStrategy.DROP_OLDEST)
    rejects = queue(2, BackpressureStrategy.REJECT_NEW)
    bus.subscribe(OrderPlaced, dropping, name="drops", durable=False, queue=drops)
    async with bus:
        await bus.publish(OrderPlaced(number=0))
        await dropping.started.wait()
        summary = await bus.publish_many(orders(5))
        assert (summary.accepted, summary.dropped) == (5, 3)

        bus.subscribe(OrderPlaced, rejecting, name="rejects", durable=False, queue=rejects)
        await bus.publish(OrderPlaced(number=0))
        await rejecting.started.wait()
        summary = await bus.publish_many(orders(5))
        assert (summary.published, summary.accepted, summary.rejected) == (5, 2, 3)
        assert len(await stored(bus)) == 1 + 5 + 1 + 2

        dropping.release.set()
        rejecting.release.set()
        await bus.settled()
    conserves(bus)


async def test_filters_are_asked_once_for_each(place: Place) -> None:
    asked: list[int] = []

    async def even(event: Event) -> bool:
        assert isinstance(event, OrderPlaced)
        asked.append(event.number)
        await anyio.lowlevel.checkpoint()
        return event.number % 2 == 0

    bus = MessageBus(journal=place(), filters=[even])
    handler = Recorder()
    bus.subscribe(OrderPlaced, handler)
    async with bus:
        summary = await bus.publish_many(orders(7))
        await bus.settled()
        assert await stored(bus) == [0, 2, 4, 6]

    assert asked == list(range(7))
    assert (summary.published, summary.accepted, summary.filtered) == (7, 4, 3)
    assert handler.numbers == [0, 2, 4, 6]
    conserves(bus)


async def test_it_joins_a_transaction(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    async with MessageBus(journal=place()) as bus:
        sizes = count_appends(bus, monkeypatch)

        async with bus.transaction() as transaction:
            summary = await bus.publish_many(orders(3))
            assert await stored(bus) == []
        assert summary.accepted == 3
        assert [receipt.status for receipt in transaction.receipts] == [PublishStatus.DURABLE] * 3

        async def undecided() -> None:
            async with bus.transaction():
                await bus.publish_many(orders(3))
                raise RuntimeError("undecided")

        with pytest.raises(RuntimeError, match="undecided"):
            await undecided()
        assert sizes == [3]
        assert await stored(bus) == [0, 1, 2]


@pytest.mark.parametrize("is_async", [False, True])
async def test_those_before_one_that_is_refused_are_published(place: Place, is_async: bool) -> None:
    bus = MessageBus(journal=place())
    handler = Recorder()
    bus.subscribe(OrderPlaced, handler)

    async def some(events: Sequence[Any]) -> AsyncGenerator[Any]:
        for event in events:
            yield event

    async with bus:
        for bad, error in (("no event", WrongMessageTypeError), (object(), StoredMessageError)):
            last = Unwritable(what=bad) if error is StoredMessageError else bad
            mixed: list[Any] = [*orders(3), last, OrderPlaced(number=99)]
            async with aclosing(some(mixed)) as source:
                with pytest.raises(error):
                    await bus.publish_many(source if is_async else mixed)

        await bus.settled()
        assert await stored(bus) == [0, 1, 2, 0, 1, 2]
    assert handler.numbers == [0, 1, 2, 0, 1, 2]
    conserves(bus)


async def test_a_source_that_fails_has_published_what_it_gave(place: Place) -> None:
    def failing() -> Iterator[OrderPlaced]:
        yield from orders(3)
        raise RuntimeError("no more")

    async with MessageBus(journal=place()) as bus:
        with pytest.raises(RuntimeError, match="no more"):
            await bus.publish_many(failing())

        assert await stored(bus) == [0, 1, 2]


async def test_a_commit_that_fails_publishes_nothing_and_ends_it(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = MessageBus(journal=place())
    handler = Recorder()
    bus.subscribe(OrderPlaced, handler, name="in memory", durable=False)
    pulled: list[int] = []

    async def endless() -> AsyncGenerator[OrderPlaced]:
        number = 0
        while True:
            pulled.append(number)
            yield OrderPlaced(number=number)
            number += 1
            await anyio.lowlevel.checkpoint()

    async with bus:

        def full(records: Sequence[Record]) -> None:
            if any(b"7" in record.payload for record in records):
                raise JournalError("The disk is full.")

        watch_appends(bus, monkeypatch, full)
        async with aclosing(endless()) as source:
            with pytest.raises(JournalError, match="disk is full"):
                await bus.publish_many(source, chunk=5)
        await bus.settled()
        written = await stored(bus)

    assert written == list(range(len(written)))
    assert 7 not in written
    assert handler.numbers == written
    conserves(bus)


async def test_a_message_that_is_there_already_is_counted_and_handled_once(place: Place) -> None:
    bus = MessageBus(journal=place())
    handler, other = Recorder(), Recorder()
    bus.subscribe(OrderPlaced, handler)
    bus.subscribe(OrderPlaced, other, name="in memory", durable=False)
    first, second = orders(2)
    async with bus:
        await bus.publish(first)
        summary = await bus.publish_many([first, second, second])
        await bus.settled()
        assert await stored(bus) == [0, 1]

    assert summary.accepted == 3
    assert handler.numbers == other.numbers == [0, 1]
    conserves(bus)


async def test_a_cancelled_call_has_published_whole_commits_only(place: Place) -> None:
    bus = MessageBus(journal=place())
    handler = Recorder()
    bus.subscribe(OrderPlaced, handler, name="in memory", durable=False)

    async def until_cancelled(scope: anyio.CancelScope) -> AsyncGenerator[OrderPlaced]:
        for number in range(10):
            yield OrderPlaced(number=number)
        scope.cancel()
        await anyio.lowlevel.checkpoint()
        raise AssertionError

    async with bus:
        with anyio.CancelScope() as scope:
            await bus.publish_many(until_cancelled(scope), chunk=4)
        assert scope.cancelled_caught
        await bus.settled()
        written = await stored(bus)

    assert written == list(range(len(written)))
    assert handler.numbers == written
    conserves(bus)


async def test_a_handler_may_publish_many_and_is_their_cause(place: Place) -> None:
    bus = MessageBus(journal=place())
    handler = Recorder()
    bus.subscribe(OrderPlaced, handler, name="small", durable=False, queue=queue(2))

    @bus.on(Begun)
    async def begun(event: Begun, context: Context) -> None:
        await context.bus.publish_many(orders(20))

    async with bus:
        first = Begun()
        await bus.publish(first)
        with anyio.fail_after(20):
            await bus.settled()
        page = (await records(bus))[1:]
        assert {record.causation_id for record in page} == {first.message_id}

    assert handler.numbers == list(range(20))
    conserves(bus)


async def test_whoever_replaces_publish_sees_each_event(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    class Counting(MessageBus):
        async def publish(self, event: Event, **options: Any) -> Any:
            assert isinstance(event, OrderPlaced)
            seen.append(event.number)
            return await super().publish(event, **options)

    async with Counting(journal=place()) as bus:
        sizes = count_appends(bus, monkeypatch)
        await bus.publish_many(orders(3))

    assert seen == [0, 1, 2]
    assert sizes == [1, 1, 1]
