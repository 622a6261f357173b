"""Delivery: a message to one endpoint of a group, or to the next one if that is down."""

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
from msgbus.routing.endpoints.health import HealthMonitor, Passage
from msgbus.routing.envelope import EventEnvelope
from msgbus.runtime.clock import Clock, SystemClock
from msgbus.runtime.event_loop import LATE
from msgbus.runtime.timeouts import in_time
from msgbus.telemetry.logging import log
from msgbus.telemetry.redaction import redact_exception

MAX_MESSAGE_SIZE: Final = 1024 * 1024
MAX_DELIVERIES: Final = 1000
DELIVERY_TIMEOUT: Final = 10.0
"""Seconds that a delivery may take: a third of what a request waits for its answer."""


@final
class AnswersLater:
    """What a delivery gives if the answer will come as a message of its own."""


LATER: Final = AnswersLater()

_delivering: Final[ContextVar[tuple[EndpointPool, ...]]] = ContextVar(
    "msgbus_delivering", default=()
)
"""The pools in whose deliveries this code runs."""


def size_of(payload: object) -> int:
    """How many bytes a payload has on the wire: as it is, or as JSON."""
    if isinstance(payload, bytes | bytearray):
        return len(payload)
    if isinstance(payload, str):
        return len(payload.encode(errors="surrogatepass"))
    if isinstance(payload, Message):
        return len(payload.__pydantic_serializer__.to_json(payload))
    return len(to_json(payload, serialize_unknown=True))


