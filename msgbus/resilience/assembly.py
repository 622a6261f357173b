"""The call chain of a `ResilientMessageBus` around each handler, and its dead letters."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, final
from weakref import WeakKeyDictionary

from typing_extensions import override

from msgbus.bus.assembly import Assembly
from msgbus.errors import (
    DeadLetterError,
    MessageDepthError,
    Refusal,
)
from msgbus.messages.frame import frame_handling
from msgbus.messages.message import (
    Event,
    Message,
    SystemEvent,
    first_message,
    ids_of,
    metadata_of,
)
from msgbus.messages.system_events import RetryScheduledEvent
from msgbus.middleware.chain import with_timeout
from msgbus.middleware.concurrency import ConcurrencyLimitMiddleware
from msgbus.middleware.rate_limit import RateLimitMiddleware
from msgbus.resilience.breaker import CircuitBreaker
from msgbus.resilience.circuits import Circuits
from msgbus.resilience.config import (
    DEFAULT_RETRY,
    DURABLE_RETRY,
    NO_RETRY,
    CircuitBreakerConfig,
    RateLimit,
    RetryAttempt,
    RetryConfig,
)
from msgbus.resilience.dead_letters.entry import DeadLetterEntry
from msgbus.resilience.dead_letters.memory import MemoryDeadLetterStore
from msgbus.resilience.dead_letters.queue import DeadLetterQueue
from msgbus.resilience.guard import Guard, keep_earlier_events
from msgbus.resilience.policy import Breaker, Policy, PolicyTable, describe
from msgbus.telemetry.logging import log
from msgbus.telemetry.redaction import redact_exception

if TYPE_CHECKING:
    from msgbus.bus.bus_state import BusState
    from msgbus.bus.lanes.lane import Lane
    from msgbus.bus.plans import CommandPlan
    from msgbus.bus.session import SessionState
    from msgbus.handlers.injection import Call
    from msgbus.handlers.registration import Registration
    from msgbus.messages.frame import Frame
    from msgbus.messages.results import CommandResult, FailedResult
    from msgbus.middleware.chain import Middleware
    from msgbus.resilience.retry import FailureRecord


@final
class ResilientAssembly(Assembly):
    """Retry, breaker, limits and fallback around each handler; a dead letter for each failure.

    Args:
        state: The bus.
        policies: What to do when a handler fails.
        breaker: The breaker of circuits that are named without a configuration.
    """

    def __init__(self, state: BusState, policies: PolicyTable, breaker: Breaker | None) -> None:
        super().__init__(state)
        self.policies = policies
        self.circuits = Circuits(state, breaker)
        self.guards: WeakKeyDictionary[Registration, Guard] = WeakKeyDictionary()
        self.letters: DeadLetterQueue | None = None
        """The queue of dead letters, if the bus has one."""

    @override
    def describe(self, registration: Registration) -> str:
        policy = self._policy_of(registration)
        if registration.timeout is not None:
            policy = replace(policy, timeout=registration.timeout)
        circuit = self.circuits.name_of(registration, policy.breaker)
        return "\n".join(describe(policy, circuit))

    def _policy_of(self, registration: Registration) -> Policy:
        policy = self.policies.of(registration)
        if self._state.is_durable(registration):
            # Its subscription retries, and counts attempts across restarts.
            return replace(policy, retry=None)
        return policy

    # -- failures ----------------------------------------------------------------------------

    @override
    def command_failed(self, frame: CommandResult[Any], result: FailedResult[Any]) -> None:
        error = result.peek_exception()
        if isinstance(error, MessageDepthError) and frame.parent is not None:
            return  # only the outermost call is dead-lettered; hundreds may be below it
        plan: CommandPlan = frame.owner
        # `execute` returns the result to its caller, who sees the failure.
        letter = self._dead_letter(
            frame, frame.message, plan.registration, error, scope=plan.scope, answered=True
        )
        if letter is not None:
            result.add_metadata("dead_letter", letter.letter_id)

    @override
    def event_failed(self, lane: Lane, event: Event, error: BaseException) -> None:
        if lane.is_durable:  # the subscription decides: a retry, or a dead letter
            return
        if isinstance(error, Exception):
            self._dead_letter(
                frame_handling(event),
                event,
                lane.registration,
                error,
                scope=lane.session_id,
                answered=False,
            )

    def _dead_letter(
        self,
        frame: Frame | None,
        message: Message,
        registration: Registration,
        error: Exception,
        *,
        scope: str | None,
        answered: bool,
    ) -> DeadLetterEntry | None:
        is_about_us = isinstance(message, SystemEvent) or metadata_of(message).from_system
        if self.letters is None or isinstance(error, Refusal) or is_about_us:
            return None
        guard = self.guards.get(registration)
        policy = self.policies.of(registration) if guard is None else guard.policy
        if not policy.dead_letters:
            return None
        context = None if frame is None else frame.context
        failures: FailureRecord | None = None if context is None else context.failures
        now = self._state.clock.time()
        attempts = 1 if context is None else context.attempt
        if self._state.durability is not None:
            self._state.durability.recorder.dead_lettered(
                message, registration.name, attempts, error
            )
        return self.letters.add(
            message,
            handler=registration.name,
            error=error,
            attempts=attempts,
            first_attempt=now if failures is None else failures.first_attempt,
            last_attempt=now if failures is None else failures.last_attempt,
            reason="not retried" if failures is None else failures.reason,
            answered=answered,
            scope=scope,
            target=registration.target_key,
        )

    @override
    def command_unobserved(self, result: FailedResult[Any]) -> None:
        letter_id = result.metadata.get("dead_letter")
        runtime = self._state.runtime
        if isinstance(letter_id, str) and runtime is not None:
            # Called by the garbage collector, in any thread and at any moment.
            task = partial(self._mark_unanswered, letter_id)

            def begin() -> None:
                with suppress(RuntimeError):  # trio takes no task while its run ends
                    runtime.spawn(task, name="msgbus unanswered letter")

            runtime.call_soon(begin)

    async def _mark_unanswered(self, letter_id: str) -> None:
        if self.letters is None:
            return
        try:
            await self.letters.mark_unanswered(letter_id)
        except DeadLetterError as error:  # it stays out of `replay_all`, and is still there
            log.warning("letter_not_marked", letter_id=letter_id, error=redact_exception(error))

    # -- around each handler -------------------------------------------------------------------

    @override
    def assemble(
        self, registration: Registration, call: Call, session: SessionState | None
    ) -> Call:
        state = self._state
        guard = self.guard(registration, session)
        call = state.limit_time(registration, state.wrap(registration, call, "attempt"))
        if registration.timeout is None and guard.policy.timeout is not None:
            call = with_timeout(call, guard.policy.timeout, registration.name, state.clock)
        call = state.observed(registration, call, session, "attempt")
        for limit in guard.limits:
            call = _inside(limit, call)
        if registration.batch:
            call = _on_a_copy(call)
        call = guard.around(call)
        if any(entry.per == "message" for entry in state.middleware):
            call = keep_earlier_events(call)
        return state.wrap(registration, call, "message")

    @override
    def durable_retry(self, registration: Registration) -> RetryConfig:
        retry = self.policies.of(registration).retry
        if retry is None:
            return NO_RETRY
        # The default of the bus is for callers who wait; a given one is used as it is.
        return DURABLE_RETRY if retry is DEFAULT_RETRY else retry

    @override
    def writes_names(self) -> bool:
        letters = self.letters
        in_file = letters is not None and not isinstance(letters.store, MemoryDeadLetterStore)
        return in_file or super().writes_names()

    @override
    def is_retried(self, registration: Registration) -> bool:
        return self.policies.of(registration).retry is not None

    def guard(self, registration: Registration, session: SessionState | None) -> Guard:
        """Get the handler's guard, which survives rebuilding of its call chain."""
        guards: Any = self.guards if session is None else session.attachments
        guard: Guard | None = guards.get(registration)
        if guard is None:
            guard = guards[registration] = self._make_guard(registration, session)
        return guard

    def _make_guard(self, registration: Registration, session: SessionState | None) -> Guard:
        policy = self._policy_of(registration)
        circuit: CircuitBreaker | None = None
        breaker = policy.breaker
        is_new = (
            isinstance(breaker, CircuitBreakerConfig)
            and self.circuits.known(registration, breaker) is None
        )
        if is_new and session is not None:
            # The bus's own handlers take their names first.
            self.make_circuits(registration.name)
        if breaker is not None:
            circuit = self.circuits.of(registration, breaker)
        limits: list[Middleware] = []
        if policy.rate_limit is not None:
            rate = policy.rate_limit
            rate = rate if isinstance(rate, RateLimit) else RateLimit(per_second=rate)
            limits.append(RateLimitMiddleware(rate.per_second, burst=rate.burst))
        if policy.bulkhead is not None:
            limits.append(ConcurrencyLimitMiddleware(policy.bulkhead))
        return Guard(
            registration.name,
            policy,
            circuit,
            self._state.clock,
            limits=limits,
            waits=not registration.is_command,
            on_retry=self._retry_scheduled,
            on_failure=None if session is None else self.circuits.keep,
        )

    def _retry_scheduled(self, retry: RetryAttempt) -> None:
        message = first_message(retry.message)
        text = redact_exception(retry.error)
        log.warning(
            "retry_scheduled",
            bus=self._state.config.name,
            handler=retry.handler,
            **ids_of(message),
            attempt=retry.attempt,
            delay=retry.delay,
            error=text,
            traceback=retry.error,
        )
        if self._state.may_want(RetryScheduledEvent):
            self._state.system_events.publish(
                RetryScheduledEvent,
                message,
                lambda: RetryScheduledEvent(
                    handler=retry.handler,
                    message_type=type(message).__name__,
                    failed_id=metadata_of(message).message_id,
                    attempt=retry.attempt,
                    delay=retry.delay,
                    error=text,
                ),
            )

    def make_circuits(self, name: str) -> None:
        """Make the circuits of the bus's own handlers of this name, if there are none."""
        for session_id, registration in self._state.registry.registrations():
            if session_id is None and registration.name == name:
                self.guard(registration, None)


def _inside(limit: Middleware, call: Call) -> Call:
    return lambda message: limit(message, call)


def _on_a_copy(call: Call) -> Call:
    # A handler that empties its list must not leave the next attempt without events.
    return lambda events: call(events.copy())
