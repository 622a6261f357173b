"""MessageRouter: routes, endpoints and open requests, tied together.

```text
 route_message(envelope)
   request       ─► the first route  ─► one endpoint of its group ─► the answer, back here
   response      ─► the request that waits for it, here or at its `reply_to`
   notification  ─► every route      ─► one endpoint of each group; nobody there is an error
   event         ─► every route, and the bus if there is one; nobody there is fine
```
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field, replace
from typing import Any, Final, cast, final

from msgbus.bus.context import current_frame
from msgbus.errors import (
    ConfigurationError,
    NoRouteError,
    RequestTimeoutError,
    RoutingError,
)
from msgbus.messages.topics.pattern import check_topic
from msgbus.messages.topics.router import PatternRouter
from msgbus.routing.endpoints.balancing import Balancing
from msgbus.routing.endpoints.correlation import CorrelationManager
from msgbus.routing.endpoints.delivery import (
    DELIVERY_TIMEOUT,
    LATER,
    MAX_DELIVERIES,
    MAX_MESSAGE_SIZE,
    EndpointPool,
)
from msgbus.routing.endpoints.endpoints import EndpointRegistry
from msgbus.routing.endpoints.health import HealthMonitor, Passage
from msgbus.routing.envelope import EventEnvelope, MessageKind, new_id
from msgbus.routing.forwarding import OutputPublisher, refusal_of
from msgbus.runtime.clock import Clock, SystemClock
from msgbus.runtime.event_loop import current_runtime, run_together
from msgbus.telemetry.logging import log
from msgbus.telemetry.redaction import redact_exception
from msgbus.telemetry.stats import Durations, DurationStats

PUBLISHED: Final = "publish"
"""Stands for `publish=` among the deliveries of an event."""


@final
@dataclass(frozen=True, slots=True)
class Delivered:
    """What became of a message at one endpoint or group."""

    endpoint_id: str
    """The name that the route leads to."""

    error: str | None = None
    """Why it was not delivered, secrets removed."""

    exception: Exception | None = field(default=None, repr=False)

    @property
    def success(self) -> bool:
        """Whether it was delivered."""
        return self.error is None


@final
@dataclass(frozen=True, slots=True)
class RoutingReport:
    """What became of one message."""

    kind: MessageKind
    topic: str | None
    deliveries: tuple[Delivered, ...] = ()
    """One for each endpoint or group that it was meant for, in order of priority."""

    reply: Any = None
    """The answer to a request."""

    accepted: bool = True
    """For a response: whether somebody waited for it."""

    @property
    def delivered(self) -> int:
        """How many got it."""
        return sum(one.success for one in self.deliveries)

    @property
    def failed(self) -> tuple[Delivered, ...]:
        """Those that did not get it."""
        return tuple(one for one in self.deliveries if not one.success)

    @property
    def is_partial(self) -> bool:
        """Whether some got it and some did not."""
        return 0 < self.delivered < len(self.deliveries)


@final
class _Time:
    """The time that the handler which asks has left, if it has a deadline."""

    # Seconds by which a timer may be early.
    TOLERANCE: Final = 1e-3

    def __init__(self) -> None:
        frame = current_frame.get()
        self._deadline = None if frame is None else frame.deadline
        self._clock: Clock | None = None if frame is None else frame.owner.bus.clock
        self._began = 0.0 if self._clock is None else self._clock.now()

    @property
    def taken(self) -> float:
        """Seconds from the beginning until now."""
        return 0.0 if self._clock is None else self._clock.now() - self._began

    @property
    def is_over(self) -> bool:
        """Whether the deadline has come."""
        if self._deadline is None or self._clock is None:
            return False
        return self._clock.now() >= self._deadline - self.TOLERANCE


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RouterMetrics(DurationStats):
    """What a router has routed, at one moment; the durations are those of finding the way.

    Responses are not among them: they go to the request that waits, not by a topic.
    """

    routed: int
    """Messages that led somewhere: to a route, or to `publish`."""

    unroutable: int
    """Messages that led nowhere."""

    routes: int
    """Endpoints and groups that messages led to."""


@final
class MessageRouter:
    """Brings envelopes to endpoints, and answers back to those who asked.

    ```python
    router = MessageRouter()
    router.endpoints.register(Endpoint("worker-1", send, group="billing"))
    router.routes.register_route("shop.billing.*", "billing")
    total = await router.request("shop.billing.total", Total(order=7))
    ```

    It belongs to one event loop; responses may come from any thread.

    Args:
        routes: Which topics lead where.
        endpoints: Who is there.
        correlations: The open requests.
        monitor: Knows which endpoints are well.
        publish: Where events go beside the routes: a callable `(topic, envelope)`, such as
            `publish_on(bus)`.
        balancing: How the endpoints of a group share the work.
        timeout: Seconds that one delivery may take; `None` for no limit. Less than a request
            waits, so that another endpoint can be asked in its time.
        max_message_size: Bytes of the largest payload.
        max_deliveries: Deliveries under way at once, those not counted that are made inside
            another.
        slow_route: Warn, as `slow_route`, when finding the way of a message takes longer; off
            unless given, such as `100e-6`.
        clock: Where time comes from.

    Raises:
        ConfigurationError: A number makes no sense.
    """

    def __init__(
        self,
        *,
        routes: PatternRouter | None = None,
        endpoints: EndpointRegistry | None = None,
        correlations: CorrelationManager | None = None,
        monitor: HealthMonitor | None = None,
        publish: OutputPublisher | None = None,
        balancing: Balancing = "round_robin",
        timeout: float | None = DELIVERY_TIMEOUT,
        max_message_size: int = MAX_MESSAGE_SIZE,
        max_deliveries: int = MAX_DELIVERIES,
        slow_route: float | None = None,
        clock: Clock | None = None,
    ) -> None:
        time: Clock = SystemClock() if clock is None else clock
        self.routes = PatternRouter() if routes is None else routes
        self.endpoints = EndpointRegistry() if endpoints is None else endpoints
        self.correlations = CorrelationManager(clock=time) if correlations is None else correlations
        self._publish = publish
        if slow_route is not None and not slow_route > 0:
            message = f"slow_route={slow_route} must be a number of seconds above 0, or None."
            raise ConfigurationError(message)
        self._clock = time
        self._slow_route = slow_route
        self._durations = Durations()
        self._routed = 0
        self._unroutable = 0
        self._routes_taken = 0
        self.pool = EndpointPool(
            self.endpoints,
            monitor=monitor,
            balancing=balancing,
            timeout=timeout,
            max_message_size=max_message_size,
            max_deliveries=max_deliveries,
            clock=time,
        )

    @property
    def monitor(self) -> HealthMonitor:
        """Knows which endpoints are well."""
        return self.pool.monitor

    async def request(
        self, topic: str, payload: Any, *, timeout: float | None = None, reply_to: str | None = None
    ) -> Any:
        """Ask whoever a topic leads to, and give the answer.

        Raises:
            NoRouteError: The topic leads nowhere.
            RequestTimeoutError: No answer came in time.
            RoutingError: It could not be delivered.
            Exception: What the endpoint raised, or answered.
        """
        envelope = EventEnvelope(
            payload,
            topic=topic,
            kind=MessageKind.REQUEST,
            correlation_id=new_id(),
            reply_to=reply_to,
        )
        return (await self.route_message(envelope, timeout=timeout)).reply

    async def route_message(
        self, envelope: EventEnvelope[Any], *, timeout: float | None = None
    ) -> RoutingReport:
        """Deliver a message as its kind demands, and say what became of it.

        A request waits for its answer, which is in the report. A notification or an event
        that some endpoints did not get does not raise: the report says who.

        Args:
            envelope: The message; its `topic` says where to, its `kind` how.
            timeout: For a request: seconds to wait for the answer, 30 if not given.

        Raises:
            InvalidTopicError: The envelope has no topic, or a wrong one.
            NoRouteError: A request or notification that leads nowhere.
            MessageTooLargeError: The payload is too large; nobody got it.
            RequestTimeoutError: A request without an answer in time.
            RoutingError: A request that could not be delivered; a response without an id.
            Exception: What the endpoint of a request raised, or answered.
        """
        if envelope.kind is MessageKind.RESPONSE:
            return await self._respond(envelope)
        topic = "" if envelope.topic is None else envelope.topic
        check_topic(topic)
        self.pool.check_size(envelope)
        if envelope.kind is MessageKind.REQUEST:
            return await self._ask(topic, envelope, timeout)
        if envelope.kind is MessageKind.NOTIFICATION:
            return await self._notify(topic, envelope)
        return await self._publish_event(topic, envelope)

    async def _ask(
        self, topic: str, envelope: EventEnvelope[Any], timeout: float | None
    ) -> RoutingReport:
        began = self._clock.now()
        route = self.routes.find_route(topic)
        self._count(topic, began, 0 if route is None else 1)
        if route is None:
            raise NoRouteError(topic)

        cut: list[Passage] = []
        time = _Time()

        async def send(request_id: str) -> None:
            asked = envelope
            if envelope.correlation_id is None:
                asked = replace(envelope, correlation_id=request_id)
            answer = await self.pool.deliver_checked(route.endpoint_id, asked, cut)
            if answer is not LATER:
                self.correlations.reply(request_id, answer)

        try:
            reply = await self.correlations.request(
                send,
                correlation_id=envelope.correlation_id,
                timeout=timeout,
                what=f"{envelope.message_type} to {topic!r}",
            )
        except RequestTimeoutError as error:
            await self.pool.end_cut(cut, error.seconds)
            raise
        except BaseException:
            self._cancelled(cut, time)
            raise
        return RoutingReport(envelope.kind, topic, (Delivered(route.endpoint_id),), reply)

    def _cancelled(self, cut: list[Passage], time: _Time) -> None:
        """The one who asks was cancelled, perhaps because its own deadline has come."""
        if cut and time.is_over:
            # Detached, as one who is cancelled cannot wait for whoever hears of it.
            end = self.pool.end_cut
            current_runtime().spawn(end, cut, time.taken, name="msgbus delivery")
            return
        for passage in cut:
            passage.cancelled()

    async def _respond(self, envelope: EventEnvelope[Any]) -> RoutingReport:
        if envelope.correlation_id is None:
            message = (
                "A response needs the correlation id of its request. "
                "Make it from the request: request.response(payload)."
            )
            raise RoutingError(message)
        address = envelope.topic
        is_here = self.correlations.is_pending(envelope.correlation_id)
        if not is_here and address is not None and self.endpoints.members(address):
            return await self._deliver_to_all([address], address, envelope)
        answer = envelope.payload
        if isinstance(answer, BaseException):
            accepted = self.correlations.fail(envelope.correlation_id, answer)
        else:
            accepted = self.correlations.reply(envelope.correlation_id, answer)
        return RoutingReport(envelope.kind, address, accepted=accepted)

    async def _notify(self, topic: str, envelope: EventEnvelope[Any]) -> RoutingReport:
        names = self._names(topic)
        if not names:
            raise NoRouteError(topic)
        return await self._deliver_to_all(names, topic, envelope)

    async def _publish_event(self, topic: str, envelope: EventEnvelope[Any]) -> RoutingReport:
        names = self._names(topic, is_published=self._publish is not None)
        report = await self._deliver_to_all(names, topic, envelope)
        if self._publish is None:
            return report
        try:
            answer = self._publish(topic, envelope)
            if inspect.isawaitable(answer):
                answer = await answer
            published = Delivered(PUBLISHED, refusal_of(answer))
        except Exception as error:
            published = Delivered(PUBLISHED, redact_exception(error), error)
        return replace(report, deliveries=(*report.deliveries, published))

    def _names(self, topic: str, *, is_published: bool = False) -> list[str]:
        """Where a topic leads: each name once, in order of priority."""
        began = self._clock.now()
        names = list(
            dict.fromkeys(route.endpoint_id for route in self.routes.find_all_routes(topic))
        )
        self._count(topic, began, len(names), is_published=is_published)
        return names

    def _count(self, topic: str, began: float, found: int, *, is_published: bool = False) -> None:
        """Take into account that the way of one message was looked for."""
        seconds = self._clock.now() - began
        durations = self._durations
        durations.recent.append(seconds)
        if len(durations.recent) >= durations.FOLD_AT:
            durations.fold()
        self._routes_taken += found
        if found or is_published:
            self._routed += 1
        else:
            self._unroutable += 1
        limit = self._slow_route
        if limit is not None and seconds > limit:
            log.warning("slow_route", topic=topic, seconds=seconds, limit=limit)

    def metrics(self) -> RouterMetrics:
        """What it has routed, and how long it took to find the way."""
        _, seconds, buckets = self._durations.read()
        return RouterMetrics(
            routed=self._routed,
            unroutable=self._unroutable,
            routes=self._routes_taken,
            seconds=seconds,
            buckets=tuple(buckets),
        )

    async def _deliver_to_all(
        self, names: list[str], topic: str, envelope: EventEnvelope[Any]
    ) -> RoutingReport:
        done: list[Delivered | None] = [None] * len(names)

        async def deliver(place: int) -> None:
            name = names[place]
            try:
                await self.pool.deliver(name, envelope)
                done[place] = Delivered(name)
            except Exception as error:
                done[place] = Delivered(name, redact_exception(error), error)

        if names:
            await run_together(deliver, len(names))
        return RoutingReport(envelope.kind, topic, tuple(cast("list[Delivered]", done)))
