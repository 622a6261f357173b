"""MessageDispatchEngine: details of envelopes, types, metrics and hops."""

from __future__ import annotations

from typing import Any, Protocol

import pytest

from msgbus import Command, ConfigurationError, Event
from msgbus.errors import DuplicateHandlerError, EngineFrozenError, HandlerSignatureError
from msgbus.routing import (
    LATENCY_HISTOGRAM_BUCKETS,
    DispatcherRegistry,
    DispatchMetrics,
    DispatchResult,
    DispatchStatus,
    EventEnvelope,
    MessageCategory,
    MessageDispatchEngine,
)
from tests.unit.routing.engines import (
    COMMAND,
    EVENT,
    PLACED,
    TOPIC,
    Log,
    OrderPlaced,
    Reducer,
    engine_of,
    failing,
    nothing,
    route,
)


class ShipOrder(Command[None]):
    number: int = 0


class Shipment(Event):
    pass


class Express(Shipment, name="shop.Express"):
    pass


# -- what a dispatcher sees ----------------------------------------------------------------


async def test_a_dispatcher_sees_the_topic_of_the_dispatch() -> None:
    seen: list[EventEnvelope[Any]] = []

    async def note(envelope: EventEnvelope[Any]) -> None:
        seen.append(envelope)

    engine = engine_of({"a": note, "b": note})
    elsewhere = EventEnvelope(OrderPlaced(), topic="shop.events.other", correlation_id="flow")
    there = EventEnvelope(OrderPlaced(), topic=TOPIC)

    await engine.dispatch(TOPIC, PLACED)
    await engine.dispatch(TOPIC, elsewhere)
    await engine.dispatch(TOPIC, there)

    assert [envelope.topic for envelope in seen] == [TOPIC] * 6
    assert seen[0].payload is PLACED.payload
    assert (seen[2].envelope_id, seen[2].correlation_id) == (elsewhere.envelope_id, "flow")
    assert seen[4] is there
    assert (PLACED.topic, elsewhere.topic) == (None, "shop.events.other")  # not changed


# -- commands ------------------------------------------------------------------------------


def test_an_envelope_of_a_command_is_a_command() -> None:
    assert EventEnvelope(ShipOrder()).category is COMMAND
    assert EventEnvelope.of(ShipOrder()).category is COMMAND
    assert EventEnvelope(ShipOrder(), category=MessageCategory.INTENT).category is (
        MessageCategory.INTENT
    )
    assert EventEnvelope(OrderPlaced()).category is None  # an event, an intent or a projection


async def test_a_command_goes_to_the_dispatchers_of_commands() -> None:
    log = Log()
    engine = MessageDispatchEngine()
    engine.register_dispatcher("events", log.named("events"), EVENT)
    engine.register_dispatcher("commands", log.named("commands"), COMMAND)
    engine.register_route(route("events"))
    engine.register_route(route("commands", category=COMMAND))
    engine.freeze()

    result = await engine.dispatch("shop.orders", EventEnvelope(ShipOrder()))
    mismatch = await engine.dispatch(TOPIC, EventEnvelope(ShipOrder()))

    assert log.ran == ["commands"]
    assert result.message_category is COMMAND
    assert mismatch.error_code == "CATEGORY_MISMATCH"


async def test_a_command_that_is_passed_on_takes_the_category_of_its_new_topic() -> None:
    log = Log()
    second = MessageDispatchEngine()
    second.register_dispatcher("events", log.named("events"), EVENT)
    second.register_route(route("events"))
    second.freeze()
    first = MessageDispatchEngine(publish_outputs=second.dispatch)
    first.register_dispatcher("commands", Log().named("c", "shop.events.shipped"), COMMAND)
    first.register_route(route("commands", category=COMMAND))
    first.freeze()

    result = await first.dispatch("shop.commands.ship", EventEnvelope(ShipOrder()))

    assert result.is_successful()
    assert log.ran == ["events"]


# -- message types -------------------------------------------------------------------------


