"""What bus.stats() and Prometheus say of durable handlers and of the journal."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
from prometheus_client import generate_latest

from msgbus import BusConfig, Command, MessageBus, Refusal, Unhandleable
from msgbus.bus.durable.outbox import OutboxEntry
from msgbus.errors import JournalError
from msgbus.resilience.config import RetryConfig
from msgbus.telemetry.prometheus import BusCollector, expose
from tests.fakes import Recorder, SlowHandler, let_others_run
from tests.unit.durable.conftest import Site
from tests.unit.durable.places import OrderPlaced, OrderShipped, Place, journal_of, orders
from tests.unit.telemetry.exposition import parsed, value


class PlaceOrder(Command):
    number: int = 0


async def test_a_bus_without_a_journal_says_nothing_of_either() -> None:
    async with MessageBus() as bus:
        stats = bus.stats()

    assert stats.subscriptions == {}
    assert stats.journal is None
    assert stats.as_dict()["journal"] is None
    assert "msgbus_subscription_lag{" not in expose(bus)
    assert "msgbus_journal_backlog{" not in expose(bus)


async def test_a_durable_handler_is_there_from_its_registration(place: Place) -> None:
    bus = MessageBus(journal=place())
    bus.subscribe(OrderPlaced, Recorder(), name="mail", durable="receipts")
    bus.subscribe(OrderPlaced, Recorder(), name="in memory", durable=False)

    before = bus.stats()
    async with bus:
        during = bus.stats()
    after = bus.stats()

    standing = [one.subscriptions["receipts"].standing for one in (before, during, after)]
    assert standing == ["new", "active", "closed"]
    assert list(before.subscriptions) == ["receipts"]
    assert before.subscriptions["receipts"].handler == "mail"


async def test_lag_age_and_what_is_in_hand_are_told(memory: Site) -> None:
    clock = memory.clock
    bus = memory.bus()
    slow = SlowHandler()
    bus.subscribe(OrderPlaced, slow, durable="slow", ack_timeout=None)
    async with bus:
        await bus.publish_many(orders(5))
        await slow.started.wait()
        await clock.advance(30)
        await let_others_run()

        stats = bus.stats().subscriptions["slow"]
        assert (stats.lag, stats.in_flight, stats.last_acked) == (5, 1, 0)
        assert stats.oldest_unacked_age == pytest.approx(30, abs=1)
        series = parsed(expose(bus))
        assert value(series, "subscription_lag", subscription="slow") == 5
        assert value(series, "subscription_in_flight", subscription="slow") == 1
        assert value(series, "subscription_active", subscription="slow") == 1
        age = value(series, "subscription_oldest_unacked_seconds", subscription="slow")
        assert age == pytest.approx(30, abs=1)

        slow.release.set()
        await bus.settled()
        stats = bus.stats().subscriptions["slow"]
        assert (stats.lag, stats.in_flight, stats.last_acked, stats.acked) == (0, 0, 5, 5)
        assert stats.oldest_unacked_age == 0


async def test_counters_say_what_became_of_each_message(place: Place) -> None:
    bus = MessageBus(journal=place())
    tries: list[int] = []

    @bus.on(OrderPlaced, durable="all kinds", retry=RetryConfig(max_retries=1, initial_delay=0))
    async def all_kinds(event: OrderPlaced) -> None:
        tries.append(event.number)
        if event.number == 1 and tries.count(1) == 1:
            raise ValueError("once")
        if event.number == 2:
            raise ValueError("always")
        if event.number == 3:
            raise Refusal("not this one")

    async with bus:
        await bus.publish_many(orders(4))
        await bus.settled()
        stats = bus.stats().subscriptions["all kinds"]
        series = parsed(expose(bus))

    assert (stats.delivered, stats.acked, stats.refused) == (6, 3, 1)
    assert (stats.failed, stats.redelivered, stats.dead_lettered) == (3, 2, 1)
    assert (stats.dropped, stats.stalls, stats.errors, stats.skipped) == (0, 0, 0, 0)
    assert (stats.lag, stats.waiting, stats.scheduled) == (0, 0, 0)
    for name, expected in {
        "delivered": 6,
        "acked": 3,
        "failed": 3,
        "redelivered": 2,
        "dead_lettered": 1,
        "dropped": 0,
        "stalls": 0,
        "errors": 0,
    }.items():
        found = value(series, f"subscription_{name}_total", subscription="all kinds")
        assert (name, found) == (name, expected)


@pytest.mark.parametrize(("in_process", "waiting", "scheduled"), [(7200, 1, 0), (1, 0, 1)])
async def test_a_message_that_waits_for_another_try_is_counted(
    memory: Site, in_process: float, waiting: int, scheduled: int
) -> None:
    clock = memory.clock
    config = BusConfig(drain_timeout=0)
    bus = memory.bus(config)
    later = RetryConfig(max_retries=1, initial_delay=3600, max_delay=3600, in_process=in_process)

    @bus.on(OrderPlaced, durable="later", retry=later)
    async def fails(event: OrderPlaced) -> None:
        raise ValueError(event.number)

    async with bus:
        await bus.publish(OrderPlaced())
        await let_others_run()
        await clock.advance(1)
        await let_others_run()
        stats = bus.stats().subscriptions["later"]
        assert (stats.waiting, stats.scheduled, stats.in_flight) == (waiting, scheduled, 0)
        series = parsed(expose(bus))
        assert value(series, "subscription_waiting", subscription="later") == waiting
        assert value(series, "subscription_scheduled", subscription="later") == scheduled


async def test_the_backlog_of_the_recorder_and_its_failures_are_told(
    monkeypatch: pytest.MonkeyPatch, memory: Site
) -> None:
    clock = memory.clock
    bus = memory.bus()

    @bus.handles(PlaceOrder)
    async def place_order(command: PlaceOrder) -> None:
        pass

    async with bus:
        stats = bus.stats().journal
        assert stats is not None
        assert (stats.level, stats.backlog, stats.write_failures) == ("memory", 0, 0)

        async def full(operations: Sequence[Any]) -> list[Any]:
            raise JournalError("The disk is full.")

        with monkeypatch.context() as patch:
            patch.setattr(journal_of(bus), "commit", full)
            await bus.execute(PlaceOrder())
            await let_others_run()
            stats = bus.stats().journal
            assert stats is not None
            assert (stats.backlog, stats.write_failures) == (2, 1)
            series = parsed(expose(bus))
            assert value(series, "journal_backlog") == 2
            assert value(series, "journal_write_failures_total") == 1
        await clock.advance(1)
        await let_others_run()
        stats = bus.stats().journal
        assert stats is not None
        assert (stats.backlog, stats.write_failures) == (0, 1)


async def test_what_relays_do_is_told(memory: Site) -> None:
    clock = memory.clock

    class Once:
        def __init__(self) -> None:
            self.entries = [OutboxEntry.of(OrderPlaced())]

        async def pending(self, limit: int) -> Sequence[OutboxEntry]:
            if not self.entries:
                raise OSError("away")
            return self.entries[:limit]

        async def done(self, entries: Sequence[OutboxEntry]) -> None:
            self.entries.clear()

    async with memory.bus() as bus:
        bus.relay(Once(), every=1)
        await let_others_run()
        await clock.advance(1)
        await let_others_run()
        stats = bus.stats().journal
        assert stats is not None
        assert (stats.relayed, stats.relay_failures, stats.appended) == (1, 1, 1)
        series = parsed(expose(bus))
        assert value(series, "outbox_relayed_total") == 1
        assert value(series, "outbox_failures_total") == 1


async def test_all_of_it_is_plain_json(place: Place) -> None:
    bus = MessageBus(BusConfig(name="shop"), journal=place())
    bus.subscribe(OrderPlaced, Recorder(), durable="receipts")
    async with bus:
        await bus.publish_many(orders(3))
        await bus.settled()
        figures = json.loads(json.dumps(bus.stats().as_dict()))

    assert figures["subscriptions"]["receipts"]["acked"] == 3
    assert figures["subscriptions"]["receipts"]["standing"] == "active"
    assert figures["journal"]["appended"] == 3


async def test_two_buses_of_one_name_are_told_of_together(memory: Site) -> None:
    clock = memory.clock
    first, second = (memory.bus() for _ in range(2))
    slow = SlowHandler()
    for bus in (first, second):
        bus.subscribe(OrderPlaced, slow, durable="shared", ack_timeout=None)
    async with first, second:
        await first.publish_many(orders(3))
        await slow.started.wait()
        await clock.advance(1)
        await let_others_run()
        standings = {bus.stats().subscriptions["shared"].standing for bus in (first, second)}
        assert standings == {"active", "standby"}
        series = parsed(expose(first, second))
        assert value(series, "subscription_active", subscription="shared") == 1
        assert value(series, "subscription_lag", subscription="shared") == 3
        assert value(series, "subscription_in_flight", subscription="shared") == 1
        slow.release.set()
        with anyio.fail_after(20):
            await first.settled()


async def test_names_beyond_the_limit_are_summed(memory: Site) -> None:
    bus = memory.bus()
    for number in range(5):
        kind = OrderPlaced if number % 2 else OrderShipped
        bus.subscribe(kind, Recorder(), durable=f"sub-{number}")
    async with bus:
        await bus.publish_many(orders(4))
        await bus.settled()
        series = parsed(generate_latest(BusCollector(bus, max_series=1)).decode())

    assert value(series, "subscription_acked_total", subscription="_overflow") == 8


# -- dead letters --------------------------------------------------------------------------------


async def test_a_plain_bus_with_a_journal_counts_its_dead_letters(tmp_path: Path) -> None:
    """List g: what a durable handler gives up is kept in the journal, and counted."""
    bus = MessageBus(journal=f"sqlite:///{tmp_path / 'shop.db'}?reserve=0")

    @bus.on(OrderPlaced, retry=RetryConfig(max_retries=0))
    async def fail(event: OrderPlaced) -> None:
        raise ValueError("no")

    assert bus.stats().dead_letters == 0
    async with bus:
        for number in range(3):
            await bus.publish(OrderPlaced(number=number))
        await bus.settled()

        assert bus.stats().dead_letters == 3
        metrics = {metric.name: metric for metric in BusCollector(bus).collect()}
        assert metrics["msgbus_dead_letter_queue_size"].samples[0].value == 3

    assert bus.stats().dead_letters == 3


async def test_a_plain_bus_counts_the_letters_of_enqueued_commands() -> None:
    """List g: they are in the journal as well."""
    bus = MessageBus(journal="memory:")

    @bus.handles(PlaceOrder)
    async def charge(command: PlaceOrder) -> None:
        raise Unhandleable("no such card")

    async with bus:
        await bus.enqueue(PlaceOrder())
        await bus.settled()
        assert bus.stats().dead_letters == 1
