"""Retry, circuit breaker and fallback around the calls of one handler.

A message that is handled at the first attempt costs one coroutine more than without: a closed
circuit is one comparison, and retry is looked at only after a failure.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, cast, final

from msgbus.errors import CircuitOpenError, Refusal
from msgbus.messages.frame import context_of, current_frame
from msgbus.messages.message import first_message, ids_of, metadata_of
from msgbus.resilience.config import RetryAttempt
from msgbus.resilience.retry import CIRCUIT_OPEN, Retry, first_failure
from msgbus.telemetry.logging import log
from msgbus.telemetry.redaction import redact_exception

if TYPE_CHECKING:
    from msgbus.handlers.injection import Call
    from msgbus.messages.frame import Frame
    from msgbus.messages.message import Event
    from msgbus.resilience.breaker import CircuitBreaker, Permit
    from msgbus.resilience.policy import Policy
    from msgbus.runtime.clock import Clock


@final
class Guard:
    """Retry, breaker and fallback of one handler.

    Args:
        handler: Name of the handler.
        policy: Its policy.
        breaker: Its circuit, if any.
        clock: Clock to use.
        limits: Middleware around each attempt, innermost first.
        waits: Whether to wait for an open circuit instead of failing: on a lane, so that
            an outage does not dead-letter the backlog.
        on_retry: Called before each delay.
        on_failure: Called with the circuit when the first attempt of a message has failed.
    """

    def __init__(
        self,
        handler: str,
        policy: Policy,
        breaker: CircuitBreaker | None,
        clock: Clock,
        *,
        limits: Sequence[Callable[[Any, Call], Awaitable[Any]]] = (),
        waits: bool,
        on_retry: Callable[[RetryAttempt], None],
        on_failure: Callable[[CircuitBreaker], None] | None = None,
    ) -> None:
        self.handler = handler
        self.policy = policy
        self.breaker = breaker
        self.limits = limits
        self.retry = None if policy.retry is None else Retry(policy.retry, clock)
        self._clock = clock
        self._waits = waits
        self._on_retry = on_retry
        self._on_failure = on_failure

    def around(self, attempt: Call) -> Call:
        """Wrap `attempt` in breaker, retry and fallback."""
        call = attempt
        if self.breaker is not None:
            call = self._with_breaker(attempt, self.breaker)
        elif self.retry is not None:
            call = self._with_retry(attempt)
        return call if self.policy.fallback is None else self._with_fallback(call)

    def _with_retry(self, attempt: Call) -> Call:
        async def call(message: Any) -> Any:
            try:
                return await attempt(message)
            except Exception as error:
                failure = error
            return await self._recover(message, attempt, failure)

        return call

    def _with_breaker(self, attempt: Call, breaker: CircuitBreaker) -> Call:
        records_all = breaker.records_all

        async def call(message: Any) -> Any:
            if records_all or not breaker.is_closed:
                permit = await self._first_permit(message)
                try:
                    return await self._once(permit, message, attempt)
                except Exception as error:
                    failure = error
                return await self._recover(message, attempt, failure)
            generation = breaker.generation
            try:
                value = await attempt(message)
            except Exception as error:
                failure = error
            else:
                if breaker.in_a_row:
                    breaker.succeeded(generation)
                return value
            breaker.ended(generation, failure)
            return await self._recover(message, attempt, failure)

        return call

    async def _first_permit(self, message: Any) -> Permit | None:
        try:
            return await self._permit(message)
        except CircuitOpenError:
            context = context_of(_frame())
            context.attempt = 0  # the handler is never called
            context.failures = first_failure(self._clock)
            context.failures.reason = CIRCUIT_OPEN
            raise

    async def _permit(self, message: Any) -> Permit | None:
        """Get a permit for the next attempt; `None` if it needs none."""
        breaker = self.breaker
        if breaker is None or (breaker.is_closed and not breaker.records_all):
            return None
        message_id = metadata_of(first_message(message)).message_id
        try:
            return breaker.acquire(message_id)
        except CircuitOpenError:
            if not self._waits:
                raise
        events, owner = _listed(message), _frame().owner
        with self._parked(events, owner), owner.waiting_for_circuit(events):
            return await breaker.wait(message_id)

    async def _once(self, permit: Permit | None, message: Any, attempt: Call) -> Any:
        """Run one attempt, and record its outcome in the circuit."""
        breaker = self.breaker
        if breaker is None:
            return await attempt(message)
        if permit is None:
            generation = breaker.generation
            try:
                value = await attempt(message)
            except Exception as error:
                breaker.ended(generation, error)
                raise
            breaker.succeeded(generation)
            return value
        try:
            value = await attempt(message)
        except Exception as error:
            permit.failure(error)
            raise
        except BaseException:
            permit.release()
            raise
        permit.success()
        return value

    async def _recover(self, message: Any, attempt: Call, error: Exception) -> Any:
        """Retry as the policy says."""
        if self._on_failure is not None and self.breaker is not None:
            self._on_failure(self.breaker)
        frame = _frame()
        context = context_of(frame)
        failures = context.failures = first_failure(self._clock)
        if self.retry is None or frame.is_retried_later:
            failures.reason = "no retry"
            raise error
        del context.emitted[context.kept :]  # events of a failed attempt
        state, events = self.retry.begin(), _listed(message)
        attempts = 1
        while True:
            decision = self.retry.decide(state, error, attempts, frame.deadline)
            if decision.delay is None:
                failures.reason = decision.reason
                raise error
            self._announce(RetryAttempt(message, self.handler, attempts, error, decision.delay))
            permit = None
            with self._parked(events, frame.owner):
                await self._clock.sleep(decision.delay)
            try:
                permit = await self._permit(message)
            except CircuitOpenError:
                failures.reason = CIRCUIT_OPEN
            if failures.reason is CIRCUIT_OPEN:
                raise error  # the cause, not the circuit that its own failures opened
            attempts += 1
            context.attempt += 1
            frame.owner.counts.retried += len(events)
            try:
                return await self._once(permit, message, attempt)
            except Exception as again:
                error = again
            del context.emitted[context.kept :]
            failures.last_attempt = datetime.fromtimestamp(self._clock.time(), tz=UTC)

    def _announce(self, attempt: RetryAttempt) -> None:
        self._on_retry(attempt)
        hook = self.policy.retry and self.policy.retry.on_retry
        if not hook:
            return
        try:
            hook(attempt)
        except Exception as error:  # a broken hook must not break the retry
            log.error(
                "retry_hook_failed",
                handler=self.handler,
                error=redact_exception(error),
                traceback=error,
            )

    @contextmanager
    def _parked(self, events: list[Event], owner: Any) -> Generator[None]:
        """Let the lane return the events if the bus stops while they wait."""
        if not self._waits:
            yield
            return
        parked: list[Event] = owner.backing_off
        parked.extend(events)
        try:
            yield
        finally:
            ids = {id(event) for event in events}  # two events may be equal
            parked[:] = [event for event in parked if id(event) not in ids]

    def _with_fallback(self, call: Call) -> Call:
        fallback = self.policy.fallback

        async def call_or_fall_back(message: Any) -> Any:
            try:
                return await call(message)
            except Refusal:
                raise
            except Exception as error:
                failure = error
            context = context_of(_frame())
            del context.emitted[context.kept :]
            value = fallback(message, failure) if callable(fallback) else fallback
            if inspect.isawaitable(value):
                value = await value
            text = redact_exception(failure)
            if context.failures is None:
                context.failures = first_failure(self._clock)
            context.failures.fallback = text
            log.warning(
                "fallback_used",
                handler=self.handler,
                **ids_of(first_message(message)),
                attempt=context.attempt,
                error=text,
                traceback=failure,
            )
            return value

        return call_or_fall_back


def keep_earlier_events(call: Call) -> Call:
    """Wrap `call` so that events emitted by middleware before it survive a failed attempt."""

    async def mark(message: Any) -> Any:
        context = _frame().context
        if context is not None:
            context.kept = len(context.emitted)
        return await call(message)

    return mark


def _listed(message: Any) -> list[Event]:
    return cast("list[Event]", message if isinstance(message, list) else [message])


def _frame() -> Frame:
    return cast("Frame", current_frame.get())  # the bus sets it before it calls a handler
