"""Tables of a journal in memory: dictionaries, and the steps of a commit on them."""

from __future__ import annotations

import threading
from collections.abc import (
    Callable,
    Collection,
    Hashable,
    Mapping,
    MutableMapping,
    Sequence,
)
from itertools import islice
from typing import Any, Final, final

from msgbus._next.journal import rows
from msgbus._next.journal.errors import MemberEndedError
from msgbus._next.journal.operations import (
    Append,
    Drop,
    Fence,
    Note,
    Operation,
    Pass,
    Put,
    Remove,
    Reply,
    Save,
    Seek,
)
from msgbus._next.journal.ports import Claim, Due, Scan
from msgbus._next.journal.records import (
    DELAYED,
    HOLDING,
    Appended,
    Cursor,
    DeliveryRecord,
    Instance,
    Letter,
    Member,
    Pending,
    Record,
    Result,
    Selection,
    State,
)
from msgbus.journal.watch import Watch
from msgbus.runtime.clock import Clock

Table = MutableMapping[Any, Any]

_SCAN: Final = 5_000
"""Messages that one read looks at."""

_ABSENT: Final = object()


@final
class MemoryTables:
    """The tables, each a dictionary, and the steps of a commit. Changes can be undone."""

    def __init__(self, clock: Clock) -> None:
        self.lock = threading.RLock()
        self.watch = Watch(clock)
        self._clock = clock
        self.numbers: dict[str, int] = {}
        self.messages: dict[int, Record] = {}
        self.offsets: dict[str, int] = {}
        self._cursors: dict[tuple[str, int], Cursor] = {}
        self.pending: dict[tuple[str, int], Pending] = {}
        self.letters: dict[tuple[str, int], Letter] = {}
        self.results: dict[str, Result] = {}
        self.deliveries: dict[int, DeliveryRecord] = {}
        self.instances: dict[tuple[str, str], Instance] = {}
        self._members: dict[int, Member] = {}
        self.renewed: dict[int, tuple[float, float]] = {}
        """Since when, and how often, members are renewed by themselves."""
        self.appended: list[Claim] = []
        self.acting: int | None = None
        """Id of the member on whose behalf the current operations are applied."""
        self._undo: list[tuple[Table, Hashable, object]] = []

    # -- changes that can be undone --------------------------------------------------------------

    def change(self, table: Table, key: Hashable, value: object) -> None:
        """Set an entry, or delete it with `_ABSENT`."""
        self._undo.append((table, key, table.get(key, _ABSENT)))
        _set(table, key, value)

    def next(self, counter: str) -> int:
        self.change(self.numbers, counter, self.numbers.get(counter, 0) + 1)
        return self.numbers[counter]

    def mark(self) -> int:
        return len(self._undo)

    def roll_back(self, mark: int = 0) -> None:
        while len(self._undo) > mark:
            _set(*self._undo.pop())

    def keep(self) -> None:
        self._undo.clear()

    # -- Log -------------------------------------------------------------------------------------

    def head(self) -> int:
        """Return the highest offset ever given."""
        return self.numbers.get("head", 0)

    def read(
        self,
        after: int,
        limit: int,
        selection: Selection,
        partitions: Collection[int] | None = None,
    ) -> Scan:
        """Read records behind an offset; see `Log.read`."""
        return self._scan(after, self.head(), limit, selection, partitions)

    def _scan(
        self,
        after: int,
        until: int,
        limit: int,
        selection: Selection,
        partitions: Collection[int] | None = None,
    ) -> Scan:
        found: list[Record | int] = []
        upto = max(min(until, after + _SCAN), after)
        for offset in range(after + 1, upto + 1):
            record = self.messages.get(offset)
            if record is None or not selection.takes(record):
                continue
            if partitions is None or selection.partition(record) in partitions:
                found.append(record)
                if len(found) >= limit:
                    return Scan(found, offset)
        return Scan(found, upto)

    def apply(self, operations: Sequence[Operation], member: Member | None) -> list[Appended]:
        """Apply operations on behalf of a member; return the results of the `Append`s."""
        results: list[Appended] = []
        self.acting = None if member is None else member.id
        for operation in operations:
            if isinstance(operation, Append):
                results.append(self._append(*operation))
            else:
                _STEPS[type(operation)](self, operation)
        return results

    def _append(
        self, record: Record, queue: str | None, due: float | None, unique: str | None
    ) -> Appended:
        is_delayed = queue == DELAYED
        unique = record.message_id if is_delayed else unique
        known = self.offsets.get(record.message_id)
        if known is None and unique is not None and queue is not None:
            known = next((row.offset for row in self._rows(queue) if row.holds(unique)), None)
        if known is not None:
            return Appended(known, is_duplicate=True)
        offset = self.next("delayed" if is_delayed else "head")
        if not is_delayed:
            record = record._replace(offset=offset)
            self.change(self.messages, offset, record)
            self.change(self.offsets, record.message_id, offset)
        row = rows.queued(queue, record, offset, due, unique)
        if queue is not None:
            self.change(self.pending, (queue, offset), row)
        if not is_delayed:
            self.appended.append(Claim(row, record))
        return Appended(offset)

    def put(self, operation: Put) -> None:
        row, stored = operation.row, self._changeable(operation.row, operation.row.version - 1)
        self._check_unique(row)
        if row.state is State.PARKED and self._is_first(row):
            row = rows.first_of_key(row)
        self._set_row(row)
        if operation.letter is not None and row.state not in {State.DONE, State.KEPT}:
            self.change(self.letters, (row.subscription, row.offset), operation.letter)
        if operation.promote and stored is not None:
            self._promote(stored)

    def drop(self, operation: Drop) -> None:
        row = self._changeable(operation.row, operation.row.version)
        if row is None:
            raise rows.row_changed(operation.row)
        cursor = self._cursors.get((row.subscription, row.partition))
        if cursor is not None and row.offset > cursor.acked:
            self._set_row(rows.done(row))
        else:
            self._delete(row)
        self._promote(row)

    def _changeable(self, row: Pending, version: int) -> Pending | None:
        """Return the stored row, if it is at this version and not claimed by another member."""
        stored = self.row(row.subscription, row.offset)
        if (0 if stored is None else stored.version) != version:
            raise rows.row_changed(row)
        if stored is not None and stored.owner not in (None, self.acting):
            raise rows.not_the_owner(row)
        return stored

    def _is_first(self, row: Pending) -> bool:
        """Tell whether no row of its key is before it."""
        if row.key is None:
            return True
        held = self._held(row.subscription, row.partition)
        return held.get(row.key, row.offset) >= row.offset

    def _check_unique(self, row: Pending) -> None:
        if row.unique is not None and row.state is not State.DEAD:
            for other in self._rows(row.subscription):
                if other.holds(row.unique) and other.offset != row.offset:
                    raise rows.unique_taken(row)

    def _set_row(self, row: Pending) -> None:
        self.change(self.pending, (row.subscription, row.offset), row)
        if row.state in {State.DONE, State.KEPT}:
            self.change(self.letters, (row.subscription, row.offset), _ABSENT)

    def _delete(self, row: Pending) -> None:
        self.change(self.pending, (row.subscription, row.offset), _ABSENT)
        self.change(self.letters, (row.subscription, row.offset), _ABSENT)

    def _promote(self, done: Pending) -> None:
        """Let the first parked row of a key go, unless another row holds it back."""
        if done.key is None:
            return
        same = [
            row
            for row in self._rows(done.subscription)
            if (row.key, row.partition) == (done.key, done.partition)
        ]
        if not any(row.state in HOLDING for row in same):
            for row in islice((row for row in same if row.state is State.PARKED), 1):
                self._set_row(row.moved(State.WAITING, time=row.time, due=0.0))

    def move(self, operation: Pass) -> None:
        cursor = operation.cursor
        stored = self._cursors.get((cursor.name, cursor.partition))
        if (
            stored is None
            or (stored.owner, stored.epoch) != (cursor.owner, cursor.epoch)
            or (stored.owner is None and stored.acked != cursor.acked)
        ):
            raise rows.owner_changed(cursor)
        moved = operation.after._replace(selection=stored.selection)
        self.change(self._cursors, (cursor.name, cursor.partition), moved)
        self._forget_done(moved)

    def fence(self, fence: Fence) -> None:
        row = self.row(fence.subscription, fence.offset)
        cursor = self._cursors.get((fence.subscription, fence.partition))
        owner: int | None = None
        if fence.version is not None:
            if row is not None and row.version == fence.version:
                owner = row.owner
        elif row is None and cursor is not None and cursor.acked < fence.offset:
            owner = cursor.owner if cursor.epoch == fence.epoch else None
        if owner is None or owner != self.acting:
            raise rows.delivery_taken(fence.subscription, fence.offset)

    def seek(self, operation: Seek) -> None:
        name, offset = operation.name, min(operation.offset, self.head())
        for row in self._rows(name):
            if row.offset > offset and row.state is not State.KEPT:
                self._delete(row)
        for cursor in self.cursors(name):
            epoch = cursor.epoch + 1
            moved = cursor._replace(acked=offset, fetched=offset, owner=None, epoch=epoch)
            self.change(self._cursors, (name, cursor.partition), moved)

    def remove(self, operation: Remove) -> None:
        for row in self._rows(operation.name):
            self._delete(row)
        for cursor in self.cursors(operation.name):
            self.change(self._cursors, (cursor.name, cursor.partition), _ABSENT)

    def reply(self, reply: Reply) -> None:
        if reply.message_id not in self.results:
            result = Result(reply.message_id, reply.body, reply.error, reply.time)
            self.change(self.results, reply.message_id, result)

    def note(self, operation: Note) -> None:
        self.change(self.deliveries, self.next("delivery"), operation.delivery)

    def save(self, operation: Save) -> None:
        instance = operation.instance
        stored = self.instance(instance.name, instance.key)
        if (0 if stored is None else stored.version) != instance.version - 1:
            raise rows.instance_changed(instance)
        self.change(self.instances, (instance.name, instance.key), instance)

    # -- Members ---------------------------------------------------------------------------------

    def has(self, member: Member) -> bool:
        return member.id in self._members

    def require(self, member: Member) -> None:
        """Raise unless the member exists."""
        if not self.has(member):
            raise MemberEndedError(member)

    def members(self) -> list[Member]:
        """Return all members, by id."""
        return [self._counted(member) for member in self._members.values()]

    def _counted(self, member: Member) -> Member:
        """Add the renewals that another engine's thread would have written."""
        since, every = self.renewed.get(member.id, (0.0, 0.0))
        count = int((self._clock.now() - since) / every) if every else 0
        return member._replace(renewals=member.renewals + count)

    def stop_renewing(self, member: int) -> None:
        """Keep the count of renewals as it is now."""
        if member in self._members:
            self._members[member] = self._counted(self._members[member])
        self.renewed.pop(member, None)

    def join(self, process: str, serves: Mapping[str, str]) -> Member:
        member = Member(self.next("member"), process, dict(serves), 0)
        self.change(self._members, member.id, member)
        return member

    def renew(self, member: Member) -> Member:
        """Show that the member is alive; see `Members.renew`."""
        self.require(member)
        renewed = member._replace(renewals=self._members[member.id].renewals + 1)
        self.change(self._members, member.id, renewed)
        return self._counted(renewed)

    def end(self, member: Member) -> bool:
        """Delete a member that was not renewed since it was read; see `Members.end`."""
        stored = self._members.get(member.id)
        if stored is None or self._counted(stored).renewals != member.renewals:
            return False
        self.change(self._members, member.id, _ABSENT)
        for row in self._rows(None):
            if row.owner == member.id:
                self._set_row(row.moved(State.WAITING, time=row.time, due=0.0, alone=True))
        for cursor in self.cursors():
            if cursor.owner == member.id:
                freed = cursor._replace(owner=None)
                self.change(self._cursors, (cursor.name, cursor.partition), freed)
        return True

    def cursors(self, name: str | None = None) -> list[Cursor]:
        """Return the cursors of one subscription, or of all, by name and partition."""
        found = sorted(self._cursors.items())
        return [cursor for _, cursor in found if name in (None, cursor.name)]

    def open(self, name: str, selection: Selection, start: int) -> list[Cursor]:
        """Return the cursors of a subscription, made if it is new; see `Members.open`."""
        start = min(start, self.head())
        found = self.cursors(name) or [
            Cursor(name, partition, start, start, None, 0, selection.text)
            for partition in range(selection.partitions)
        ]
        if len(found) != selection.partitions:
            raise rows.other_partitions(name, len(found), selection.partitions)
        if all(member.serves.get(name) != found[0].selection for member in self._members.values()):
            found = [cursor._replace(selection=selection.text) for cursor in found]
        for cursor in found:
            self.change(self._cursors, (name, cursor.partition), cursor)
        return found

    def acquire(
        self, member: Member, name: str, partition: int, selection: Selection
    ) -> Cursor | None:
        """Take a partition that has no owner; see `Members.acquire`."""
        self.require(member)
        cursor = self._cursor(name, partition)
        if cursor.owner is not None:
            return None
        held = self._held(name, partition)
        after = cursor.acked
        while after < cursor.fetched:
            scan = self._scan(after, cursor.fetched, _SCAN, selection, (partition,))
            after = scan.upto
            for record in _undamaged(scan):
                if (name, record.offset) not in self.pending:
                    self._set_row(rows.doubtful(name, record, partition, selection, held))
        taken = cursor._replace(acked=cursor.fetched, owner=member.id, epoch=cursor.epoch + 1)
        self.change(self._cursors, (name, partition), taken)
        self._forget_done(taken)
        return taken

    def _cursor(self, name: str, partition: int) -> Cursor:
        cursor = self._cursors.get((name, partition))
        if cursor is None:
            raise rows.removed(name)
        return cursor

    def _held(self, name: str, partition: int) -> dict[str, int]:
        """Return the lowest offset of a row of each key."""
        found = [row for row in self._rows(name) if row.partition == partition]
        return {row.key: row.offset for row in reversed(found) if row.key is not None}

    def _forget_done(self, cursor: Cursor) -> None:
        """Delete rows of acknowledged messages that the cursor has passed."""
        for row in self._rows(cursor.name):
            is_done = (row.state, row.partition) == (State.DONE, cursor.partition)
            if is_done and row.offset <= cursor.acked:
                self._delete(row)

    # -- Deliveries ------------------------------------------------------------------------------

    def claim(
        self,
        member: Member,
        name: str,
        limit: int,
        now: float,
        *,
        selection: Selection | None = None,
        partitions: Collection[int] | None = None,
        alone: bool = False,
    ) -> list[Claim]:
        """Claim rows that are due; see `Deliveries.claim`."""
        self.require(member)
        claims: list[Claim] = []
        for row in islice(self._due(name, now, partitions, alone), limit):
            record = self.record(row)
            assert record is not None  # noqa: S101 (retention leaves what a row needs)
            claims.append(Claim(rows.claimed(row, member, now, alone=alone), record))
            self._set_row(claims[-1].row)
        room = limit - len(claims)
        if selection is not None and room > 0 and not alone:
            cursor = self._cursor(name, 0)
            scan = self._scan(cursor.acked, self.head(), room, selection)
            new = [
                Claim(rows.newly_claimed(name, record, member, now), record)
                for record in _undamaged(scan)
                if (name, record.offset) not in self.pending
            ]
            steps: list[Operation] = [Put(one.row) for one in new]
            steps.append(Pass(cursor, scan.upto, scan.upto))
            self.apply(steps, member)
            claims += new
        return claims

    # -- Rows ------------------------------------------------------------------------------------

    def _rows(self, name: str | None) -> list[Pending]:
        """Rows of a subscription, or of all, by offset."""
        found = [row for row in self.pending.values() if name in (None, row.subscription)]
        return sorted(found, key=lambda row: (row.offset, row.subscription))

    def find(
        self,
        name: str | None,
        states: Collection[State],
        *,
        key: str | None = None,
        after: Pending | None = None,
        limit: int = 100,
    ) -> list[Pending]:
        """Return rows of a subscription, or of all; see `Rows.find`."""
        start = (-1, "") if after is None else (after.offset, after.subscription)
        found = (
            row
            for row in self._rows(name)
            if row.state in states
            and (row.offset, row.subscription) > start
            and key in (None, row.key)
        )
        return list(islice(found, limit))

    def count(self, name: str | None = None) -> dict[State, int]:
        """Count rows by state."""
        counts: dict[State, int] = {}
        for row in self._rows(name):
            counts[row.state] = counts.get(row.state, 0) + 1
        return counts

    def blocked_keys(self, name: str, partition: int) -> set[str]:
        """Return the keys of a partition that have rows."""
        return set(self._held(name, partition))

    def _due(
        self, name: str, now: float, partitions: Collection[int] | None, alone: bool | None
    ) -> list[Pending]:
        found = [
            (row.due, row.offset, row)
            for row in self._rows(name)
            if row.due is not None
            and row.due <= now
            and alone in (None, row.alone)
            and (partitions is None or row.partition in partitions)
        ]
        return [row for _, _, row in sorted(found)]

    def next_due(self, name: str, partitions: Collection[int] | None = None) -> Due:
        """Return when the next row is due."""
        waiting = self._due(name, float("inf"), partitions, None)
        return Due(waiting[0].due if waiting else None, any(row.alone for row in waiting))

    def due(self, name: str, now: float, limit: int = 100) -> list[Pending]:
        """Return waiting rows whose time has come; claims nothing."""
        return self._due(name, now, None, None)[:limit]

    def row(self, name: str, offset: int) -> Pending | None:
        """Return one row."""
        return self.pending.get((name, offset))

    def record(self, row: Pending) -> Record | None:
        """Return the message of a row."""
        return row.body or self.messages.get(row.offset)

    def letter(self, row: Pending) -> Letter | None:
        """Return the letter of a dead row."""
        return self.letters.get((row.subscription, row.offset))

    def result(self, message_id: str) -> Result | None:
        """Return the result of an enqueued command."""
        return self.results.get(message_id)

    def instance(self, name: str, key: str) -> Instance | None:
        """Return one instance."""
        return self.instances.get((name, key))

    def due_instances(self, now: float, limit: int = 100) -> list[Instance]:
        """Return instances whose `wake` has come, the longest overdue first."""
        found = [
            (one.wake, one.name, one.key, one)
            for one in self.instances.values()
            if one.wake is not None and one.wake <= now
        ]
        return [one for *_, one in sorted(found)][:limit]


_STEPS: Final[dict[type, Callable[[MemoryTables, Any], None]]] = {
    Put: MemoryTables.put,
    Drop: MemoryTables.drop,
    Pass: MemoryTables.move,
    Fence: MemoryTables.fence,
    Seek: MemoryTables.seek,
    Remove: MemoryTables.remove,
    Reply: MemoryTables.reply,
    Note: MemoryTables.note,
    Save: MemoryTables.save,
}


def _set(table: Table, key: Hashable, value: object) -> None:
    if value is _ABSENT:
        table.pop(key, None)
    else:
        table[key] = value


def _undamaged(scan: Scan) -> list[Record]:
    return [record for record in scan.records if isinstance(record, Record)]
