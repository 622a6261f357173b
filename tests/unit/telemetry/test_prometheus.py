"""Metrics for Prometheus: the right numbers, in the right form."""

from __future__ import annotations

import math
from dataclasses import replace
from importlib.metadata import version

import anyio
import pytest
from prometheus_client.parser import text_string_to_metric_families

from msgbus import (
    BackpressureStrategy,
    BusConfig,
    Event,
    MessageBus,
    QueueConfig,
)
from msgbus.runtime.clock import VirtualClock
from msgbus.telemetry.prometheus import expose
from msgbus.telemetry.stats import BOUNDS
from tests.fakes import OrderPlaced, OrderShipped, SlowHandler, let_others_run
from tests.unit.telemetry.exposition import PlaceOrder, Series, Source, empty, ignore, parsed, value

COUNTERS = [
    "events_published", "events_processed", "events_failed", "events_filtered",
    "events_rejected", "events_dropped", "events_abandoned", "events_retried",
    "commands_sent", "commands_processed", "commands_failed", "commands_cancelled",
    "commands_retried",
    "subscription_delivered", "subscription_acked", "subscription_skipped", "subscription_failed",
    "subscription_timed_out", "subscription_redelivered", "subscription_dead_lettered",
    "subscription_dropped", "subscription_stalls", "subscription_errors",
    "journal_write_failures", "outbox_relayed", "outbox_failures",
]  # fmt: skip
HISTOGRAMS = ["event_processing_duration_seconds", "command_processing_duration_seconds"]
GAUGES = [
    "queue_size", "backpressure_active", "active_sessions", "registered_handlers",
    "events_scheduled", "circuit_breaker_state", "dead_letter_queue_size",
    "subscription_lag", "subscription_oldest_unacked_seconds", "subscription_scheduled",
    "subscription_damaged",
    "subscription_trimmed",
    "subscription_active", "subscription_in_flight", "subscription_waiting", "journal_backlog",
]  # fmt: skip


async def fail_odd(message: PlaceOrder | OrderPlaced) -> None:
    if message.number % 2:
        raise ValueError(message.number)


async def test_the_counters_of_events_add_up_with_what_was_done() -> None:
    def is_big(event: Event) -> bool:
        return isinstance(event, OrderPlaced) and event.number > 7

    bus = MessageBus(filters=[lambda event: event != OrderPlaced(number=4)])
    bus.register_event_handler(OrderPlaced, fail_odd)
    bus.register_event_handler(OrderPlaced, ignore, name="big", filter=is_big)

    async with bus:
        await bus.publish_many(OrderPlaced(number=number) for number in range(10))
        await bus.publish(OrderShipped())
        await bus.settled()
        series = parsed(expose(bus))

    placed = {"message_type": "OrderPlaced"}
    assert value(series, "events_published_total", **placed) == 10
    assert value(series, "events_published_total", message_type="OrderShipped") == 1
    assert value(series, "events_rejected_total", **placed) == 0
    assert value(series, "events_filtered_total", handler="", **placed) == 1
    assert value(series, "events_processed_total", handler="fail_odd", **placed) == 4
    assert value(series, "events_failed_total", handler="fail_odd", **placed) == 5
    assert value(series, "events_filtered_total", handler="fail_odd", **placed) == 0
    assert value(series, "events_processed_total", handler="big", **placed) == 2
    assert value(series, "events_filtered_total", handler="big", **placed) == 7


