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

from msgbus.errors import BusStateError, CircuitOpenError
from msgbus.resilience.config import PERMANENT

if TYPE_CHECKING:
    from msgbus.resilience.config import RetryConfig
    from msgbus.runtime.clock import Clock

CIRCUIT_OPEN: Final = "circuit open"

_NOT_IN_PROCESS: Final = (*PERMANENT, BusStateError, CircuitOpenError)
"""Errors that no retry can fix while the caller waits."""


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
        if isinstance(error, _NOT_IN_PROCESS):
            return RetryDecision(None, "permanent error")
        now, config = self._clock.now(), self.config
        state.attempt_number = attempt
        state.outcome = tenacity.Future.construct(attempt, error, has_exception=True)
        state.outcome_timestamp = now
        if not (config.allows(error) if config.retry is None else config.retry(state)):
            return RetryDecision(None, "not to be retried")
        # Before the stop strategy, as one of them reads the upcoming delay.
        if config.wait is None:
            delay = config.delay(attempt, self._chance())
        else:
            delay = max(float(config.wait(state)), 0.0)
        state.upcoming_sleep = delay
        if attempt > config.retries_of(error) if config.stop is None else config.stop(state):
            return RetryDecision(None, "retries exhausted")
        if deadline is not None and now + delay >= deadline:
            return RetryDecision(None, "no time left for a retry")
        state.idle_for += delay
        return RetryDecision(delay)


def first_failure(clock: Clock) -> FailureRecord:
    """The record of a first failure, now."""
    now = datetime.fromtimestamp(clock.time(), tz=UTC)
    return FailureRecord(now, now)
