"""The words in which a subscription is described: mode, guarantee, beginning, last resort."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar, final

if TYPE_CHECKING:
    from msgbus.journal.port import Journal


class Mode(StrEnum):
    """Who gets what, and in which order."""

    EXCLUSIVE = "exclusive"
    """One active consumer; messages begin in the order of the journal."""

    SHARED = "shared"
    """All consumers in turn; no order is promised."""

    KEY_SHARED = "key_shared"
    """All consumers; messages of one key one after the other, in order."""


class Delivery(StrEnum):
    """What a crash may do to a message."""

    AT_LEAST_ONCE = "at_least_once"
    """It may be delivered again."""

    AT_MOST_ONCE = "at_most_once"
    """It may be lost while it is being handled, but is never delivered again."""


class Poison(StrEnum):
    """What becomes of a message that has failed for the last time."""

    DEAD_LETTER = "dead_letter"
    """It goes to the dead letters, in the transaction that passes it."""

    DROP = "drop"
    """It is passed, counted and logged."""

    BLOCK = "block"
    """The subscription stops at it until `resume` or `seek`."""


@final
@dataclass(frozen=True, slots=True)
class StartAt:
    """Where a new subscription begins; one that exists goes on where it was.

    `StartAt.EARLIEST`, `StartAt.LATEST`, `StartAt.at(17)` for an offset,
    `StartAt.since(datetime(...))` for a time.
    """

    EARLIEST: ClassVar[StartAt]
    """At the oldest message that is left."""

    LATEST: ClassVar[StartAt]
    """Behind the newest message."""

    offset: int | None = None
    """The first message to be delivered has this offset, or the next that there is."""

    time: float | None = None
    """The first message to be delivered was recorded then or later; seconds since the epoch."""

    is_latest: bool = False
    """Behind the newest message."""

    @classmethod
    def at(cls, offset: int) -> StartAt:
        """At this offset."""
        if offset < 0:
            message = f"An offset is 0 or more, not {offset}."
            raise ValueError(message)
        return cls(offset=offset)

    @classmethod
    def since(cls, time: datetime | float) -> StartAt:
        """At the first message recorded at `time` or later."""
        if isinstance(time, datetime):
            if time.tzinfo is None:
                message = f"{time} has no time zone; say which one, such as datetime.now(UTC)."
                raise ValueError(message)
            time = time.timestamp()
        return cls(time=float(time))

    @classmethod
    def of(cls, value: object) -> StartAt:
        """A `StartAt` as it is, a whole number as an offset, a datetime as a time."""
        if isinstance(value, StartAt):
            return value
        if isinstance(value, datetime):
            return cls.since(value)
        if isinstance(value, int) and not isinstance(value, bool):
            return cls.at(value)
        message = (
            f"{value!r:.60} is no place to start. Give StartAt.EARLIEST, StartAt.LATEST, "
            f"an offset, or a datetime."
        )
        raise ValueError(message)


async def first_offset(journal: Journal, start: StartAt) -> int:
    """The offset of the first message that `start` means, whether it is there yet or not."""
    if start.is_latest:
        return await journal.head() + 1
    if start.time is not None:
        return await journal.offset_at(start.time)
    if start.offset is not None:
        return max(start.offset, 1)
    return await journal.first()


StartAt.EARLIEST = StartAt()
StartAt.LATEST = StartAt(is_latest=True)
