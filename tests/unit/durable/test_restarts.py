"""A bus with a journal is started again (19a), or finds the name of a handler taken (19g)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from msgbus import Command, MessageBus
from msgbus.bus.durable.relaying import Relay
from msgbus.errors import JournalClosedError
from msgbus.journal.memory import MemoryJournal
from msgbus.subscriptions.progress import Standing
from tests.durable_shop import Placed, Seen, url_of
from tests.fakes import conserves, logged
from tests.unit.durable.conftest import Site
from tests.unit.durable.places import OrderPlaced
from tests.unit.durable.shop_outbox import ShopDatabase


class Count(Command[str], name="restarts.Count"):
    number: int = 0


TWO_LOOPS = [("asyncio", "asyncio"), ("trio", "trio"), ("asyncio", "trio"), ("trio", "asyncio")]


async def test_what_was_acknowledged_is_not_delivered_again_and_the_rest_is_once(
    site: Site,
) -> None:
    bus = site.bus()
    seen, beside = Seen(), list[int]()
    begun, is_held = anyio.Event(), True

    @bus.on(Placed, durable="store")
    async def store(event: Placed) -> None:
        if event.number == 2 and is_held:
            begun.set()
            await anyio.sleep_forever()
        await seen(event)

    bus.subscribe(
        Placed, lambda event: beside.append(event.number), inline=True, durable=False, name="beside"
    )
    await bus.start()
    for number in (1, 2, 3):
        await bus.publish(Placed(number=number))
    await begun.wait()
    report = await bus.stop(0)
    assert (seen.numbers, report.persisted) == ([1], 2)

    is_held = False
    async with bus:
        await bus.settled()
        assert seen.numbers == [1, 2, 3]
        await bus.publish(Placed(number=4))
        await bus.settled()
    assert seen.numbers == [1, 2, 3, 4]
    async with bus:
        await bus.settled()
    assert seen.numbers == beside == [1, 2, 3, 4]
    conserves(bus)


async def test_delayed_events_and_enqueued_commands_wait_for_the_next_run(site: Site) -> None:
    bus = site.bus()
    seen = Seen()
    bus.subscribe(Placed, seen, durable="store")
    done: list[int] = []

    @bus.handles(Count)
    async def count(command: Count) -> str:
        done.append(command.number)
        return str(command.number)

    async with bus:
        await bus.publish(Placed(number=1), delay=5)
        ticket = await bus.enqueue(Count(number=2), 5)
    async with bus:
        await bus.settled()
        assert (seen.numbers, done) == ([], [])
        await site.clock.advance(6)
        assert await (await bus.ticket(ticket.message_id)).result() == "2"
        await bus.settled()
    async with bus:
        await bus.settled()
    assert (seen.numbers, done) == ([1], [2])


@pytest.mark.parametrize(("first", "second"), TWO_LOOPS)
def test_a_journal_is_opened_again_on_another_event_loop(
    first: str, second: str, tmp_path: Path
) -> None:
    bus = MessageBus(journal=url_of(tmp_path))
    seen = Seen()
    bus.subscribe(Placed, seen, durable="store")

    @bus.handles(Count)
    async def count(command: Count) -> str:
        await bus.publish(Placed(number=command.number))
        return "done"

    async def run(number: int) -> None:
        async with bus:
            ticket = await bus.enqueue(Count(number=number))
            assert await ticket.result() == "done"
            await bus.execute(Count(number=number + 1))
            await bus.publish_many([Placed(number=number + 2)])
            late = bus.subscribe(Placed, Seen(), durable=f"late-{number}")
            await bus.settled()
            await late.close()

    anyio.run(run, 1, backend=first)
    anyio.run(run, 11, backend=second)

    assert seen.numbers == [1, 2, 3, 11, 12, 13]


async def test_a_handler_registered_between_two_runs_reads_from_its_place(site: Site) -> None:
    bus = site.bus()
    early, late = Seen(), Seen()
    subscription = bus.subscribe(Placed, early, durable="early")
    async with bus:
        await bus.publish(Placed(number=1))
        subscription.pause()
    bus.subscribe(Placed, late, durable="late")
    async with bus:
        await bus.publish(Placed(number=2))
        await bus.settled()
        assert subscription.progress().standing is Standing.ACTIVE
    assert (early.numbers, late.numbers) == ([1, 2], [1, 2])


async def test_a_relay_goes_on_in_the_next_run_unless_it_was_closed(
    memory: Site, tmp_path: Path
) -> None:
    bus = memory.bus()
    seen: list[int] = []

    @bus.on(OrderPlaced, durable="store")
    async def store(event: OrderPlaced) -> None:
        seen.append(event.number)

    shop, other_shop = ShopDatabase(tmp_path / "shop.db"), ShopDatabase(tmp_path / "other.db")
    relay, other = bus.relay(shop), bus.relay(other_shop)
    async with bus:
        shop.place_order(1)
        await relayed(relay, 1)
        await bus.settled()
        await other.close()
    shop.place_order(2)
    other_shop.place_order(3)
    async with bus:
        await relayed(relay, 2)
        await bus.settled()
    assert seen == [1, 2]
    assert other_shop.waiting() == 1


async def relayed(relay: Relay, number: int) -> None:
    """Wait until it has published so many; it looks into a database in a thread."""
    with anyio.fail_after(10):
        while relay.published < number:
            relay.wake()
            await anyio.lowlevel.checkpoint()


async def test_a_journal_that_its_owner_has_closed_fails_the_start_and_says_so() -> None:
    journal = MemoryJournal()
    bus = MessageBus(journal=journal)
    bus.subscribe(Placed, Seen(), durable="store")
    async with bus:
        await bus.publish(Placed(number=1))
    await journal.close()

    with pytest.raises(JournalClosedError, match=r"closed\. Open another one"):
        await bus.start()
    assert not bus.is_running


async def test_a_start_that_the_journal_failed_can_be_tried_again(tmp_path: Path) -> None:
    folder = tmp_path / "later"
    bus = MessageBus(journal=url_of(folder))
    seen = Seen()
    bus.subscribe(Placed, seen, durable="store")
    with pytest.raises(Exception, match="later"):
        await bus.start()
    assert not bus.is_running

    folder.mkdir()
    async with bus:
        await bus.publish(Placed(number=1))
    assert seen.numbers == [1]


async def test_a_durable_handler_whose_name_is_taken_says_so_at_once(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    def bus_of(seen: Seen) -> tuple[MessageBus, Any]:
        bus = site.bus()
        return bus, bus.subscribe(Placed, seen, durable="store")

    here, there = Seen(), Seen()
    first, first_handler = bus_of(here)
    second, second_handler = bus_of(there)
    async with first:
        await first.publish(Placed(number=1))
        await first.settled()
        assert logged(caplog, "subscription_standby") == []
        async with second:
            [entry] = logged(caplog, "subscription_standby")
            assert entry["subscription"] == "store"
            assert entry["owner"] == str(os.getpid())
            progress = second_handler.progress()
            assert (progress.standing, progress.owner) == (Standing.STANDBY, entry["owner"])
            assert second.stats().subscriptions["store"].owner == entry["owner"]
            assert first_handler.progress().owner is None

            await first.stop()
            await site.clock.advance(30)
            await second.publish(Placed(number=2))
            await second.settled()
            assert second_handler.progress().owner is None
            assert len(logged(caplog, "subscription_standby")) == 1
    assert (here.numbers, there.numbers) == ([1], [2])
