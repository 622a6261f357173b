"""Retries that wait in the journal's schedule: those that are due next, and when to look again."""

from __future__ import annotations

from bisect import insort
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from msgbus.journal.records import Scheduled
    from msgbus.subscriptions.desk import Desk
    from msgbus.subscriptions.ledger import Ledger

INFINITY = float("inf")


@final
class Agenda:
    """Holds no more than `fetch_size` entries, however many wait; the journal has the rest."""

    def __init__(self, desk: Desk, ledger: Ledger) -> None:
        self._desk = desk
        self._ledger = ledger
        self._most = desk.config.fetch_size
        self._next: list[tuple[float, str, Scheduled]] = []
        self._horizon = INFINITY
        """What is due from here on is in the journal only."""
        self.count = 0
        """Messages that wait in the schedule only."""

    async def begin(self) -> None:
        """Look how many there are; which, when they are needed."""
        self.forget()
        self.count = await self._ledger.count_scheduled()
        self.look_again()

    def forget(self) -> None:
        """Another engine has the schedule now."""
        self._next.clear()
        self._horizon = INFINITY
        self.count = 0

    def look_again(self) -> None:
        """Read what is due next from the journal before the next one is taken."""
        self._next.clear()
        self._horizon = -INFINITY if self.count else INFINITY

    def add(self, entry: Scheduled) -> None:
        """One more waits; the journal knows of it."""
        self.count += 1
        self._hold(entry)

    def _hold(self, entry: Scheduled) -> None:
        if entry.due >= self._horizon:
            return
        insort(self._next, (entry.due, entry.id, entry), key=_order)
        if len(self._next) > self._most:
            self._horizon, _, _ = self._next.pop()

    def found(self) -> None:
        """One of them is in the window now."""
        self.count -= 1

    def due(self) -> float:
        """When the next one is due, or the journal has to be asked; infinity if none waits."""
        return self._next[0][0] if self._next else self._horizon

    async def take(self, now: float) -> Scheduled | None:
        """The next one that is due and nowhere else, if there is one."""
        while self.due() <= now:
            if not self._next:
                await self._load()
                continue
            _, _, entry = self._next.pop(0)
            if not self._is_elsewhere(entry):
                self.count -= 1
                return entry
        return None

    async def _load(self) -> None:
        limit = self._most
        while True:
            rows = await self._ledger.scheduled(limit)
            fresh = [row for row in rows if not self._is_elsewhere(row)]
            is_all = len(rows) < limit
            if fresh or is_all:
                break
            limit *= 2  # all of these are at work; there are never more than the window has
        # A row may be in hand here and due again already: it must not hide the others.
        self._next = [(row.due, row.id, row) for row in fresh[: self._most]]
        if len(fresh) > self._most:
            self._horizon = fresh[self._most].due
        else:
            self._horizon = INFINITY if is_all else rows[-1].due

    def _is_elsewhere(self, entry: Scheduled) -> bool:
        """Whether the window has it, or will: what is still to be read finds its own date."""
        desk, record = self._desk, entry.record
        return (
            record.offset > desk.cursor.looked
            or record.offset in desk.window
            or record.message_id in desk.unschedule
        )


def _order(item: tuple[float, str, Scheduled]) -> tuple[float, str]:
    return item[:2]
