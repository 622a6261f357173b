"""A limit on how long a call may take, by the bus's clock."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgbus.errors import HandlerTimeoutError
from msgbus.messages import message_type_of

if TYPE_CHECKING:
    from msgbus.clock import Clock
    from msgbus.injection import Call


def with_timeout(call: Call, seconds: float, handler: str, clock: Clock) -> Call:
    """`call`, cancelled after `seconds`."""

    async def call_within(message: Any) -> Any:
        return await within(call, message, seconds, handler, clock)

    return call_within


async def within(call: Call, message: Any, seconds: float, handler: str, clock: Clock) -> Any:
    """The value of `call`, if it comes in time.

    Raises:
        HandlerTimeoutError: It did not, and was cancelled.
    """
    with clock.cancel_after(seconds) as scope:
        return await call(message)
    if scope.cancelled_caught:
        raise HandlerTimeoutError(
            handler=handler, message_type=message_type_of(message), seconds=seconds
        )
    return None  # pragma: no cover (the scope either returned above or was caught)
