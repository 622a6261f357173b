"""The loops of the modes: `PartitionedLoop` owns partitions, `SharedLoop` claims messages."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, final

from msgbus.errors import StaleError
from msgbus.journal.operations import Drop, Put
from msgbus.journal.records import State
from msgbus.subscriptions.failures import log_overflow
from msgbus.subscriptions.loop import SubscriptionLoop
from msgbus.subscriptions.partitioned import PartitionedState
from msgbus.subscriptions.shared import SharedState
from msgbus.telemetry.logging import log

if TYPE_CHECKING:
    from msgbus.journal.ports import Scan
    from msgbus.journal.records import Cursor, Record
    from msgbus.subscriptions.in_flight import InFlight


def _offset(record: Record | int) -> int:
    return record if isinstance(record, int) else record.offset


def _cut_off(several: Sequence[InFlight]) -> None:
    """Cancel the handlers of deliveries; not those of others that have their task now."""
    for one in several:
        if one.worker is not None and one.is_running:
            one.worker.cancel()


@final
class PartitionedLoop(SubscriptionLoop[PartitionedState]):
    """Delivers from the partitions that this process owns."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.state.describe = self._letter

    def _partitions(self) -> Collection[int] | None:
        return [number for number, one in self.state.owned.items() if not one.is_leaving]

    def _take_note(self) -> None:
        for one, error in self.state.take_overflow():
            log_overflow(one, error)
            self.on_final_failure(one, None)

    async def _claim(self) -> bool:
        limit = min(self.state.room(), self.state.max_in_flight)
        self._is_full = limit <= 0
        if self._is_full:
            return False
        claims = await self.journal.claim(
            self.member, self.name, limit, self._clock.time(), partitions=self._partitions()
        )
        self.state.admit_claims(claims)
        self.start_workers()
        return bool(claims)

    async def _read_on(self) -> None:
        state = self.state
        await self._check_keys()
        while (page := state.next_page()) is not None:
            position, partitions = page
            scan = None
            try:
                scan = await self.journal.read(
                    position, state.room(), state.selection, [one.number for one in partitions]
                )
                scan = await self._without_done(scan)
            finally:
                state.take_page(partitions, scan)
            await self.journal.commit([], self.member)

    async def _without_done(self, scan: Scan) -> Scan:
        """Leave out messages that were handled before a seek."""
        if not self.state.selection.keeps_done or not scan.records:
            return scan
        kept = [await self.journal.row(self.name, _offset(one)) for one in scan.records]
        left = [one for one, row in zip(scan.records, kept, strict=True) if row is None]
        self.state.counts.skipped += len(kept) - len(left)
        return scan._replace(records=left)

    # -- keys ------------------------------------------------------------------------------------

    async def _check_keys(self) -> None:
        """Count the rows of keys, and let those go on that have none left."""
        state = self.state
        for key, number in state.begin_check().items():
            state.checked(number, key, await self.journal.key_rows(self.name, number, key))

    async def _release_keys(self) -> None:
        """Let keys go on that wait for a dead letter; the letter stays."""
        self._releases_keys = False
        after = None
        while rows := await self.journal.find(self.name, (State.DEAD,), after=after):
            for after in rows:
                if after.key is not None:
                    free = after.moved(State.DEAD, time=self._clock.time(), key=None)
                    with suppress(StaleError):  # it is being replayed, or was discarded
                        await self.journal.commit([Put(free, promote=True)], self.member)
        self.state.check_all()

    # -- partitions ------------------------------------------------------------------------------

    async def check_ownership(self) -> None:
        """Drop partitions that others own now, and cut off their handlers."""
        await self._lose(await self.journal.cursors(self.name))

    async def _lose(self, cursors: Sequence[Cursor]) -> None:
        ended, claimed = self.state.lose({cursor.partition: cursor for cursor in cursors})
        _cut_off(ended)
        for one in claimed:
            stored = await self.journal.row(self.name, one.offset)
            if stored is None and not one.is_ended:  # a seek has deleted it
                _cut_off(self.state.abandon([one]))

    async def balance(self, members: Sequence[int]) -> None:
        """Own a fair part of the partitions: release what is too much, take what is free.

        Args:
            members: Ids of those who serve the subscription, this one among them.
        """
        state, name = self.state, self.name
        cursors = self.figures.cursors = await self.journal.cursors(name)
        await self._lose(cursors)  # a seek of another process has freed them
        least, rest = divmod(state.selection.partitions, len(members))
        most = least + (sorted(members).index(self.member.id) < rest)
        mine = [one for one in state.owned.values() if not one.is_leaving]
        for partition in mine[most:]:
            partition.is_leaving = True
        free = [one.partition for one in cursors if one.owner is None]
        for number in free[: max(most - len(mine), 0)]:
            await self._acquire(number)
        if any(one.is_leaving for one in state.owned.values()):
            self.flush()

    async def _acquire(self, number: int) -> None:
        state = self.state
        cursor = await self.journal.acquire(self.member, self.name, number, state.selection)
        if cursor is None:
            return
        blocked = await self.journal.blocked_keys(self.name, number)
        if not state.owned:
            log.info("subscription_active", subscription=self.name, epoch=cursor.epoch)
        state.add(cursor, blocked)
        self.look()