async def test_events_that_were_rejected_dropped_or_abandoned_are_counted() -> None:
    bus = MessageBus()
    slow, full = SlowHandler(), SlowHandler()
    drop = QueueConfig(max_size=1, strategy=BackpressureStrategy.DROP_OLDEST)
    bus.register_event_handler(OrderPlaced, slow, name="slow", queue=drop)
    reject = QueueConfig(max_size=1, strategy=BackpressureStrategy.REJECT_NEW)
    bus.register_event_handler(OrderShipped, full, name="full", queue=reject)

    await bus.start()
    for event_type, handler in ((OrderPlaced, slow), (OrderShipped, full)):
        await bus.publish(event_type())
        await handler.started.wait()
        await bus.publish_many(event_type() for _ in range(4))
    during = parsed(expose(bus))
    await bus.stop(timeout=0)
    series = parsed(expose(bus))

    placed = {"handler": "slow", "message_type": "OrderPlaced"}
    assert value(during, "queue_size", **placed) == 1
    assert value(series, "queue_size", **placed) == 0
    assert value(series, "events_dropped_total", **placed) == 3
    assert value(series, "events_abandoned_total", **placed) == 2
    assert value(series, "events_rejected_total", message_type="OrderShipped") == 3
    assert value(series, "events_published_total", message_type="OrderShipped") == 5


async def test_the_counters_of_commands_add_up_with_what_was_done() -> None:
    bus = MessageBus()
    bus.register_command_handler(PlaceOrder, fail_odd)

    async with bus:
        for number in range(5):
            result = await bus.execute(PlaceOrder(number=number))
            assert result.success is (number % 2 == 0)
        series = parsed(expose(bus))

    labels = {"handler": "fail_odd", "message_type": "PlaceOrder"}
    assert value(series, "commands_sent_total", **labels) == 5
    assert value(series, "commands_processed_total", **labels) == 3
    assert value(series, "commands_failed_total", **labels) == 2
    assert value(series, "commands_cancelled_total", **labels) == 0


async def test_a_cancelled_command_is_counted_as_such() -> None:
    bus = MessageBus()

    @bus.handles(PlaceOrder)
    async def endless(command: PlaceOrder) -> None:
        await anyio.sleep_forever()

    async with bus:
        with anyio.move_on_after(0):
            await bus.execute(PlaceOrder())
        series = parsed(expose(bus))

    labels = {"handler": "endless", "message_type": "PlaceOrder"}
    assert value(series, "commands_sent_total", **labels) == 1
    assert value(series, "commands_cancelled_total", **labels) == 1


async def test_gauges_follow_the_bus() -> None:
    bus = MessageBus(BusConfig(queue=QueueConfig(max_size=1)), clock=VirtualClock())
    slow = SlowHandler()
    bus.register_event_handler(OrderPlaced, slow, name="slow")
    bus.register_command_handler(PlaceOrder, ignore)
    pages: list[Series] = []

    async with bus, bus.session(), bus.session(), anyio.create_task_group() as tasks:
        await bus.publish(OrderShipped(), delay=60)
        await bus.publish(OrderPlaced())
        await slow.started.wait()
        await bus.publish(OrderPlaced())
        tasks.start_soon(bus.publish, OrderPlaced())
        await let_others_run()
        pages.append(parsed(expose(bus)))
        slow.release.set()
        await bus.settled()
        pages.append(parsed(expose(bus)))

    busy, idle = pages
    labels = {"handler": "slow", "message_type": "OrderPlaced"}
    assert value(busy, "active_sessions") == 2
    assert value(busy, "registered_handlers") == 2
    assert value(busy, "events_scheduled") == 1
    assert value(busy, "queue_size", **labels) == 1
    assert value(busy, "backpressure_active", **labels) == 1
    assert value(idle, "queue_size", **labels) == 0
    assert value(idle, "backpressure_active", **labels) == 0


def test_circuits_and_dead_letters_are_read_from_the_stats() -> None:
    circuits = {"mail": "open", "db": "closed", "cache": "half_open", "odd": "forced"}
    source = Source(replace(empty(), circuits=circuits, dead_letters=3))

    series = parsed(expose(source))

    assert value(series, "dead_letter_queue_size") == 3
    states = {name: value(series, "circuit_breaker_state", handler=name) for name in circuits}
    assert states == {"mail": 2, "db": 0, "cache": 1, "odd": -1}


