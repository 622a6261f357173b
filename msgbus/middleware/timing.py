"""Durations of handler calls by message type."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, final

from msgbus.errors import ConfigurationError
from msgbus.messages.message import message_type_of
from msgbus.middleware.chain import CallNext
from msgbus.middleware.delivery import current_clock, current_handler, require_above_zero
from msgbus.runtime.clock import Clock
from msgbus.telemetry.logging import log
from msgbus.telemetry.redaction import redact_exception
from msgbus.telemetry.stats import Durations, DurationStats


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Timing(DurationStats):
    """Snapshot of the durations of one message type: `count`, `seconds`, `p50` ..."""

    count: int


@final
class TimingMiddleware:
    """Measure the duration of all calls by message type, whatever their outcome.

    It measures the rest of the chain: list it last for the handler alone, first to include
    the other middleware. A list for a batch handler is one call, under the type of its first
    event.

    Args:
        slow: Seconds from which a call is slow; needs `on_slow`.
        on_slow: Called with the message (or the list) and its seconds after each slow
            call. If it raises, that is logged as `slow_callback_failed`, and the
            outcome of the message is unchanged.
        clock: Clock for durations; the bus's clock unless given.

    Raises:
        ConfigurationError: Only one of `slow` and `on_slow` is given, or `slow` is not
            above 0.
    """

    batch: Final = True

    def __init__(
        self,
        *,
        slow: float | None = None,
        on_slow: Callable[[Any, float], object] | None = None,
        clock: Clock | None = None,
    ) -> None:
        require_above_zero("slow", slow)
        if (slow is None) is not (on_slow is None):
            message = (
                "slow= and on_slow= go together: a threshold, and the function to call above it."
            )
            raise ConfigurationError(message)
        self._slow = slow
        self._on_slow = on_slow
        self._clock = clock
        self._durations: dict[str, Durations] = {}

    async def __call__(self, message: Any, call_next: CallNext) -> Any:
        """Call the handler and measure the duration."""
        now = current_clock(self._clock).now
        began = now()
        try:
            return await call_next(message)
        finally:
            self._record(message, now() - began)

    def timings(self) -> Mapping[str, Timing]:
        """The durations so far, by the name of the message type. Safe from any thread."""
        timings: dict[str, Timing] = {}
        for name, durations in list(self._durations.items()):
            count, seconds, buckets = durations.read()
            timings[name] = Timing(count=count, seconds=seconds, buckets=tuple(buckets))
        return timings

    def _record(self, message: Any, seconds: float) -> None:
        name = message_type_of(message).__name__
        durations = self._durations.get(name)
        if durations is None:
            durations = self._durations[name] = Durations()
        durations.add(seconds)
        if self._slow is not None and seconds >= self._slow:
            self._call_on_slow(message, seconds)

    def _call_on_slow(self, message: Any, seconds: float) -> None:
        assert self._on_slow is not None  # noqa: S101 (checked in the constructor)
        try:
            self._on_slow(message, seconds)
        except Exception as error:
            log.error(
                "slow_callback_failed",
                message_type=message_type_of(message).__name__,
                handler=current_handler(),
                error=redact_exception(error),
                traceback=error,
            )
