"""Whether, and after how long, to try again: tenacity's strategies, asked by our own loop.

Nothing here runs before something has failed. The pause is worked out once per failure;
the log, the hook and the sleep get the same number.
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
"""What comes out the same however often it is tried."""


@final
@dataclass(slots=True)
class Trouble:
    """What has gone wrong with one message in one handler so far."""

    first_attempt: datetime
    """When the first try had failed."""

    last_attempt: datetime
    """When the latest try had failed."""

    reason: str = ""
    """Why it is not tried again."""

    fallback: str | None = None
    """The error that a fallback has answered for, secrets removed."""


@final
@dataclass(frozen=True, slots=True)
class Verdict:
    """What to do about a failure."""

    pause: float | None
    """Seconds to wait before the next try, or `None` to give up."""

    reason: str = ""
    """Why to give up."""


class Retry:
    """The strategies of one `RetryConfig`, ready to be asked."""

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
        """The state that tenacity's strategies look at, for one message."""
        # No function and no retry object: the strategies ask only for numbers and outcomes.
        state = tenacity.RetryCallState(cast("Any", None), None, (), {})
        state.start_time = self._clock.now()
        return state

    def judge(
        self,
        state: tenacity.RetryCallState,
        error: Exception,
        attempt: int,
        deadline: float | None,
    ) -> Verdict:
        """What to do, now that try number `attempt` has failed with `error`."""
        if isinstance(error, CircuitOpenError):
            return Verdict(None, CIRCUIT_OPEN)
        if isinstance(error, PERMANENT):
            return Verdict(None, "permanent error")
        now = self._clock.now()
        state.attempt_number = attempt
        state.outcome = tenacity.Future.construct(attempt, error, has_exception=True)
        state.outcome_timestamp = now
        if not self._retry(state):
            return Verdict(None, "not to be retried")
        # Before the stop strategy is asked: one of them looks at the coming pause.
        pause = max(float(self._wait(state)), 0.0)
        state.upcoming_sleep = pause
        if self._stop(state):
            return Verdict(None, "retries exhausted")
        if deadline is not None and now + pause >= deadline:
            return Verdict(None, "no time left for a retry")
        state.idle_for += pause
        return Verdict(pause)

    def _is_wanted(self, error: BaseException) -> bool:
        config = self.config
        return isinstance(error, config.retry_on) and not isinstance(error, config.give_up_on)

    def _back_off(self, state: tenacity.RetryCallState) -> float:
        config = self.config
        try:
            pause = config.initial_delay * config.exponential_base ** (state.attempt_number - 1)
        except OverflowError:
            pause = config.max_delay if config.initial_delay else 0.0
        if config.jitter:
            pause = min(pause, config.max_delay) * (0.5 + self._chance())
        return min(pause, config.max_delay)


def trouble_now(clock: Clock) -> Trouble:
    """The beginning of trouble."""
    now = datetime.fromtimestamp(clock.time(), tz=UTC)
    return Trouble(now, now)
