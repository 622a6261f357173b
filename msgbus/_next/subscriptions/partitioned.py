"""`PartitionedState`: partitions that this process owns, read from the log in order.

EXCLUSIVE is one partition and one order for all messages; KEY_SHARED has an order per key.
Every cursor is written by `operations` alone, with what a commit appends or a page brings.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, final

from msgbus._next.journal.operations import Operation, Pass, Put
from msgbus._next.journal.ports import Claim, Scan
from msgbus._next.journal.records import Cursor, Member, Pending, Record, State
from msgbus._next.subscriptions.in_flight import InFlight
from msgbus._next.subscriptions.partition import Partition
from msgbus._next.subscriptions.state import Settlement, SubscriptionState

IDLE_STEP = 1000
"""Messages of others after which a cursor is written though nothing was handed out."""


class Page(NamedTuple):
    """A part of the log that was read for partitions at the same position."""

    partitions: Sequence[Partition]
    scan: Scan


@final
class PartitionedState(SubscriptionState):
    """The state of an EXCLUSIVE or KEY_SHARED subscription.

    Args:
        at_most_once: Acknowledge messages before they are handed out.
    """

    def __init__(self, *args: Any, at_most_once: bool = False, **options: Any) -> None:
        super().__init__(*args, **options)
        self.owned: dict[int, Partition] = {}
        self.unchecked: dict[str, None] = {}
        """Keys of which a row has ended: the last one, maybe."""
        self._parked_since: set[str] = set()
        self._at_most_once = at_most_once
        self._pages: list[Page] = []
        self._fed: list[tuple[Partition, int, list[InFlight]]] = []
        """What the commit being written hands out, and up to where it looked."""
        self._before: dict[Partition, tuple[Cursor, int]] = {}
        self._released: list[Partition] = []
        self._has_parked = False
        """The commit being written parks messages; the row before them may be gone by now."""

    def begin(self, member: Member) -> None:
        """Start anew as this member."""
        with self.lock:
            super().begin(member)
            self.owned = {}
            self.unchecked.clear()
            self._pages = []

    # -- partitions ------------------------------------------------------------------------------

    def add(self, cursor: Cursor, blocked: set[str]) -> None:
        """Begin to work on a partition that was acquired."""
        with self.lock:
            self.owned[cursor.partition] = Partition(cursor, blocked)

    def lose(self, cursors: Mapping[int, Cursor]) -> list[InFlight]:
        """Drop the partitions that others own now; return those whose handler is running."""
        with self.lock:
            lost: set[Partition] = set()
            for number, partition in list(self.owned.items()):
                stored, own = cursors.get(number), partition.cursor
                if stored is None or (stored.owner, stored.epoch) != (own.owner, own.epoch):
                    lost.add(self.owned.pop(number))
            for page in [page for page in self._pages if lost.intersection(page.partitions)]:
                self._pages.remove(page)
                self.take_page(page.partitions, None)
            return self.abandon([one for one in self.in_flight if one.partition in lost])

    # -- reading ---------------------------------------------------------------------------------

    @property
    def is_behind(self) -> bool:
        """Whether there is something to read."""
        return any(p.is_open and p.position < self.head for p in self.owned.values())

    def next_page(self) -> tuple[int, list[Partition]] | None:
        """Return the position to read behind, and for whom; they wait for `take_page` then."""
        with self.lock:
            behind = [p for p in self.owned.values() if p.is_open and p.position < self.head]
            if not behind or not self.has_low_stock or self.room() <= 0:
                return None
            position = min(partition.position for partition in behind)
            group = [partition for partition in behind if partition.position == position]
            for partition in group:
                partition.is_reading = True
            return position, group

    def take_page(self, partitions: Sequence[Partition], scan: Scan | None) -> None:
        """Hand out a page with the next commit; `None` if it could not be read."""
        with self.lock:
            if scan is not None:
                self._pages.append(Page(partitions, scan))
                return
            for partition in partitions:
                partition.is_reading = False

    def admit_claims(self, claims: Sequence[Claim], *, alone: bool = False) -> list[InFlight]:
        """Hand out rows that were claimed."""
        with self.lock:
            assert self.member is not None  # noqa: S101 (only a member claims)
            admitted: list[InFlight] = []
            for row, record in claims:
                attempt = row.attempt if alone else row.attempt + 1
                partition = self.owned.get(row.partition)
                key = self.selection.order_key(record)
                one = InFlight(self.name, record, attempt, key, self.member, partition, row)
                if partition is not None:
                    partition.rows += 1
                admitted.append(one)
                if alone:
                    self.in_flight[one] = None
                else:
                    self.admit(one)
            return admitted

    # -- how deliveries end ----------------------------------------------------------------------

    def _end(self, one: InFlight) -> None:
        one.is_ended = True
        partition = one.partition
        if partition is None:
            return
        if one.row is not None:
            partition.rows -= 1
        else:
            partition.advance()

    def _written(self, settlement: Settlement) -> None:
        super()._written(settlement)
        self._check_later(*settlement.ended)

    def forget(self, settlement: Settlement) -> None:
        """Drop a settlement that was refused."""
        with self.lock:
            super().forget(settlement)
            self._check_later(*settlement.ended)

    def _check_later(self, *several: InFlight) -> None:
        """Find out whether their keys have rows left, now that theirs have changed."""
        for one in several:
            if one.row is not None and one.key is not None:
                self.unchecked[one.key] = None

    def acknowledged_in_commit(self, one: InFlight) -> None:
        """End a delivery that a commit of the handler itself has acknowledged."""
        with self.lock:
            one.is_marked = True
            super().acknowledged_in_commit(one)
            self._check_later(one)

    def _guard(self, one: InFlight) -> list[Operation]:
        return [] if one.row is not None or self._at_most_once else [one.fence()]

    def _mark_handled(self, one: InFlight, time: float) -> list[Operation]:
        """Return rows for earlier messages of its key that the cursor has not passed.

        Without them, the next owner would deliver those again, after the row of this one.
        """
        handled: list[Operation] = []
        for other in () if one.partition is None else one.partition.order:
            is_before = other.key == one.key and other.offset < one.offset
            if is_before and other.is_ended and not other.is_marked and other.row is None:
                other.is_marked = True
                handled.append(Put(other.as_row(State.DONE, time=time)))
        return handled

    def _hold_back(self, one: InFlight) -> list[InFlight]:
        assert one.key is not None  # noqa: S101 (only a key can be held back)
        if one.partition is not None:
            one.partition.blocked.add(one.key)
            self._parked_since.add(one.key)
        return super()._hold_back(one)

    def check(self, key: str) -> None:
        """Begin to find out whether a key has rows left."""
        with self.lock:
            self.unchecked.pop(key, None)
            self._parked_since.discard(key)

    def unblock(self, key: str) -> None:
        """Let messages of a key go on that had no row left, unless one was parked since."""
        with self.lock:
            if key not in self._parked_since:
                for partition in self.owned.values():
                    partition.blocked.discard(key)

    # -- commits ---------------------------------------------------------------------------------

    @property
    def is_dirty(self) -> bool:
        """Whether something waits to be written."""
        return (
            bool(self._notes or self._settled or self._pages)
            or any(p.is_leaving and p.is_idle for p in self.owned.values())
            or any(self._has_moved(p) for p in self.owned.values())
        )

    @staticmethod
    def _has_moved(partition: Partition) -> bool:
        """Tell whether the acknowledged offset is worth a write of its own."""
        cursor, acked = partition.cursor, partition.acked
        is_doubtful = cursor.fetched > cursor.acked
        return acked > cursor.acked and (is_doubtful or acked - cursor.acked >= IDLE_STEP)

    def _own_operations(self, appended: Sequence[Claim], before: int) -> list[Operation]:
        self._fed, self._before, self._released = [], {}, []
        operations: list[Operation] = []
        opened: dict[Partition, int] = {}
        pages, self._pages = self._pages, []
        for page in pages:
            operations += self._open(page.partitions, page.scan.records, page.scan.upto, opened)
        if appended and not pages:
            operations += self._feed(appended, before, opened)
        for partition in self.owned.values():
            operations += self._move(partition, opened.get(partition))
        return operations

    def _feed(
        self, appended: Sequence[Claim], before: int, opened: dict[Partition, int]
    ) -> list[Operation]:
        """Hand out what was just appended to partitions that wait for exactly that."""
        room = self.room()
        group = {p.number: p for p in self.owned.values() if p.is_open and p.position == before}
        if room <= 0 or not group:
            return []
        selection = self.selection
        records = [
            claim.record
            for claim in appended
            if selection.takes(claim.record) and selection.partition(claim.record) in group
        ]
        upto = appended[-1].record.offset if len(records) <= room else records[room - 1].offset
        return self._open(list(group.values()), records[:room], upto, opened)

    def _open(
        self,
        partitions: Collection[Partition],
        records: Sequence[Record | int],
        upto: int,
        opened: dict[Partition, int],
    ) -> list[Operation]:
        """Take records for their partitions; return rows for those that are not handed out."""
        operations: list[Operation] = []
        handed: dict[Partition, list[InFlight]] = {p: [] for p in partitions}
        first = next(iter(partitions))
        for record in records:
            if isinstance(record, int):
                operations.append(Put(self._damaged(record, first.number)))
                opened[first] = record
                continue
            partition = self._partition_of(record, partitions)
            opened[partition] = record.offset
            one = self._in_flight(record, partition)
            if one.key is not None and one.key in partition.blocked:
                self._parked_since.add(one.key)
                self.counts.parked += 1
                self._has_parked = True
                operations.append(Put(self._parked(one)))
            else:
                handed[partition].append(one)
        for partition, several in handed.items():
            self._before.setdefault(partition, (partition.cursor, partition.position))
            partition.position = max(upto, partition.position)
            self._fed.append((partition, upto, several))
        return operations

    def _partition_of(self, record: Record, partitions: Collection[Partition]) -> Partition:
        if len(partitions) == 1:
            return next(iter(partitions))
        number = self.selection.partition(record)
        return next(partition for partition in partitions if partition.number == number)

    def _in_flight(self, record: Record, partition: Partition) -> InFlight:
        assert self.member is not None  # noqa: S101 (only a member owns partitions)
        key = self.selection.order_key(record)
        return InFlight(self.name, record, 1, key, self.member, partition)

    def _damaged(self, offset: int, partition: int) -> Pending:
        error, now = "The message is damaged.", self.clock.time()
        state = State.DAMAGED
        return Pending(
            self.name, offset, partition, None, state, 0, None, None, 1, False, error, now
        )

    def _move(self, partition: Partition, fetched: int | None) -> list[Operation]:
        """Write the cursor of a partition if it has moved, or is released."""
        cursor = partition.cursor
        is_released = partition.is_leaving and partition.is_idle
        acked = max(partition.acked, cursor.acked)
        if fetched is not None and self._at_most_once:
            acked = max(acked, fetched)
        if fetched is None and not is_released and not self._has_moved(partition):
            return []
        self._before.setdefault(partition, (cursor, partition.position))
        moved = Pass(cursor, acked, max(cursor.fetched, acked, fetched or 0), is_released)
        partition.cursor = moved.after
        if is_released:
            self._released.append(partition)
        return [moved]

    def _kept(self) -> bool:
        is_fed = bool(self._fed)
        for partition, upto, several in self._fed:
            partition.is_reading = False
            partition.looked = max(partition.looked, upto)
            if self.owned.get(partition.number) is partition:
                for one in several:
                    self._hand_out(one, partition)
                partition.advance()
        for partition in self._released:
            self.owned.pop(partition.number, None)
        self._fed, self._before, self._released = [], {}, []
        return is_fed

    def _needs_look(self) -> bool:
        has_parked, self._has_parked = self._has_parked, False
        return has_parked or (self.is_behind and self.has_low_stock)

    def _hand_out(self, one: InFlight, partition: Partition) -> None:
        if not self._at_most_once:
            partition.order.append(one)
        if one.key is not None and one.key in partition.blocked:
            # Blocked since it was taken: it has to wait in the journal, too.
            self.in_flight[one] = None
            self._parked_since.add(one.key)
            self._settled.append(Settlement((one,), (Put(self._parked(one)),)))
        else:
            self.admit(one)

    def _refused(self) -> None:
        for partition, (cursor, position) in self._before.items():
            partition.cursor, partition.position = cursor, position
            partition.is_reading = False
        self._fed, self._before, self._released = [], {}, []
