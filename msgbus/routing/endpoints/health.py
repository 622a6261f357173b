"""HealthMonitor: whether endpoints are well, proven by what they get done.

Three things can put an endpoint out of order, and each has its own way back:

- its deliveries fail: its circuit breaker opens, and closes once a real delivery succeeds;
- its health checks fail, again and again: until one passes;
- it takes messages and finishes none: until one is finished.

Silence proves nothing. An endpoint that was never checked and never got a message done is
`UNKNOWN`, not healthy; it is used all the same, as somebody has to be the first to try.
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
from msgbus.resilience.breaker import CircuitBreaker, Permit
from msgbus.resilience.config import CircuitBreakerConfig
from msgbus.resilience.states import CircuitState
from msgbus.routing.endpoints.endpoints import Endpoint, EndpointRegistry
from msgbus.runtime.clock import Clock, SystemClock
from msgbus.runtime.event_loop import Task, current_runtime
from msgbus.telemetry.logging import log
from msgbus.telemetry.redaction import redact_exception

if TYPE_CHECKING:
    from types import TracebackType


class EndpointUnhealthyEvent(SystemEvent):
    """An endpoint is out of order; messages go to others from now on."""

    endpoint_id: str
    reason: str
    """What is wrong, secrets removed."""


class EndpointRecoveredEvent(SystemEvent):
    """An endpoint that was out of order works again."""

    endpoint_id: str
    down_for: float
    """Seconds that it was out of order."""


Hear: TypeAlias = Callable[[SystemEvent], Any]
"""Hears of endpoints that go and come back, sync or async: `bus.publish` is one."""


class HealthState(Enum):
    """What is known of an endpoint."""

    UNKNOWN = "unknown"
    """Nothing has proven it well, or unwell."""

    HEALTHY = "healthy"
    """A check has passed or a delivery succeeded, and nothing is wrong since."""

    UNHEALTHY = "unhealthy"
    """It is out of order."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointHealth:
    """One endpoint's health at one moment."""

    state: HealthState
    reason: str | None
    """Why it is out of order."""

    circuit: CircuitState
    last_progress: float | None
    """Seconds since it last passed a check or finished a delivery; `None` if it never did."""


@final
class _Watch:
    """What the monitor knows of one endpoint."""

    def __init__(self, endpoint: Endpoint, breaker: CircuitBreaker) -> None:
        self.endpoint = endpoint
        self.breaker = breaker
        self.failed_checks = 0
        self.check_error = ""
        self.last_progress: float | None = None
        self.busy_since = 0.0
        """When it began to have something to do, or last finished something."""
        self.down_since: float | None = None


@final
class Passage:
    """Leave for one delivery, to be ended in one of four ways; a second ending does nothing."""

    __slots__ = ("_began", "_is_over", "_monitor", "_permit", "_watch")

    def __init__(self, monitor: HealthMonitor, watch: _Watch, permit: Permit) -> None:
        self._monitor = monitor
        self._watch = watch
        self._permit = permit
        self._is_over = False
        self._began = monitor.clock.now()
        endpoint = watch.endpoint
        if endpoint.in_flight == 0:
            watch.busy_since = self._began
        endpoint.in_flight += 1

    async def succeeded(self) -> None:
        """The delivery succeeded: the endpoint is making progress."""
        if self._end():
            self._watch.endpoint.delivered += 1
            self._made_progress()
            self._permit.success()
            await self._monitor.assess(self._watch)

    async def answered(self, error: Exception) -> None:
        """The endpoint raised an error that is its answer, and so is up.

        Unless the breaker was told what to ignore: then that decides.
        """
        if self._monitor.judges_answers:
            await self.failed(error)
        elif self._end():
            self._watch.endpoint.failed += 1
            self._made_progress()
            self._permit.success()
            await self._monitor.assess(self._watch)

    async def failed(self, error: Exception) -> None:
        """The delivery failed: the endpoint is out of reach, or took too long."""
        if not self._end():
            return
        watch = self._watch
        watch.endpoint.failed += 1
        if not watch.breaker.counts(error):
            self._made_progress()
        self._permit.failure(error)
        await self._monitor.assess(watch, error)

    def cancelled(self) -> None:
        """The delivery was cancelled, which says nothing about the endpoint."""
        if self._end():
            self._permit.release()

    def is_older_than(self, seconds: float) -> bool:
        """Whether the endpoint has had the message for so long."""
        return self._monitor.clock.now() - self._began >= seconds

    def _end(self) -> bool:
        """Whether this is its first ending."""
        if self._is_over:
            return False
        self._is_over = True
        self._watch.endpoint.in_flight -= 1
        return True

    def _made_progress(self) -> None:
        self._watch.last_progress = self._watch.busy_since = self._monitor.clock.now()


