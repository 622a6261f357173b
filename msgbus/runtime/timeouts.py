"""Limits on how long something may take, by a clock."""

from __future__ import annotations

from collections.abc import Awaitable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from msgbus.errors import HandlerTimeoutError
from msgbus.messages.message import message_type_of
from msgbus.runtime.clock import SystemClock
from msgbus.runtime.event_loop import LATE, Late, finish_within, is_on_trio

if TYPE_CHECKING:
    from msgbus.handlers.injection import Call
    from msgbus.runtime.clock import Clock

T = TypeVar("T")


async def in_time(coroutine: Coroutine[Any, Any, T], seconds: float, clock: Clock) -> T | Late:
    """The value of `coroutine`, or `LATE` if it was not there in time and was cancelled."""
    if isinstance(clock, SystemClock) and not is_on_trio():
        return await finish_within(coroutine, seconds)
    with clock.cancel_after(seconds):
        return await coroutine
    return LATE


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
    value = await in_time(_awaited(call(message)), seconds, clock)
    if value is LATE:
        raise HandlerTimeoutError(
            handler=handler, message_type=message_type_of(message), seconds=seconds
        )
    return value


async def _awaited(awaitable: Awaitable[T]) -> T:
    return await awaitable