async def test_durations_are_cumulative_and_end_with_their_count() -> None:
    clock = VirtualClock()
    bus = MessageBus(clock=clock)
    seconds = iter([0.2, 0.3, 0.3, 2.0, 90.0])

    @bus.handles(PlaceOrder)
    async def place_order(command: PlaceOrder) -> None:
        await clock.advance(next(seconds))

    async with bus:
        for _ in range(5):
            await bus.call(PlaceOrder())
        series = parsed(expose(bus))

    name = "command_processing_duration_seconds"
    labels = {"handler": "place_order", "message_type": "PlaceOrder"}
    buckets = [
        value(series, f"{name}_bucket", le=bound, **labels) for bound in (*map(str, BOUNDS), "+Inf")
    ]
    assert None not in buckets
    at = dict(zip((*BOUNDS, math.inf), buckets, strict=True))
    assert (at[0.1], at[0.25], at[0.5], at[2.5], at[60.0], at[math.inf]) == (0, 1, 3, 4, 4, 5)
    assert value(series, f"{name}_count", **labels) == 5
    assert value(series, f"{name}_sum", **labels) == pytest.approx(92.8)


async def test_durations_of_events_count_every_call_of_the_handler() -> None:
    bus = MessageBus()
    bus.register_event_handler(OrderPlaced, fail_odd)
    bus.register_event_handler(OrderShipped, ignore, name="lists", batch=True)

    async with bus:
        await bus.publish_many(OrderPlaced(number=number) for number in range(600))
        await bus.publish_many(OrderShipped() for _ in range(7))
        await bus.settled()
        series = parsed(expose(bus))

    name = "event_processing_duration_seconds_count"
    assert value(series, name, handler="fail_odd", message_type="OrderPlaced") == 600
    assert value(series, name, handler="lists", message_type="OrderShipped") == 1


async def test_where_durations_are_sampled_each_stands_for_those_left_out() -> None:
    clock = VirtualClock()
    bus = MessageBus(BusConfig(histogram_every=8), clock=clock)

    @bus.handles(PlaceOrder)
    async def place_order(command: PlaceOrder) -> None:
        await clock.advance(0.25)

    async with bus:
        for _ in range(16):
            await bus.call(PlaceOrder())
        series = parsed(expose(bus))

    name = "command_processing_duration_seconds"
    labels = {"handler": "place_order", "message_type": "PlaceOrder"}
    assert value(series, "commands_processed_total", **labels) == 16
    assert value(series, f"{name}_count", **labels) == 16
    assert value(series, f"{name}_bucket", le="+Inf", **labels) == 16
    assert value(series, f"{name}_sum", **labels) == 4.0


# -- the form ----------------------------------------------------------------------------------


def test_every_metric_is_there_under_its_name_and_kind() -> None:
    kinds = {
        family.name: family.type for family in text_string_to_metric_families(expose(MessageBus()))
    }

    assert kinds == {
        **{f"msgbus_{name}": "counter" for name in COUNTERS},
        **{f"msgbus_{name}": "histogram" for name in HISTOGRAMS},
        **{f"msgbus_{name}": "gauge" for name in GAUGES},
        "msgbus_build_info": "gauge",
    }


def test_the_version_is_told() -> None:
    series = parsed(expose(MessageBus()))

    labels = frozenset({"version": version("msgbus")}.items())
    assert series["msgbus_build_info", labels] == 1


async def test_labels_are_bus_handler_and_message_type_only() -> None:
    bus = MessageBus()
    bus.register_event_handler(OrderPlaced, ignore)
    bus.register_command_handler(PlaceOrder, ignore)

    async with bus, bus.session("a-session-id") as session:
        await session.publish(OrderPlaced(number=4711))
        await session.execute(PlaceOrder())
        await session.settled()
        text = expose(bus)

    names = {name for _, labels in parsed(text) for name, _ in labels}
    assert names == {"bus", "handler", "message_type", "le", "version"}
    assert "a-session-id" not in text
    assert "4711" not in text


def test_every_metric_has_a_help_text() -> None:
    families = list(text_string_to_metric_families(expose(MessageBus())))

    assert [family.name for family in families if not family.documentation] == []
