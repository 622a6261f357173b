"""`PartitionedState`: partitions that this process owns, read from the log in order.

EXCLUSIVE is one partition and one order for all messages; KEY_SHARED has an order per key.
Every cursor is written by `operations` alone, with what a commit appends or a page brings.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, final

from msgbus.journal.operations import Fence, Operation, Pass, Put
from msgbus.journal.ports import Claim, KeyRows, Scan
from msgbus.journal.records import Cursor, Member, Pending, Record, State
from msgbus.subscriptions.in_flight import InFlight
from msgbus.subscriptions.partition import BlockedKey, Partition
from msgbus.subscriptions.rules import Describe, describe
from msgbus.subscriptions.state import Settlement, SubscriptionState

IDLE_STEP: Final = 1000
"""Messages of others after which a cursor is written though nothing was handed out."""


PARK_LIMIT: Final = 10_000
"""Messages of one key that are parked at most, unless another number is given."""


class LogPage(NamedTuple):
    """A part of the log that was read for partitions at the same position."""

    partitions: Sequence[Partition]
    scan: Scan


@final
class PartitionedState(SubscriptionState):
    """The state of an EXCLUSIVE or KEY_SHARED subscription.

    Args:
        at_most_once: Acknowledge messages before they are handed out.
        park_limit: Messages of one key that are parked at most.
    """

    def __init__(
        self,
        *args: Any,
        at_most_once: bool = False,
        park_limit: int = PARK_LIMIT,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self.owned: dict[int, Partition] = {}
        self.describe: Describe = describe
        """Describes a dead letter."""
        self._park_limit = park_limit
        self._unchecked: dict[str, int] = {}
        """Keys whose rows are to be counted, with their partition: none is left, maybe."""
        self._overflow: list[tuple[InFlight, str]] = []
        self._overflowing: list[tuple[InFlight, str]] = []
        """What the commit being written dead-letters as too many are parked before it."""
        self._parking: list[BlockedKey] = []
        """Counts that the commit being written has raised."""
        self._rows_upto: dict[Partition, int] = {}
        """Highest offsets to which the commit being written gives rows."""
        self._parked_since: set[str] = set()
        self._at_most_once = at_most_once
        self._pages: list[LogPage] = []
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
            self._unchecked.clear()
            self._pages = []

    # -- partitions ------------------------------------------------------------------------------

    def add(self, cursor: Cursor, blocked: Iterable[str]) -> None:
        """Begin to work on a partition that was acquired."""
        with self.lock:
            self.owned[cursor.partition] = Partition(cursor, blocked)

    def lose(self, cursors: Mapping[int, Cursor]) -> tuple[list[InFlight], list[InFlight]]:
        """Drop the partitions that others own now.

        Returns:
            Deliveries that ended with that and had begun; and those that have a claimed row,
            which stays this process's own unless it was deleted.
        """
        with self.lock:
            lost: set[Partition] = set()
            for number, partition in list(self.owned.items()):
                stored, own = cursors.get(number), partition.cursor
                if stored is None or (stored.owner, stored.epoch) != (own.owner, own.epoch):
                    lost.add(self.owned.pop(number))
            for page in [page for page in self._pages if lost.intersection(page.partitions)]:
                self._pages.remove(page)
                self.take_page(page.partitions, None)
            in_flight = [one for one in self.in_flight if one.partition in lost]
            claimed = [one for one in in_flight if one.row is not None]
            for one in claimed:
                one.partition = None
            return self.abandon([one for one in in_flight if one.row is None]), claimed

    def owns(self, fence: Fence) -> bool:
        """Tell whether the partition of a delivery is still this process's own."""
        partition = self.owned.get(fence.partition)
        return partition is not None and partition.cursor.epoch == fence.epoch

    def release(self) -> list[Operation]:
        """Return what lets other members have the partitions, and the rows in flight."""
        with self.lock:
            settled = {one for settlement in self._settled for one in settlement.ended}
            known = {p: self._known_upto(p, settled) for p in self.owned.values()}
            for one in list(self.in_flight):
                partition = one.partition
                if one.row is None and partition in known and one.offset > known[partition]:
                    del self.in_flight[one]  # nothing knows of it: it is read again
            operations = super().release()
            for partition, upto in known.items():
                operations.append(Pass(partition.cursor, upto, upto, release=True))
            self.owned = {}
            return operations

    def _known_upto(self, partition: Partition, settled: Collection[InFlight]) -> int:
        """Return the offset beyond which no message was begun or has a row."""
        known = [partition.acked, partition.rows_upto]
        if self._at_most_once:
            known.append(partition.looked)
        known += [
            one.offset
            for one in partition.order
            if one.is_ended or one.worker is not None or one in settled
        ]
        return max(known)

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
                self._pages.append(LogPage(partitions, scan))
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
                one.is_kept = self.selection.keeps_done
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
                self._unchecked[one.key] = one.row.partition

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
            blocked = one.partition.blocked.setdefault(one.key, BlockedKey())
            blocked.count = None  # together with those behind it
            self._parked_since.add(one.key)
        return super()._hold_back(one)

    # -- blocked keys ----------------------------------------------------------------------------

    def check_all(self) -> None:
        """Count the rows of all blocked keys again."""
        with self.lock:
            for number, partition in self.owned.items():
                self._unchecked.update(dict.fromkeys(partition.blocked, number))

    def begin_check(self) -> dict[str, int]:
        """Return the keys whose rows are to be counted now, with their partitions."""
        with self.lock:
            unchecked, self._unchecked = self._unchecked, {}
            # What blocks the order as a whole may have been discarded by another process.
            for number, partition in self.owned.items():
                if "" in partition.blocked and partition.is_idle:
                    unchecked[""] = number
            self._parked_since.difference_update(unchecked)
            return unchecked

    def checked(self, number: int, key: str, rows: KeyRows) -> None:
        """Take note of the rows of a key, unless some were parked since: let it go if none is left.

        Args:
            number: Its partition.
            key: The key.
            rows: Its rows, as they were counted.
        """
        with self.lock:
            partition = self.owned.get(number)
            if partition is None or key in self._parked_since:
                return
            if not rows.size:
                partition.blocked.pop(key, None)
            elif key in partition.blocked:
                partition.blocked[key] = BlockedKey(*rows)

    def _park(self, one: InFlight, blocked: BlockedKey) -> Put:
        """Return what parks a message; beyond the limit, what dead-letters it."""
        assert one.key is not None  # noqa: S101 (only a key is blocked)
        self._has_parked = True
        self._parked_since.add(one.key)
        if blocked.count is not None and blocked.count > self._park_limit:
            return self._dead_letter(one, blocked)
        if blocked.count is None:
            assert one.partition is not None  # noqa: S101 (it was read for a partition)
            self._unchecked[one.key] = one.partition.number
        else:
            blocked.count += 1
            self._parking.append(blocked)
        self.counts.parked += 1
        return Put(self._parked(one))

    def _dead_letter(self, one: InFlight, blocked: BlockedKey) -> Put:
        now = self.clock.time()
        reason = (
            f"its key waits for message {blocked.first}, and park_limit={self._park_limit} "
            f"messages wait before it"
        )
        self._overflowing.append((one, reason))
        one.received = now
        row = one.as_row(State.DEAD, time=now, attempt=0, error=reason)
        return Put(row, self.describe(one, None, now)._replace(reason=reason))

    def take_overflow(self) -> list[tuple[InFlight, str]]:
        """Take messages that were dead-lettered as too many are parked, with the reason."""
        with self.lock:
            overflow, self._overflow = self._overflow, []
            return overflow

    # -- commits ---------------------------------------------------------------------------------

    @property
    def is_dirty(self) -> bool:
        """Whether something waits to be written."""
        return (
            bool(self._notes or self._settled or self._pages)
            or any(p.is_leaving and p.is_idle for p in self.owned.values())
            or any(self._has_moved(p) for p in self.owned.values())
        )

    def _has_moved(self, partition: Partition) -> bool:
        """Tell whether the acknowledged offset is worth a write of its own."""
        cursor, acked = partition.cursor, partition.acked
        # Up to `fetched` it is in doubt; what was handled before a seek is passed in silence.
        is_awaited = cursor.fetched > cursor.acked or self.selection.keeps_done
        return acked > cursor.acked and (is_awaited or acked - cursor.acked >= IDLE_STEP)

    def _own_operations(self, appended: Sequence[Claim], before: int) -> list[Operation]:
        self._fed, self._before, self._released = [], {}, []
        self._overflowing, self._parking, self._rows_upto = [], [], {}
        operations: list[Operation] = []
        opened: dict[Partition, int] = {}
        pages, self._pages = self._pages, []
        if self.is_draining or self.member is None:
            for page in pages:
                self.take_page(page.partitions, None)
            pages = []
        began: dict[Partition, int] = {}
        for page in pages:
            trimmed = max(page.scan.trimmed, page.partitions[0].position)
            began.update(dict.fromkeys(page.partitions, trimmed))
            operations += self._open(page.partitions, page.scan.records, page.scan.upto, opened)
        if appended and not pages:
            operations += self._feed(appended, before, opened)
        for partition in self.owned.values():
            operations += self._move(partition, opened.get(partition), began.get(partition))
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
        records: list[Record] = []
        upto = appended[-1].record.offset
        for _, record in appended:
            if selection.takes(record) and selection.partition(record) in group:
                if len(records) == room:
                    upto = records[-1].offset
                    break
                records.append(record)
        return self._open(list(group.values()), records, upto, opened)

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
        by_number = {p.number: p for p in partitions}
        first = next(iter(partitions))
        for record in records:
            if isinstance(record, int):
                operations.append(Put(self._damaged(record, first.number)))
                opened[first] = self._rows_upto[first] = record
                continue
            partition = by_number.get(self.selection.partition(record), first)
            opened[partition] = record.offset
            one = self._in_flight(record, partition)
            blocked = None if one.key is None else partition.blocked.get(one.key)
            if blocked is None:
                handed[partition].append(one)
            else:
                operations.append(self._park(one, blocked))
                self._rows_upto[partition] = record.offset
        for partition, several in handed.items():
            self._before.setdefault(partition, (partition.cursor, partition.position))
            partition.position = max(upto, partition.position)
            self._fed.append((partition, upto, several))
        return operations

    def _in_flight(self, record: Record, partition: Partition) -> InFlight:
        assert self.member is not None  # noqa: S101 (only a member owns partitions)
        key = self.selection.order_key(record)
        return InFlight(
            self.name,
            record,
            1,
            key,
            self.member,
            partition,
            is_kept=self.selection.keeps_done,
            is_acked_first=self._at_most_once,
        )

    def _damaged(self, offset: int, partition: int) -> Pending:
        error, now = "The message is damaged.", self.clock.time()
        state = State.DAMAGED
        return Pending(
            self.name, offset, partition, None, state, 0, None, None, 1, False, error, now
        )

    def _move(
        self, partition: Partition, fetched: int | None, trimmed: int | None
    ) -> list[Operation]:
        """Write the cursor of a partition if it has moved, or is released."""
        cursor = partition.cursor
        is_released = partition.is_leaving and partition.is_idle
        acked = max(partition.acked, cursor.acked)
        if fetched is not None and self._at_most_once:
            acked = max(acked, fetched)
        if fetched is None and not is_released and not self._has_moved(partition):
            return []
        self._before.setdefault(partition, (cursor, partition.position))
        fetched, owner = max(cursor.fetched, acked, fetched or 0), cursor.owner
        if is_released:
            self._released.append(partition)
            owner = None
        partition.cursor = cursor._replace(acked=acked, fetched=fetched, owner=owner)
        return [Pass(cursor, acked, fetched, is_released, trimmed)]

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
        self.counts.dead_lettered += len(self._overflowing)
        self._overflow += self._overflowing
        self._overflowing, self._parking = [], []
        for partition, upto in self._rows_upto.items():
            partition.rows_upto = max(partition.rows_upto, upto)
        return is_fed

    def _needs_look(self, settled: Sequence[Settlement]) -> bool:
        has_parked, self._has_parked = self._has_parked, False
        return bool(settled) or has_parked or (self.is_behind and self.has_low_stock)

    def _hand_out(self, one: InFlight, partition: Partition) -> None:
        if not self._at_most_once:
            partition.order.append(one)
        if one.key is not None and one.key in partition.blocked:
            # Blocked since it was taken: it has to wait in the journal, too.
            self.in_flight[one] = None
            self._parked_since.add(one.key)
            partition.blocked[one.key].count = None
            self._settled.append(Settlement((one,), (*self._guard(one), Put(self._parked(one)))))
        else:
            self.admit(one)

    def _refused(self) -> None:
        for partition, (cursor, position) in self._before.items():
            partition.cursor, partition.position = cursor, position
            partition.is_reading = False
        for blocked in self._parking:
            if blocked.count is not None:
                blocked.count -= 1
        self._fed, self._before, self._released = [], {}, []
        self._overflowing, self._parking = [], []
