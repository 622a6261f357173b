"""The configuration of a bus; seconds are floats."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from msgbus.handlers.config import QueueConfig
from msgbus.runtime.arguments import Options


class BusConfig(Options):
    """Configuration of a bus: names, sizes and times."""

    name: str = Field(default="msgbus", min_length=1)
    """Label in logs and metrics; give each of several buses its own."""

    queue: QueueConfig = QueueConfig()
    """The queue of every handler that has no `queue=` of its own."""

    max_threads: int = Field(default=40, ge=1)
    """Sync handlers that may run at the same time, each in a thread."""

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
    """What a commit of the journal must survive; otherwise the start fails."""

    command_workers: int = Field(default=10, ge=1)
    """Enqueued commands that this bus handles at the same time."""

    member_ttl: float = Field(default=5.0, gt=0)
    """Seconds without renewal after which others take over; one in the journal's URL wins."""
