"""What stands between a message and its handler: retry and breaker in one, then fallback.

A message that is handled at the first try costs one coroutine more than without a guard:
a closed circuit is one comparison, and retry is only looked at after a failure.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, cast, final

from msgbus.bus.context import context_of, current_frame
from msgbus.errors import CircuitOpenError, Refusal
from msgbus.messages.message import first_message, metadata_of
from msgbus.resilience.config import RetryAttempt
from msgbus.resilience.retry import CIRCUIT_OPEN, Retry, trouble_now
from msgbus.telemetry.logging import ids_of, log
from msgbus.telemetry.redaction import redact_exception

if TYPE_CHECKING:
    from msgbus.bus.context import Frame
    from msgbus.handlers.injection import Call
    from msgbus.messages.message import Event
    from msgbus.middleware.chain import Middleware
    from msgbus.resilience.breaker import CircuitBreaker, Permit
    from msgbus.resilience.policy import Policy
    from msgbus.runtime.clock import Clock


@final
class Guard:
    """Around one handler, for as long as the handler is registered.

    Args:
        handler: Its name.
        policy: What to do when it fails.
        breaker: Its circuit, if it has one.
        clock: Where time comes from.
        limits: What one try must pass before the handler, innermost first.
        waits: Whether to wait for an open circuit instead of failing: on a lane, so that
            an outage does not burn the backlog into dead letters.
        on_retry: Told before each pause.
        on_failure: Told of the circuit of each message whose first try failed.
    """

    def __init__(
        self,
        handler: str,
        policy: Policy,
        breaker: CircuitBreaker | None,
        clock: Clock,
        *,
        limits: Sequence[Middleware] = (),
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
        self._tell = on_retry
        self._on_failure = on_failure

    def around(self, attempt: Call) -> Call:
        """`attempt` inside breaker, retry and fallback."""
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
        streak = breaker.streak

        async def call(message: Any) -> Any:
            if streak is None or not breaker.is_closed:
                permit = await self._first_permit(message)
                try:
                    return await _under(permit, attempt, message)
                except Exception as error:
                    failure = error
                return await self._recover(message, attempt, failure)
            generation = breaker.generation
            try:
                value = await attempt(message)
            except Exception as error:
                failure = error
            else:
                if streak.failures:
                    breaker.succeeded(generation)
                return value
            breaker.ended(generation, failure, _message_id(message))
            return await self._recover(message, attempt, failure)

        return call

    async def _first_permit(self, message: Any) -> Permit | None:
        try:
            return await self._permit(message)
        except CircuitOpenError:
            context = context_of(_frame())
            context.attempt = 0  # the handler is never called
            context.trouble = trouble_now(self._clock)
            context.trouble.reason = CIRCUIT_OPEN
            raise

    async def _permit(self, message: Any) -> Permit | None:
        breaker = self.breaker
        if breaker is None:
            return None
        try:
            return breaker.acquire(_message_id(message))
        except CircuitOpenError:
            if not self._waits:
                raise
        with self._parked(message), _frame().owner.waiting_for_circuit(_listed(message)):
            return await breaker.wait(_message_id(message))

    async def _recover(self, message: Any, attempt: Call, error: Exception) -> Any:
        """Try again, as often and as patiently as the policy says."""
        if self._on_failure is not None and self.breaker is not None:
            self._on_failure(self.breaker)
        frame = _frame()
        context = context_of(frame)
        trouble = context.trouble = trouble_now(self._clock)
        if self.retry is None or frame.is_retried_later:
            trouble.reason = "no retry"
            raise error
        del context.emitted[context.kept :]  # it speaks of something that did not happen
        state = self.retry.begin()
        tries = 1
        while True:
            verdict = self.retry.judge(state, error, tries, frame.deadline)
            if verdict.pause is None:
                trouble.reason = verdict.reason
                raise error
            self._announce(RetryAttempt(message, self.handler, tries, error, verdict.pause))
            with self._parked(message):
                await self._clock.sleep(verdict.pause)
            permit = None
            try:
                permit = await self._permit(message)
            except CircuitOpenError:
                trouble.reason = CIRCUIT_OPEN
            if trouble.reason is CIRCUIT_OPEN:
                raise error  # the cause, not the circuit that its own failures have opened
            tries += 1
            context.attempt += 1
            frame.owner.counts.retried += len(_listed(message))
            try:
                return await _under(permit, attempt, message)
            except Exception as again:
                error = again
            del context.emitted[context.kept :]
            trouble.last_attempt = datetime.fromtimestamp(self._clock.time(), tz=UTC)

    def _announce(self, attempt: RetryAttempt) -> None:
        self._tell(attempt)
        hook = self.policy.retry and self.policy.retry.on_retry
        if hook:
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
    def _parked(self, message: Any) -> Generator[None]:
        """While it waits, a lane can hand the message back if the bus stops."""
        if not self._waits:
            yield
            return
        parked: list[Event] = _frame().owner.parked
        mine = _listed(message)
        parked.extend(mine)
        try:
            yield
        finally:
            for event in mine:
                _remove(parked, event)

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
            if context.trouble is None:
                context.trouble = trouble_now(self._clock)
            context.trouble.fallback = text
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


async def _under(permit: Permit | None, attempt: Call, message: Any) -> Any:
    """One try, of which the circuit is told."""
    if permit is None:
        return await attempt(message)
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


def marking(call: Call) -> Call:
    """`call`, inside of middleware that may have emitted something of its own before it."""

    async def mark(message: Any) -> Any:
        context = _frame().context
        if context is not None:
            context.kept = len(context.emitted)
        return await call(message)

    return mark


def _listed(message: Any) -> list[Event]:
    return cast("list[Event]", message if isinstance(message, list) else [message])


def _remove(events: list[Event], event: Event) -> None:
    # By identity: two events may be equal.
    events[:] = [one for one in events if one is not event]


def _message_id(message: Any) -> str:
    return metadata_of(first_message(message)).message_id


def _frame() -> Frame:
    return cast("Frame", current_frame.get())  # the bus sets it before it calls a handler