async def test_a_class_among_message_types_takes_its_subclasses() -> None:
    log = Log()
    engine = MessageDispatchEngine()
    engine.register_dispatcher("base", log.named("base"), EVENT, {Shipment})
    engine.register_dispatcher("name", log.named("name"), EVENT, {"Shipment"})
    engine.register_dispatcher("other", log.named("other"), EVENT, {OrderPlaced})
    for name in ("base", "name", "other"):
        engine.register_route(route(name))
    engine.freeze()

    await engine.dispatch(TOPIC, EventEnvelope(Express()))
    await engine.dispatch(TOPIC, EventEnvelope(Shipment()))
    await engine.dispatch(TOPIC, EventEnvelope({"plain": True}, message_type="Shipment"))

    assert log.ran == ["base", "base", "name", "base", "name"]


async def test_payloads_of_one_name_and_different_classes_are_told_apart() -> None:
    log = Log()
    engine = MessageDispatchEngine()
    engine.register_dispatcher("base", log.named("base"), EVENT, {Shipment})
    engine.register_route(route("base"))
    engine.freeze()

    fits = await engine.dispatch(TOPIC, EventEnvelope(Express(), message_type="x"))
    differs = await engine.dispatch(TOPIC, EventEnvelope(OrderPlaced(), message_type="x"))

    assert fits.is_successful()
    assert differs.status is DispatchStatus.NO_DISPATCHER


async def test_a_route_may_name_a_subclass_of_what_its_dispatcher_takes() -> None:
    log = Log()
    engine = MessageDispatchEngine()
    engine.register_dispatcher("base", log.named("base"), EVENT, {Shipment})
    engine.register_route(route("base", message_type="shop.Express"))
    engine.freeze()

    await engine.dispatch(TOPIC, EventEnvelope(Express()))
    await engine.dispatch(TOPIC, EventEnvelope(Shipment()))

    assert log.ran == ["base"]


def test_a_registry_finds_dispatchers_by_subclass() -> None:
    class Carrier(Reducer):
        def __init__(self) -> None:
            super().__init__()
            self.message_types: Any = {Shipment}

    registry = DispatcherRegistry()
    carrier = Carrier()
    registry.register_dispatcher(carrier)

    assert registry.get_dispatchers(EVENT, Express) == [carrier]
    assert registry.get_dispatchers(EVENT, OrderPlaced) == []
    assert registry.get_dispatchers(EVENT, "Shipment") == [carrier]
    assert registry.get_dispatchers(EVENT, "shop.Express") == []


def test_a_class_that_cannot_be_asked_for_subclasses_is_refused() -> None:
    class Weighs(Protocol):
        weight: int

    with pytest.raises(ConfigurationError, match="Weighs"):
        MessageDispatchEngine().register_dispatcher("d", nothing, EVENT, {Weighs})


# -- registrations that are refused ----------------------------------------------------------


def test_a_refused_registration_leaves_no_trace_in_the_metrics() -> None:
    engine = MessageDispatchEngine()
    with pytest.raises(HandlerSignatureError):
        engine.register_dispatcher("none", "no function", EVENT)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError):
        engine.register_dispatcher("texts", nothing, EVENT, "Shipment")
    engine.freeze()
    with pytest.raises(EngineFrozenError):
        engine.register_dispatcher("late", nothing, EVENT)

    assert engine.get_structured_metrics().dispatcher_metrics == {}
    for name in ("none", "texts", "late"):
        assert engine.get_dispatcher_metrics(name) is None


def test_a_registry_goes_in_as_a_whole_or_not_at_all() -> None:
    class Named(Reducer):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.dispatcher_id = name

    registry = DispatcherRegistry()
    registry.register_dispatcher(Named("first"))
    registry.register_dispatcher(Named("taken"))
    engine = MessageDispatchEngine()
    engine.register_dispatcher("taken", nothing, EVENT)

    with pytest.raises(DuplicateHandlerError, match="'taken'"):
        engine.include(registry)

    assert engine.dispatcher_ids == ("taken",)
    assert engine.get_dispatcher_metrics("first") is None


# -- hops ----------------------------------------------------------------------------------


def going_round(**options: Any) -> MessageDispatchEngine:
    engines: list[MessageDispatchEngine] = []

    async def back(topic: str, envelope: EventEnvelope[Any]) -> DispatchResult:
        return await engines[0].dispatch(topic, envelope)

    engines.append(engine_of({"d": Log().named("d", TOPIC)}, publish_outputs=back, **options))
    return engines[0]


