"""MessageDispatchEngine: who gets a message, in which order, and what comes back."""

from __future__ import annotations

import functools
import threading
from typing import Any
from uuid import uuid4

import anyio
import pytest

from msgbus import ConfigurationError, Event
from msgbus.clock import VirtualClock
from msgbus.errors import DuplicateHandlerError, EngineFrozenError, EngineNotFrozenError
from msgbus.routing import (
    DispatcherRegistry,
    DispatchResult,
    DispatchRoute,
    DispatchStatus,
    EventEnvelope,
    MessageCategory,
    MessageDispatchEngine,
    MessageDispatcher,
)

EVENT = MessageCategory.EVENT
COMMAND = MessageCategory.COMMAND
TOPIC = "shop.events.orders"


class OrderPlaced(Event, name="shop.OrderPlaced"):
    number: int = 0


class OrderShipped(Event):
    pass


PLACED = EventEnvelope(OrderPlaced(number=7))


def route(
    dispatcher_id: str,
    pattern: str = "shop.**",
    category: MessageCategory = EVENT,
    *,
    route_id: str | None = None,
    message_type: str | None = None,
    priority: int = 0,
    enabled: bool = True,
) -> DispatchRoute:
    return DispatchRoute(
        route_id or f"to-{dispatcher_id}",
        pattern,
        category,
        dispatcher_id,
        message_type=message_type,
        priority=priority,
        enabled=enabled,
    )


class Log:
    """Makes dispatchers that note who ran."""

    def __init__(self) -> None:
        self.ran: list[str] = []

    def named(self, name: str, output: Any = None) -> Any:
        async def dispatcher(envelope: EventEnvelope[Any]) -> Any:
            self.ran.append(name)
            return output

        return dispatcher


async def nothing(envelope: EventEnvelope[Any]) -> None:
    pass


async def failing(envelope: EventEnvelope[Any]) -> None:
    message = "no way to https://bob:hunter2@example.org"
    raise ValueError(message)


def engine_of(
    dispatchers: dict[str, Any], *, clock: VirtualClock | None = None, **options: Any
) -> MessageDispatchEngine:
    """A frozen engine in which every dispatcher has a route of its own, in this order."""
    engine = MessageDispatchEngine(clock=clock, **options)
    for name, dispatcher in dispatchers.items():
        engine.register_dispatcher(name, dispatcher, EVENT)
        engine.register_route(route(name))
    engine.freeze()
    return engine


# -- who gets it ---------------------------------------------------------------------------


