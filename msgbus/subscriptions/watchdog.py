"""A look every half second: how far behind, how old, and whether work lies about undone."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from msgbus.journal.port import Journal
    from msgbus.runtime.clock import Clock
    from msgbus.subscriptions.desk import Desk
    from msgbus.subscriptions.ledger import Ledger


@final
class Watchdog:
    """Finds what a lost wake-up leaves behind; looks whether there are consumers or not."""

    def __init__(
        self,
        journal: Journal,
        desk: Desk,
        ledger: Ledger,
        clock: Clock,
        on_stall: Callable[[], object],
    ) -> None:
        self._journal = journal
        self._desk = desk
        self._ledger = ledger
        self._clock = clock
        self._on_stall = on_stall
        self._suspicion: tuple[int, int] | None = None
        self._oldest: tuple[int, float] | None = None
        self.head = 0
        """The newest offset of the journal at the last look."""
        self.due = clock.now()
        """When it looks again."""

    async def look_if_due(self) -> None:
        """Look, if it is time to."""
        now = self._clock.now()
        if now < self.due:
            return
        self.due = now + self._desk.config.watchdog
        self.head = await self._journal.head()
        await self._find_oldest()
        self._find_stall()

    def _find_stall(self) -> None:
        """The same work undone at two looks in a row, and nobody busy with it, is a stall."""
        desk = self._desk
        if not desk.has_work(self.head):
            self._suspicion = None
            return
        state = (desk.counts.delivered, desk.cursor.looked)
        if state != self._suspicion:
            self._suspicion = state
            return
        self._suspicion = None
        desk.counts.stalls += 1
        desk.head = max(desk.head, self.head)  # the round that follows reads up to here
        self._on_stall()

    async def _find_oldest(self) -> None:
        """The oldest message that is not done, if it is not in the window."""
        desk = self._desk
        position = desk.cursor.position
        if len(desk.window) or self.head <= desk.cursor.looked:
            self._oldest = None
        elif self._oldest is None or self._oldest[0] <= position:
            records, _ = await self._ledger.read(desk.cursor.looked + 1, 1)
            self._oldest = (records[0].offset, records[0].time) if records else None

    def oldest_age(self) -> float:
        """Seconds since the oldest message that is not done was recorded."""
        entry = self._desk.window.oldest
        if entry is not None:
            return max(self._clock.time() - entry.record.time, 0.0)
        if self._oldest is not None and self._oldest[0] > self._desk.cursor.position:
            return max(self._clock.time() - self._oldest[1], 0.0)
        return 0.0
