"""Metrics for Prometheus: the right numbers, under bounded labels, on no registry unasked."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from importlib.metadata import version

import anyio
import pytest
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from msgbus import (
    BackpressureStrategy,
    BusConfig,
    BusStats,
    Command,
    ConfigurationError,
    Event,
    MessageBus,
    QueueConfig,
)
from msgbus.clock import VirtualClock
from msgbus.telemetry.prometheus import BusCollector, expose
from msgbus.telemetry.stats import BOUNDS, CommandHandlerStats, EventHandlerStats
from tests.fakes import OrderPlaced, OrderShipped, SlowHandler, let_others_run

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]

COUNTERS = [
    "events_published", "events_processed", "events_failed", "events_filtered",
    "events_rejected", "events_dropped", "events_abandoned",
    "commands_sent", "commands_processed", "commands_failed", "commands_cancelled",
]  # fmt: skip
HISTOGRAMS = ["event_processing_duration_seconds", "command_processing_duration_seconds"]
GAUGES = [
    "queue_size", "backpressure_active", "active_sessions", "registered_handlers",
    "events_scheduled", "circuit_breaker_state", "dead_letter_queue_size",
]  # fmt: skip


class PlaceOrder(Command):
    number: int = 0


async def ignore(message: object) -> None:
    pass


async def fail_odd(message: PlaceOrder | OrderPlaced) -> None:
    if message.number % 2:
        raise ValueError(message.number)


def parsed(text: str) -> Series:
    """All samples of an exposition; two of one name and labels are an error."""
    series: Series = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in series, f"twice: {key}"
            series[key] = sample.value
    return series


def value(series: Series, name: str, **labels: str) -> float | None:
    """One sample of the bus called `msgbus`, unless said otherwise."""
    return series.get((f"msgbus_{name}", frozenset({"bus": "msgbus", **labels}.items())))


class Source:
    """A bus that is nothing but its figures."""

    def __init__(self, stats: BusStats) -> None:
        self.config = BusConfig(name=stats.name)
        self.figures = stats

    def stats(self) -> BusStats:
        return self.figures


def empty(name: str = "msgbus") -> BusStats:
    return BusStats(name=name, state="running", commands={}, handlers={}, events={})


# -- the numbers -------------------------------------------------------------------------------


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


async def test_events_that_were_rejected_dropped_or_given_up_are_counted() -> None:
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


# -- registries --------------------------------------------------------------------------------


def names_on(registry: Collector) -> list[str]:
    return [family.name for family in registry.collect()]


def test_nothing_is_registered_unasked() -> None:
    BusCollector(MessageBus())

    assert [name for name in names_on(REGISTRY) if name.startswith("msgbus")] == []


def test_it_registers_itself_on_the_registry_it_is_given() -> None:
    registry = CollectorRegistry()

    BusCollector(MessageBus(), registry=registry)

    assert "msgbus_queue_size" in names_on(registry)


def test_it_can_be_registered_by_hand_and_taken_out_again() -> None:
    registry = CollectorRegistry(auto_describe=True)
    collector = BusCollector(MessageBus())

    registry.register(collector)
    registered = names_on(registry)
    registry.unregister(collector)

    assert "msgbus_queue_size" in registered
    assert names_on(registry) == []


def test_registering_reads_nothing_from_the_bus() -> None:
    class Unready:
        config = BusConfig()

        def stats(self) -> BusStats:
            pytest.fail("was read")

    BusCollector(Unready(), registry=CollectorRegistry(auto_describe=True))


def test_a_registry_in_the_place_of_a_bus_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="registry=registry"):
        BusCollector(MessageBus(), CollectorRegistry())  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def test_no_bus_at_all_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="one bus or more"):
        BusCollector()


def test_multi_process_mode_is_refused_with_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "/tmp/metrics")

    with pytest.raises(ConfigurationError, match=r"multi-process mode.*scrape each process"):
        BusCollector(MessageBus())
    with pytest.raises(ConfigurationError, match="PROMETHEUS_MULTIPROC_DIR is set"):
        expose(MessageBus())


# -- several buses -----------------------------------------------------------------------------


def family_counts(registry: CollectorRegistry) -> Counter[str]:
    lines = generate_latest(registry).decode().splitlines()
    return Counter(line.split()[2] for line in lines if line.startswith("# TYPE"))


def buses_on(registry: CollectorRegistry) -> set[str]:
    series = parsed(generate_latest(registry).decode())
    return {dict(labels)["bus"] for name, labels in series if name == "msgbus_active_sessions"}


def test_two_buses_share_one_set_of_metrics() -> None:
    registry = CollectorRegistry()
    orders, billing = (MessageBus(BusConfig(name=name)) for name in ("orders", "billing"))

    BusCollector(orders, billing, registry=registry)

    assert set(family_counts(registry).values()) == {1}
    assert buses_on(registry) == {"orders", "billing"}


def test_a_second_collector_for_one_registry_joins_the_first() -> None:
    registry, other = CollectorRegistry(), CollectorRegistry()
    orders, billing = (MessageBus(BusConfig(name=name)) for name in ("orders", "billing"))

    BusCollector(orders, registry=registry)
    BusCollector(billing, registry=registry)
    BusCollector(billing, registry=other)

    assert set(family_counts(registry).values()) == {1}
    assert buses_on(registry) == {"orders", "billing"}
    assert buses_on(other) == {"billing"}


def test_a_collector_that_was_taken_out_comes_back_with_the_next_bus() -> None:
    registry = CollectorRegistry()
    orders, billing = (MessageBus(BusConfig(name=name)) for name in ("orders", "billing"))
    collector = BusCollector(orders, registry=registry)
    registry.unregister(collector)

    BusCollector(billing, registry=registry)

    assert buses_on(registry) == {"orders", "billing"}


async def test_buses_of_one_name_are_counted_together() -> None:
    clock = VirtualClock()

    async def take_a_second(command: PlaceOrder) -> None:
        await clock.advance(1.0)

    one, two = MessageBus(clock=clock), MessageBus(clock=clock)
    collector = BusCollector(one, two, one)
    collector.add(two)

    for bus, count in ((one, 2), (two, 3)):
        bus.register_command_handler(PlaceOrder, take_a_second)
        async with bus:
            for _ in range(count):
                await bus.execute(PlaceOrder())

    series = parsed(generate_latest(collector).decode())
    labels = {"handler": "take_a_second", "message_type": "PlaceOrder"}
    assert value(series, "commands_sent_total", **labels) == 5
    assert value(series, "command_processing_duration_seconds_count", **labels) == 5
    assert value(series, "command_processing_duration_seconds_sum", **labels) == 5.0
    assert value(series, "registered_handlers") == 2


def test_back_pressure_is_on_or_off_however_many_feel_it() -> None:
    lane = EventHandlerStats(
        handler="slow",
        message_type="OrderPlaced",
        handled=0,
        failed=0,
        filtered=0,
        dropped=0,
        abandoned=0,
        overflowed=0,
        queued=3,
        running=1,
        backpressure=True,
        seconds=0.0,
        buckets=(0,) * (len(BOUNDS) + 1),
    )
    sources = [Source(replace(empty(), handlers={"slow": lane})) for _ in range(2)]

    series = parsed(expose(*sources))

    labels = {"handler": "slow", "message_type": "OrderPlaced"}
    assert value(series, "backpressure_active", **labels) == 1
    assert value(series, "queue_size", **labels) == 6


# -- bounds ------------------------------------------------------------------------------------


async def publish_to(bus: MessageBus, names: Iterable[str]) -> None:
    for name in names:
        bus.register_event_handler(OrderPlaced, ignore, name=name)
    await bus.publish(OrderPlaced())
    await bus.settled()


def handlers_in(series: Series, name: str) -> dict[str, float]:
    return {
        dict(labels)["handler"]: number
        for (metric, labels), number in series.items()
        if metric == f"msgbus_{name}"
    }


async def test_beyond_the_budget_handlers_are_summed() -> None:
    bus = MessageBus()
    collector = BusCollector(bus, max_series=3)

    async with bus:
        await publish_to(bus, [f"h{number}" for number in range(10)])
        series = parsed(generate_latest(collector).decode())

    # One of the three is the event type itself.
    assert handlers_in(series, "events_processed_total") == {"h0": 1, "h1": 1, "_overflow": 8}
    counts = handlers_in(series, "event_processing_duration_seconds_count")
    assert counts == {"h0": 1, "h1": 1, "_overflow": 8}
    assert value(series, "events_published_total", message_type="OrderPlaced") == 1


async def test_a_series_keeps_its_name_from_scrape_to_scrape() -> None:
    first, second = (MessageBus(BusConfig(name=name)) for name in ("first", "second"))
    collector = BusCollector(first, second, max_series=4)

    async with first, second:
        await publish_to(first, ["a"])
        await publish_to(second, ["b"])
        before = handlers_in(parsed(generate_latest(collector).decode()), "events_processed_total")
        await publish_to(first, ["c"])
        after = handlers_in(parsed(generate_latest(collector).decode()), "events_processed_total")

    assert before == {"a": 1, "b": 1}
    assert after == {"a": 2, "b": 1, "_overflow": 1}


def test_a_thousand_series_fit_by_default_and_no_more() -> None:
    commands = {
        f"h{number}": CommandHandlerStats(
            handler=f"h{number}",
            message_type="PlaceOrder",
            sent=1,
            handled=1,
            failed=0,
            cancelled=0,
            running=0,
            seconds=0.0,
            buckets=(1,) + (0,) * len(BOUNDS),
        )
        for number in range(1100)
    }
    registry = CollectorRegistry()
    BusCollector(Source(replace(empty(), commands=commands)), registry=registry)

    (family,) = (one for one in registry.collect() if one.name == "msgbus_commands_sent")

    sent = {sample.labels["handler"]: sample.value for sample in family.samples}
    assert len(sent) == 1001
    assert sent["_overflow"] == 100
    assert sum(sent.values()) == 1100


async def test_event_types_and_circuits_are_bounded_too() -> None:
    bus = MessageBus()
    types = [type(f"Made{number}", (Event,), {"__module__": __name__}) for number in range(3)]
    for event_type in types:
        await bus.publish(event_type())
    circuits = {"a": "closed", "b": "open", "c": "half_open"}
    source = Source(replace(bus.stats(), circuits=circuits))

    series = parsed(generate_latest(BusCollector(source, max_series=1)).decode())

    assert value(series, "events_published_total", message_type="Made0") == 1
    assert value(series, "events_published_total", message_type="_overflow") == 2
    # Of several circuits the worst is told, as a sum of states says nothing.
    assert value(series, "circuit_breaker_state", handler="_overflow") == 2


def test_a_budget_below_one_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="max_series"):
        BusCollector(MessageBus(), max_series=0)


def test_a_scrape_from_another_thread_tries_again_where_counters_were_being_added() -> None:
    class Changing(Source):
        tries = 0

        def stats(self) -> BusStats:
            self.tries += 1
            if self.tries < 3:
                message = "dictionary changed size during iteration"
                raise RuntimeError(message)
            return self.figures

    source = Changing(empty())

    assert value(parsed(expose(source)), "active_sessions") == 0


def test_a_source_that_fails_for_good_fails_the_scrape() -> None:
    class Broken(Source):
        def stats(self) -> BusStats:
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        expose(Broken(empty()))
