"""Events that wait in another database: published, then marked, and never twice in the journal."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from uuid import uuid4

import anyio
import pytest

from msgbus import (
    BackpressureStrategy,
    BusClosedError,
    ConfigurationError,
    Context,
    Event,
    MessageBus,
)
from msgbus.bus.durable.outbox import OutboxEntry
from msgbus.bus.durable.relaying import RelayReport
from msgbus.errors import BusStateError
from msgbus.journal import upcasts
from tests.durable_shop import records
from tests.fakes import (
    Recorder,
    SlowHandler,
    conserves,
    let_others_run,
    logged,
    queue,
)
from tests.unit.durable.conftest import Site
from tests.unit.durable.places import OrderPlaced, OrderShipped, Place, stored
from tests.unit.durable.shop_outbox import ShopDatabase


class Measured(Event, name="outbox.Measured", version=2, topic="depot.measured", key="place"):
    place: str
    celsius: float


@upcasts(Measured, from_version=1)
def from_fahrenheit(data: dict[str, float]) -> dict[str, float]:
    return {"place": data["place"], "celsius": (data["fahrenheit"] - 32) / 1.8}


@pytest.fixture
def shop(tmp_path: Path) -> ShopDatabase:
    return ShopDatabase(tmp_path / "shop.db")


class ListOutbox:
    """An outbox in memory."""

    def __init__(self, entries: Sequence[OutboxEntry] = ()) -> None:
        self.entries = list(entries)
        self.looks = 0

    async def pending(self, limit: int) -> Sequence[OutboxEntry]:
        self.looks += 1
        return self.entries[:limit]

    async def done(self, entries: Sequence[OutboxEntry]) -> None:
        ids = {entry.id for entry in entries}
        self.entries = [entry for entry in self.entries if entry.id not in ids]


def entries(*numbers: int) -> list[OutboxEntry]:
    return [OutboxEntry.of(OrderPlaced(number=number)) for number in numbers]


async def test_what_was_committed_is_published_once_and_what_was_not_never(
    place: Place, shop: ShopDatabase
) -> None:
    bus = MessageBus(journal=place())
    handler = Recorder()
    bus.subscribe(OrderPlaced, handler, durable="receipts")
    written = [shop.place_order(number) for number in range(3)]
    with pytest.raises(RuntimeError, match="sold out"):
        shop.place_order(3, fail=True)

    async with bus:
        report = await bus.relay_once(shop)
        again = await bus.relay_once(shop)
        await bus.settled()
        page = await records(bus)

    assert (report.published, report.done, again.done) == (3, 3, 0)
    assert handler.numbers == [0, 1, 2]
    assert [record.message_id for record in page] == [entry.id for entry in written]
    assert shop.waiting() == 0
    conserves(bus)


async def test_entries_that_could_not_be_marked_are_published_again_and_not_delivered_again(
    place: Place, shop: ShopDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = MessageBus(journal=place())
    handler, in_memory = Recorder(), Recorder()
    bus.subscribe(OrderPlaced, handler, durable="receipts")
    bus.subscribe(OrderPlaced, in_memory, name="in memory", durable=False)
    for number in range(3):
        shop.place_order(number)

    async def broken(entries: Sequence[OutboxEntry]) -> None:
        raise OSError("the database is away")

    async with bus:
        with monkeypatch.context() as patch:
            patch.setattr(shop, "done", broken)
            with pytest.raises(OSError, match="away"):
                await bus.relay_once(shop)
        shop.place_order(3)
        report = await bus.relay_once(shop)
        await bus.settled()
        assert await stored(bus) == [0, 1, 2, 3]

    assert (report.published, report.duplicates) == (1, 3)
    assert handler.numbers == in_memory.numbers == [0, 1, 2, 3]
    assert shop.waiting() == 0
    conserves(bus)


_DIES = """
import os, sys
from pathlib import Path
import anyio
from msgbus import MessageBus
from tests.unit.durable.shop_outbox import ShopDatabase

class Dying(ShopDatabase):
    async def done(self, entries):
        os._exit(9)

async def main():
    folder = Path(sys.argv[1])
    shop = Dying(folder / "shop.db")
    for number in range(5):
        shop.place_order(number)
    async with MessageBus(journal=f"sqlite:///{folder / 'journal.db'}") as bus:
        await bus.relay_once(shop)

