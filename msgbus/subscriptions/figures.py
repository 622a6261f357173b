"""`Figures`: what a subscription's loop notes for `progress()`, which reads no journal."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple, final

from msgbus.journal.records import Record, State
from msgbus.subscriptions.partitioned import PartitionedState
from msgbus.subscriptions.shared import SharedState

if TYPE_CHECKING:
    from msgbus.journal.ports import Due, Journal
    from msgbus.journal.records import Cursor
    from msgbus.subscriptions.state import SubscriptionState

MANY: Final = 1000
"""Waiting rows from which they are counted once a second only."""

READS: Final = 4
"""Reads of the log in which unread messages are counted at a time, where nothing is delivered."""

PAGE: Final = 1000
"""Messages that one of these reads returns at most; it passes 5,000 of other handlers."""


class Unread(NamedTuple):
    """Messages of a subscription behind an offset, as far as they are counted."""

    after: int
    upto: int
    """Those behind this offset are not counted."""
    found: int
    oldest: float | None = None
    """Time of the first of them."""

    def left(self, position: int, head: int) -> int:
        """Return how many are left behind a position, at most."""
        if position < self.after:
            return head - position
        known = min(self.found, max(self.upto - position, 0))
        return known + max(head - max(self.upto, position), 0)


NOTHING: Final = Unread(0, 0, 0)


@final
@dataclass(slots=True)
class Figures:
    """Numbers of one membership of a subscription."""

    running: int = 0
    """Attempts that are running."""
    retrying: int = 0
    """Messages that wait for a retry in this process."""
    scheduled: int = 0
    """Messages that wait for a retry in the journal, as last counted."""
    damaged: int = 0
    """Messages that were set aside as damaged, as last counted."""
    skipped: int = 0
    """Messages that retention has removed before the subscription was given them, at most."""
    counted: float = 0.0
    """Monotonic seconds of that count."""
    is_recovering: bool = False
    """Rows have to run alone."""
    beside: set[int] = field(default_factory=set[int])
    """Offsets of rows that had to run alone and run beside others."""
    owner: str | None = None
    """Process id of another process that delivers the subscription."""
    cursors: Sequence[Cursor] = ()
    """As last read."""
    unread: Unread = NOTHING
    """As last counted."""
    unread_counted: float = 0.0
    """Monotonic seconds of that count."""

    async def count_rows(self, journal: Journal, state: SubscriptionState, due: Due) -> None:
        """Count the rows that wait, if there are any."""
        now = state.clock.now()
        if due.time is None:
            self.scheduled = 0
        elif self.scheduled < MANY or now - self.counted >= 1.0:
            self.counted = now
            self.scheduled = (await journal.count(state.name)).get(State.WAITING, 0)

    async def count_unread(
        self,
        journal: Journal,
        state: SubscriptionState,
        partitions: Collection[int] | None,
        *,
        is_stopped: bool,
    ) -> None:
        """Go on to count the messages that nobody has got yet: a few reads a second.

        A few messages more are counted at once, if nothing is delivered.
        """
        position, now, unread = position_of(state, self.cursors), state.clock.now(), self.unread
        if position != unread.after:
            unread = Unread(position, position, 0)
        more = state.head - unread.upto
        is_soon = is_stopped and more <= PAGE
        if more <= 0 or not (is_soon or now - self.unread_counted >= 1.0):
            return
        self.unread_counted = now
        for _ in range(READS if is_stopped else 1):
            if unread.upto >= state.head:
                break
            scan = await journal.read(unread.upto, PAGE, state.selection, partitions)
            times = (one.time for one in scan.records if isinstance(one, Record))
            oldest = next(times, None) if unread.oldest is None else unread.oldest
            upto, found = max(scan.upto, unread.upto), unread.found + len(scan.records)
            unread = Unread(position, upto, found, oldest)
        self.unread = unread


def position_of(state: SubscriptionState, cursors: Sequence[Cursor]) -> int:
    """Return the offset up to which messages were handed out, or have rows."""
    if isinstance(state, PartitionedState) and state.owned:
        return min(one.looked for one in state.owned.values())
    stored = min((cursor.acked for cursor in cursors), default=0)
    if isinstance(state, SharedState) and state.is_queue:
        return state.head
    if isinstance(state, SharedState) and state.feed.claimed is not None:
        return state.feed.claimed
    return stored


def lag_of(state: SubscriptionState, figures: Figures) -> int:
    """Return how many messages are left to do, at most: see `Progress.lag`."""
    position = position_of(state, figures.cursors)
    taken = sum(one.offset <= position and not one.is_ended for one in state.in_flight)
    return taken + figures.unread.left(position, state.head)


def acked_of(state: SubscriptionState, cursors: Sequence[Cursor]) -> tuple[int, int]:
    """Return the offset up to which everything is done here, and as far as that is written."""
    if isinstance(state, PartitionedState) and state.owned:
        owned = state.owned.values()
        acked = min(one.acked for one in owned)
        # At most once, they were acknowledged before.
        ahead = [one.offset - 1 for one in state.in_flight if one.is_acked_first]
        return min((acked, *ahead)), min(one.cursor.acked for one in owned)
    stored = min((cursor.acked for cursor in cursors), default=0)
    if isinstance(state, SharedState):
        stored = stored if state.feed.claimed is None else state.feed.claimed
        return min((one.offset - 1 for one in state.in_flight), default=stored), stored
    return stored, stored
