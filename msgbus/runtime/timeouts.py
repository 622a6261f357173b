"""Timeouts by a clock."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from msgbus.runtime.clock import SystemClock
from msgbus.runtime.event_loop import LATE, Late, finish_within, is_on_trio

if TYPE_CHECKING:
    from msgbus.runtime.clock import Clock

T = TypeVar("T")


async def in_time(coroutine: Coroutine[Any, Any, T], seconds: float, clock: Clock) -> T | Late:
    """The value of `coroutine`, or `LATE` if it took longer and was cancelled."""
    if isinstance(clock, SystemClock) and not is_on_trio():
        return await finish_within(coroutine, seconds)
    with clock.cancel_after(seconds):
        return await coroutine
    return LATE
