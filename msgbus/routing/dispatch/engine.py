"""MessageDispatchEngine: dispatch envelopes to all dispatchers with a matching route.

Register dispatchers and routes, then `freeze()` validates them and makes an immutable snapshot.
`dispatch` reads only that, so any number of threads and event loops may call it at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from logging import INFO
from typing import Any, Final, cast, final

from msgbus.errors import (
    ConfigurationError,
    EngineFrozenError,
    EngineNotFrozenError,
    HandlerSignatureError,
)
from msgbus.routing.dispatch.dispatchers import (
    DispatcherEntry,
    DispatcherRegistry,
    DispatchFunction,
    FanOut,
    MessageDispatcher,
    MessageTypes,
    accepted_types,
    duplicate,
    is_async,
)
from msgbus.routing.dispatch.logging import Dispatched, DispatchLog
from msgbus.routing.dispatch.metrics import (
    DispatcherCounts,
    DispatcherMetrics,
    DispatchMetrics,
    EngineCounts,
)
from msgbus.routing.dispatch.results import (
    HOP_LIMIT,
    DispatchOutcome,
    DispatchResult,
    DispatchStatus,
)
from msgbus.routing.dispatch.routes import DispatchPlan, DispatchRoute, FrozenRoutes, route_faults
from msgbus.routing.envelope import EventEnvelope, MessageCategory, require_category
from msgbus.routing.forwarding import OutputPublisher, publish_outputs
from msgbus.runtime.arguments import require_id, require_timeout
from msgbus.runtime.clock import Clock, SystemClock
from msgbus.telemetry.logging import EventLogger, StandardLogger

NO_TIMEOUT: Final = float("inf")


@final
class MessageDispatchEngine:
    """Dispatches envelopes by topic, category and type: register, freeze, dispatch.

    ```python
    engine = MessageDispatchEngine()
    engine.register_dispatcher("stock", reserve, MessageCategory.EVENT, {"OrderPlaced"})
    engine.register_route(DispatchRoute("r1", "shop.events.**", MessageCategory.EVENT, "stock"))
    engine.freeze()
    result = await engine.dispatch("shop.events.orders", EventEnvelope(OrderPlaced()))
    ```

    Args:
        timeout: Time limit of each dispatcher, in seconds; `None` for no limit.
        publish_outputs: Publishes outputs: a callable `(topic, envelope)`, such as another
            engine's `dispatch` or `publish_on(bus)`. Without one they are only reported.
        max_hops: How often a message may be published as an output.
        max_threads: How many sync dispatchers run at once, on each event loop.
        cache_size: How many kinds of messages have their dispatchers cached.
        clock: The source of time.
        logger: A logger of `logging` or structlog, or any object with methods `debug`, `info`,
            `warning` and `error`, called with an event and fields. By default structlog if it
            is configured, else the logger `msgbus`, as for a bus.

    Raises:
        ConfigurationError: `timeout` is not above 0, or `logger` lacks a method.
    """

    def __init__(
        self,
        *,
        timeout: float | None = 30.0,
        publish_outputs: OutputPublisher | None = None,
        max_hops: int = 16,
        max_threads: int = 40,
        cache_size: int = 10_000,
        clock: Clock | None = None,
        logger: EventLogger | StandardLogger | None = None,
    ) -> None:
        time: Clock = SystemClock() if clock is None else clock
        require_timeout("the engine", timeout)
        self._timeout = timeout
        self._publish = publish_outputs
        self._max_hops = max_hops
        self._cache_size = cache_size
        self._now: Callable[[], float] = time.now
        self._time: Callable[[], float] = time.time
        self._log = DispatchLog(logger)
        self._logs: Callable[[int], bool] = self._log.is_enabled
        self._fanout = FanOut(time, max_threads, self._log)
        self._counts = EngineCounts()
        self._registering = threading.Lock()
        self._dispatchers: dict[str, DispatcherEntry] = {}
        self._routes: dict[str, DispatchRoute] = {}
        self._frozen: FrozenRoutes | None = None

    # -- registration ----------------------------------------------------------------------

    def register_dispatcher(
        self,
        dispatcher_id: str,
        dispatcher: DispatchFunction | MessageDispatcher,
        category: MessageCategory,
        message_types: MessageTypes | None = None,
        *,
        timeout: float | None = None,
    ) -> None:
        """Add a dispatcher: a function of an envelope, or an object with `handle`.

        It gets messages only by a route; one without routes is allowed.

        Args:
            dispatcher_id: Its id.
            dispatcher: The function or object. A sync function runs in a thread.
            category: The category of messages it takes.
            message_types: The types it takes, by name or class; by default all. A class
                includes its subclasses.
            timeout: Time limit in seconds, instead of the engine's; `inf` for no limit.

        Raises:
            DuplicateHandlerError: The id is registered.
            EngineFrozenError: The engine is frozen.
            HandlerSignatureError: `dispatcher` is not callable.
            ConfigurationError: The id is blank, or an argument is not valid.
        """
        self._add([self._entry(dispatcher_id, dispatcher, category, message_types, timeout)])

    def include(self, registry: DispatcherRegistry) -> None:
        """Add all current dispatchers of a registry; none of them if one is refused."""
        self._add(
            [
                self._entry(one.dispatcher_id, one, one.category, one.message_types, None)
                for one in registry
            ]
        )

    def _entry(
        self,
        dispatcher_id: str,
        dispatcher: DispatchFunction | MessageDispatcher,
        category: MessageCategory,
        message_types: MessageTypes | None,
        timeout: float | None,
    ) -> DispatcherEntry:
        require_id("A dispatcher's id", dispatcher_id)
        function = _function(dispatcher_id, dispatcher)
        require_category(f"dispatcher {dispatcher_id!r}", category)
        require_timeout(f"dispatcher {dispatcher_id!r}", timeout)
        seconds = self._timeout if timeout is None else timeout
        return DispatcherEntry(
            dispatcher_id,
            function,
            category,
            accepted_types(message_types),
            None if seconds == NO_TIMEOUT else seconds,
            is_async(function),
            DispatcherCounts(),
        )

    def _add(self, entries: Sequence[DispatcherEntry]) -> None:
        with self._registering:
            for entry in entries:
                self._require_open(f"dispatcher {entry.dispatcher_id!r}")
                if entry.dispatcher_id in self._dispatchers:
                    raise duplicate("dispatcher", entry.dispatcher_id)
            for entry in entries:
                self._dispatchers[entry.dispatcher_id] = entry
                self._counts.add_dispatcher(entry.dispatcher_id, entry.counts)

    def register_route(self, route: DispatchRoute) -> None:
        """Add a route. `freeze` checks that its dispatcher exists.

        Raises:
            ConfigurationError: It is not a `DispatchRoute`.
            DuplicateHandlerError: The id is registered.
            EngineFrozenError: The engine is frozen.
        """
        given = cast("object", route)
        if not isinstance(given, DispatchRoute):
            message = (
                f"{given!r:.80} is not a DispatchRoute. Make one: DispatchRoute(route_id, "
                f"topic_pattern, message_category, dispatcher_id)."
            )
            raise ConfigurationError(message)
        with self._registering:
            self._require_open(f"route {route.route_id!r}")
            if route.route_id in self._routes:
                raise duplicate("route", route.route_id)
            self._routes[route.route_id] = route

    def _require_open(self, what: str) -> None:
        if self._frozen is not None:
            raise EngineFrozenError(what=what)

    def freeze(self) -> None:
        """Validate dispatchers and routes, and refuse changes from now on. Idempotent.

        Raises:
            ConfigurationError: Lists all faults; the engine is not frozen.
        """
        with self._registering:
            if self._frozen is not None:
                return
            # Sorting keeps the order of registration among equals.
            routes = sorted(self._routes.values(), key=lambda route: -route.priority)
            faults = route_faults(routes, self._dispatchers)
            if faults:
                raise ConfigurationError(faults=faults)
            self._frozen = FrozenRoutes(routes, self._dispatchers, self._cache_size)

    @property
    def is_frozen(self) -> bool:
        """Whether `freeze` was called."""
        return self._frozen is not None

    @property
    def routes(self) -> Sequence[DispatchRoute]:
        """All routes, in order of registration."""
        return tuple(self._routes.values())

    @property
    def dispatcher_ids(self) -> Sequence[str]:
        """The ids of all dispatchers, in order of registration."""
        return tuple(self._dispatchers)

    # -- dispatching -----------------------------------------------------------------------

    async def dispatch(self, topic: str, envelope: EventEnvelope[Any]) -> DispatchResult:
        """Run all dispatchers with a matching route, and return the result.

        They run concurrently, started by priority; each has its own time limit and outcome.
        What a dispatcher raises is in its outcome; only cancellation is raised.

        Raises:
            EngineNotFrozenError: `freeze` was not called.
        """
        plan = self._plan(topic, envelope)
        logged = self._started(plan, topic, envelope) if self._logs(INFO) else None
        steps = plan.steps
        if not steps:
            return self._without_dispatchers(plan, topic, envelope, logged)
        if envelope.topic != topic:
            envelope = envelope.addressed_to(topic)
        began_at = self._time()
        began = self._now()
        outcomes: list[DispatchOutcome | None] = [None] * len(steps)
        try:
            if len(steps) == 1:
                outcomes[0] = await self._fanout.run_one(steps[0], envelope)
            else:
                await self._fanout.run(steps, envelope, outcomes)
            result = _summarise(plan, topic, envelope, outcomes, began_at)
            if self._publish is not None and result.outputs:
                await self._publish_outputs(self._publish, result, envelope)
        except BaseException:
            elapsed = (self._now() - began) * 1000
            ended = [
                (counts, one) for counts, one in zip(plan.counts, outcomes, strict=True) if one
            ]
            self._counts.record(None, plan.category, elapsed, ended, topic, began_at)
            if logged is not None:
                self._log.cancelled(logged, elapsed, plan.dispatcher_ids, plan.route_ids)
            raise
        result.duration_ms = elapsed = (self._now() - began) * 1000
        executions = zip(plan.counts, result.outcomes, strict=True)
        self._counts.record(result.status, plan.category, elapsed, executions, topic, began_at)
        if logged is not None:
            self._log.completed(logged, result, plan.dispatcher_ids, plan.route_ids)
        return result

    def _started(self, plan: DispatchPlan, topic: str, envelope: EventEnvelope[Any]) -> Dispatched:
        given = Dispatched(topic, plan.category, envelope)
        self._log.started(given, plan.dispatcher_ids, plan.route_ids)
        return given

    def dispatchers_for(self, topic: str, envelope: EventEnvelope[Any]) -> tuple[str, ...]:
        """Return the ids of the dispatchers of a message, by priority."""
        return self._plan(topic, envelope).dispatcher_ids

    def route(self, topic: str, envelope: EventEnvelope[Any]) -> DispatchResult:
        """Find the dispatchers of a message without running them: status `ROUTED`.

        Raises:
            EngineNotFrozenError: `freeze` was not called.
        """
        plan = self._plan(topic, envelope)
        if not plan.steps:
            return _empty(plan, topic, envelope, self._time())
        outcomes = [
            DispatchOutcome(step.entry.dispatcher_id, step.route_id, DispatchStatus.ROUTED)
            for step in plan.steps
        ]
        result = _summarise(plan, topic, envelope, outcomes, self._time())
        result.status = DispatchStatus.ROUTED
        return result

    def _plan(self, topic: str, envelope: EventEnvelope[Any]) -> DispatchPlan:
        frozen = self._frozen
        if frozen is None:
            message = "This engine is not frozen. Call freeze() after all registrations."
            raise EngineNotFrozenError(message)
        try:
            payload: object = envelope.payload
            return frozen.cache[topic, envelope.category, envelope.message_type, type(payload)]
        except (KeyError, TypeError, AttributeError):
            return frozen.resolve(topic, envelope)

    def _without_dispatchers(
        self,
        plan: DispatchPlan,
        topic: str,
        envelope: EventEnvelope[Any],
        logged: Dispatched | None,
    ) -> DispatchResult:
        at = self._time()
        result = _empty(plan, topic, envelope, at)
        self._counts.record(plan.status, result.message_category, 0.0, (), topic, at)
        if plan.error_message is not None and plan.error_code is not None:
            given = Dispatched(topic, plan.category, envelope)
            self._log.unhandled(given, plan.error_message, plan.error_code)
        if logged is not None:
            self._log.completed(logged, result, (), ())
        return result

    async def _publish_outputs(
        self, publish: OutputPublisher, result: DispatchResult, envelope: EventEnvelope[Any]
    ) -> None:
        failures = await publish_outputs(publish, result.outputs, envelope, self._max_hops)
        if not failures:
            return
        result.status = DispatchStatus.PUBLISH_FAILED
        result.unpublished = tuple(one.topic for one in failures)
        codes = [one.code for one in failures]
        result.error_code = HOP_LIMIT if HOP_LIMIT in codes else codes[0]
        texts = list(dict.fromkeys(one.reason for one in failures))
        if result.error_message is not None:
            texts.insert(0, result.error_message)
        result.error_message = "; ".join(texts)
        given = Dispatched(result.topic, result.message_category, envelope)
        self._log.unpublished(given, result)

    # -- metrics ---------------------------------------------------------------------------

    def get_structured_metrics(self) -> DispatchMetrics:
        """Return a snapshot of all metrics."""
        return self._counts.read()

    def get_dispatcher_metrics(self, dispatcher_id: str) -> DispatcherMetrics | None:
        """Return a snapshot of one dispatcher's metrics, or `None`."""
        return self._counts.read_dispatcher(dispatcher_id)

    def __repr__(self) -> str:
        state = "frozen" if self._frozen is not None else "open"
        return (
            f"<MessageDispatchEngine {state}: "
            f"{len(self._dispatchers)} dispatchers, {len(self._routes)} routes>"
        )


