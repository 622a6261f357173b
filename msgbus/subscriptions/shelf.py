"""What waits behind a message of its key that is stuck, so that other keys can go on.

A window that is full of such messages lets their records go and keeps their offsets. When
their turn comes they are read again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, final

if TYPE_CHECKING:
    from msgbus.journal.records import Record
    from msgbus.subscriptions.desk import Desk
    from msgbus.subscriptions.ledger import Ledger

KEPT: Final = (10, 1)
"""Messages of one key that stay in a full window: first so many, then fewer."""


@final
class Shelf:
    """Moves messages between the window and the journal."""

    def __init__(self, desk: Desk, ledger: Ledger) -> None:
        self._desk = desk
        self._ledger = ledger

    def make_room(self) -> None:
        """If the window is full and little of it can go out, keep only what comes first."""
        desk = self._desk
        window, limit = desk.window, desk.config.max_buffered
        if desk.config.is_at_most_once or len(window) < limit:
            return
        if window.ready_count > desk.config.fetch_size // 2:
            return
        for keep in KEPT:
            window.clear_out(keep)
            if len(window) <= limit // 2:
                return

    async def bring_back(self) -> None:
        """Read what has come to its turn."""
        desk = self._desk
        window = desk.window
        while window.hungry and not desk.is_held and (room := desk.room()):
            wanted: dict[int, str] = {}
            for key in list(window.hungry)[:room]:
                offsets = window.shelf(key, max(room // len(window.hungry), 1))
                if desk.is_suspect(offsets[0]):
                    del offsets[1:]  # only what begins at once is counted as begun
                for offset in offsets:
                    wanted[offset] = key
            await self._take_in(wanted, await self._read(sorted(wanted)))

    async def _read(self, offsets: list[int]) -> dict[int, Record]:
        """The records at these offsets, as few pages as it takes."""
        found: dict[int, Record] = {}
        size = self._desk.config.fetch_size
        place = 0
        while place < len(offsets):
            start = offsets[place]
            limit = min(size, offsets[-1] - start + 1)
            records, end = await self._ledger.read(start, limit)
            found |= {record.offset: record for record in records}
            while place < len(offsets) and offsets[place] <= max(end, start):
                place += 1
        return found

    async def _take_in(self, wanted: dict[int, str], found: dict[int, Record]) -> None:
        desk, ledger = self._desk, self._ledger
        entries = {offset: desk.entry(found[offset]) for offset in wanted if offset in found}
        limit = desk.config.retry.max_attempts
        suspects = [
            entry
            for entry in entries.values()
            if (entry.stored or desk.is_suspect(entry.offset)) and entry.stored < limit
        ]
        if suspects:
            await ledger.commit([ledger.counted(suspects)])
        for entry in suspects:
            entry.stored = entry.attempt
        for offset, key in wanted.items():
            if offset in entries:
                desk.admit(entries[offset])
            else:
                desk.cursor.done(offset)  # it is not in the journal any more
            desk.window.unshelved(key, 1)
        desk.moved()
