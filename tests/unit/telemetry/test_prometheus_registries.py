"""Metrics for Prometheus: under bounded labels, of several buses, on no registry unasked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import pytest
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.registry import Collector

from msgbus import (
    BusConfig,
    BusStats,
    ConfigurationError,
    Event,
    MessageBus,
)
from msgbus.runtime.clock import VirtualClock
from msgbus.telemetry.prometheus import BusCollector, expose
from msgbus.telemetry.stats import BOUNDS, CommandHandlerStats, EventHandlerStats
from tests.fakes import OrderPlaced
from tests.unit.telemetry.exposition import PlaceOrder, Series, Source, empty, ignore, parsed, value


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


def test_a_registry_instead_of_a_bus_is_refused() -> None:
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


def test_a_scrape_from_another_thread_reads_again_while_counters_are_added() -> None:
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
