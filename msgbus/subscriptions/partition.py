"""`Partition`: one partition of a subscription that this process owns."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from msgbus.journal.records import Cursor

if TYPE_CHECKING:
    from collections.abc import Iterable

    from msgbus.subscriptions.in_flight import InFlight


@final
@dataclass(slots=True)
class BlockedKey:
    """A key with rows that later messages have to wait for."""

    first: int | None = None
    """Offset of its first row, as last seen."""
    count: int | None = None
    """Number of its rows, as far as this process knows; `None` until they are counted."""


@final
class Partition:
    """What is known of a partition as long as it is owned."""

    def __init__(self, cursor: Cursor, blocked: Iterable[str] = ()) -> None:
        self.number = cursor.partition
        self.cursor = cursor
        """As it was last written."""
        self.position = cursor.fetched
        """Messages up to here were looked at; those of a commit in progress are included."""
        self.looked = cursor.fetched
        """Messages up to here were looked at and, where they are taken, handed out."""
        self.acked = cursor.acked
        """Messages up to here have ended."""
        self.order: deque[InFlight] = deque()
        """Those that were handed out from the log, in order, from the oldest open one on."""
        self.blocked = {key: BlockedKey() for key in blocked}
        """Keys with rows that later messages have to wait for."""
        self.rows_upto = cursor.acked
        """The highest offset that was given a row instead of being handed out."""
        self.rows = 0
        """Claimed rows of this partition that are in flight."""
        self.is_reading = False
        """A page is being read, so nothing may be handed out of turn."""
        self.is_leaving = False
        """It goes to another member once nothing of it is in flight."""

    @property
    def is_open(self) -> bool:
        """Whether more may be handed out: it stays, and its order is not blocked as a whole."""
        return not self.is_leaving and not self.is_reading and "" not in self.blocked

    @property
    def is_idle(self) -> bool:
        """Whether nothing of it is in flight or being read."""
        return not self.order and not self.rows and not self.is_reading

    def advance(self) -> None:
        """Move `acked` over what has ended, up to the first that has not."""
        order = self.order
        while order and order[0].is_ended:
            self.acked = order.popleft().record.offset
        if not order:
            self.acked = max(self.acked, self.looked)
