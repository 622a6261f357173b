"""A limit on how long a call may take."""

from __future__ import annotations

from typing import Any, Final, final

from msgbus.middleware.chain import CallNext
from msgbus.middleware.delivery import clock_at_hand, current_handler, require_above_zero
from msgbus.runtime.clock import Clock
from msgbus.runtime.timeouts import within


@final
class TimeoutMiddleware:
    """Cancels what stands inside of it after `seconds`, and fails the message.

    The failure is a `HandlerTimeoutError`. A batch handler has `seconds` for the whole
    list. Added with `per="message"` the limit covers all retries together. A sync handler
    runs on in its thread, as threads cannot be stopped; its value is thrown away.

    Args:
        seconds: How long a call may take.
        clock: Where time comes from; the bus's clock unless given.

    Raises:
        ConfigurationError: `seconds` is not above 0.
    """

    batch: Final = True

    def __init__(self, seconds: float, *, clock: Clock | None = None) -> None:
        require_above_zero("seconds", seconds)
        self._seconds = seconds
        self._clock = clock

    async def __call__(self, message: Any, call_next: CallNext) -> Any:
        """The value, if it comes in time.

        Raises:
            HandlerTimeoutError: It did not.
        """
        clock = clock_at_hand(self._clock)
        return await within(call_next, message, self._seconds, current_handler(), clock)
