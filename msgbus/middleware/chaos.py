"""Trouble on purpose, to see whether the policies hold."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

from msgbus.errors import ConfigurationError
from msgbus.messages.message import Message, message_type_of
from msgbus.middleware.chain import CallNext
from msgbus.middleware.delivery import clock_at_hand, current_handler, messages_in
from msgbus.runtime.clock import Clock
from msgbus.telemetry.logging import log


class ChaosError(Exception):
    """What `ChaosMiddleware` fails with unless told otherwise."""


@final
@dataclass(slots=True)
class ChaosCounts:
    """What a `ChaosMiddleware` has done so far."""

    calls: int = 0
    """Calls it might have troubled."""

    failed: int = 0
    delayed: int = 0
    duplicated: int = 0


@final
class ChaosMiddleware:
    """Makes handlers fail, wait or run twice, at random, so that you can test your policies.

    The dice are seeded: the same seed and the same calls give the same trouble. Add it with
    `per="attempt"`, as is the default: then each try has its own dice, and stands inside of
    retry, breaker and timeout. A list for a batch handler is one call.

    Args:
        fail: Share of calls that fail before the handler is called, from 0 to 1.
        delay: Share of calls that wait first.
        duplicate: Share of calls whose handler runs twice; the second outcome counts.
        seconds: How long a delay is.
        error: Makes the error of a failure.
        types: Trouble only messages of these classes; a list if one of its events is.
        seed: Of the dice.
        clock: Where delays come from; the bus's clock unless given.

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
        self._dice = random.Random(seed)
        self._clock = clock
        self.counts = ChaosCounts()

    async def __call__(self, message: Any, call_next: CallNext) -> Any:
        """Call on, with trouble if the dice say so."""
        if not any(isinstance(one, self._types) for one in messages_in(message)):
            return await call_next(message)
        # All dice are thrown at every call: one share does not shift the trouble of another.
        delays, fails, duplicates = (
            self._dice.random() < share for share in (self._delay, self._fail, self._duplicate)
        )
        self.counts.calls += 1
        if delays:
            self.counts.delayed += 1
            self._say("delay", message)
            await clock_at_hand(self._clock).sleep(self._seconds)
        if fails:
            self.counts.failed += 1
            self._say("fail", message)
            raise self._error()
        if duplicates:
            self.counts.duplicated += 1
            self._say("duplicate", message)
            await call_next(message)
        return await call_next(message)

    def _say(self, trouble: str, message: Any) -> None:
        log.warning(
            "chaos",
            trouble=trouble,
            handler=current_handler(),
            message_type=message_type_of(message).__name__,
        )
