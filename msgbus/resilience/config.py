"""How patiently a message is handled: frozen data, asked but never changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, final

from pydantic import ConfigDict, Field, field_validator, model_validator

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
"""Errors that speak of the message or of the code, not of a service that is down. By default they
do not count against a circuit; an `OSError` does, even where it is one of these too."""

Ignored: TypeAlias = type[Exception] | Callable[[Exception], bool]
"""An exception type, or a function that says whether an exception does not count."""


@final
@dataclass(frozen=True, slots=True)
class RetryAttempt:
    """A try that failed and will be followed by another, as `on_retry` sees it."""

    message: Any
    """The message; in a batch handler the list."""

    handler: str
    """Who failed."""

    attempt: int
    """The try that failed, from 1."""

    error: Exception
    """What it failed with."""

    delay: float
    """Seconds until the next try: the very number that is slept."""


class RetryConfig(Options):
    """How often, and how patiently, a handler that failed is tried again.

    The pause doubles from `initial_delay` to `max_delay`. Any strategy of tenacity may take
    the place of the numbers: `RetryConfig(stop=stop_after_delay(60), wait=wait_random(1, 5))`.
    What can never succeed is not tried again, whatever is said here: a `Refusal`, an open
    circuit, a missing handler, a message that does not validate.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    max_retries: int = Field(default=3, ge=0)
    """Tries after the first; 0 means no retry."""

    initial_delay: float = Field(default=0.1, ge=0)
    """Seconds before the first retry."""

    max_delay: float = Field(default=10.0, ge=0)
    """Upper bound of one pause, jitter included."""

    exponential_base: float = Field(default=2.0, ge=1)
    """By how much each pause is longer than the one before."""

    jitter: bool = True
    """Multiply each pause by a random factor between 0.5 and 1.5, so that callers who failed
    together do not come back together."""

    retry_on: tuple[type[Exception], ...] = (Exception,)
    """Only these are tried again."""

    give_up_on: tuple[type[Exception], ...] = ()
    """These are never tried again, even if `retry_on` names a base of them."""

    stop: Callable[[Any], Any] | None = None
    """A tenacity stop strategy, instead of `max_retries`."""

    wait: Callable[[Any], Any] | None = None
    """A tenacity wait strategy, instead of the delays above."""

    retry: Callable[[Any], Any] | None = None
    """A tenacity retry strategy, instead of `retry_on` and `give_up_on`."""

    on_retry: Callable[[RetryAttempt], None] | None = None
    """Called before each pause."""


class CircuitBreakerConfig(Options):
    """When a circuit opens, for how long, and what closes it again.

    Without a window, `failure_threshold` failures in a row open it. With a window, so many
    failures inside of it do, or, with `failure_rate`, that share of its calls.
    """

    failure_threshold: int = Field(default=5, ge=1)
    """Failures that open the circuit: in a row, or inside the window."""

    window: float | None = Field(default=None, gt=0)
    """Count the calls of the last so many seconds."""

    window_calls: int | None = Field(default=None, ge=1)
    """Count the last so many calls, instead of a time; 100 if only `failure_rate` is given."""

    failure_rate: float | None = Field(default=None, gt=0, le=1)
    """Share of failed calls in the window that opens the circuit, instead of a number."""

    minimum_calls: int = Field(default=10, ge=1)
    """Calls that the window must hold before its rate means anything."""

    recovery_time: float = Field(default=30.0, gt=0)
    """Seconds an open circuit stays open before it lets a call try."""

    recovery_growth: float = Field(default=2.0, ge=1)
    """By how much it stays open longer each time that a probe fails, once `failure_threshold`
    different messages have; calls that are for no message count at once."""

    max_recovery_time: float = Field(default=300.0, gt=0)
    """Upper bound of the time it stays open."""

    half_open_max: int = Field(default=1, ge=1)
    """Calls that may try at once while half open; so many successes close it."""

    permit_timeout: float = Field(default=60.0, gt=0)
    """Seconds after which a try that never came back no longer counts, so that a lost one
    cannot hold the circuit half open for good."""

    jitter: float = Field(default=0.1, ge=0, lt=1)
    """Share by which the open time is shortened at random, so that not all come at once."""

    slow_call: float | None = Field(default=None, gt=0)
    """Seconds from which a successful call counts as a failure."""

    ignore: tuple[Ignored, ...] = MESSAGE_ERRORS
    """Exceptions that are answers: the service is up. Types, and functions such as
    one for HTTP 4xx. Replaces the default: write `(*MESSAGE_ERRORS, is_4xx)` to add to it, `()` to
    count everything. A `Refusal` and a `RecursionError` never count."""

    @field_validator("ignore", mode="before")
    @classmethod
    def _check_ignored(cls, ignore: Any) -> tuple[Any, ...]:
        given: list[Any] = [ignore] if callable(ignore) else list(ignore)
        for one in given:
            is_error = isinstance(one, type) and issubclass(one, Exception)
            if not is_error and (isinstance(one, type) or not callable(one)):
                message = (
                    f"ignore={one!r}: give a tuple of exception types, and of functions that "
                    f"take an exception and say whether it does not count."
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
    """So many calls per second; a token is taken before the call begins."""

    per_second: float = Field(gt=0)
    """Calls per second, in the long run."""

    burst: float | None = Field(default=None, ge=1)
    """Calls at once after a quiet time; one second's worth unless given."""