anyio.run(main)
"""


def test_a_process_that_dies_between_publishing_and_marking_publishes_nothing_twice(
    tmp_path: Path,
) -> None:
    ended = subprocess.run([sys.executable, "-c", _DIES, str(tmp_path)], timeout=60, check=False)
    assert ended.returncode == 9
    shop = ShopDatabase(tmp_path / "shop.db")
    assert shop.waiting() == 5
    handler = Recorder()

    async def start_again() -> RelayReport:
        bus = MessageBus(journal=f"sqlite:///{tmp_path / 'journal.db'}")
        bus.subscribe(OrderPlaced, handler, durable="receipts")
        async with bus:
            report = await bus.relay_once(shop)
            await bus.settled()
            assert await stored(bus) == [0, 1, 2, 3, 4]
        return report

    report = anyio.run(start_again)
    assert (report.published, report.duplicates) == (0, 5)
    assert handler.numbers == [0, 1, 2, 3, 4]
    assert shop.waiting() == 0


async def test_an_entry_brings_its_id_cause_headers_topic_and_version(place: Place) -> None:
    bus = MessageBus(journal=place())
    outbox = ListOutbox()

    @bus.on(OrderPlaced)
    async def measure(event: OrderPlaced, context: Context) -> None:
        outbox.entries.append(OutboxEntry.of(Measured(place="attic", celsius=20)))

    old = OutboxEntry(
        id=str(uuid4()),
        name="outbox.Measured",
        payload='{"place": "cellar", "fahrenheit": 50}',
        headers={"by": "hand"},
        topic="depot.cellar",
    )
    async with bus:
        cause = OrderPlaced(number=1)
        await bus.publish(cause, headers={"trace": "1"})
        await bus.settled()
        outbox.entries.append(old)
        assert OutboxEntry.from_json(old.to_json()) == old
        await bus.relay_once(outbox)
        _, new_record, old_record = await records(bus)

    assert new_record.causation_id == new_record.correlation_id == cause.message_id
    assert dict(new_record.headers) == {"trace": "1"}
    assert (new_record.topic, new_record.key, new_record.depth) == ("depot.measured", "attic", 1)
    assert (old_record.message_id, old_record.topic) == (old.id, "depot.cellar")
    assert dict(old_record.headers) == {"by": "hand"}
    assert (old_record.version, old_record.json()) == (2, {"place": "cellar", "celsius": 10.0})
    assert old_record.correlation_id == old_record.root_id == old.id


async def test_what_cannot_be_published_stays_is_told_of_once_and_holds_up_nothing(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    good = entries(1, 2)
    bad = [
        OutboxEntry(id=str(uuid4()), name="outbox.Unknown", payload="{}"),
        OutboxEntry(id=str(uuid4()), name="places.OrderPlaced", payload='{"number": "x"}'),
        OutboxEntry(id="17", name="places.OrderPlaced", payload="{}"),
    ]
    outbox = ListOutbox([bad[0], good[0], bad[1], bad[2], good[1]])
    async with MessageBus(journal=place()) as bus:
        report = await bus.relay_once(outbox)
        again = await bus.relay_once(outbox)
        assert await stored(bus) == [1, 2]

    assert outbox.entries == bad
    assert report.published == 2
    assert [entry for entry, _ in report.refused] == [entry.id for entry in bad]
    unknown, misfit, no_id = (reason for _, reason in report.refused)
    assert "no event class" in unknown
    assert "does not fit" in misfit
    assert "no UUID" in no_id
    assert again.refused == report.refused
    assert len(logged(caplog, "outbox_entry_refused")) == 3


async def test_filtered_entries_are_done_and_rejected_ones_stay(place: Place) -> None:
    bus = MessageBus(journal=place(), filters=[lambda event: getattr(event, "number", 0) != 1])
    slow = SlowHandler()
    rejects = queue(2, BackpressureStrategy.REJECT_NEW)
    bus.subscribe(OrderPlaced, slow, name="slow", durable=False, queue=rejects)
    outbox = ListOutbox(entries(1, 2, 3, 4))
    async with bus:
        await bus.publish(OrderPlaced(number=0))
        await slow.started.wait()
        report = await bus.relay_once(outbox)
        assert (report.filtered, report.published, report.rejected) == (1, 2, 1)
        assert [one.payload for one in outbox.entries] == ['{"number":4}']
        slow.release.set()
        await bus.settled()
        assert (await bus.relay_once(outbox)).published == 1
        await bus.settled()

    assert outbox.entries == []
    assert slow.ended == [0, 2, 3, 4]
    conserves(bus)


async def test_a_relay_works_from_start_to_stop_and_can_be_woken(memory: Site) -> None:
    clock = memory.clock
    bus = memory.bus()
    handler = Recorder()
    bus.subscribe(OrderPlaced, handler, name="in memory", durable=False)
    outbox = ListOutbox(entries(1, 2, 3))
    relay = bus.relay(outbox, every=10, limit=2)
    assert outbox.looks == 0

    async with bus:
        await let_others_run()
        # Two passes at once, as the first was full; then it waits.
        assert (handler.numbers, outbox.looks) == ([1, 2, 3], 2)

        outbox.entries += entries(4)
        await let_others_run()
        assert handler.numbers == [1, 2, 3]
        await clock.advance(10)
        await let_others_run()
        assert handler.numbers == [1, 2, 3, 4]

        outbox.entries += entries(5)
        relay.wake()
        await let_others_run()
        assert handler.numbers == [1, 2, 3, 4, 5]
        assert (relay.published, relay.failures) == (5, 0)
        assert relay.last is not None
        assert relay.last.published == 1

        outbox.entries += entries(6)
        await relay.close()
        await clock.advance(100)
        await let_others_run()
        assert handler.numbers == [1, 2, 3, 4, 5]
        second = bus.relay(outbox, every=10)
        await let_others_run()
        assert handler.numbers == [1, 2, 3, 4, 5, 6]
        looks = outbox.looks
    outbox.entries += entries(7)
    second.wake()
    await clock.advance(100)
    assert outbox.looks == looks
    with pytest.raises(BusClosedError):
        bus.relay(outbox)
    conserves(bus)


async def test_a_relay_outlives_an_outbox_that_fails(
    caplog: pytest.LogCaptureFixture, memory: Site
) -> None:
    clock = memory.clock

    class Flaky(ListOutbox):
        async def pending(self, limit: int) -> Sequence[OutboxEntry]:
            if self.looks < 2:
                self.looks += 1
                raise OSError("postgres://shop:hunter2@db is away")
            return await super().pending(limit)

    outbox = Flaky(entries(1))
    async with memory.bus() as bus:
        relay = bus.relay(outbox, every=1)
        for _ in range(3):
            await let_others_run()
            await clock.advance(1)
        await let_others_run()

        assert (relay.failures, relay.published) == (2, 1)
        failures = logged(caplog, "outbox_failed")
        assert [failure["failures"] for failure in failures] == [1, 2]
        assert "hunter2" not in str(failures)


async def test_a_page_of_refused_entries_is_not_read_over_and_over(memory: Site) -> None:
    outbox = ListOutbox([OutboxEntry(id=str(uuid4()), name="outbox.Unknown", payload="{}")])
    async with memory.bus() as bus:
        bus.relay(outbox, every=1, limit=1)
        await let_others_run()
        assert outbox.looks == 1


async def test_it_says_how_long_the_oldest_has_waited(memory: Site) -> None:
    clock = memory.clock
    async with memory.bus() as bus:
        old = OutboxEntry(
            id=str(uuid4()), name="places.OrderPlaced", payload="{}", time=clock.time() - 90
        )
        new = OutboxEntry(id=str(uuid4()), name="places.OrderPlaced", payload="{}")
        report = await bus.relay_once(ListOutbox([old, new]))

    assert report.oldest == pytest.approx(90)


async def test_it_is_refused_where_it_would_lose_or_cannot_work(place: Place) -> None:
    outbox = ListOutbox(entries(1))
    async with MessageBus() as plain:
        with pytest.raises(ConfigurationError, match=r"bus.relay_once\(\) needs a journal"):
            await plain.relay_once(outbox)
        with pytest.raises(ConfigurationError, match=r"bus.relay\(\) needs a journal"):
            plain.relay(outbox)
    async with MessageBus(journal=place()) as bus:
        with pytest.raises(ConfigurationError, match=r"The outbox is .*lacks done, pending"):
            await bus.relay_once([])  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        with pytest.raises(ValueError, match="limit"):
            await bus.relay_once(outbox, limit=0)
        with pytest.raises(ValueError, match="every"):
            bus.relay(outbox, every=0)
        async with bus.transaction():
            with pytest.raises(BusStateError, match="Call it outside"):
                await bus.relay_once(outbox)
        assert len(outbox.entries) == 1
    with pytest.raises(BusClosedError):
        await bus.relay_once(outbox)


async def test_an_entry_of_an_event_is_that_event(place: Place) -> None:
    event = OrderShipped(number=3)
    entry = OutboxEntry.of(event)
    async with MessageBus(journal=place()) as bus:
        await bus.publish(event)
        report = await bus.relay_once(ListOutbox([entry]))

    assert entry.id == event.message_id
    assert entry.time == event.created_at.timestamp()
    assert report.duplicates == 1
