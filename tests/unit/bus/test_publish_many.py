"""publish_many: an iterable of events, sync or async, and a count of what became of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from msgbus import Event, MessageBus
from msgbus.errors import WrongMessageTypeError
from tests.fakes import OrderPlaced, Recorder, conserves


class NothingHappened(Event):
    pass


async def test_publish_many_takes_an_iterable_and_counts() -> None:
    bus = MessageBus(filters=[lambda event: getattr(event, "number", 0) % 3 != 0])
    handler = Recorder()
    bus.subscribe(OrderPlaced, handler)

    async with bus:
        summary = await bus.publish_many(OrderPlaced(number=number) for number in range(9))
        await bus.settled()

    assert (summary.published, summary.accepted, summary.filtered) == (9, 6, 3)
    assert (summary.rejected, summary.dropped) == (0, 0)
    assert handler.numbers == [1, 2, 4, 5, 7, 8]
    conserves(bus)


async def test_publish_many_gives_others_a_turn_after_each_chunk() -> None:
    bus = MessageBus()
    handler = Recorder()
    bus.subscribe(OrderPlaced, handler)
    handled_before: list[int] = []

    def orders() -> Iterator[OrderPlaced]:
        for number in range(200):
            handled_before.append(len(handler.numbers))
            yield OrderPlaced(number=number)

    async with bus:
        await bus.publish_many(orders(), chunk=2)

    assert handled_before[-1] > 0


async def test_publish_many_gives_others_a_turn_in_an_async_iterable_too() -> None:
    bus = MessageBus()
    handler = Recorder()
    bus.subscribe(OrderPlaced, handler)
    handled_before: list[int] = []

    async def orders() -> AsyncIterator[OrderPlaced]:
        for number in range(200):
            handled_before.append(len(handler.numbers))
            yield OrderPlaced(number=number)

    async with bus:
        summary = await bus.publish_many(orders(), chunk=2)

    assert summary.accepted == 200
    assert handler.numbers == list(range(200))
    assert handled_before[-1] > 0


async def test_publish_many_stops_at_what_is_no_event_and_keeps_those_before() -> None:
    bus = MessageBus()
    handler = Recorder()
    bus.subscribe(OrderPlaced, handler)
    mixed: list[Event] = [OrderPlaced(number=1), "no event", OrderPlaced(number=2)]  # type: ignore[list-item]  # pyright: ignore[reportAssignmentType]

    async with bus:
        with pytest.raises(WrongMessageTypeError, match="takes an Event, not str"):
            await bus.publish_many(mixed)
        await bus.settled()

    assert handler.numbers == [1]
    conserves(bus)


async def test_publish_many_of_one_event_instead_of_several_is_refused() -> None:
    async with MessageBus() as bus:
        with pytest.raises((TypeError, ValueError)):
            await bus.publish_many(NothingHappened())  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


async def test_publish_many_refuses_a_chunk_of_nothing() -> None:
    async with MessageBus() as bus:
        with pytest.raises(ValueError, match="chunk"):
            await bus.publish_many([], chunk=0)
