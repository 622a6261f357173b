"""HealthMonitor: health checks of endpoints.

An endpoint is unhealthy

- while its circuit breaker is open: failed deliveries open it, a successful one closes it;
- after several failed health checks, until one passes;
- if deliveries are in flight and none finishes for some time, until one does.

An endpoint without a passed check or a finished delivery is `UNKNOWN`; it is used like a healthy
one.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Self, TypeAlias, final

import anyio

from msgbus.errors import CircuitOpenError, ConfigurationError
from msgbus.messages.message import SystemEvent
from msgbus.resilience.breaker import CircuitBreaker, CircuitState, Permit
from msgbus.resilience.config import CircuitBreakerConfig
from msgbus.routing.endpoints.endpoints import Endpoint, EndpointRegistry
from msgbus.runtime.clock import Clock, SystemClock
from msgbus.runtime.event_loop import Task, current_runtime
from msgbus.telemetry.logging import log
from msgbus.telemetry.redaction import redact_exception

if TYPE_CHECKING:
    from types import TracebackType


class EndpointUnhealthyEvent(SystemEvent):
    """An endpoint has become unhealthy; messages go to others."""

    endpoint_id: str
    reason: str
    """Why it is unhealthy, redacted."""


class EndpointRecoveredEvent(SystemEvent):
    """An unhealthy endpoint is healthy again."""

    endpoint_id: str
    down_for: float
    """Seconds for which it was unhealthy."""


HealthListener: TypeAlias = Callable[[SystemEvent], Any]
"""Called with health events, sync or async: `bus.publish` is one."""


class HealthState(Enum):
    """The health of an endpoint."""

    UNKNOWN = "unknown"
    """No check has passed and no delivery has finished yet."""

    HEALTHY = "healthy"
    """A check has passed or a delivery succeeded, and nothing has failed since."""

    UNHEALTHY = "unhealthy"
    """It gets no messages, except to test a half-open circuit."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointHealth:
    """The health of one endpoint at one moment."""

    state: HealthState
    reason: str | None
    """Why it is unhealthy."""

    circuit: CircuitState
    last_progress: float | None
    """Seconds since its last passed check or finished delivery; `None` if there is none."""


@final
class _EndpointState:
    """What the monitor knows about one endpoint."""

    def __init__(self, endpoint: Endpoint, breaker: CircuitBreaker) -> None:
        self.endpoint = endpoint
        self.breaker = breaker
        self.failed_checks = 0
        self.check_error = ""
        self.last_progress: float | None = None
        self.busy_since = 0.0
        """When it became busy, or last finished a delivery."""
        self.down_since: float | None = None


@final
class DeliveryPermit:
    """Permission for one delivery, ended in one of four ways; a second end does nothing."""

    __slots__ = ("_began", "_is_ended", "_monitor", "_permit", "_state")

    def __init__(self, monitor: HealthMonitor, state: _EndpointState, permit: Permit) -> None:
        self._monitor = monitor
        self._state = state
        self._permit = permit
        self._is_ended = False
        self._began = monitor.clock.now()
        endpoint = state.endpoint
        if endpoint.in_flight == 0:
            state.busy_since = self._began
        endpoint.in_flight += 1

    async def succeeded(self) -> None:
        """End it: the delivery succeeded."""
        if self._end():
            self._state.endpoint.delivered += 1
            self._made_progress()
            self._permit.success()
            await self._monitor.publish_change(self._state)

    async def replied(self, error: Exception) -> None:
        """End it: the endpoint replied with an error, and so is reachable.

        If the breaker has its own `ignore`, that decides whether the error counts.
        """
        if self._monitor.counts_replies:
            await self.failed(error)
        elif self._end():
            self._state.endpoint.failed += 1
            self._made_progress()
            self._permit.success()
            await self._monitor.publish_change(self._state)

    async def failed(self, error: Exception) -> None:
        """End it: the endpoint was unreachable or timed out."""
        if not self._end():
            return
        state = self._state
        state.endpoint.failed += 1
        if not state.breaker.counts(error):
            self._made_progress()
        self._permit.failure(error)
        await self._monitor.publish_change(state, error)

    def cancelled(self) -> None:
        """End it: the delivery was cancelled, which does not affect the health."""
        if self._end():
            self._permit.release()

    def is_older_than(self, seconds: float) -> bool:
        """Return whether the delivery began at least `seconds` ago."""
        return self._monitor.clock.now() - self._began >= seconds

    def _end(self) -> bool:
        """Return whether this is the first end."""
        if self._is_ended:
            return False
        self._is_ended = True
        self._state.endpoint.in_flight -= 1
        return True

    def _made_progress(self) -> None:
        self._state.last_progress = self._state.busy_since = self._monitor.clock.now()


