"""Delayed events on a bus with a journal: kept, published once, taken back."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime

import anyio
import pytest

from msgbus import (
    BackpressureStrategy,
    Context,
    Event,
    EventRefusedEvent,
    MessageBus,
    PublishStatus,
    QueueConfig,
)
from msgbus.errors import JournalFullError, StoredMessageError
from msgbus.journal.operations import Append
from msgbus.journal.records import DELAYED, Record
from msgbus.runtime.clock import VirtualClock
from msgbus.testing.conformance.journal.kit import make_record
from tests.durable_shop import Place, Placed, Seen, Shipped, journal_of, recorded, records
from tests.fakes import conserves, let_others_run, logged
from tests.unit.durable.conftest import Site
from tests.unit.durable.places import watch_appends
from tests.unit.durable.test_publish import Odd


async def advance(site: Site, bus: MessageBus, seconds: float) -> None:
    await site.clock.advance(seconds)
    await bus.settled()


# -- when it is due ----------------------------------------------------------------------------


async def test_a_delayed_event_waits_in_the_journal_and_is_published_once(site: Site) -> None:
    bus, seen, durable = site.bus(), Seen(), Seen()
    bus.subscribe(Placed, seen, durable=False)
    bus.subscribe(Placed, durable, name="durable")

    async with bus:
        receipt = await bus.publish(Placed(number=1), delay=5)
        assert (receipt.status, receipt.offset, receipt.handlers) == (
            PublishStatus.DURABLE,
            None,
            2,
        )
        assert bus.stats().scheduled == 1
        assert await recorded(bus) == []
        await advance(site, bus, 4.9)
        assert (seen.numbers, durable.numbers) == ([], [])
        await advance(site, bus, 0.2)

        assert (seen.numbers, durable.numbers) == ([1], [1])
        assert await recorded(bus) == [("durable.Placed", "event")]
        assert bus.stats().scheduled == 0
        assert bus.stats().events["Placed"].published == 1
        conserves(bus)


async def test_delayed_events_come_in_order_of_time_and_of_publish(site: Site) -> None:
    bus, seen = site.bus(), Seen()
    bus.subscribe(Placed, seen, durable=False)

    async with bus:
        for number in (31, 11, 32, 12, 33):
            await bus.publish(Placed(number=number), delay=number // 10)
        await advance(site, bus, 2)
        assert seen.numbers == [11, 12]
        await advance(site, bus, 5)

    assert seen.numbers == [11, 12, 31, 32, 33]


async def test_many_that_are_due_at_once_all_come_in_order(memory: Site) -> None:
    bus, seen = memory.bus(), Seen()
    bus.subscribe(Placed, seen, durable=False)

    async with bus:
        for number in range(250):
            await bus.publish(Placed(number=number), delay=1)
        await advance(memory, bus, 1)
        conserves(bus)

    assert seen.numbers == list(range(250))


async def test_what_falls_due_while_nobody_runs_is_published_at_the_next_start(site: Site) -> None:
    first = site.bus()
    await first.start()
    await first.publish(Placed(number=1), delay=60)
    await first.publish(Placed(number=2), at=datetime.fromtimestamp(1_000_500, tz=UTC))
    report = await first.stop()
    await site.clock.advance(60)
    second, seen = site.bus(), Seen()
    second.subscribe(Placed, seen, durable=False)

    async with second:
        await second.settled()

        assert report.persisted == 2
        assert report.scheduled == ()
        assert seen.numbers == [1]
        assert second.stats().scheduled == 1


async def test_an_event_delayed_before_the_start_is_kept(site: Site) -> None:
    bus, seen = site.bus(), Seen()
    bus.subscribe(Placed, seen)
    await bus.publish(Placed(number=1), delay=5)
    await site.clock.advance(60)

    async with bus:
        await bus.settled()

    assert seen.numbers == [1]


async def test_of_several_buses_one_publishes_it(site: Site) -> None:
    buses = [site.bus(), site.bus(), site.bus()]
    seen = Seen()
    for bus in buses:
        bus.subscribe(Placed, seen, durable=False)
        await bus.start()
    for number in range(20):
        await buses[number % 3].publish(Placed(number=number), delay=1)

    await site.clock.advance(1)
    for bus in buses:
        await bus.settled()

    assert sorted(seen.numbers) == list(range(20))
    assert len(await recorded(buses[0])) == 20
    counts = [bus.stats().events.get("Placed") for bus in buses]
    assert sum(0 if one is None else one.published for one in counts) == 20
    for bus in buses:
        conserves(bus)
        await bus.stop()


async def test_an_earlier_event_of_another_bus_is_not_overlooked(memory: Site) -> None:
    bus, other, came = memory.bus(), memory.bus(), anyio.Event()

    @bus.on(Placed, durable=False)
    async def note(event: Placed) -> None:
        came.set()

    async with bus:  # the other is not started: it publishes nothing by itself
        await bus.publish(Placed(), delay=3600)
        await other.publish(Placed(), delay=0)
        with anyio.fail_after(10):
            await came.wait()

        assert len(await recorded(bus)) == 1


async def test_it_keeps_where_it_came_from(site: Site) -> None:
    first, command = site.bus(), Place()

    @first.handles(Place)
    async def place(command: Place, context: Context) -> str:
        await context.publish(Shipped(), delay=60, headers={"trace": "1"}, topic="late.parcels")
        return ""

    async with first:
        await first.execute(command)
    second = site.bus()
    came: list[Shipped] = []

    @second.on("late.*", durable=False)
    async def note(event: Event) -> None:
        assert isinstance(event, Shipped)
        came.append(event)

    async with second:
        await advance(site, second, 60)

    (event,) = came
    assert event.causation_id == event.correlation_id == command.message_id
    assert event.headers == {"trace": "1"}


async def test_an_event_of_a_class_that_is_not_here_is_published_as_it_stands(site: Site) -> None:
    record = make_record(1, name="shop.Gone")
    bus = site.bus()

    async with bus:
        await journal_of(bus).commit([Append(record, DELAYED, site.clock.time() - 1)])
        await bus.settled()

        (found,) = await records(bus)
        assert (found.name, found.payload) == ("shop.Gone", record.payload)
        assert found.time == site.clock.time()


async def test_settled_does_not_wait_for_what_is_not_due(site: Site) -> None:
    async with site.bus() as bus:
        await bus.publish(Placed(), delay=3600)
        await bus.settled(timeout=10)

        assert bus.stats().scheduled == 1


async def test_what_cannot_be_written_is_refused_at_once(site: Site) -> None:
    async with site.bus() as bus:
        with pytest.raises(StoredMessageError, match="Odd"):
            await bus.publish(Odd(thing=object()), delay=1)

        assert bus.stats().scheduled == 0


# -- taken back --------------------------------------------------------------------------------


async def test_a_delayed_event_is_taken_back_once_by_itself_or_by_its_id(site: Site) -> None:
    bus, seen = site.bus(), Seen()
    bus.subscribe(Placed, seen, durable=False)
    events = [Placed(number=number) for number in range(3)]

    async with bus, site.bus() as other:
        for event in events:
            await bus.publish(event, delay=5)

        assert await bus.unschedule(events[0])
        assert await other.unschedule(events[1].message_id)
        assert not await bus.unschedule(events[1])
        await site.clock.advance(5)
        await other.settled()
        await bus.settled()
        assert not await bus.unschedule(events[2])
        assert await recorded(bus) == [("durable.Placed", "event")]


async def test_without_a_journal_delayed_events_are_taken_back_as_well() -> None:
    clock = VirtualClock()
    bus, seen = MessageBus(clock=clock), Seen()
    bus.subscribe(Placed, seen)
    twice, once, late = Placed(number=1), Placed(number=2), Placed(number=3)

    async with bus:
        await bus.publish(twice, delay=5)
        await bus.publish(twice, delay=6)
        receipt = await bus.publish(once, delay=5)
        await bus.publish(late, delay=5)
        assert receipt.cancel is not None

        assert await bus.unschedule(twice)
        assert await bus.unschedule(once.message_id)
        assert not receipt.cancel()
        assert not await bus.unschedule(once)
        assert not await bus.unschedule("unknown")
        assert bus.stats().scheduled == 1
        await clock.advance(10)
        assert not await bus.unschedule(late)

    assert seen.numbers == [3]


# -- with what else there is -------------------------------------------------------------------


async def test_filters_are_asked_when_it_is_due(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[int] = []

    def pick(event: Event) -> bool:
        assert isinstance(event, Placed)
        asked.append(event.number)
        if event.number == 1:
            raise LookupError("password=hunter2")
        return event.number != 2

    bus, seen = site.bus(filters=[pick]), Seen()
    bus.subscribe(Placed, seen, durable=False)
    refused: list[EventRefusedEvent] = []

    @bus.on(EventRefusedEvent)
    async def note(event: EventRefusedEvent) -> None:
        refused.append(event)

    events = [Placed(number=number) for number in (1, 2, 3)]
    async with bus:
        for event in events:
            await bus.publish(event, delay=1)
        assert asked == []
        await advance(site, bus, 1)

        assert asked == [1, 2, 3]
        assert seen.numbers == [3]
        assert [(one.event_id, one.reason) for one in refused] == [
            (events[0].message_id, "LookupError: password=[redacted]")
        ]
        assert len(logged(caplog, "delayed_event_refused")) == 1
        counts = bus.stats().events["Placed"]
        assert (counts.admitted, counts.filtered, counts.rejected) == (1, 1, 1)
        assert len(await recorded(bus)) == 1
        assert bus.stats().scheduled == 0
        conserves(bus)


async def test_a_due_event_that_does_not_fit_is_told_about(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    bus = site.bus()
    begun, release = anyio.Event(), anyio.Event()

    async def hang(event: Placed) -> None:
        begun.set()
        await release.wait()

    refusing = QueueConfig(max_size=1, strategy=BackpressureStrategy.REJECT_NEW)
    bus.subscribe(Placed, hang, name="slow", durable=False, queue=refusing)
    async with bus:
        await bus.publish(Placed(number=1))
        await begun.wait()
        await bus.publish(Placed(number=2))
        await bus.publish(Placed(number=3), delay=1)
        await site.clock.advance(1)
        with anyio.fail_after(10):
            while bus.stats().scheduled:
                await anyio.lowlevel.checkpoint()
        release.set()
        await bus.settled()

        assert "slow" in logged(caplog, "delayed_event_refused")[0]["reason"]
        assert len(await recorded(bus)) == 2
        conserves(bus)


async def test_a_delayed_publish_in_a_transaction_is_part_of_it(site: Site) -> None:
    bus, seen = site.bus(), Seen()
    bus.subscribe(Placed, seen, durable=False)

    async with bus:
        with suppress(LookupError):
            async with bus.transaction():
                await bus.publish(Placed(number=1), delay=1)
                raise LookupError
        async with bus.transaction() as tx:
            if site.has_tables:
                tx.execute("CREATE TABLE orders (number)")
            receipt = await bus.publish(Placed(number=2), delay=1)
        assert receipt.status is PublishStatus.ACCEPTED
        await advance(site, bus, 1)

    assert seen.numbers == [2]


async def test_a_journal_that_fails_keeps_its_delayed_events(
    memory: Site, caplog: pytest.LogCaptureFixture
) -> None:
    bus, seen = memory.bus(), Seen()
    bus.subscribe(Placed, seen, durable=False)

    def refuse(appended: Sequence[Record]) -> None:
        if appended:
            raise JournalFullError("No space is left.")

    async with bus:
        await bus.publish(Placed(number=1), delay=1)
        with pytest.MonkeyPatch.context() as full:
            watch_appends(bus, full, refuse)
            await memory.clock.advance(3)
            assert seen.numbers == []
            assert logged(caplog, "journal_task_failed")[0]["task"] == "delayed events"
        await memory.clock.advance(1)
        await bus.settled()

        assert seen.numbers == [1]
        assert bus.stats().events["Placed"].rejected == 0
        conserves(bus)


async def test_a_bus_that_stops_in_the_middle_of_a_filter_leaves_the_event_where_it_was(
    memory: Site,
) -> None:
    asked = anyio.Event()

    async def never_answer(event: Event) -> bool:
        asked.set()
        await anyio.sleep_forever()
        return True

    first = memory.bus(filters=[never_answer])
    await first.start()
    await first.publish(Placed(number=1), delay=1)
    await memory.clock.advance(1)
    await asked.wait()
    report = await first.stop(timeout=0)
    second, seen = memory.bus(), Seen()
    second.subscribe(Placed, seen, durable=False)
    async with second:
        await second.settled()

    assert report.persisted == 1
    assert seen.numbers == [1]


async def test_system_events_are_delayed_in_memory(memory: Site) -> None:
    class Ping(EventRefusedEvent):
        pass

    bus, came = memory.bus(), Seen()

    @bus.on(Ping)
    async def note(event: Ping) -> None:
        came.numbers.append(1)

    ping = Ping(event_type="x", event_id="y", reason="z")
    async with bus:
        receipt = await bus.publish(ping, delay=1)
        taken = ping.model_copy()
        await bus.publish(taken, delay=1)
        assert await bus.unschedule(taken)
        await memory.clock.advance(1)
        await let_others_run()

        assert receipt.status is PublishStatus.ACCEPTED
        assert came.numbers == [1]
