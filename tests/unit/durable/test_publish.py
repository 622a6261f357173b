"""Publishing on a bus with a journal: what is recorded, and who gets it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest

from msgbus import (
    BackpressureStrategy,
    BusConfig,
    Context,
    Event,
    MessageBus,
    PublishStatus,
    QueueConfig,
)
from msgbus.errors import JournalClosedError, StoredMessageError
from msgbus.journal.memory import MemoryJournal
from tests.durable_shop import (
    Place,
    Placed,
    PlacedOnline,
    Seen,
    Shipped,
    journal_of,
    recorded,
    records,
    url_of,
)
from tests.fakes import conserves, let_others_run


class Odd(Event):
    thing: Any = None


async def test_a_publish_is_durable_once_the_journal_has_it() -> None:
    async with MessageBus(journal="memory:") as bus:
        first = await bus.publish(Placed())
        second = await bus.publish(Placed())

        assert first.status is PublishStatus.DURABLE
        assert (first.offset, second.offset) == (1, 2)
        assert first.accepted


async def test_the_journal_knows_the_flow() -> None:
    bus = MessageBus(journal="memory:")

    @bus.handles(Place)
    async def place(command: Place, context: Context) -> str:
        context.emit(Placed(sku=command.sku))
        return command.sku

    @bus.on(Placed)
    async def ship(event: Placed, context: Context) -> None:
        await context.publish(Shipped(sku=event.sku))

    async with bus:
        command = Place(sku="jam")
        await bus.execute(command)
        await bus.settled()

        assert await recorded(bus) == [
            ("durable.Place", "command"),
            ("durable.Placed", "event"),
            ("durable.Shipped", "event"),
        ]
        (tree,) = await journal_of(bus).flow(command.correlation_id)
        assert tree.record.name == "durable.Place"
        assert tree.children[0].record.name == "durable.Placed"
        shipped = tree.children[0].children[0].record
        assert (shipped.depth, shipped.root_id) == (2, command.message_id)
        assert shipped.topic == "shop.orders.shipped"


async def test_a_message_that_is_published_twice_is_handled_once() -> None:
    bus = MessageBus(journal="memory:")
    durable, in_memory = Seen(), Seen()
    bus.subscribe(Placed, durable, name="durable")
    bus.subscribe(Placed, in_memory, name="in_memory", durable=False)

    async with bus:
        event = Placed(number=1)
        await bus.publish(event)
        again = await bus.publish(event)
        await bus.settled()

        assert again.duplicate
        assert again.offset == 1
        assert durable.numbers == in_memory.numbers == [1]
        conserves(bus)


async def test_handlers_in_memory_see_the_order_of_the_journal() -> None:
    bus = MessageBus(journal="memory:")
    seen = Seen()
    bus.subscribe(Placed, seen, durable=False)

    async with bus:
        async with anyio.create_task_group() as group:
            for number in range(50):
                group.start_soon(bus.publish, Placed(number=number))
        await bus.settled()
        order = [one.json()["number"] for one in await records(bus)]

    assert seen.numbers == order


async def test_what_the_journal_refuses_is_handled_by_nobody() -> None:
    journal = MemoryJournal()
    bus = MessageBus(journal=journal)
    seen = Seen()
    bus.subscribe(Placed, seen, durable=False)
    await bus.start()
    await journal.close()

    with pytest.raises(JournalClosedError):
        await bus.publish(Placed(number=1))
    await let_others_run()

    assert seen.numbers == []
    assert bus.stats().events["Placed"].rejected == 1
    assert bus.stats().handlers["Seen"].queued == 0
    conserves(bus)
    await bus.stop()


async def test_a_batch_handler_is_not_given_what_the_journal_refused() -> None:
    journal = MemoryJournal()
    bus = MessageBus(journal=journal)
    lists: list[list[int]] = []

    @bus.on(Placed, batch=True, durable=False)
    async def take(events: list[Placed]) -> None:
        lists.append([one.number for one in events])

    await bus.start()
    await bus.publish(Placed(number=1))
    await bus.settled()
    await journal.close()
    with pytest.raises(JournalClosedError):
        await bus.publish(Placed(number=2))
    await let_others_run()

    assert lists == [[1]]
    conserves(bus)
    await bus.stop()


async def test_an_event_that_is_no_json_is_refused_before_anything_happens() -> None:
    bus = MessageBus(journal="memory:")
    got: list[object] = []
    bus.subscribe(Odd, got.append, name="got", durable=False, inline=True)

    async with bus:
        with pytest.raises(StoredMessageError, match="cannot be written as JSON"):
            await bus.publish(Odd(thing=object()))
        await bus.settled()

        assert got == []
        assert await recorded(bus) == []


async def test_what_is_filtered_or_rejected_is_not_in_the_journal() -> None:
    config = BusConfig(queue=QueueConfig(max_size=1, strategy=BackpressureStrategy.REJECT_NEW))
    bus = MessageBus(config, journal="memory:", filters=[lambda event: not is_number(event, 9)])
    release = anyio.Event()
    begun = anyio.Event()

    @bus.on(Placed, durable=False)
    async def slow(event: Placed) -> None:
        begun.set()
        await release.wait()

    async with bus:
        assert (await bus.publish(Placed(number=9))).status is PublishStatus.FILTERED
        await bus.publish(Placed(number=1))
        await begun.wait()
        await bus.publish(Placed(number=2))
        assert (await bus.publish(Placed(number=3))).status is PublishStatus.REJECTED
        release.set()
        await bus.settled()

        assert [one.json()["number"] for one in await records(bus)] == [1, 2]
        conserves(bus)


def is_number(event: Event, number: int) -> bool:
    return getattr(event, "number", None) == number


async def test_events_from_before_the_start_are_kept_and_delivered() -> None:
    bus = MessageBus(journal="memory:")
    durable, in_memory = Seen(), Seen()
    bus.subscribe(Placed, durable, name="durable")
    bus.subscribe(Placed, in_memory, name="in_memory", durable=False)

    assert (await bus.publish(Placed(number=1))).status is PublishStatus.DURABLE
    async with bus:
        await bus.settled()

        assert durable.numbers == in_memory.numbers == [1]


async def test_a_file_keeps_it_all_for_the_next_bus(tmp_path: Path) -> None:
    async with MessageBus(journal=url_of(tmp_path)) as first:
        for number in range(3):
            await first.publish(PlacedOnline(number=number))

    second = MessageBus(journal=url_of(tmp_path))
    seen = Seen()
    second.subscribe(Placed, seen, durable="seen")
    async with second:
        await second.settled()
        assert seen.numbers == [0, 1, 2]

    third = MessageBus(journal=url_of(tmp_path))
    third.subscribe(Placed, seen, durable="seen")
    async with third:
        await third.publish(Placed(number=3))
        await third.settled()

    assert seen.numbers == [0, 1, 2, 3]


async def test_a_journal_that_was_handed_over_stays_open() -> None:
    async with MemoryJournal() as journal:
        async with MessageBus(journal=journal) as bus:
            await bus.publish(Placed())

        assert await journal.head() == 1