async def test_the_hop_limit_reaches_the_caller_as_such() -> None:
    result = await going_round(max_hops=5).dispatch(TOPIC, PLACED)

    assert result.status is DispatchStatus.PUBLISH_FAILED
    assert result.error_code == "HOP_LIMIT"
    assert result.error_message == (
        f"{TOPIC} was not published: the message has made 5 hops, the limit of this engine. "
        f"Dispatchers forward it in a loop, or max_hops=5 is too low."
    )
    assert list(result.unpublished) == [TOPIC]
    assert not result.requires_retry()  # it would end there again


async def test_the_hop_limit_counts_more_than_other_failures_of_outputs() -> None:
    engines: list[MessageDispatchEngine] = []

    async def publish(topic: str, envelope: EventEnvelope[Any]) -> DispatchResult:
        if topic == "broken.one":
            raise ConnectionError
        return await engines[0].dispatch(topic, envelope)

    both = Log().named("d", ["broken.one", TOPIC])
    engines.append(engine_of({"d": both}, publish_outputs=publish, max_hops=2))

    result = await engines[0].dispatch(TOPIC, PLACED)

    assert result.error_code == "HOP_LIMIT"
    assert list(result.unpublished) == ["broken.one", TOPIC]


# -- metrics -------------------------------------------------------------------------------


async def test_the_buckets_of_the_histogram_are_public() -> None:
    engine = engine_of({"d": nothing})

    assert LATENCY_HISTOGRAM_BUCKETS == (
        1, 5, 10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10000,
    )  # fmt: skip
    names = [*(f"le_{bound:g}ms" for bound in LATENCY_HISTOGRAM_BUCKETS), "gt_10000ms"]
    assert list(engine.get_structured_metrics().latency_histogram) == names


def test_metrics_can_be_recorded_without_an_engine() -> None:
    empty = DispatchMetrics()

    first = empty.record_dispatch(
        duration_ms=45.2, success=True, category=EVENT, dispatcher_id="mail", topic=TOPIC
    )
    metrics = first.record_dispatch(
        duration_ms=4.8,
        success=False,
        category=COMMAND,
        dispatcher_id="mail",
        topic="shop.commands.x",
        error_message="password=hunter2",
    ).record_dispatch(duration_ms=0.1, success=True)

    assert empty == DispatchMetrics()
    assert (first.total_dispatches, first.success_rate, first.error_rate) == (1, 1, 0)
    assert metrics.total_dispatches == 3
    assert (metrics.successful_dispatches, metrics.failed_dispatches) == (2, 1)
    assert metrics.category_metrics == {"event": 1, "command": 1, "intent": 0, "projection": 0}
    assert metrics.avg_latency_ms == pytest.approx(50.1 / 3)
    assert (metrics.min_latency_ms, metrics.max_latency_ms) == (0.1, 45.2)
    filled = {name: count for name, count in metrics.latency_histogram.items() if count}
    assert filled == {"le_1ms": 1, "le_5ms": 1, "le_50ms": 1}
    mail = metrics.get_dispatcher_metrics("mail")
    assert mail is not None
    assert (mail.execution_count, mail.success_count, mail.error_count) == (2, 1, 1)
    assert mail.avg_latency_ms == pytest.approx(25)
    assert mail.last_topic == "shop.commands.x"
    assert mail.last_error_message == "password=[redacted]"
    assert mail.last_executed_at is not None
    assert metrics.dispatcher_executions == 2
    assert metrics.get_dispatcher_metrics("ghost") is None


async def test_what_an_engine_counted_can_be_recorded_further() -> None:
    engine = engine_of({"good": nothing, "bad": failing})
    await engine.dispatch(TOPIC, PLACED)

    before = engine.get_structured_metrics()
    after = before.record_dispatch(duration_ms=20_000, success=True, dispatcher_id="good")

    assert (after.total_dispatches, after.partial_dispatches) == (2, 1)
    assert after.latency_histogram["gt_10000ms"] == 1
    assert after.dispatcher_metrics["good"].success_count == 2
    assert after.dispatcher_metrics["bad"] == before.dispatcher_metrics["bad"]
    assert before.dispatcher_metrics["good"].last_topic == TOPIC
    assert engine.get_structured_metrics() == before
