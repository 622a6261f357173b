"""Timeouts of handler calls."""

from __future__ import annotations

from typing import Any, Final, final

from msgbus.middleware.chain import CallNext, within
from msgbus.middleware.delivery import current_clock, current_handler, require_above_zero
from msgbus.runtime.clock import Clock


@final
class TimeoutMiddleware:
    """Cancel the rest of the chain after `seconds` and fail with `HandlerTimeoutError`.

    A batch handler has `seconds` for the whole list. Added with `per="message"`, the limit
    covers all attempts together. A sync handler runs on in its thread, as threads cannot be
    stopped; its value is discarded.

    Args:
        seconds: Seconds that a call may take.
        clock: Clock to use; the bus's clock unless given.

    Raises:
        ConfigurationError: `seconds` is not above 0.
    """

    batch: Final = True

    def __init__(self, seconds: float, *, clock: Clock | None = None) -> None:
        require_above_zero("seconds", seconds)
        self._seconds = seconds
        self._clock = clock

    async def __call__(self, message: Any, call_next: CallNext) -> Any:
        """Call the handler within the time limit.

        Raises:
            HandlerTimeoutError: It took longer.
        """
        clock = current_clock(self._clock)
        return await within(call_next, message, self._seconds, current_handler(), clock)
