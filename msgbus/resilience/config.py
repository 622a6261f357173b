"""Configuration of retry, circuit breaker and rate limit: frozen data."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, final

from pydantic import ConfigDict, Field, ValidationError, field_validator, model_validator

from msgbus.errors import (
    ConfigurationError,
    Refusal,
    StoredMessageError,
    Unhandleable,
    WrongMessageTypeError,
)
from msgbus.runtime.arguments import Options

MESSAGE_ERRORS: Final[tuple[type[Exception], ...]] = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    AssertionError,
    ArithmeticError,
    NotImplementedError,
)
"""Errors caused by the message or the code, not by a service that is down. By default they do not
count as failures of a circuit; an `OSError` does, even if it is one of these too."""

PERMANENT: Final = (
    Refusal,
    Unhandleable,
    ConfigurationError,
    WrongMessageTypeError,
    StoredMessageError,
    ValidationError,
    RecursionError,
)
"""Errors that no retry can fix, now or later. An open circuit and a closed bus are not among them:
a durable subscription waits until they have passed."""

Ignored: TypeAlias = type[Exception] | Callable[[Exception], bool]
"""An exception type, or a function that returns whether an exception is ignored."""


@final
@dataclass(frozen=True, slots=True)
class RetryAttempt:
    """A failed attempt that will be retried, as passed to `on_retry`."""

    message: Any
    """The message; of a batch handler the list."""

    handler: str
    """Name of the handler that failed."""

    attempt: int
    """Number of the failed attempt, from 1."""

    error: Exception
    """The exception."""

    delay: float
    """Seconds until the next attempt, exactly as slept."""


class RetryConfig(Options):
    """When a failed handler is retried: exponential backoff with jitter.

    The delay doubles from `initial_delay` to `max_delay`. Any strategy of tenacity may replace
    the numbers: `RetryConfig(stop=stop_after_delay(60), wait=wait_random(1, 5))`; not on a durable
    handler, as a function cannot be stored. Errors that cannot succeed later are never retried: a
    `Refusal`, a missing handler, a message that does not validate.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    max_retries: int = Field(default=3, ge=0)
    """Attempts after the first; 0 means no retry."""

    initial_delay: float = Field(default=0.1, ge=0)
    """Seconds before the first retry."""

    max_delay: float = Field(default=10.0, ge=0)
    """Upper bound of one delay in seconds, jitter included."""

    exponential_base: float = Field(default=2.0, ge=1)
    """Factor from one delay to the next."""

    jitter: bool = True
    """Multiply each delay by a random factor between 0.5 and 1.5, so that callers which failed
    together do not retry together."""

    in_process: float = Field(default=5.0, ge=0)
    """Longer delays of a durable handler are kept in the journal, so that a restart neither forgets
    nor shortens them."""

    message_retries: int | None = Field(default=None, ge=0)
    """At most so many retries after one of `MESSAGE_ERRORS`; `None` for `max_retries`."""

    retry_on: tuple[type[Exception], ...] = (Exception,)
    """Only these are retried."""

    give_up_on: tuple[type[Exception], ...] = ()
    """These are never retried, even if `retry_on` has a base class of them."""

    stop: Callable[[Any], Any] | None = None
    """A tenacity stop strategy, instead of `max_retries`."""

    wait: Callable[[Any], Any] | None = None
    """A tenacity wait strategy, instead of the delays above."""

    retry: Callable[[Any], Any] | None = None
    """A tenacity retry strategy, instead of `retry_on` and `give_up_on`."""

    on_retry: Callable[[RetryAttempt], None] | None = None
    """Called before each delay."""

    def delay(self, attempt: int, chance: float = 0.5) -> float:
        """Return the seconds between the failed attempt number `attempt` and the next.

        Args:
            attempt: Number of the failed attempt, from 1.
            chance: A random number from 0 to 1 for the jitter; 0.5 changes nothing.
        """
        try:
            delay = self.initial_delay * self.exponential_base ** (attempt - 1)
        except OverflowError:
            delay = self.max_delay if self.initial_delay else 0.0
        if self.jitter:
            delay = min(delay, self.max_delay) * (0.5 + chance)
        return min(delay, self.max_delay)

    def allows(self, error: BaseException) -> bool:
        """Tell whether another attempt may follow this error, as far as its type says."""
        return isinstance(error, self.retry_on) and not isinstance(
            error, (*PERMANENT, *self.give_up_on)
        )

    def retries_of(self, error: BaseException) -> int:
        """Return how many retries there are at most if the last attempt ended in this error."""
        is_of_message = isinstance(error, MESSAGE_ERRORS) and not isinstance(error, OSError)
        if self.message_retries is None or not is_of_message:
            return self.max_retries
        return min(self.message_retries, self.max_retries)

    def pause(self, attempt: int, error: BaseException | None) -> float | None:
        """Return the seconds until the next attempt of a durable handler, or `None` for none.

        Args:
            attempt: Number of the failed attempt, from 1.
            error: Why it failed; `None` if its process ended.
        """
        if error is not None and not self.allows(error):
            return None
        retries = self.max_retries if error is None else self.retries_of(error)
        return None if attempt > retries else self.delay(attempt, random.random())


