"""How big and how patient a bus is: frozen models, seconds as floats."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Literal, final

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
    """Slow publishers down as the queue fills, and let go as it empties; drops nothing."""


@final
@dataclass(frozen=True, slots=True)
class QueueLevel:
    """How full a queue is as it crosses a mark, for `on_high` and `on_low`."""

    handler: str
    """The handler that the queue belongs to."""

    queued: int
    """Events that wait in it."""


class QueueConfig(Options):
    """The queue of one handler."""

    max_size: int = Field(default=10_000, ge=1)
    """Events that may wait for one handler."""

    batch_size: int = Field(default=100, ge=1)
    """Events handled before other tasks get a turn; the longest list of a batch handler."""

    linger: float = Field(default=0.0, ge=0)
    """How long a batch handler waits for its list to fill."""

    strategy: BackpressureStrategy = BackpressureStrategy.WAIT
    """What happens when the queue is full."""

    max_overflow: int = Field(default=100_000, ge=0)
    """Events beyond `max_size` that handlers may add, as they can never wait."""

    high_water: int | None = Field(default=None, ge=1)
    """Events at which `on_high` is called, once until the queue has been low again."""

    low_water: int | None = Field(default=None, ge=0)
    """Events at which `on_low` is called after that; half of `high_water` unless given."""

    on_high: Callable[[QueueLevel], object] | None = None
    """Called with a `QueueLevel` when the queue has filled up to `high_water`; it must not wait."""

    on_low: Callable[[QueueLevel], object] | None = None
    """Called when it has emptied to `low_water`, or was given up; it must not wait."""

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


class BusConfig(Options):
    """Everything about a bus that is a number or a name."""

    name: str = Field(default="msgbus", min_length=1)
    """Label in logs and metrics; give each of several buses its own."""

    queue: QueueConfig = QueueConfig()
    """The queue of every handler that does not bring its own."""

    max_threads: int = Field(default=40, ge=1)
    """Sync handlers that may run at the same time."""

    max_depth: int | None = Field(default=None, ge=1)
    """How deep messages may cause each other; beyond it sending is a `MessageDepthError`."""

    drain_timeout: float = Field(default=30.0, ge=0)
    """How long leaving `async with bus:` waits for events that are still queued."""

    session_timeout: float = Field(default=30.0, ge=0)
    """How long leaving a session waits for its own handlers."""

    histogram_every: int = Field(default=1, ge=1)
    """Take the duration of every n-th call into the histogram; counts stay exact."""

    slow_publish: float | None = Field(default=None, gt=0)
    """Warn of each `publish` that takes longer, waiting included, such as `1e-3`; it costs time."""

    slow_callback: float | None = Field(default=1.0, gt=0)
    """Warn of a handler that blocks the event loop for longer; `None` switches this off."""

    record: Literal["all", "failures", "messages"] = "all"
    """What a journal gets beside events: commands, and all deliveries, failed ones, or none."""

    record_buffer: int = Field(default=10_000, ge=1)
    """Commands and deliveries that may wait to be recorded; beyond that, handlers wait."""

    require_ack: Literal["memory", "os", "fsync", "quorum", "quorum_fsync"] | None = None
    """The least that a journal must promise for each append; otherwise the start fails."""

    command_workers: int = Field(default=10, ge=1)
    """Enqueued commands that this bus handles at the same time."""

    command_lease: float = Field(default=10.0, gt=0)
    """Seconds after which an enqueued command is tried again if its process has died."""
