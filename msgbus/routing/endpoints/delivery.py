"""EndpointPool: deliver a message to one endpoint of a group, with failover and retries."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, Final, final

import anyio
from pydantic_core import to_json

from msgbus.errors import (
    ConfigurationError,
    EndpointFailedError,
    MessageTooLargeError,
    MissingEndpointError,
    NoHealthyEndpointError,
    Refusal,
)
from msgbus.messages.message import Message
from msgbus.resilience.config import RetryAttempt, RetryConfig
from msgbus.resilience.retry import Retry
from msgbus.routing.endpoints.balancing import Balancing, make_balancer
from msgbus.routing.endpoints.endpoints import Endpoint, EndpointRegistry
from msgbus.routing.endpoints.health import DeliveryPermit, HealthMonitor
from msgbus.routing.envelope import EventEnvelope
from msgbus.runtime.clock import Clock, SystemClock
from msgbus.runtime.event_loop import LATE, in_time
from msgbus.telemetry.logging import log
from msgbus.telemetry.redaction import redact_exception

MAX_MESSAGE_SIZE: Final = 1024 * 1024
MAX_DELIVERIES: Final = 1000
DELIVERY_TIMEOUT: Final = 10.0
"""Time limit of a delivery, in seconds: a third of that of a request."""


LATER: Final = object()
"""The result of a delivery if the reply comes as a response message."""

_delivering: Final[ContextVar[tuple[EndpointPool, ...]]] = ContextVar(
    "msgbus_delivering", default=()
)
"""The pools whose deliveries this code runs in."""


def size_of(payload: object) -> int:
    """Return the bytes of a payload: of text or bytes as they are, of others as JSON."""
    if isinstance(payload, bytes | bytearray):
        return len(payload)
    if isinstance(payload, str):
        return len(payload.encode(errors="surrogatepass"))
    if isinstance(payload, Message):
        return len(payload.__pydantic_serializer__.to_json(payload))
    return len(to_json(payload, serialize_unknown=True))


@final
class EndpointPool:
    """Delivers messages to endpoints, with balancing, limits and failover.

    If an endpoint is unreachable, the message goes to the next one, so two of them may have seen
    it: delivery is at least once. Other errors are the endpoint's reply: they are raised, and do
    not count against the endpoint. A pool belongs to one event loop.

    Args:
        endpoints: The endpoints to deliver to.
        monitor: The health of the endpoints; by default a monitor without checks.
        balancing: `round_robin`, `least_in_flight`, `weighted`, `by_key`, or a `Balancer`.
        timeout: Time limit of one delivery with its retries, in seconds; `None` for no limit.
            Less than that of a request, so that another endpoint can be used in its time.
        failover_on: Errors that mean "unreachable", in addition to `TimeoutError`.
        max_message_size: Bytes of the largest payload, as JSON unless it is text or bytes.
        max_deliveries: Deliveries in flight at once; more wait. A delivery inside another, as
            by an endpoint that sends a request, does not count.
        clock: The source of time.
    """

    def __init__(
        self,
        endpoints: EndpointRegistry,
        *,
        monitor: HealthMonitor | None = None,
        balancing: Balancing = "round_robin",
        timeout: float | None = DELIVERY_TIMEOUT,
        failover_on: tuple[type[Exception], ...] = (OSError,),
        max_message_size: int = MAX_MESSAGE_SIZE,
        max_deliveries: int = MAX_DELIVERIES,
        clock: Clock | None = None,
    ) -> None:
        if max_deliveries < 1:
            message = f"max_deliveries must be at least 1, not {max_deliveries}."
            raise ConfigurationError(message)
        self._clock: Clock = SystemClock() if clock is None else clock
        self.endpoints = endpoints
        self.monitor = HealthMonitor(endpoints, clock=self._clock) if monitor is None else monitor
        self._balancer = make_balancer(balancing)
        self._timeout = timeout
        self._failover_on = (*failover_on, TimeoutError)
        self.max_message_size = max_message_size
        self.max_deliveries = max_deliveries
        self._slots: anyio.Semaphore | None = None

    async def deliver(self, name: str, envelope: EventEnvelope[Any]) -> Any:
        """Deliver to the endpoint or group of this name, and return the reply.

        Raises:
            MissingEndpointError: No endpoint and no group has this name.
            MessageTooLargeError: The payload is too large; nothing was delivered.
            NoHealthyEndpointError: All are unhealthy; nothing was delivered.
            EndpointFailedError: All attempted endpoints are unreachable.
            Exception: The error that the endpoint raised.
        """
        self.check_size(envelope)
        return await self.deliver_checked(name, envelope)

    async def deliver_checked(
        self,
        name: str,
        envelope: EventEnvelope[Any],
        interrupted: list[DeliveryPermit] | None = None,
    ) -> Any:
        """Deliver a message whose size has been checked.

        With `interrupted`, the permit of a cancelled delivery is not ended but appended there:
        the caller knows whether its own time limit was the cause, and must end it.
        """
        outer = _delivering.get()
        if self in outer:
            # Inside a delivery that has a slot: waiting for another could deadlock.
            return await self._deliver(name, envelope, interrupted)
        if self._slots is None:
            self._slots = anyio.Semaphore(self.max_deliveries, fast_acquire=True)
        async with self._slots:
            token = _delivering.set((*outer, self))
            try:
                return await self._deliver(name, envelope, interrupted)
            finally:
                _delivering.reset(token)

    def check_size(self, envelope: EventEnvelope[Any]) -> None:
        """Raise `MessageTooLargeError` if the payload is larger than `max_message_size`."""
        size = size_of(envelope.payload)
        if size > self.max_message_size:
            raise MessageTooLargeError(
                envelope.message_type, size=size, max_size=self.max_message_size
            )

    async def _deliver(
        self, name: str, envelope: EventEnvelope[Any], interrupted: list[DeliveryPermit] | None
    ) -> Any:
        # Read only now: endpoints may have changed while this waited for a slot.
        members = self.endpoints.members(name)
        if not members:
            raise MissingEndpointError(name)
        failures: list[tuple[str, Exception]] = []
        reasons: dict[str, str] = {}
        for endpoint in self._balancer.order(members, envelope.key):
            permit = self.monitor.admit(endpoint)
            if isinstance(permit, str):
                reasons[endpoint.endpoint_id] = permit
                continue
            self._balancer.took(endpoint, members)
            try:
                return await self._send(endpoint, permit, envelope, interrupted)
            except Exception as error:
                if not self._is_unreachable(error):
                    raise
                failures.append((endpoint.endpoint_id, error))
        if failures:
            attempts = [(attempted, redact_exception(error)) for attempted, error in failures]
            raise EndpointFailedError(name, attempts=attempts) from failures[-1][1]
        retry_after = min(self.monitor.retry_after(endpoint) for endpoint in members)
        raise NoHealthyEndpointError(name, reasons=reasons, retry_after=retry_after)

    def _is_unreachable(self, error: Exception) -> bool:
        return isinstance(error, self._failover_on) and not isinstance(error, Refusal)

    async def _send(
        self,
        endpoint: Endpoint,
        permit: DeliveryPermit,
        envelope: EventEnvelope[Any],
        interrupted: list[DeliveryPermit] | None,
    ) -> Any:
        """Deliver to one endpoint, with its retries."""
        until = None if self._timeout is None else self._clock.now() + self._timeout
        try:
            return await self._attempt(endpoint, permit, envelope, until, interrupted)
        except Exception as error:
            if endpoint.retry is None:
                raise
            failure = error
        retry = Retry(endpoint.retry, self._clock)
        state = retry.begin()
        attempt = 1
        while True:
            decision = retry.decide(state, failure, attempt, until)
            if decision.delay is None or not self._is_for_retry(endpoint.retry, failure):
                raise failure
            failed = RetryAttempt(envelope, endpoint.endpoint_id, attempt, failure, decision.delay)
            _report_retry(endpoint.retry, failed)
            await self._clock.sleep(decision.delay)
            again = self.monitor.admit(endpoint)
            if isinstance(again, str):  # it has become unhealthy
                raise failure
            attempt += 1
            try:
                return await self._attempt(endpoint, again, envelope, until, interrupted)
            except Exception as error:
                failure = error

    def _is_for_retry(self, retry: RetryConfig, error: Exception) -> bool:
        """Return whether to retry: for a reply only if the config names errors."""
        names_errors = not retry.model_fields_set.isdisjoint({"retry_on", "retry"})
        return names_errors or self._is_unreachable(error)

    async def _attempt(
        self,
        endpoint: Endpoint,
        permit: DeliveryPermit,
        envelope: EventEnvelope[Any],
        until: float | None,
        interrupted: list[DeliveryPermit] | None,
    ) -> Any:
        try:
            if until is None:
                reply = await endpoint.deliver(envelope)
            else:
                reply = await self._attempt_in_time(endpoint, envelope, until)
        except Exception as error:
            if self._is_unreachable(error):
                await permit.failed(error)
            else:
                await permit.replied(error)
            raise
        except BaseException:
            if interrupted is None:
                permit.cancelled()
            else:
                interrupted.append(permit)
            raise
        await permit.succeeded()
        return LATER if endpoint.answers_later else reply

    async def _attempt_in_time(
        self, endpoint: Endpoint, envelope: EventEnvelope[Any], until: float
    ) -> Any:
        seconds = max(until - self._clock.now(), 0.0)
        reply = await in_time(endpoint.deliver(envelope), seconds, self._clock)
        if reply is not LATE:
            return reply
        message = f"{endpoint.endpoint_id} did not take the message within {self._timeout:g} s."
        raise TimeoutError(message)

    async def end_interrupted(self, interrupted: list[DeliveryPermit], seconds: float) -> None:
        """End the permits of deliveries whose requester timed out after `seconds`.

        That counts as a failure of an endpoint that had at least half of that time, not of one
        that got the message later, after others had failed.
        """
        for permit in interrupted:
            if permit.is_older_than(self._half_of(seconds)):
                await permit.failed(TimeoutError(f"no reply within {seconds:g} s"))
            else:
                permit.cancelled()

    def _half_of(self, seconds: float) -> float:
        return seconds / 2 if self._timeout is None else min(seconds / 2, self._timeout)


def _report_retry(retry: RetryConfig, attempt: RetryAttempt) -> None:
    envelope: EventEnvelope[Any] = attempt.message
    log.warning(
        "delivery_retried",
        endpoint=attempt.handler,
        message_type=envelope.message_type,
        message_id=envelope.envelope_id,
        correlation_id=envelope.correlation_id,
        attempt=attempt.attempt,
        delay=attempt.delay,
        error=redact_exception(attempt.error),
        traceback=attempt.error,
    )
    if retry.on_retry is not None:
        try:
            retry.on_retry(attempt)
        except Exception as error:  # a broken hook must not break the retry
            log.error(
                "retry_hook_failed",
                handler=attempt.handler,
                error=redact_exception(error),
                traceback=error,
            )
