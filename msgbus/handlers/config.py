"""The configuration of one handler's queue; seconds are floats."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import final

from pydantic import Field, model_validator

from msgbus.runtime.arguments import Options


class BackpressureStrategy(Enum):
    """What a publish does when a handler's queue is full."""

    WAIT = "wait"
    """Wait for room, in order of arrival; a cancelled wait publishes nothing."""

    REJECT_NEW = "reject_new"
    """Refuse the new event, for all its handlers; the receipt says `REJECTED`."""

    DROP_OLDEST = "drop_oldest"
    """Drop the oldest event of the full queue; the receipt says `DROPPED` and which."""

    ADAPTIVE_RATE_LIMIT = "adaptive_rate_limit"
    """Slow publishers down as the queue fills; drops nothing."""


@final
@dataclass(frozen=True, slots=True)
class QueueLevel:
    """The level of a queue that crossed `high_water` or `low_water`."""

    handler: str
    """The handler that the queue belongs to."""

    queued: int
    """Events waiting in the queue."""


class QueueConfig(Options):
    """Configuration of the queue of one handler."""

    max_size: int = Field(default=10_000, ge=1)
    """Events that may wait for one handler."""

    batch_size: int = Field(default=100, ge=1)
    """Events handled before the worker yields; the longest list of a batch handler."""

    linger: float = Field(default=0.0, ge=0)
    """Seconds that a batch handler waits for its list to fill."""

    strategy: BackpressureStrategy = BackpressureStrategy.WAIT
    """What happens when the queue is full."""

    max_overflow: int = Field(default=100_000, ge=0)
    """Events beyond `max_size` that handlers may publish, as they never wait."""

    high_water: int | None = Field(default=None, ge=1)
    """Queued events at which `on_high` is called; not again before the queue was at `low_water`."""

    low_water: int | None = Field(default=None, ge=0)
    """Queued events at which `on_low` is called after that; half of `high_water` unless given."""

    on_high: Callable[[QueueLevel], object] | None = None
    """Called with a `QueueLevel` when the queue has filled to `high_water`; it must not block."""

    on_low: Callable[[QueueLevel], object] | None = None
    """Called when the queue has emptied to `low_water` or was discarded; it must not block."""

    @model_validator(mode="after")
    def _check_marks(self) -> QueueConfig:
        message = ""
        high, low = self.high_water, self.low_water
        callbacks = [one for one in (self.on_high, self.on_low) if one is not None]
        if high is None:
            if callbacks or low is not None:
                message = "low_water=, on_high= and on_low= need a high_water=; give one."
        elif not callbacks:
            message = f"high_water={high} does nothing without on_high= or on_low=; give one."
        elif high > self.max_size:
            message = f"high_water={high} is above max_size={self.max_size}; lower it."
        elif low is not None and low >= high:
            message = f"low_water={low} must be below high_water={high}."
        elif any(inspect.iscoroutinefunction(one) for one in callbacks):
            message = "on_high= and on_low= take a plain function, not an async one."
        if message:
            raise ValueError(message)
        return self
