"""Values that look-ups (`Questions`) and the upkeep of a journal return. All are read-only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, final

from msgbus.journal.records import Outcome, Record


class Page(NamedTuple):
    """Messages that were found, and where the next page begins."""

    records: Sequence[Record | int]
    """In order; an offset in place of a record that is damaged."""
    next: int | None = None
    """The `start` of the next page; `None` if this is the last."""


@final
@dataclass(frozen=True, slots=True)
class FlowNode:
    """One message of a flow, with those it caused below it, in the order of the log."""

    record: Record
    children: tuple[FlowNode, ...] = ()


@final
@dataclass(frozen=True, slots=True)
class DeliveryCount:
    """Number of deliveries of one handler that ended alike within one minute."""

    handler: str
    outcome: Outcome
    minute: float
    """Seconds since the epoch at which the minute begins."""
    count: int


@final
@dataclass(frozen=True, slots=True)
class LetterCount:
    """Dead rows of one subscription with the same type of error and name of message."""

    subscription: str
    error_type: str
    """Empty if the rows have no letters."""
    name: str | None
    """Wire name of the messages; `None` if they cannot be read."""
    count: int
    first: float
    """Seconds since the epoch at which the first of them was dead-lettered."""
    last: float
    error: str | None
    """Text of the error of the one with the highest offset."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Limits of what a journal keeps, and of how far subscriptions may hold that back.

    Messages that a subscription has not been given are kept as long as it needs them, or up to the
    `hold_` limits, if there are any. One that is beyond them is warned of once. What pending rows
    need, and what was handed out, is never removed.
    """

    max_age: float | None = None
    """Seconds."""

    max_bytes: int | None = None
    """Size of the pages in use."""

    max_count: int | None = None
    """Messages."""

    hold_age: float | None = None
    """Seconds: messages that are older should be held back by no subscription."""

    hold_bytes: int | None = None
    """Size of the pages in use from which no subscription should hold back anything."""

    hold_count: int | None = None
    """Messages, of the newest, that a subscription may hold back."""

    beyond: Literal["warn", "skip"] = "warn"
    """Policy beyond that: a warning and nothing else, or a warning and later the removal."""

    warn_for: float = 3600.0
    """Seconds between the warning and the first removal."""

    def __post_init__(self) -> None:
        """Refuse what makes no sense.

        Raises:
            ValueError: `beyond` is unknown, or there is nothing to be beyond of.
        """
        if self.beyond not in ("warn", "skip"):
            message = f"beyond={self.beyond!r} is unknown. Write 'warn' or 'skip'."
            raise ValueError(message)
        if self.beyond == "skip" and not self.has_holds:
            message = "beyond='skip' needs a limit: hold_age, hold_bytes or hold_count."
            raise ValueError(message)

    @property
    def has_holds(self) -> bool:
        """Tell whether there is a limit to what subscriptions may hold back."""
        return (self.hold_age, self.hold_bytes, self.hold_count) != (None, None, None)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TrimReport:
    """Result of a trim."""

    removed: int
    """Number of messages."""

    first: int
    """The lowest offset that is left, as `Questions.first` returns it."""

    held_back_by: tuple[str, ...] = ()
    """Subscriptions and queues that need messages which would otherwise have been removed."""

    overdue: tuple[str, ...] = ()
    """Those of them that hold back more than they may."""

    skipped: Mapping[str, int] = field(default_factory=dict[str, int])
    """Removed messages that a subscription had not been given, at most, by its name."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """Result of a check of the whole journal."""

    messages: int
    """Number of undamaged records."""

    damaged: tuple[int, ...] = ()
    """Offsets of records that are damaged or missing; the first thousand of them."""

    problems: tuple[str, ...] = ()
    """Everything else that is wrong, in words; the first thousand of them."""

    @property
    def is_sound(self) -> bool:
        """Whether nothing is wrong."""
        return not self.damaged and not self.problems