@final
class EndpointPool:
    """Delivers to endpoints: balanced, bounded, and past those that are down.

    A delivery that fails because its endpoint is out of reach goes to the next endpoint,
    which may mean that two of them have seen the message: delivery is at least once. Other
    errors are the endpoint's answer: they go to the caller, and do not count against the
    endpoint. It belongs to one event loop.

    Args:
        endpoints: Whom to deliver to.
        monitor: Knows who is well; one that only judges deliveries if not given.
        balancing: `round_robin`, `least_in_flight`, `weighted`, `by_key`, or a `Balancer`.
        timeout: Seconds that one delivery may take, with all its retries; `None` for no limit.
            Less than a request waits for its answer, so that another endpoint can be asked.
        failover_on: Errors that mean "out of reach"; running out of time is one of them.
        max_message_size: Bytes of the largest payload, as JSON unless it is text or bytes.
        max_deliveries: Deliveries under way at once; more wait for their turn. What is
            delivered inside a delivery, as by a worker that asks another, uses its place.
        clock: Where time comes from.
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
        self._places: anyio.Semaphore | None = None

    async def deliver(self, name: str, envelope: EventEnvelope[Any]) -> Any:
        """Deliver to the endpoint or group of this name, and give what it answers.

        Raises:
            MissingEndpointError: There is none of this name.
            MessageTooLargeError: The payload is too large; nobody got it.
            NoHealthyEndpointError: All are out of order; nobody got it.
            EndpointFailedError: All that were tried are out of reach.
            Exception: What the endpoint raised.
        """
        self.check_size(envelope)
        return await self.deliver_checked(name, envelope)

    async def deliver_checked(
        self, name: str, envelope: EventEnvelope[Any], cut: list[Passage] | None = None
    ) -> Any:
        """As `deliver`, of a message whose size has been checked.

        With `cut`, the passage of a delivery that is cancelled is left open and put there: the
        caller knows whether its own time had run out, and must end it.
        """
        outer = _delivering.get()
        if self in outer:
            # Inside a delivery that has a place: to wait for another could be for ever.
            return await self._deliver(name, envelope, cut)
        if self._places is None:
            self._places = anyio.Semaphore(self.max_deliveries, fast_acquire=True)
        async with self._places:
            token = _delivering.set((*outer, self))
            try:
                return await self._deliver(name, envelope, cut)
            finally:
                _delivering.reset(token)

    def check_size(self, envelope: EventEnvelope[Any]) -> None:
        """Raise if the payload is larger than may be delivered.

        Raises:
            MessageTooLargeError: It is.
        """
        size = size_of(envelope.payload)
        if size > self.max_message_size:
            raise MessageTooLargeError(
                envelope.message_type, size=size, max_size=self.max_message_size
            )

    async def _deliver(
        self, name: str, envelope: EventEnvelope[Any], cut: list[Passage] | None
    ) -> Any:
        # Asked for only now: while this waited for its turn, endpoints may have changed.
        members = self.endpoints.members(name)
        if not members:
            raise MissingEndpointError(name)
        failures: list[tuple[str, Exception]] = []
        reasons: dict[str, str] = {}
        for endpoint in self._balancer.order(members, envelope.key):
            passage = self.monitor.admit(endpoint)
            if isinstance(passage, str):
                reasons[endpoint.endpoint_id] = passage
                continue
            self._balancer.took(endpoint, members)
            try:
                return await self._send(endpoint, passage, envelope, cut)
            except Exception as error:
                if not self._is_out_of_reach(error):
                    raise
                failures.append((endpoint.endpoint_id, error))
        if failures:
            attempts = [(tried, redact_exception(error)) for tried, error in failures]
            raise EndpointFailedError(name, attempts=attempts) from failures[-1][1]
        retry_after = min(self.monitor.retry_after(endpoint) for endpoint in members)
        raise NoHealthyEndpointError(name, reasons=reasons, retry_after=retry_after)

    def _is_out_of_reach(self, error: Exception) -> bool:
        return isinstance(error, self._failover_on) and not isinstance(error, Refusal)

    async def _send(
        self,
        endpoint: Endpoint,
        passage: Passage,
        envelope: EventEnvelope[Any],
        cut: list[Passage] | None,
    ) -> Any:
        """Deliver to one endpoint, as often as its retries say."""
        until = None if self._timeout is None else self._clock.now() + self._timeout
        try:
            return await self._try(endpoint, passage, envelope, until, cut)
        except Exception as error:
            if endpoint.retry is None:
                raise
            failure = error
        retry = Retry(endpoint.retry, self._clock)
        state = retry.begin()
        attempt = 1
        while True:
            verdict = retry.judge(state, failure, attempt, until)
            if verdict.pause is None or not self._is_for_retry(endpoint.retry, failure):
                raise failure
            failed = RetryAttempt(envelope, endpoint.endpoint_id, attempt, failure, verdict.pause)
            _announce(endpoint.retry, failed)
            await self._clock.sleep(verdict.pause)
            again = self.monitor.admit(endpoint)
            if isinstance(again, str):  # its circuit has opened, or it is unwell
                raise failure
            attempt += 1
            try:
                return await self._try(endpoint, again, envelope, until, cut)
            except Exception as error:
                failure = error

    def _is_for_retry(self, retry: RetryConfig, error: Exception) -> bool:
        """Whether to ask again makes sense: for an answer only if the config names errors."""
        names_errors = not retry.model_fields_set.isdisjoint({"retry_on", "retry"})
        return names_errors or self._is_out_of_reach(error)

    async def _try(
        self,
        endpoint: Endpoint,
        passage: Passage,
        envelope: EventEnvelope[Any],
        until: float | None,
        cut: list[Passage] | None,
    ) -> Any:
        try:
            if until is None:
                answer = await endpoint.deliver(envelope)
            else:
                answer = await self._try_in_time(endpoint, envelope, until)
        except Exception as error:
            if self._is_out_of_reach(error):
                await passage.failed(error)
            else:
                await passage.answered(error)
            raise
        except BaseException:
            if cut is None:
                passage.cancelled()
            else:
                cut.append(passage)
            raise
        await passage.succeeded()
        return LATER if endpoint.answers_later else answer

    async def _try_in_time(
        self, endpoint: Endpoint, envelope: EventEnvelope[Any], until: float
    ) -> Any:
        seconds = max(until - self._clock.now(), 0.0)
        answer = await in_time(endpoint.deliver(envelope), seconds, self._clock)
        if answer is not LATE:
            return answer
        message = f"{endpoint.endpoint_id} did not take the message within {self._timeout:g} s."
        raise TimeoutError(message)

    async def end_cut(self, cut: list[Passage], seconds: float) -> None:
        """End the passages of deliveries whose requester's time, so many seconds, is over.

        That counts against the endpoint that had most of it; not against one that was asked in
        the last moment, after others.
        """
        for passage in cut:
            if passage.is_older_than(self._most_of(seconds)):
                await passage.failed(TimeoutError(f"no answer within {seconds:g} s"))
            else:
                passage.cancelled()

    def _most_of(self, seconds: float) -> float:
        return seconds / 2 if self._timeout is None else min(seconds / 2, self._timeout)


def _announce(retry: RetryConfig, attempt: RetryAttempt) -> None:
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