DEFAULT_RETRY: Final = RetryConfig()
"""Retries of a `ResilientMessageBus` without `retry=`, in process."""

NO_RETRY: Final = RetryConfig(max_retries=0)

DURABLE_RETRY: Final = RetryConfig(
    max_retries=8, initial_delay=0.5, exponential_base=3.0, max_delay=600.0, message_retries=2
)
"""Retries of durable handlers and enqueued commands without `retry=`: hours for a service that is
down, seconds for a message that cannot be handled."""


def require_storable(retry: RetryConfig, who: str) -> None:
    """Raise if a durable handler cannot use these retries.

    Args:
        retry: Its retries.
        who: Its name, for the error.

    Raises:
        ConfigurationError: They are functions, which the journal cannot store.
    """
    functions = {"stop": retry.stop, "wait": retry.wait, "retry": retry.retry}
    given = ", ".join(f"{name}=" for name, function in functions.items() if function is not None)
    if given:
        message = (
            f"{who} cannot use RetryConfig({given}...): its retries are kept in the journal and "
            f"may be made by another process, which does not have the function. Use max_retries, "
            f"initial_delay, exponential_base, max_delay, retry_on and give_up_on instead."
        )
        raise ConfigurationError(message)


class CircuitBreakerConfig(Options):
    """When a circuit opens, for how long, and when it closes again.

    Without a window, `failure_threshold` consecutive failures open it. With a window, that
    number of failures inside of it, or with `failure_rate` that share of its calls.
    """

    failure_threshold: int = Field(default=5, ge=1)
    """Failures that open the circuit: consecutive, or inside the window."""

    window: float | None = Field(default=None, gt=0)
    """Count the calls of the last `window` seconds."""

    window_calls: int | None = Field(default=None, ge=1)
    """Count the last `window_calls` calls; 100 if only `failure_rate` is given."""

    failure_rate: float | None = Field(default=None, gt=0, le=1)
    """Share of failed calls in the window that opens the circuit, instead of a number."""

    minimum_calls: int = Field(default=10, ge=1)
    """Calls that the window must hold before `failure_rate` applies."""

    recovery_time: float = Field(default=30.0, gt=0)
    """Seconds that a circuit stays open before it lets a probe through."""

    recovery_growth: float = Field(default=2.0, ge=1)
    """Factor by which the open time grows with each failed probe, once `failure_threshold`
    different messages have failed as probes; calls without a message count at once."""

    max_recovery_time: float = Field(default=300.0, gt=0)
    """Upper bound of the open time in seconds."""

    half_open_max: int = Field(default=1, ge=1)
    """Probes at once while half open; that many successes close the circuit."""

    permit_timeout: float = Field(default=60.0, gt=0)
    """Seconds after which a probe that never ended no longer counts, so that a lost one cannot
    keep the circuit half open for ever."""

    jitter: float = Field(default=0.1, ge=0, lt=1)
    """Share by which the open time is shortened at random, so that callers do not probe at once."""

    slow_call: float | None = Field(default=None, gt=0)
    """Seconds from which a successful call counts as a failure."""

    ignore: tuple[Ignored, ...] = MESSAGE_ERRORS
    """Exceptions that do not count as failures, as they prove that the service is up. Types, and
    functions such as one for HTTP 4xx. Replaces the default: write `(*MESSAGE_ERRORS, is_4xx)` to
    add to it, `()` to count everything. A `Refusal` and a `RecursionError` never count."""

    @field_validator("ignore", mode="before")
    @classmethod
    def _check_ignored(cls, ignore: Any) -> tuple[Any, ...]:
        given: list[Any] = [ignore] if callable(ignore) else list(ignore)
        for one in given:
            is_error = isinstance(one, type) and issubclass(one, Exception)
            if not is_error and (isinstance(one, type) or not callable(one)):
                message = (
                    f"ignore={one!r}: give a tuple of exception types, and of functions that "
                    f"take an exception and return whether it is ignored."
                )
                raise ValueError(message)
        return tuple(given)

    @model_validator(mode="after")
    def _check_windows(self) -> CircuitBreakerConfig:
        if self.window is not None and self.window_calls is not None:
            message = "Give window= (seconds) or window_calls= (calls), not both."
            raise ValueError(message)
        self._check_that_it_can_open()
        if self.max_recovery_time < self.recovery_time:
            message = (
                f"max_recovery_time={self.max_recovery_time:g} is less than "
                f"recovery_time={self.recovery_time:g}; raise it."
            )
            raise ValueError(message)
        return self

    def _check_that_it_can_open(self) -> None:
        if self.window_calls is None:
            return
        name = "failure_threshold" if self.failure_rate is None else "minimum_calls"
        needed = self.failure_threshold if self.failure_rate is None else self.minimum_calls
        if needed > self.window_calls:
            message = (
                f"A window of {self.window_calls} calls never holds {name}={needed}, so the "
                f"circuit would never open; lower {name} or raise window_calls."
            )
            raise ValueError(message)


class RateLimit(Options):
    """Limit on calls per second; a token is taken before a call begins."""

    per_second: float = Field(gt=0)
    """Calls per second, in the long run."""

    burst: float | None = Field(default=None, ge=1)
    """Calls that may begin at once; one second's worth unless given."""