@final
class SharedLoop(SubscriptionLoop[SharedState]):
    """Delivers what this process claims."""

    _epoch: int | None = None
    """That of the cursor, as last seen; a seek changes it."""

    @property
    def _has_replies(self) -> bool:
        return self.state.is_queue

    async def check_ownership(self) -> None:
        """Read the cursor again before the next feed; after a seek, cut off what comes again."""
        self.state.feed.forget()
        if not self.state.is_queue:
            await self._check_epoch()

    async def balance(self, members: Sequence[int]) -> None:
        """Leave others their part of the work; notice if one of them has called `seek`.

        Args:
            members: Ids of those who serve the subscription, this one among them.
        """
        self.state.set_others(len(members) - 1)
        if not self.state.is_queue and await self._check_epoch():
            self.state.feed.forget()
            self.look()

    async def _check_epoch(self) -> bool:
        """After a seek, drop claims that it has deleted, cut off their handlers; return true."""
        cursors = self.figures.cursors = await self.journal.cursors(self.name)
        epoch, self._epoch = self._epoch, cursors[0].epoch if cursors else None
        if cursors and epoch != self._epoch:
            self.state.feed.claimed = cursors[0].acked
        if epoch in (None, self._epoch):
            return False
        for one in list(self.state.in_flight):
            stored = await self.journal.row(self.name, one.offset)
            is_own = stored is not None and stored.owner == one.member.id
            if one.row is not None and not is_own and not one.is_ended:
                _cut_off(self.state.abandon([one]))
        return True

    async def _claim(self) -> bool:
        state = self.state
        room = state.room()
        self._is_full = False
        if room <= 0 or not state.has_low_stock:
            self._is_full = True
            return False
        selection = None if state.is_queue else state.selection
        claims = await self.journal.claim(
            self.member, self.name, room, self._clock.time(), selection=selection
        )
        self._is_full = len(claims) == room
        if self._rules.is_once and claims:
            # In one commit, instead of one for each before it begins.
            state.acking = claims
            try:
                await self.journal.commit([Drop(claim.row) for claim in claims], self.member)
                for one in state.admit_claims(claims):
                    one.row, one.is_acked_first = None, True
            finally:
                state.acking = ()
        else:
            state.admit_claims(claims)
        claimed = [claim.row.offset for claim in claims]
        state.feed.claimed = max((*claimed, state.feed.claimed or 0))
        self.start_workers()
        return bool(claims)

    async def _read_on(self) -> None:
        state = self.state
        if state.is_queue:
            return
        while state.feed.looked < state.head and await self._claim():
            pass
        if not self._is_full and state.feed.looked < state.head:
            (cursor,) = self.figures.cursors = await self.journal.cursors(self.name)
            state.feed.know(cursor, max(cursor.acked, state.feed.looked))
