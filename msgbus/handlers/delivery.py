"""Options of a durable handler: mode, delivery guarantee, start position, poison messages."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import ClassVar, final

from pydantic import Field

from msgbus.runtime.arguments import Options


class Mode(StrEnum):
    """How messages are distributed to the consumers of a subscription."""

    EXCLUSIVE = "exclusive"
    """One active consumer; messages begin in the order of the journal."""

    SHARED = "shared"
    """All consumers share the messages; no order is promised."""

    KEY_SHARED = "key_shared"
    """All consumers share the messages; those of one key are handled in order, one at a time."""


class Delivery(StrEnum):
    """Delivery guarantee after a crash."""

    AT_LEAST_ONCE = "at_least_once"
    """A message may be redelivered."""

    AT_MOST_ONCE = "at_most_once"
    """A message in flight may be lost, and is never redelivered."""


class Poison(StrEnum):
    """What happens to a message whose last attempt failed."""

    DEAD_LETTER = "dead_letter"
    """Dead-letter it, in the transaction that acknowledges it."""

    DROP = "drop"
    """Acknowledge it; it is counted and logged."""

    BLOCK = "block"
    """Stop the subscription at it until `resume` or `seek`."""


class SubscriptionTuning(Options):
    """Numbers that few have to change."""

    buffer: int = Field(default=1000, ge=1)
    """Messages in memory at most: being handled, ready, or waiting for a short pause."""

    partitions: int = Field(default=16, ge=1, le=4096)
    """Parts into which the keys of a `KEY_SHARED` subscription are divided: at most so many
    processes share it. Fixed when the subscription is made."""

    burst: int = Field(default=1, ge=1)
    """Deliveries that may begin at once under `rate_limit` after a quiet time."""


@final
@dataclass(frozen=True, slots=True)
class StartAt:
    """Start position of a new subscription; an existing one continues at its cursor.

    `StartAt.EARLIEST`, `StartAt.LATEST`, `StartAt.at(17)` for an offset,
    `StartAt.since(datetime(...))` for a time.
    """

    EARLIEST: ClassVar[StartAt]
    """The oldest message that is left."""

    LATEST: ClassVar[StartAt]
    """After the newest message."""

    offset: int | None = None
    """Offset of the first message to deliver, or the next one that exists."""

    time: float | None = None
    """Deliver messages recorded at this time or later; seconds since the epoch."""

    is_latest: bool = False
    """Start after the newest message."""

    @classmethod
    def at(cls, offset: int) -> StartAt:
        """Start at this offset."""
        if offset < 0:
            message = f"An offset is 0 or more, not {offset}."
            raise ValueError(message)
        return cls(offset=offset)

    @classmethod
    def since(cls, time: datetime | float) -> StartAt:
        """Start at the first message recorded at `time` or later."""
        if isinstance(time, datetime):
            if time.tzinfo is None:
                message = f"{time} has no time zone; say which one, such as datetime.now(UTC)."
                raise ValueError(message)
            time = time.timestamp()
        return cls(time=float(time))

    @classmethod
    def of(cls, value: object) -> StartAt:
        """Convert an offset or a datetime; return a `StartAt` unchanged."""
        if isinstance(value, StartAt):
            return value
        if isinstance(value, datetime):
            return cls.since(value)
        if isinstance(value, int) and not isinstance(value, bool):
            return cls.at(value)
        message = (
            f"{value!r:.60} is not a start position. Give StartAt.EARLIEST, StartAt.LATEST, "
            f"an offset, or a datetime."
        )
        raise ValueError(message)


StartAt.EARLIEST = StartAt()
StartAt.LATEST = StartAt(is_latest=True)
