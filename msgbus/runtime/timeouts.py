"""Timeouts by a clock."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from msgbus.runtime.clock import Clock


def time_limit(seconds: float | None, clock: Clock) -> AbstractContextManager[object]:
    """Cancel what is in the block after `seconds`; `None` for never."""
    return nullcontext() if seconds is None else clock.cancel_after(seconds)