@final
class HealthMonitor:
    """Monitors the health of all endpoints of a registry, including later ones.

    ```python
    async with HealthMonitor(endpoints, on_event=bus.publish) as monitor:
        ...
        monitor.health("worker-1").state
    ```

    Without `async with` there are no periodic checks, but deliveries still count. A monitor
    belongs to one event loop.

    Args:
        endpoints: The endpoints to monitor.
        interval: Seconds between two checks of an endpoint.
        timeout: Time limit of a check, in seconds.
        jitter: The part of the interval over which checks are spread, 0 to 1.
        failed_checks: Consecutive failures that make an endpoint unhealthy.
        stall_after: Seconds without a finished delivery that make a busy endpoint unhealthy.
        breaker: The circuit breaker of each endpoint. Without an `ignore` of its own only
            deliveries count that were unreachable or timed out; other errors are replies.
        on_event: Called with `EndpointUnhealthyEvent` and `EndpointRecoveredEvent`.
        clock: The source of time.
        chance: Returns random numbers from 0 to 1, for the jitter.

    Raises:
        ConfigurationError: A number is out of range.
    """

    def __init__(
        self,
        endpoints: EndpointRegistry,
        *,
        interval: float = 5.0,
        timeout: float = 1.0,
        jitter: float = 0.1,
        failed_checks: int = 2,
        stall_after: float = 30.0,
        breaker: CircuitBreakerConfig | None = None,
        on_event: HealthListener | None = None,
        clock: Clock | None = None,
        chance: Callable[[], float] = random.random,
    ) -> None:
        if interval <= 0 or timeout <= 0 or failed_checks < 1 or not 0 <= jitter <= 1:
            message = (
                f"A HealthMonitor needs interval > 0, timeout > 0, failed_checks >= 1 and a "
                f"jitter from 0 to 1, not {interval}, {timeout}, {failed_checks} and {jitter}."
            )
            raise ConfigurationError(message)
        self.clock: Clock = SystemClock() if clock is None else clock
        self._endpoints = endpoints
        self._interval = interval
        self._timeout = timeout
        self._jitter = jitter
        self._failed_checks = failed_checks
        self._stall_after = stall_after
        config = breaker or CircuitBreakerConfig()
        self.counts_replies = "ignore" in config.model_fields_set
        """Whether errors that are an endpoint's reply may count against it."""
        # The pool decides what is unreachable, and that counts whatever its type.
        self._breaker = config if self.counts_replies else config.model_copy(update={"ignore": ()})
        self._on_event = on_event
        self._chance = chance
        self._states: dict[str, _EndpointState] = {}
        self._task: Task | None = None

    # -- state -------------------------------------------------------------------------------

    def health(self, endpoint_id: str) -> EndpointHealth | None:
        """Return the health of one endpoint, or `None`."""
        endpoint = self._endpoints.get(endpoint_id)
        if endpoint is None:
            return None
        state = self._state(endpoint)
        reason = self._reason(state)
        last = state.last_progress
        known = HealthState.UNKNOWN if last is None else HealthState.HEALTHY
        return EndpointHealth(
            state=known if reason is None else HealthState.UNHEALTHY,
            reason=reason,
            circuit=state.breaker.state,
            last_progress=None if last is None else self.clock.now() - last,
        )

    def report(self) -> dict[str, EndpointHealth]:
        """Return the health of all endpoints, by id."""
        found = {one.endpoint_id: self.health(one.endpoint_id) for one in self._endpoints}
        return {name: health for name, health in found.items() if health is not None}

    def is_healthy(self, endpoint_id: str) -> bool:
        """Return whether this endpoint is `HEALTHY`."""
        health = self.health(endpoint_id)
        return health is not None and health.state is HealthState.HEALTHY

    def _state(self, endpoint: Endpoint) -> _EndpointState:
        state = self._states.get(endpoint.endpoint_id)
        # A new endpoint with the same id starts with a new state.
        if state is None or state.endpoint is not endpoint:
            name = f"endpoint {endpoint.endpoint_id}"
            breaker = CircuitBreaker(self._breaker, name=name, clock=self.clock)
            state = _EndpointState(endpoint, breaker)
            self._states[endpoint.endpoint_id] = state
            self._remove_unregistered()
        return state

    def _remove_unregistered(self) -> None:
        if len(self._states) > len(self._endpoints):
            gone = [name for name in self._states if name not in self._endpoints]
            for name in gone:
                del self._states[name]

    def _reason(self, state: _EndpointState) -> str | None:
        """Return why the endpoint is unhealthy, or `None`."""
        reason = self._blocked(state)
        if reason is None and not state.breaker.is_closed:
            reason = _circuit_reason(state.breaker)
        return reason

    def _blocked(self, state: _EndpointState) -> str | None:
        """Return why no delivery is admitted, apart from the circuit, or `None`."""
        if state.failed_checks >= self._failed_checks:
            return f"{state.failed_checks} health checks failed, the last one: {state.check_error}"
        idle = self.clock.now() - state.busy_since
        in_flight = state.endpoint.in_flight
        if in_flight and idle >= self._stall_after:
            return f"no delivery finished for {idle:g} s, {in_flight} in flight"
        return None

    # -- deliveries --------------------------------------------------------------------------

    def admit(self, endpoint: Endpoint) -> DeliveryPermit | str:
        """Admit one delivery, or return the reason why not.

        A half-open circuit admits one delivery as a test.
        """
        state = self._state(endpoint)
        blocked = self._blocked(state)
        if blocked is not None:
            return blocked
        try:
            return DeliveryPermit(self, state, state.breaker.acquire())
        except CircuitOpenError:
            return _circuit_reason(state.breaker)

    def retry_after(self, endpoint: Endpoint) -> float:
        """Return the seconds after which a retry may succeed."""
        state = self._state(endpoint)
        return self._interval if state.breaker.is_closed else state.breaker.retry_after

    async def publish_change(
        self, state: _EndpointState, error: BaseException | None = None
    ) -> None:
        """Publish an event if the endpoint has become unhealthy or recovered."""
        reason = self._reason(state)
        endpoint_id = state.endpoint.endpoint_id
        if reason is not None and state.down_since is None:
            state.down_since = self.clock.now()
            if error is not None:
                reason = f"{reason}, the last error: {redact_exception(error)}"
            await self._publish(EndpointUnhealthyEvent(endpoint_id=endpoint_id, reason=reason))
        elif reason is None and state.down_since is not None:
            down_for = self.clock.now() - state.down_since
            state.down_since = None
            await self._publish(EndpointRecoveredEvent(endpoint_id=endpoint_id, down_for=down_for))

    async def _publish(self, event: EndpointUnhealthyEvent | EndpointRecoveredEvent) -> None:
        if self._on_event is None:
            return
        try:
            result = self._on_event(event)
            if inspect.isawaitable(result):
                await result
        except Exception as error:  # a broken listener must not break the delivery
            log.error(
                "health_listener_failed",
                endpoint=event.endpoint_id,
                message_type=type(event).__name__,
                error=redact_exception(error),
                traceback=error,
            )

    # -- checks ------------------------------------------------------------------------------

    async def check_now(self) -> dict[str, EndpointHealth]:
        """Check all endpoints once, concurrently, and return their health."""
        async with anyio.create_task_group() as tasks:
            for endpoint in self._endpoints:
                tasks.start_soon(self._check, endpoint, 0.0)
        return self.report()

    async def run(self) -> None:
        """Check all endpoints periodically, until cancelled."""
        while True:
            spread = self._interval * self._jitter
            async with anyio.create_task_group() as tasks:
                for endpoint in self._endpoints:
                    tasks.start_soon(self._check, endpoint, spread * self._chance())
                # A round lasts as long as the interval, or as its slowest check.
                await self.clock.sleep(self._interval)

    async def _check(self, endpoint: Endpoint, delay: float) -> None:
        if delay:
            await self.clock.sleep(delay)
        state = self._state(endpoint)
        if endpoint.run_check is not None:
            failure = await self._run_check(endpoint.run_check)
            if failure is None:
                state.failed_checks = 0
                state.last_progress = self.clock.now()
            else:
                state.failed_checks += 1
                state.check_error = failure
        await self.publish_change(state)

    async def _run_check(self, check: Callable[[], Any]) -> str | None:
        """Run a check; return why it failed, or `None`."""
        failure: str | None = f"no result within {self._timeout:g} s"
        with self.clock.cancel_after(self._timeout):
            try:
                failure = "it returned False" if await check() is False else None
            except Exception as error:
                failure = redact_exception(error)
        return failure

    async def __aenter__(self) -> Self:
        if self._task is None:
            self._task = current_runtime().spawn(self._run_detached, name="msgbus health")
        return self

    async def _run_detached(self) -> None:
        try:
            await self.run()
        except Exception as error:  # pragma: no cover (checks and listeners are caught above)
            log.error("health_monitor_failed", error=redact_exception(error), traceback=error)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None


def _circuit_reason(breaker: CircuitBreaker) -> str:
    return f"its circuit is {breaker.state.value.replace('_', ' ')}"