@final
class HealthMonitor:
    """Watches the endpoints of a registry, those that come later too.

    ```python
    async with HealthMonitor(endpoints, on_event=bus.publish) as monitor:
        ...
        monitor.health("worker-1").state
    ```

    Without `async with` nothing is checked by the clock, but deliveries are still judged.
    It belongs to one event loop.

    Args:
        endpoints: Whom to watch.
        interval: Seconds between two checks of an endpoint.
        timeout: Seconds that a check may take.
        jitter: The part of the interval by which checks are spread, 0 to 1.
        failed_checks: So many in a row put an endpoint out of order.
        stall_after: Seconds without a finished delivery that put a busy endpoint out of order.
        breaker: When failing deliveries do, and for how long; one breaker for each endpoint.
            Without an `ignore` of its own only deliveries count that did not reach their
            endpoint, or took too long; other errors are answers.
        on_event: Hears `EndpointUnhealthyEvent` and `EndpointRecoveredEvent`.
        clock: Where time comes from.
        chance: Gives numbers from 0 to 1, for the jitter.

    Raises:
        ConfigurationError: A number makes no sense.
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
        on_event: Hear | None = None,
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
        self.judges_answers = "ignore" in config.model_fields_set
        """Whether errors that are an endpoint's answer may count against it."""
        # What is out of reach is the pool's to say, and counts whatever its type.
        self._breaker = config if self.judges_answers else config.model_copy(update={"ignore": ()})
        self._on_event = on_event
        self._chance = chance
        self._watches: dict[str, _Watch] = {}
        self._task: Task | None = None

    # -- what is known -----------------------------------------------------------------------

    def health(self, endpoint_id: str) -> EndpointHealth | None:
        """One endpoint's health; `None` if there is no such endpoint."""
        endpoint = self._endpoints.get(endpoint_id)
        if endpoint is None:
            return None
        watch = self._watch(endpoint)
        reason = self._reason(watch)
        if reason is not None:
            state = HealthState.UNHEALTHY
        else:
            is_proven = watch.last_progress is not None
            state = HealthState.HEALTHY if is_proven else HealthState.UNKNOWN
        last = watch.last_progress
        return EndpointHealth(
            state=state,
            reason=reason,
            circuit=watch.breaker.state,
            last_progress=None if last is None else self.clock.now() - last,
        )

    def report(self) -> dict[str, EndpointHealth]:
        """The health of all endpoints, by id."""
        found = {one.endpoint_id: self.health(one.endpoint_id) for one in self._endpoints}
        return {name: health for name, health in found.items() if health is not None}

    def is_healthy(self, endpoint_id: str) -> bool:
        """Whether this endpoint is proven to be well."""
        health = self.health(endpoint_id)
        return health is not None and health.state is HealthState.HEALTHY

    def _watch(self, endpoint: Endpoint) -> _Watch:
        watch = self._watches.get(endpoint.endpoint_id)
        # Another one of the same id is another endpoint, and begins anew.
        if watch is None or watch.endpoint is not endpoint:
            name = f"endpoint {endpoint.endpoint_id}"
            watch = _Watch(endpoint, CircuitBreaker(self._breaker, name=name, clock=self.clock))
            self._watches[endpoint.endpoint_id] = watch
            self._forget_the_gone()
        return watch

    def _forget_the_gone(self) -> None:
        if len(self._watches) > len(self._endpoints):
            gone = [name for name in self._watches if name not in self._endpoints]
            for name in gone:
                del self._watches[name]

    def _reason(self, watch: _Watch) -> str | None:
        """Why the endpoint is out of order, if it is."""
        reason = self._barrier(watch)
        if reason is None and not watch.breaker.is_closed:
            reason = f"its circuit is {watch.breaker.state.value.replace('_', ' ')}"
        return reason

    def _barrier(self, watch: _Watch) -> str | None:
        """Why not even one delivery may be tried, beside what the circuit says."""
        if watch.failed_checks >= self._failed_checks:
            return f"{watch.failed_checks} health checks failed, the last one: {watch.check_error}"
        idle = self.clock.now() - watch.busy_since
        waiting = watch.endpoint.in_flight
        if waiting and idle >= self._stall_after:
            return f"no delivery was finished for {idle:g} s, {waiting} under way"
        return None

    # -- deliveries --------------------------------------------------------------------------

    def admit(self, endpoint: Endpoint) -> Passage | str:
        """Leave for one delivery, or the reason why there is none.

        An endpoint whose circuit is half open gets one to try.
        """
        watch = self._watch(endpoint)
        barrier = self._barrier(watch)
        if barrier is not None:
            return barrier
        try:
            return Passage(self, watch, watch.breaker.acquire())
        except CircuitOpenError:
            return f"its circuit is {watch.breaker.state.value.replace('_', ' ')}"

    def retry_after(self, endpoint: Endpoint) -> float:
        """Seconds after which another try may make sense."""
        watch = self._watch(endpoint)
        return self._interval if watch.breaker.is_closed else watch.breaker.retry_after

    async def assess(self, watch: _Watch, error: BaseException | None = None) -> None:
        """Tell if the endpoint went out of order just now, or came back."""
        reason = self._reason(watch)
        endpoint_id = watch.endpoint.endpoint_id
        if reason is not None and watch.down_since is None:
            watch.down_since = self.clock.now()
            if error is not None:
                reason = f"{reason}, the last error: {redact_exception(error)}"
            await self._tell(EndpointUnhealthyEvent(endpoint_id=endpoint_id, reason=reason))
        elif reason is None and watch.down_since is not None:
            down_for = self.clock.now() - watch.down_since
            watch.down_since = None
            await self._tell(EndpointRecoveredEvent(endpoint_id=endpoint_id, down_for=down_for))

    async def _tell(self, event: EndpointUnhealthyEvent | EndpointRecoveredEvent) -> None:
        if self._on_event is None:
            return
        try:
            told = self._on_event(event)
            if inspect.isawaitable(told):
                await told
        except Exception as error:  # a broken listener must not break the delivery it hears of
            log.error(
                "health_listener_failed",
                endpoint=event.endpoint_id,
                message_type=type(event).__name__,
                error=redact_exception(error),
                traceback=error,
            )

    # -- checks ------------------------------------------------------------------------------

    async def check_now(self) -> dict[str, EndpointHealth]:
        """Check all endpoints once, side by side, and give their health."""
        async with anyio.create_task_group() as tasks:
            for endpoint in self._endpoints:
                tasks.start_soon(self._check, endpoint, 0.0)
        return self.report()

    async def run(self) -> None:
        """Check all endpoints again and again, until this is cancelled."""
        while True:
            spread = self._interval * self._jitter
            async with anyio.create_task_group() as tasks:
                for endpoint in self._endpoints:
                    tasks.start_soon(self._check, endpoint, spread * self._chance())
                # The round lasts as long as the interval, or as its slowest check.
                await self.clock.sleep(self._interval)

    async def _check(self, endpoint: Endpoint, delay: float) -> None:
        if delay:
            await self.clock.sleep(delay)
        watch = self._watch(endpoint)
        if endpoint.ask_health is not None:
            trouble = await self._trouble(endpoint.ask_health)
            if trouble is None:
                watch.failed_checks = 0
                watch.last_progress = self.clock.now()
            else:
                watch.failed_checks += 1
                watch.check_error = trouble
        await self.assess(watch)

    async def _trouble(self, check: Callable[[], Any]) -> str | None:
        """What a check finds, if anything."""
        trouble: str | None = f"no answer within {self._timeout:g} s"
        with self.clock.cancel_after(self._timeout):
            try:
                trouble = "it says that it is not well" if await check() is False else None
            except Exception as error:
                trouble = redact_exception(error)
        return trouble

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
