"""`Figures`: what a subscription's loop notes for `progress()`, which reads no journal."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, final

from msgbus.journal.records import Record, State
from msgbus.subscriptions.partitioned import PartitionedState
from msgbus.subscriptions.shared import SharedState

if TYPE_CHECKING:
    from msgbus.journal.ports import Due, Journal
    from msgbus.journal.records import Cursor
    from msgbus.subscriptions.state import SubscriptionState

MANY: Final = 1000
"""Waiting rows from which they are counted once a second only."""


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
    counted: float = 0.0
    """Monotonic seconds of that count."""
    oldest: float | None = None
    """Time of the oldest message that waits while nothing is delivered, as last seen."""
    is_recovering: bool = False
    """Rows have to run alone."""
    beside: set[int] = field(default_factory=set[int])
    """Offsets of rows that had to run alone and run beside others."""
    owner: str | None = None
    """Process id of another process that delivers the subscription."""
    cursors: Sequence[Cursor] = ()
    """As last read."""

    async def count_rows(self, journal: Journal, state: SubscriptionState, due: Due) -> None:
        """Count the rows that wait, if there are any."""
        now = state.clock.now()
        if due.time is None:
            self.scheduled = 0
        elif self.scheduled < MANY or now - self.counted >= 1.0:
            self.counted = now
            self.scheduled = (await journal.count(state.name)).get(State.WAITING, 0)

    async def find_oldest(
        self, journal: Journal, state: SubscriptionState, partitions: Collection[int] | None
    ) -> None:
        """Read the time of the first message that nobody has got yet."""
        self.oldest = None
        after, _ = acked_of(state, self.cursors)
        while self.oldest is None and after < state.head:
            scan = await journal.read(after, 1, state.selection, partitions)
            for one in scan.records:
                if isinstance(one, Record):
                    self.oldest = one.time
            after = max(scan.upto, after + 1)


def acked_of(state: SubscriptionState, cursors: Sequence[Cursor]) -> tuple[int, int]:
    """Return the offset up to which everything is done here, and as far as that is written."""
    if isinstance(state, PartitionedState) and state.owned:
        owned = state.owned.values()
        return min(one.acked for one in owned), min(one.cursor.acked for one in owned)
    stored = min((cursor.acked for cursor in cursors), default=0)
    if isinstance(state, SharedState):
        stored = max(state.feed.looked, stored)
        return min((one.offset - 1 for one in state.in_flight), default=stored), stored
    return stored, stored
