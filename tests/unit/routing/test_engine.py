"""MessageDispatchEngine: routing, order of dispatchers, and results."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import pytest

from msgbus import ConfigurationError
from msgbus.routing import (
    DispatchRoute,
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
    OrderShipped,
    engine_of,
    nothing,
    route,
)

# -- who gets it ---------------------------------------------------------------------------


async def test_a_message_reaches_the_dispatcher_its_route_names() -> None:
    seen: list[EventEnvelope[Any]] = []

    async def reserve(envelope: EventEnvelope[OrderPlaced]) -> str:
        seen.append(envelope)
        return "shop.events.reserved"

    result = await engine_of({"stock": reserve}).dispatch(TOPIC, PLACED)

    assert seen == [PLACED.addressed_to(TOPIC)]
    assert result.is_successful()
    assert result.outputs == ["shop.events.reserved"]
    assert result.output_count == 1
    assert (result.route_id, result.dispatcher_id) == ("to-stock", "stock")


async def test_the_result_says_everything_about_the_dispatch() -> None:
    envelope = EventEnvelope(
        OrderPlaced(), correlation_id=uuid4(), trace_id="trace", span_id="span"
    )

    result = await engine_of({"stock": nothing}).dispatch(TOPIC, envelope)

    assert result.status is DispatchStatus.SUCCESS
    assert result.topic == TOPIC
    assert result.message_category is EVENT
    assert result.message_type == "shop.OrderPlaced"
    assert result.correlation_id == envelope.correlation_id
    assert (result.trace_id, result.span_id) == ("trace", "span")
    assert result.dispatch_id == result.dispatch_id
    assert result.started_at <= result.completed_at
    assert result.duration_ms >= 0
    assert (result.error_message, result.error_code) == (None, None)


async def test_higher_priority_comes_first_then_the_order_of_registration() -> None:
    log = Log()
    engine = MessageDispatchEngine()
    for name, priority in (("a", 0), ("b", 5), ("c", 5), ("d", -1), ("e", 9)):
        engine.register_dispatcher(name, log.named(name, f"out.{name}"), EVENT)
        engine.register_route(route(name, priority=priority))
    engine.freeze()

    result = await engine.dispatch(TOPIC, PLACED)

    assert log.ran == ["e", "b", "c", "a", "d"]
    assert result.outputs == ["out.e", "out.b", "out.c", "out.a", "out.d"]
    assert [outcome.dispatcher_id for outcome in result.outcomes] == log.ran
    assert (result.route_id, result.dispatcher_id) == ("to-e", "e")


async def test_an_exact_route_has_no_advantage_over_a_higher_priority() -> None:
    engine = MessageDispatchEngine()
    engine.register_dispatcher("exact", nothing, EVENT)
    engine.register_dispatcher("wide", nothing, EVENT)
    engine.register_route(route("exact", TOPIC))
    engine.register_route(route("wide", "**", priority=1))
    engine.freeze()

    assert (await engine.dispatch(TOPIC, PLACED)).dispatcher_id == "wide"


async def test_the_reported_route_belongs_to_a_dispatcher_that_ran() -> None:
    log = Log()
    engine = MessageDispatchEngine()
    engine.register_dispatcher("picky", log.named("picky"), EVENT, {OrderShipped})
    engine.register_dispatcher("open", log.named("open"), EVENT)
    engine.register_route(route("picky", priority=10))
    engine.register_route(route("open"))
    engine.freeze()

    result = await engine.dispatch(TOPIC, PLACED)

    assert log.ran == ["open"]
    assert (result.route_id, result.dispatcher_id) == ("to-open", "open")


async def test_a_dispatcher_with_two_routes_runs_once_by_the_first() -> None:
    log = Log()
    engine = MessageDispatchEngine()
    engine.register_dispatcher("stock", log.named("stock"), EVENT)
    engine.register_route(route("stock", "shop.**", route_id="low"))
    engine.register_route(route("stock", "*.events.*", route_id="high", priority=1))
    engine.freeze()

    result = await engine.dispatch(TOPIC, PLACED)

    assert log.ran == ["stock"]
    assert result.route_id == "high"


async def test_message_types_are_names_or_classes() -> None:
    log = Log()
    engine = MessageDispatchEngine()
    engine.register_dispatcher("by-name", log.named("by-name"), EVENT, {"shop.OrderPlaced"})
    engine.register_dispatcher("by-class", log.named("by-class"), EVENT, [OrderPlaced])
    engine.register_dispatcher("other", log.named("other"), EVENT, {OrderShipped})
    engine.register_dispatcher("dicts", log.named("dicts"), EVENT, {"dict"})
    for name in ("by-name", "by-class", "other", "dicts"):
        engine.register_route(route(name))
    engine.freeze()

    await engine.dispatch(TOPIC, PLACED)
    await engine.dispatch(TOPIC, EventEnvelope({"plain": True}))
    await engine.dispatch(TOPIC, EventEnvelope({"plain": True}, message_type="OrderShipped"))

    assert log.ran == ["by-name", "by-class", "dicts", "other"]


async def test_a_route_may_narrow_the_message_type() -> None:
    log = Log()
    engine = MessageDispatchEngine()
    engine.register_dispatcher("stock", log.named("stock"), EVENT)
    engine.register_route(route("stock", message_type="OrderShipped"))
    engine.freeze()

    assert (await engine.dispatch(TOPIC, PLACED)).status is DispatchStatus.NO_DISPATCHER
    assert (await engine.dispatch(TOPIC, EventEnvelope(OrderShipped()))).is_successful()


async def test_nobody_to_take_it_is_said_with_what_was_asked_for() -> None:
    result = await engine_of({"stock": nothing}).dispatch("bank.events.x", PLACED)

    assert result.status is DispatchStatus.NO_DISPATCHER
    assert result.is_error()
    assert result.error_code == "NO_DISPATCHER"
    assert "shop.OrderPlaced" in (result.error_message or "")
    assert "'bank.events.x'" in (result.error_message or "")
    assert (result.route_id, result.dispatcher_id, list(result.outcomes)) == (None, None, [])


async def test_a_message_that_only_disabled_routes_match_is_skipped() -> None:
    log = Log()
    engine = MessageDispatchEngine()
    engine.register_dispatcher("stock", log.named("stock"), EVENT)
    engine.register_route(route("stock", enabled=False))
    engine.freeze()

    result = await engine.dispatch(TOPIC, PLACED)

    assert result.status is DispatchStatus.SKIPPED
    assert not result.is_error()
    assert log.ran == []


async def test_routing_alone_says_who_would_get_it_and_runs_nobody() -> None:
    log = Log()
    engine = engine_of({"a": log.named("a"), "b": log.named("b")})

    result = engine.route(TOPIC, PLACED)

    assert result.status is DispatchStatus.ROUTED
    assert not result.is_terminal()
    assert [outcome.dispatcher_id for outcome in result.outcomes] == ["a", "b"]
    assert log.ran == []
    assert engine.get_structured_metrics().total_dispatches == 0
    assert engine.dispatchers_for(TOPIC, PLACED) == ("a", "b")
    assert engine.dispatchers_for("bank.x", PLACED) == ()
    assert engine.route("bank.x", PLACED).status is DispatchStatus.NO_DISPATCHER


# -- categories ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("topic", "category"),
    [
        ("dev.user.events.v1", MessageCategory.EVENT),
        ("dev.user.commands.v1", MessageCategory.COMMAND),
        ("intents.user", MessageCategory.INTENT),
        ("user.PROJECTIONS", MessageCategory.PROJECTION),
        ("shop.events.commands", MessageCategory.EVENT),
        ("shop.eventsource.orders", None),
        ("shop.event.orders", None),
    ],
)
def test_a_topic_names_its_category(topic: str, category: MessageCategory | None) -> None:
    assert MessageCategory.from_topic(topic) is category


@pytest.mark.parametrize(
    ("topic", "own", "runs"),
    [
        ("shop.commands.orders", None, ["commands"]),
        ("shop.commands.orders", COMMAND, ["commands"]),
        ("shop.orders", COMMAND, ["commands"]),
        ("shop.orders", None, ["events"]),
    ],
)
async def test_the_category_is_the_topics_else_the_envelopes_else_event(
    topic: str, own: MessageCategory | None, runs: list[str]
) -> None:
    log = Log()
    engine = MessageDispatchEngine()
    engine.register_dispatcher("events", log.named("events"), EVENT)
    engine.register_dispatcher("commands", log.named("commands"), COMMAND)
    engine.register_route(route("events"))
    engine.register_route(route("commands", category=COMMAND))
    engine.freeze()

    result = await engine.dispatch(topic, EventEnvelope(OrderPlaced(), category=own))

    assert log.ran == runs
    assert result.is_successful()


async def test_an_envelope_that_contradicts_its_topic_is_invalid() -> None:
    log = Log()
    engine = engine_of({"stock": log.named("stock")})

    result = await engine.dispatch(TOPIC, EventEnvelope(OrderPlaced(), category=COMMAND))

    assert result.status is DispatchStatus.INVALID_MESSAGE
    assert result.error_code == "CATEGORY_MISMATCH"
    assert log.ran == []


@pytest.mark.parametrize(
    ("topic", "envelope", "code"),
    [
        ("", PLACED, "INVALID_TOPIC"),
        ("shop..orders", PLACED, "INVALID_TOPIC"),
        ("shop.orders\n", PLACED, "INVALID_TOPIC"),
        (None, PLACED, "INVALID_TOPIC"),
        ([], PLACED, "INVALID_TOPIC"),
        (TOPIC, None, "INVALID_ENVELOPE"),
        (TOPIC, OrderPlaced(), "INVALID_ENVELOPE"),
    ],
)
async def test_a_message_that_is_none_is_refused_by_a_result(
    topic: Any, envelope: Any, code: str
) -> None:
    engine = engine_of({"stock": nothing})

    result = await engine.dispatch(topic, envelope)

    assert result.status is DispatchStatus.INVALID_MESSAGE
    assert result.error_code == code
    assert engine.get_structured_metrics().status_counts["invalid_message"] == 1


# -- routes by themselves --------------------------------------------------------------------


def test_a_route_answers_for_itself() -> None:
    one = DispatchRoute(
        route_id="r", topic_pattern="*.user.events.*", message_category=EVENT,
        dispatcher_id="d", message_type="UserCreated", metadata={"team": "users"},
    )  # fmt: skip

    assert one.matches_topic("dev.user.events.v1")
    assert one.matches("DEV.user.events.v1", EVENT, "UserCreated")
    assert not one.matches("dev.user.events.v1", COMMAND, "UserCreated")
    assert not one.matches("dev.user.events.v1", EVENT, "UserDeleted")
    assert not one.matches("dev.userXevents.v1", EVENT, "UserCreated")
    assert not route("d", enabled=False).matches(TOPIC, EVENT)
    with pytest.raises(TypeError):
        one.metadata["team"] = "other"  # type: ignore[index]


def test_a_route_with_a_wrong_pattern_is_refused_when_it_is_made() -> None:
    with pytest.raises(ConfigurationError, match="position"):
        route("d", "shop..x")
