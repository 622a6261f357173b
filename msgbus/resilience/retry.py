"""Retry decisions by tenacity's strategies.

Nothing here runs before an attempt has failed. The delay is computed once per failure; the log,
the hook and the sleep get the same number.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, cast, final

import tenacity
from pydantic import ValidationError

from msgbus.errors import (
    BusStateError,
    CircuitOpenError,
    ConfigurationError,
    Refusal,
    WrongMessageTypeError,
)

if TYPE_CHECKING:
    from msgbus.resilience.config import RetryConfig
    from msgbus.runtime.clock import Clock

CIRCUIT_OPEN: Final = "circuit open"

PERMANENT: Final = (
    Refusal,
    ConfigurationError,
    WrongMessageTypeError,
    BusStateError,
    CircuitOpenError,
    ValidationError,
    RecursionError,
)
"""Errors that no retry can fix."""


@final
@dataclass(slots=True)
class FailureRecord:
    """Failed attempts of one message in one handler."""

    first_attempt: datetime
    """When the first attempt failed."""

    last_attempt: datetime
    """When the latest attempt failed."""

    reason: str = ""
    """Why it is not retried."""

    fallback: str | None = None
    """The error that the fallback replaced, with secrets removed."""


@final
@dataclass(frozen=True, slots=True)
class RetryDecision:
    """Whether to retry after a failure."""

    delay: float | None
    """Seconds until the next attempt; `None` for no retry."""

    reason: str = ""
    """Why there is no retry."""


class Retry:
    """The strategies of one `RetryConfig`."""

    def __init__(
        self,
        config: RetryConfig,
        clock: Clock,
        *,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.config = config
        self._clock = clock
        self._chance = chance
        self._stop = config.stop or tenacity.stop_after_attempt(config.max_retries + 1)
        self._wait = config.wait or self._back_off
        self._retry = config.retry or tenacity.retry_if_exception(self._is_wanted)

    def begin(self) -> tenacity.RetryCallState:
        """Make the state that tenacity's strategies read, for one message."""
        # No function and no retry object: the strategies read only numbers and outcomes.
        state = tenacity.RetryCallState(cast("Any", None), None, (), {})
        state.start_time = self._clock.now()
        return state

    def decide(
        self,
        state: tenacity.RetryCallState,
        error: Exception,
        attempt: int,
        deadline: float | None,
    ) -> RetryDecision:
        """Decide after attempt number `attempt` has failed with `error`."""
        if isinstance(error, CircuitOpenError):
            return RetryDecision(None, CIRCUIT_OPEN)
        if isinstance(error, PERMANENT):
            return RetryDecision(None, "permanent error")
        now = self._clock.now()
        state.attempt_number = attempt
        state.outcome = tenacity.Future.construct(attempt, error, has_exception=True)
        state.outcome_timestamp = now
        if not self._retry(state):
            return RetryDecision(None, "not to be retried")
        # Before the stop strategy, as one of them reads the upcoming delay.
        delay = max(float(self._wait(state)), 0.0)
        state.upcoming_sleep = delay
        if self._stop(state):
            return RetryDecision(None, "retries exhausted")
        if deadline is not None and now + delay >= deadline:
            return RetryDecision(None, "no time left for a retry")
        state.idle_for += delay
        return RetryDecision(delay)

    def _is_wanted(self, error: BaseException) -> bool:
        config = self.config
        return isinstance(error, config.retry_on) and not isinstance(error, config.give_up_on)

    def _back_off(self, state: tenacity.RetryCallState) -> float:
        config = self.config
        try:
            delay = config.initial_delay * config.exponential_base ** (state.attempt_number - 1)
        except OverflowError:
            delay = config.max_delay if config.initial_delay else 0.0
        if config.jitter:
            delay = min(delay, config.max_delay) * (0.5 + self._chance())
        return min(delay, config.max_delay)


def first_failure(clock: Clock) -> FailureRecord:
    """The record of a first failure, now."""
    now = datetime.fromtimestamp(clock.time(), tz=UTC)
    return FailureRecord(now, now)
