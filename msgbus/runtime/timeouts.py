"""Timeouts by a clock."""

from __future__ import annotations

from collections.abc import Coroutine
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

from msgbus.runtime.clock import SystemClock
from msgbus.runtime.event_loop import LATE, Late, finish_within, is_on_trio

if TYPE_CHECKING:
    from msgbus.runtime.clock import Clock

T = TypeVar("T")


def time_limit(seconds: float | None, clock: Clock) -> AbstractContextManager[object]:
    """Cancel what is in the block after `seconds`; `None` for never."""
    return nullcontext() if seconds is None else clock.cancel_after(seconds)


async def in_time(coroutine: Coroutine[Any, Any, T], seconds: float, clock: Clock) -> T | Late:
    """The value of `coroutine`, or `LATE` if it took longer and was cancelled."""
    if isinstance(clock, SystemClock) and not is_on_trio():
        return await finish_within(coroutine, seconds)
    with clock.cancel_after(seconds):
        return await coroutine
    return LATE