def _function(dispatcher_id: str, dispatcher: Any) -> DispatchFunction:
    handle = getattr(dispatcher, "handle", None)
    function: Any = dispatcher if handle is None else handle
    is_class = isinstance(dispatcher, type)  # not an instance of it: `handle` has no `self`
    if is_class or not callable(function):
        given: type = dispatcher if is_class else type(dispatcher)
        message = (
            f"Dispatcher {dispatcher_id!r} is {given.__name__}: it must be a function "
            f"of an envelope, or an object with a method handle(envelope)."
        )
        raise HandlerSignatureError(message)
    return cast("DispatchFunction", function)


def _empty(plan: DispatchPlan, topic: str, envelope: Any, at: float) -> DispatchResult:
    return DispatchResult(
        status=plan.status,
        topic=topic,
        message_category=plan.category if plan.is_valid else None,
        message_type=getattr(envelope, "message_type", None),
        started_at=at,
        error_message=plan.error_message,
        error_code=plan.error_code,
        correlation_id=getattr(envelope, "correlation_id", None),
        trace_id=getattr(envelope, "trace_id", None),
        span_id=getattr(envelope, "span_id", None),
    )


def _summarise(
    plan: DispatchPlan,
    topic: str,
    envelope: EventEnvelope[Any],
    outcomes: Sequence[DispatchOutcome | None],
    at: float,
) -> DispatchResult:
    done = [outcome for outcome in outcomes if outcome is not None]
    first = done[0]
    is_plain = len(done) == 1 and first.status is DispatchStatus.SUCCESS
    result = DispatchResult(
        status=first.status,
        topic=topic,
        route_id=first.route_id,
        dispatcher_id=first.dispatcher_id,
        message_category=plan.category,
        message_type=envelope.message_type,
        started_at=at,
        outputs=(first.outputs if is_plain else [topic for one in done for topic in one.outputs]),
        outcomes=done,
        correlation_id=envelope.correlation_id,
        trace_id=envelope.trace_id,
        span_id=envelope.span_id,
    )
    if is_plain:
        return result
    failed = [outcome for outcome in done if outcome.status.is_error()]
    if failed or len(done) > 1:
        result.status = _status(done, failed)
    if failed:
        result.error_code = failed[0].error_code
        result.error_message = "; ".join(
            f"{one.dispatcher_id}: {one.error_message or one.status.value}" for one in failed
        )
    return result


def _status(done: Sequence[DispatchOutcome], failed: Sequence[DispatchOutcome]) -> DispatchStatus:
    """Return the status of all outcomes; those that were skipped count only if all were."""
    ran = [one for one in done if one.status is not DispatchStatus.SKIPPED]
    if not ran:
        return DispatchStatus.SKIPPED
    if not failed:
        return DispatchStatus.SUCCESS
    if len(failed) < len(ran):
        return DispatchStatus.PARTIAL
    kinds = {one.status for one in failed}
    return kinds.pop() if len(kinds) == 1 else DispatchStatus.HANDLER_ERROR
