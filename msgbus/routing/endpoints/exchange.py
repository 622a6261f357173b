"""MessageRouter: route requests, responses, notifications and events to endpoints.

```text
 route_message(envelope)
   request       ─► the first route  ─► one endpoint of its group ─► its reply
   response      ─► the pending request, here or at its `reply_to`
   notification  ─► every route      ─► one endpoint of each group; an error without a route
   event         ─► every route, and `publish` if given
```
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field, replace
from typing import Any, Final, cast, final

from msgbus.errors import (
    ConfigurationError,
    NoRouteError,
    RequestTimeoutError,
    RoutingError,
)
from msgbus.messages.frame import current_frame
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
from msgbus.routing.endpoints.health import DeliveryPermit, HealthMonitor
from msgbus.routing.envelope import EventEnvelope, MessageKind, new_id
from msgbus.routing.forwarding import OutputPublisher, rejection_reason
from msgbus.runtime.clock import Clock, SystemClock
from msgbus.runtime.event_loop import current_runtime, run_together
from msgbus.telemetry.logging import log
from msgbus.telemetry.redaction import redact_exception
from msgbus.telemetry.stats import Durations, DurationStats

PUBLISHED: Final = "publish"
"""The `endpoint_id` of `publish=` among the deliveries of an event."""


@final
@dataclass(frozen=True, slots=True)
class Delivered:
    """The outcome of a delivery to one endpoint or group."""

    endpoint_id: str
    """The name in the route."""

    error: str | None = None
    """Why it was not delivered, redacted."""

    exception: Exception | None = field(default=None, repr=False)

    @property
    def success(self) -> bool:
        """Whether it was delivered."""
        return self.error is None


@final
@dataclass(frozen=True, slots=True)
class RoutingReport:
    """The result of routing one message."""

    kind: MessageKind
    topic: str | None
    deliveries: tuple[Delivered, ...] = ()
    """One for each endpoint or group of the matching routes, by priority."""

    reply: Any = None
    """The reply to a request."""

    accepted: bool = True
    """For a response: whether its request was pending."""

    @property
    def delivered(self) -> int:
        """The number of successful deliveries."""
        return sum(one.success for one in self.deliveries)

    @property
    def failed(self) -> tuple[Delivered, ...]:
        """The failed deliveries."""
        return tuple(one for one in self.deliveries if not one.success)

    @property
    def is_partial(self) -> bool:
        """Whether some deliveries succeeded and some failed."""
        return 0 < self.delivered < len(self.deliveries)


@final
class _RequesterDeadline:
    """The deadline of the handler that sends a request, if it has one."""

    # Seconds by which a timer may be early.
    TOLERANCE: Final = 1e-3

    def __init__(self) -> None:
        frame = current_frame.get()
        self._deadline = None if frame is None else frame.deadline
        self._clock: Clock | None = None if frame is None else frame.owner.host.clock
        self._began = 0.0 if self._clock is None else self._clock.now()

    @property
    def elapsed(self) -> float:
        """Seconds since this was created."""
        return 0.0 if self._clock is None else self._clock.now() - self._began

    @property
    def has_passed(self) -> bool:
        """Whether the deadline has passed."""
        if self._deadline is None or self._clock is None:
            return False
        return self._clock.now() >= self._deadline - self.TOLERANCE


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RouterMetrics(DurationStats):
    """Metrics of a router at one moment; the durations are those of route lookups.

    Responses are not counted: they go to the pending request, not by topic.
    """

    routed: int
    """Messages with at least one route, or with `publish`."""

    unroutable: int
    """Messages without a route."""

    routes: int
    """Endpoints and groups found, summed over all messages."""


@final
class MessageRouter:
    """Routes envelopes to endpoints, and replies back to requesters.

    ```python
    router = MessageRouter()
    router.endpoints.register(Endpoint("worker-1", send, group="billing"))
    router.routes.register_route("shop.billing.*", "billing")
    total = await router.request("shop.billing.total", Total(order=7))
    ```

    A router belongs to one event loop; responses may come from any thread.

    Args:
        routes: The routes from topics to endpoints.
        endpoints: The endpoints.
        correlations: The pending requests.
        monitor: The health of the endpoints.
        publish: Also publishes events: a callable `(topic, envelope)`, such as
            `publish_on(bus)`.
        balancing: How messages are spread over the endpoints of a group.
        timeout: Time limit of one delivery, in seconds; `None` for no limit. Less than that of
            a request, so that another endpoint can be used in its time.
        max_message_size: Bytes of the largest payload.
        max_deliveries: Deliveries in flight at once; those made inside another do not count.
        slow_route: Seconds; log the warning `slow_route` when a route lookup takes longer. Off
            by default.
        clock: The source of time.

    Raises:
        ConfigurationError: A number is out of range.
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
        """The health of the endpoints."""
        return self.pool.monitor

    async def request(
        self, topic: str, payload: Any, *, timeout: float | None = None, reply_to: str | None = None
    ) -> Any:
        """Send a request to an endpoint of the first route, and return the reply.

        Raises:
            NoRouteError: No route matches the topic.
            RequestTimeoutError: No reply came in time.
            RoutingError: It could not be delivered.
            Exception: The error that the endpoint raised or replied with.
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
        """Deliver a message according to its kind, and return a report.

        A request waits for its reply, which is in the report. Failed deliveries of a
        notification or an event do not raise: they are in the report.

        Args:
            envelope: The message, with its `topic` and `kind`.
            timeout: For a request: seconds to wait for the reply, by default 30.

        Raises:
            InvalidTopicError: The envelope has no topic, or one that is not valid.
            NoRouteError: No route matches a request or notification.
            MessageTooLargeError: The payload is too large; nothing was delivered.
            RequestTimeoutError: A request got no reply in time.
            RoutingError: A request could not be delivered, or a response has no correlation id.
            Exception: The error that the endpoint of a request raised or replied with.
        """
        if envelope.kind is MessageKind.RESPONSE:
            return await self._respond(envelope)
        topic = "" if envelope.topic is None else envelope.topic
        check_topic(topic)
        self.pool.check_size(envelope)
        if envelope.kind is MessageKind.REQUEST:
            return await self._request(topic, envelope, timeout)
        if envelope.kind is MessageKind.NOTIFICATION:
            return await self._notify(topic, envelope)
        return await self._publish_event(topic, envelope)

    async def _request(
        self, topic: str, envelope: EventEnvelope[Any], timeout: float | None
    ) -> RoutingReport:
        began = self._clock.now()
        route = self.routes.find_route(topic)
        self._count(topic, began, 0 if route is None else 1)
        if route is None:
            raise NoRouteError(topic)

        interrupted: list[DeliveryPermit] = []
        deadline = _RequesterDeadline()

        async def send(request_id: str) -> None:
            request = envelope
            if envelope.correlation_id is None:
                request = replace(envelope, correlation_id=request_id)
            reply = await self.pool.deliver_checked(route.endpoint_id, request, interrupted)
            if reply is not LATER:
                self.correlations.reply(request_id, reply)

        try:
            reply = await self.correlations.request(
                send,
                correlation_id=envelope.correlation_id,
                timeout=timeout,
                what=f"{envelope.message_type} to {topic!r}",
            )
        except RequestTimeoutError as error:
            await self.pool.end_interrupted(interrupted, error.seconds)
            raise
        except BaseException:
            self._cancelled(interrupted, deadline)
            raise
        return RoutingReport(envelope.kind, topic, (Delivered(route.endpoint_id),), reply)

    def _cancelled(self, interrupted: list[DeliveryPermit], deadline: _RequesterDeadline) -> None:
        """End the permits after a cancellation, which the requester's deadline may have caused."""
        if interrupted and deadline.has_passed:
            # Detached, as a cancelled task cannot wait for listeners.
            end = self.pool.end_interrupted
            current_runtime().spawn(end, interrupted, deadline.elapsed, name="msgbus delivery")
            return
        for permit in interrupted:
            permit.cancelled()

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
        reply = envelope.payload
        if isinstance(reply, BaseException):
            accepted = self.correlations.fail(envelope.correlation_id, reply)
        else:
            accepted = self.correlations.reply(envelope.correlation_id, reply)
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
            result = self._publish(topic, envelope)
            if inspect.isawaitable(result):
                result = await result
            published = Delivered(PUBLISHED, rejection_reason(result))
        except Exception as error:
            published = Delivered(PUBLISHED, redact_exception(error), error)
        return replace(report, deliveries=(*report.deliveries, published))

    def _names(self, topic: str, *, is_published: bool = False) -> list[str]:
        """Return the endpoints and groups of a topic, each once, by priority."""
        began = self._clock.now()
        names = list(
            dict.fromkeys(route.endpoint_id for route in self.routes.find_all_routes(topic))
        )
        self._count(topic, began, len(names), is_published=is_published)
        return names

    def _count(self, topic: str, began: float, found: int, *, is_published: bool = False) -> None:
        """Count one route lookup."""
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
        """Return a snapshot of the metrics."""
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

        async def deliver(index: int) -> None:
            name = names[index]
            try:
                await self.pool.deliver(name, envelope)
                done[index] = Delivered(name)
            except Exception as error:
                done[index] = Delivered(name, redact_exception(error), error)

        if names:
            await run_together(deliver, len(names))
        return RoutingReport(envelope.kind, topic, tuple(cast("list[Delivered]", done)))