async def test_a_message_reaches_the_dispatcher_its_route_names() -> None:
    seen: list[EventEnvelope[Any]] = []

    async def reserve(envelope: EventEnvelope[OrderPlaced]) -> str:
        seen.append(envelope)
        return "shop.events.reserved"

    result = await engine_of({"stock": reserve}).dispatch(TOPIC, PLACED)

    assert seen == [PLACED]
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

    with pytest.raises(ConfigurationError, match="'narrow': can never be taken"):
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
        (("d", nothing, EVENT, "OrderPlaced"), "one text"),
    ],
)
def test_a_wrong_registration_is_refused_at_once(arguments: Any, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        MessageDispatchEngine().register_dispatcher(*arguments)


# -- objects as dispatchers ----------------------------------------------------------------


class Reducer:
    dispatcher_id = "reducer"
    category = EVENT
    node_kind = "reducer"

    def __init__(self, status: DispatchStatus = DispatchStatus.SUCCESS) -> None:
        self.message_types = {OrderPlaced}
        self.status = status

    async def handle(self, envelope: EventEnvelope[Any]) -> DispatchResult:
        return DispatchResult(
            status=self.status,
            topic=TOPIC,
            outputs=["shop.events.reduced"],
            error_message="password=hunter2" if self.status.is_error() else None,
        )


def test_an_object_that_says_what_it_is_for_is_a_dispatcher() -> None:
    assert isinstance(Reducer(), MessageDispatcher)


async def test_a_registry_of_objects_goes_into_an_engine() -> None:
    registry = DispatcherRegistry()
    registry.register_dispatcher(Reducer())
    registry.freeze()
    engine = MessageDispatchEngine()
    engine.include(registry)
    engine.register_route(route("reducer"))
    engine.freeze()

    result = await engine.dispatch(TOPIC, PLACED)

    assert result.is_successful()
    assert result.outputs == ["shop.events.reduced"]


@pytest.mark.parametrize(
    ("given", "status"),
    [
        (DispatchStatus.HANDLER_ERROR, DispatchStatus.HANDLER_ERROR),
        (DispatchStatus.TIMEOUT, DispatchStatus.TIMEOUT),
        (DispatchStatus.SKIPPED, DispatchStatus.SKIPPED),
    ],
)
async def test_a_result_that_a_dispatcher_gives_counts_as_its_outcome(
    given: DispatchStatus, status: DispatchStatus
) -> None:
    result = await engine_of({"reducer": Reducer(given)}).dispatch(TOPIC, PLACED)

    assert result.status is status
    assert "hunter2" not in str(result.error_message)


def test_a_registry_finds_and_refuses() -> None:
    registry = DispatcherRegistry()
    reducer = Reducer()
    registry.register_dispatcher(reducer)

    assert list(registry) == [reducer]
    assert len(registry) == 1
    assert registry.get_dispatcher("reducer") is reducer
    assert registry.get_dispatchers(EVENT, "shop.OrderPlaced") == [reducer]
    assert registry.get_dispatchers(EVENT, "OrderShipped") == []
    assert registry.get_dispatchers(COMMAND) == []
    with pytest.raises(DuplicateHandlerError):
        registry.register_dispatcher(Reducer())
    with pytest.raises(ConfigurationError, match="lacks dispatcher_id"):
        registry.register_dispatcher(object())  # type: ignore[arg-type]
    assert registry.unregister_dispatcher("reducer")
    assert not registry.unregister_dispatcher("reducer")
    registry.freeze()
    assert registry.is_frozen
    with pytest.raises(EngineFrozenError):
        registry.register_dispatcher(Reducer())
    with pytest.raises(EngineFrozenError):
        registry.unregister_dispatcher("reducer")


# -- sync dispatchers ----------------------------------------------------------------------


async def test_a_sync_dispatcher_runs_in_a_thread() -> None:
    threads: list[int] = []

    def block(envelope: EventEnvelope[Any]) -> list[str]:
        threads.append(threading.get_ident())
        return ["out.a", "out.b"]

    result = await engine_of({"sync": block}).dispatch(TOPIC, PLACED)

    assert result.outputs == ["out.a", "out.b"]
    assert threads != [threading.get_ident()]


async def test_threads_for_sync_dispatchers_are_bounded() -> None:
    lock = threading.Lock()
    running = most = 0
    go = threading.Event()
    two = threading.Event()

    def block(envelope: EventEnvelope[Any]) -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
            if running == 2:
                two.set()
        go.wait(10)
        with lock:
            running -= 1

    engine = engine_of({"sync": block}, max_threads=2)
    async with anyio.create_task_group() as tasks:
        for _ in range(8):
            tasks.start_soon(engine.dispatch, TOPIC, PLACED)
        await anyio.to_thread.run_sync(two.wait)
        go.set()

    assert most == 2
    assert engine.get_structured_metrics().successful_dispatches == 8


@pytest.mark.parametrize("kind", ["partial", "object", "sync way to a coroutine"])
async def test_whatever_can_be_called_may_be_a_dispatcher(kind: str) -> None:
    log = Log()
    inner = log.named("inner")

    class Callable:
        async def __call__(self, envelope: EventEnvelope[Any]) -> None:
            log.ran.append("inner")

    async def with_option(option: int, envelope: EventEnvelope[Any]) -> None:
        log.ran.append("inner")

    def sync(envelope: EventEnvelope[Any]) -> Any:
        return inner(envelope)

    kinds: dict[str, Any] = {
        "partial": functools.partial(with_option, 1),
        "object": Callable(),
        "sync way to a coroutine": sync,
    }
    result = await engine_of({"d": kinds[kind]}).dispatch(TOPIC, PLACED)

    assert result.is_successful()
    assert log.ran == ["inner"]


@pytest.mark.parametrize("output", [5, ["fine", 6], ["not a..topic"], {"a": 1}])
async def test_an_output_that_is_no_topic_fails_the_dispatcher(output: Any) -> None:
    result = await engine_of({"d": Log().named("d", output)}).dispatch(TOPIC, PLACED)

    assert result.status is DispatchStatus.HANDLER_ERROR
    assert result.error_code == "INVALID_OUTPUT"
    assert result.outputs == []


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
