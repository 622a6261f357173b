"""Fault injection: random failures, delays and duplicate calls."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

from msgbus.errors import ConfigurationError
from msgbus.messages.message import Message, message_type_of
from msgbus.middleware.chain import CallNext
from msgbus.middleware.delivery import current_clock, current_handler, messages_in
from msgbus.runtime.clock import Clock
from msgbus.telemetry.logging import log


class ChaosError(Exception):
    """The failure that `ChaosMiddleware` injects unless `error=` is given."""


@final
@dataclass(slots=True)
class ChaosCounts:
    """Faults that a `ChaosMiddleware` has injected so far."""

    calls: int = 0
    """Calls of the chosen types, with or without a fault."""

    failed: int = 0
    delayed: int = 0
    duplicated: int = 0


@final
class ChaosMiddleware:
    """Fault injection: make handlers fail, wait or run twice at random, to test policies.

    The random numbers are seeded: the same seed and the same calls give the same faults. Add it
    with `per="attempt"`, the default: then faults are drawn for each attempt, inside of retry,
    breaker and timeout. A list for a batch handler is one call.

    Args:
        fail: Share of calls that fail before the handler is called, from 0 to 1.
        delay: Share of calls that wait first.
        duplicate: Share of calls whose handler runs twice; the second outcome is the result.
        seconds: Length of a delay.
        error: Makes the error of a failure.
        types: Only messages of these classes; a list if one of its events is.
        seed: Seed of the random numbers.
        clock: Clock for delays; the bus's clock unless given.

    Raises:
        ConfigurationError: A share is not between 0 and 1, or `seconds` is negative.
    """

    batch: Final = True

    def __init__(
        self,
        *,
        fail: float = 0.0,
        delay: float = 0.0,
        duplicate: float = 0.0,
        seconds: float = 1.0,
        error: Callable[[], Exception] = lambda: ChaosError("Chaos made this call fail."),
        types: type[Message] | Sequence[type[Message]] = Message,
        seed: int = 0,
        clock: Clock | None = None,
    ) -> None:
        for name, share in (("fail", fail), ("delay", delay), ("duplicate", duplicate)):
            if not 0 <= share <= 1:
                message = f"{name} is a share of the calls, from 0 to 1, not {share}."
                raise ConfigurationError(message)
        if seconds < 0:
            message = f"seconds must not be negative, but is {seconds}."
            raise ConfigurationError(message)
        self._fail = fail
        self._delay = delay
        self._duplicate = duplicate
        self._seconds = seconds
        self._error = error
        self._types = (types,) if isinstance(types, type) else tuple(types)
        self._random = random.Random(seed)
        self._clock = clock
        self.counts = ChaosCounts()

    async def __call__(self, message: Any, call_next: CallNext) -> Any:
        """Call the handler, with the faults drawn for this call."""
        if not any(isinstance(one, self._types) for one in messages_in(message)):
            return await call_next(message)
        # All are drawn at every call, so that changing one share does not shift the other faults.
        delays, fails, duplicates = (
            self._random.random() < share for share in (self._delay, self._fail, self._duplicate)
        )
        self.counts.calls += 1
        if delays:
            self.counts.delayed += 1
            self._log("delay", message)
            await current_clock(self._clock).sleep(self._seconds)
        if fails:
            self.counts.failed += 1
            self._log("fail", message)
            raise self._error()
        if duplicates:
            self.counts.duplicated += 1
            self._log("duplicate", message)
            await call_next(message)
        return await call_next(message)

    def _log(self, fault: str, message: Any) -> None:
        log.warning(
            "chaos",
            fault=fault,
            handler=current_handler(),
            message_type=message_type_of(message).__name__,
        )
