"""Invalid arguments of the engine, the registries and the router are refused at once.

Never a raw AttributeError at `freeze()`, and never a registered dispatcher that is not found.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import pytest

from msgbus import ConfigurationError
from msgbus.errors import HandlerSignatureError
from msgbus.routing import (
    DispatcherRegistry,
    DispatchRoute,
    DispatchStatus,
    Endpoint,
    EndpointRegistry,
    EventEnvelope,
    MessageDispatchEngine,
    PatternRouter,
)
from tests.unit.routing.engines import EVENT, TOPIC, OrderPlaced, Reducer, engine_of


class Foreign(Enum):
    EVENT = "event"


NO_CATEGORIES: list[Any] = ["event", "EVENT", Foreign.EVENT, None, 1]
NO_IDS: list[Any] = ["", " ", "\t\n", None, 7]


async def ignore(envelope: EventEnvelope[Any]) -> None:
    pass


def make_route(**changes: Any) -> DispatchRoute:
    parts: dict[str, Any] = {
        "route_id": "r",
        "topic_pattern": "shop.**",
        "message_category": EVENT,
        "dispatcher_id": "d",
    }
    return DispatchRoute(**{**parts, **changes})


# -- categories ----------------------------------------------------------------------------


@pytest.mark.parametrize("category", NO_CATEGORIES)
def test_a_dispatcher_of_no_category_is_refused_at_registration(category: Any) -> None:
    """Point h."""
    engine = MessageDispatchEngine()

    with pytest.raises(ConfigurationError, match=r"'d' is not a MessageCategory.*EVENT"):
        engine.register_dispatcher("d", ignore, category)

    assert engine.dispatcher_ids == ()
    engine.freeze()


@pytest.mark.parametrize("category", NO_CATEGORIES)
def test_a_route_of_no_category_is_refused_where_it_is_made(category: Any) -> None:
    """Point h: it used to be an AttributeError at `freeze()`."""
    with pytest.raises(ConfigurationError, match=r"'r' is not a MessageCategory.*EVENT"):
        make_route(message_category=category)


@pytest.mark.parametrize("category", NO_CATEGORIES)
def test_an_object_of_no_category_is_refused_by_its_registry(category: Any) -> None:
    """Point h: it used to be taken, and then was never found."""
    registry = DispatcherRegistry()
    reducer: Any = Reducer()
    reducer.category = category

    with pytest.raises(ConfigurationError, match="is not a MessageCategory"):
        registry.register_dispatcher(reducer)
    with pytest.raises(ConfigurationError, match="is not a MessageCategory"):
        registry.get_dispatchers(category)

    assert len(registry) == 0


@pytest.mark.parametrize("category", ["event", Foreign.EVENT, 1])
@pytest.mark.parametrize("topic", [TOPIC, "shop.orders"])
async def test_an_envelope_of_no_category_is_an_invalid_message(category: Any, topic: str) -> None:
    """Point h: it used to be an AttributeError out of `dispatch`, or nobody's message."""
    engine = engine_of({"d": ignore})

    result = await engine.dispatch(topic, EventEnvelope(OrderPlaced(), category=category))

    assert result.status is DispatchStatus.INVALID_MESSAGE
    assert result.error_code == "INVALID_ENVELOPE"
    assert "is not a MessageCategory" in str(result.error_message)


async def test_an_envelope_whose_type_is_no_text_is_an_invalid_message() -> None:
    """Point h."""
    engine = engine_of({"d": ignore})
    wrong: Any = OrderPlaced

    for topic in (TOPIC, TOPIC):
        result = await engine.dispatch(topic, EventEnvelope(OrderPlaced(), message_type=wrong))
        assert result.error_code == "INVALID_ENVELOPE"


# -- ids -----------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", NO_IDS)
def test_empty_and_blank_ids_are_refused_everywhere(wrong: Any) -> None:
    """Point h."""
    reducer: Any = Reducer()
    reducer.dispatcher_id = wrong
    makers: list[Callable[[], object]] = [
        lambda: MessageDispatchEngine().register_dispatcher(wrong, ignore, EVENT),
        lambda: DispatcherRegistry().register_dispatcher(reducer),
        lambda: make_route(route_id=wrong),
        lambda: make_route(dispatcher_id=wrong),
        lambda: PatternRouter().register_route("shop.**", wrong),
        lambda: Endpoint(wrong, ignore),
    ]
    if wrong is not None:
        makers.append(lambda: Endpoint("e", ignore, group=wrong))
        makers.append(lambda: make_route(message_type=wrong))
        makers.append(
            lambda: MessageDispatchEngine().register_dispatcher("d", ignore, EVENT, {wrong})
        )

    for make in makers:
        with pytest.raises(ConfigurationError, match="must be text that is not blank"):
            make()


# -- routes and dispatchers ----------------------------------------------------------------


@pytest.mark.parametrize("wrong", [None, "shop.**", {"route_id": "r"}])
def test_what_is_no_route_is_refused_as_one(wrong: Any) -> None:
    """Point h."""
    engine = MessageDispatchEngine()

    with pytest.raises(ConfigurationError, match=r"is not a DispatchRoute.*DispatchRoute\("):
        engine.register_route(wrong)

    assert engine.routes == ()


@pytest.mark.parametrize("wrong", ["high", None, 1.5, True])
def test_a_priority_is_a_whole_number(wrong: Any) -> None:
    """Point h: it used to be a TypeError at `freeze()`."""
    with pytest.raises(ConfigurationError, match="priority"):
        make_route(priority=wrong)
    with pytest.raises(ConfigurationError, match="priority"):
        PatternRouter().register_route("shop.**", "e", priority=wrong)


@pytest.mark.parametrize("wrong", [None, "reserve", Reducer])
def test_what_cannot_be_called_with_an_envelope_is_no_dispatcher(wrong: Any) -> None:
    """Point h: the class of a dispatcher is not a dispatcher."""
    engine = MessageDispatchEngine()

    with pytest.raises(HandlerSignatureError, match="must be a function of an envelope"):
        engine.register_dispatcher("d", wrong, EVENT)


@pytest.mark.parametrize("wrong", [0, -1, float("nan"), "soon"])
def test_a_time_limit_is_above_zero(wrong: Any) -> None:
    """Point h."""
    with pytest.raises(ConfigurationError, match="timeout"):
        MessageDispatchEngine(timeout=wrong)
    with pytest.raises(ConfigurationError, match="timeout"):
        MessageDispatchEngine().register_dispatcher("d", ignore, EVENT, timeout=wrong)


@pytest.mark.parametrize("wrong", [None, "worker-1"])
def test_what_is_no_endpoint_is_refused_as_one(wrong: Any) -> None:
    """Point h."""
    with pytest.raises(ConfigurationError, match="is not an Endpoint"):
        EndpointRegistry().register(wrong)
