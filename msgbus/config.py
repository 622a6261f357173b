"""How big and how patient a bus is: frozen models, seconds as floats."""

from __future__ import annotations

from enum import Enum
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


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


class QueueConfig(BaseModel):
    """The queue of one handler."""

    model_config = ConfigDict(frozen=True, extra="forbid")

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


class BusConfig(BaseModel):
    """Everything about a bus that is a number or a name."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(default="msgbus", min_length=1)
    """Label in logs and metrics; give each of several buses its own."""

    queue: QueueConfig = QueueConfig()
    """The queue of every handler that does not bring its own."""

    max_threads: int = Field(default=40, ge=1)
    """Sync handlers that may run at the same time."""

    drain_timeout: float = Field(default=30.0, ge=0)
    """How long leaving `async with bus:` waits for events that are still queued."""

    session_timeout: float = Field(default=30.0, ge=0)
    """How long leaving a session waits for its own handlers."""

    histogram_every: int = Field(default=1, ge=1)
    """Take the duration of every n-th call into the histogram; counts stay exact."""

    slow_publish: float | None = Field(default=None, gt=0)
    """Warn of each `publish` that takes longer, waiting included, such as `1e-3`; it costs time."""

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
