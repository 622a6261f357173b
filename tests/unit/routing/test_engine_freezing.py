"""Freezing an engine: all faults at once, and nothing changes afterwards."""

from __future__ import annotations

from typing import Any

import pytest

from msgbus import ConfigurationError
from msgbus.errors import DuplicateHandlerError, EngineFrozenError, EngineNotFrozenError
from msgbus.routing import (
    DispatcherRegistry,
    EventEnvelope,
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
    Reducer,
    engine_of,
    nothing,
    route,
)

# -- freezing ------------------------------------------------------------------------------


async def test_an_engine_dispatches_only_once_it_is_frozen() -> None:
    engine = MessageDispatchEngine()

    with pytest.raises(EngineNotFrozenError, match="freeze"):
        await engine.dispatch(TOPIC, PLACED)


def test_a_frozen_engine_takes_nothing_more_by_any_way() -> None:
    engine = engine_of({"stock": nothing})
    registry = DispatcherRegistry()
    registry.register_dispatcher(Reducer())

    with pytest.raises(EngineFrozenError, match="dispatcher 'late'"):
        engine.register_dispatcher("late", nothing, EVENT)
    with pytest.raises(EngineFrozenError, match="route 'to-stock'"):
        engine.register_route(route("stock"))
    with pytest.raises(EngineFrozenError):
        engine.include(registry)

    assert engine.dispatcher_ids == ("stock",)
    assert len(engine.routes) == 1


async def test_what_was_handed_in_can_be_changed_without_changing_a_frozen_engine() -> None:
    log = Log()
    types: set[Any] = {OrderPlaced}
    engine = MessageDispatchEngine()
    engine.register_dispatcher("stock", log.named("stock"), EVENT, types)
    engine.register_route(route("stock"))
    engine.freeze()

    types.clear()
    types.add(OrderShipped)

    assert (await engine.dispatch(TOPIC, PLACED)).is_successful()
    assert not (await engine.dispatch(TOPIC, EventEnvelope(OrderShipped()))).is_successful()


def test_freezing_lists_all_faults_at_once_and_can_be_mended() -> None:
    engine = MessageDispatchEngine()
    engine.register_dispatcher("stock", nothing, EVENT, {"OrderPlaced"})
    engine.register_route(route("ghost"))
    engine.register_route(route("stock", "shop.commands.*", route_id="wrong-topic"))
    engine.register_route(route("stock", "a.*", COMMAND, route_id="wrong-category"))
    engine.register_route(route("stock", "b.*", route_id="wrong-type", message_type="Other"))
    engine.register_route(route("stock", "c.*", route_id="good"))
    engine.register_route(route("stock", "c.*", route_id="hidden", message_type="OrderPlaced"))
    engine.register_route(route("stock", "c.d", route_id="hidden-too", enabled=False))

    with pytest.raises(ConfigurationError) as caught:
        engine.freeze()

    subjects = [fault.subject for fault in caught.value.faults]
    assert subjects == [
        "route 'to-ghost'",
        "route 'wrong-topic'",
        "route 'wrong-category'",
        "route 'wrong-type'",
        "route 'hidden'",
        "route 'hidden-too'",
    ]
    assert not engine.is_frozen
    engine.register_dispatcher("ghost", nothing, EVENT)  # still open


@pytest.mark.parametrize(
    ("wide", "narrow"),
    [("**", "shop.*"), ("shop.*", "SHOP.*"), ("shop.*", "shop.x"), ("re:shop.+", "shop.x")],
)
def test_a_route_that_an_earlier_one_hides_is_a_fault(wide: str, narrow: str) -> None:
    engine = MessageDispatchEngine()
    engine.register_dispatcher("stock", nothing, EVENT)
    engine.register_route(route("stock", narrow, route_id="narrow"))
    engine.register_route(route("stock", wide, route_id="wide", priority=1))

    with pytest.raises(ConfigurationError, match="'narrow': can never match"):
        engine.freeze()


def test_routes_that_only_overlap_are_no_fault() -> None:
    engine = MessageDispatchEngine()
    engine.register_dispatcher("stock", nothing, EVENT)
    engine.register_dispatcher("audit", nothing, EVENT)
    engine.register_dispatcher("idle", nothing, COMMAND)  # without a route: legal
    engine.register_route(route("stock", "shop.x", route_id="narrow first"))
    engine.register_route(route("stock", "shop.*", route_id="then wide"))
    engine.register_route(route("audit", "shop.*", route_id="another dispatcher"))
    engine.register_route(route("stock", "*.x", route_id="crosswise"))
    engine.register_route(route("audit", "**", route_id="off", priority=9, enabled=False))

    engine.freeze()
    engine.freeze()

    assert engine.is_frozen


def test_ids_are_unique() -> None:
    engine = MessageDispatchEngine()
    engine.register_dispatcher("stock", nothing, EVENT)
    engine.register_route(route("stock"))

    with pytest.raises(DuplicateHandlerError, match="dispatcher 'stock'"):
        engine.register_dispatcher("stock", nothing, COMMAND)
    with pytest.raises(DuplicateHandlerError, match="route 'to-stock'"):
        engine.register_route(route("stock", "other.*"))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("d", "no function", EVENT), "must be a function"),
        (("d", nothing, "event"), "not a MessageCategory"),
        (("d", nothing, EVENT, "OrderPlaced"), "is a string"),
    ],
)
def test_a_wrong_registration_is_refused_at_once(arguments: Any, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        MessageDispatchEngine().register_dispatcher(*arguments)
