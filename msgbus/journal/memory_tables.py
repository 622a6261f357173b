"""Tables of a journal in memory: dictionaries, and the steps of a commit on them."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Generator, Hashable, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, Final, TypeVar, final

from msgbus.errors import MemberEndedError
from msgbus.journal import operations as op, rows
from msgbus.journal.ports import Claim, Due, KeyRows, Scan
from msgbus.journal.records import (
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

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
Undo = list[Callable[[], object]]

_SCAN: Final = 5_000
"""Messages that one read looks at."""


@final
class UndoTable(dict[K, V]):
    """A dictionary whose changes can be undone."""

    def __init__(self, undo: Undo) -> None:
        super().__init__()
        self._undo = undo

    def put(self, key: K, value: V) -> None:
        """Set an entry."""
        self._remember(key)
        self[key] = value

    def drop(self, key: K) -> None:
        """Delete an entry, if it is there."""
        if key in self:
            self._remember(key)
            del self[key]

    def _remember(self, key: K) -> None:
        if key in self:
            self._undo.append(lambda value=self[key]: self.__setitem__(key, value))  # type: ignore[misc]
        else:
            self._undo.append(lambda: self.pop(key, None))


@final
class MemoryTables:
    """The tables, and the steps of a commit."""

    def __init__(self, clock: Clock) -> None:
        undo: Undo = []
        self.lock = threading.RLock()
        self.watch = Watch(clock)
        self._clock = clock
        self._undo = undo
        self.numbers = UndoTable[str, int](undo)
        self.messages = UndoTable[int, Record](undo)
        self.offsets = UndoTable[str, int](undo)
        self.pending: defaultdict[str, UndoTable[int, Pending]] = defaultdict(
            lambda: UndoTable(undo)
        )
        self.letters = UndoTable[tuple[str, int], tuple[int, Letter]](undo)
        """Each with its number."""
        self.results = UndoTable[str, Result](undo)
        self.deliveries = UndoTable[int, DeliveryRecord](undo)
        self.instances = UndoTable[tuple[str, str], Instance](undo)
        self._cursors = UndoTable[tuple[str, int], Cursor](undo)
        self._members = UndoTable[int, Member](undo)
        self.renewed: dict[int, tuple[float, float]] = {}
        """Since when, and how often, members are renewed by themselves."""
        self.appended: list[Claim] = []
        self._acting: int | None = None
        """Id of the member on whose behalf the current operations are applied."""
        self._steps: dict[type, Callable[[Any], None]] = {
            op.Put: self._put,
            op.Drop: self._drop,
            op.Pass: self._pass,
            op.Fence: self._fence,
            op.Seek: self._seek,
            op.Remove: self._remove,
            op.Reply: self._reply,
            op.Note: lambda note: self.deliveries.put(self._next("delivery"), note.delivery),
            op.Save: self._save,
        }

    @contextmanager
    def undone_if_it_fails(self) -> Generator[None]:
        """Undo the changes of a block that raises."""
        mark, count = len(self._undo), len(self.appended)
        try:
            yield
        except BaseException:
            while len(self._undo) > mark:
                self._undo.pop()()
            del self.appended[count:]
            raise

    def keep(self) -> None:
        """Make the changes final."""
        self._undo.clear()

    def _next(self, counter: str) -> int:
        self.numbers.put(counter, self.numbers.get(counter, 0) + 1)
        return self.numbers[counter]

    # -- Log -------------------------------------------------------------------------------------

    def head(self) -> int:
        """Return the highest offset ever given."""
        return self.numbers.get("head", 0)

    def first(self) -> int:
        """Return the lowest offset; see `Log.first`."""
        return min(self.messages, default=self.head() + 1)

    def offset_at(self, time: float) -> int:
        """Return the lowest offset recorded at `time` or later; see `Log.offset_at`."""
        found = (offset for offset, record in self.messages.items() if record.time >= time)
        return min(found, default=self.head() + 1)

    def message(self, message_id: str) -> Record | None:
        """Return a message of the log; see `Log.message`."""
        return self.messages.get(self.offsets.get(message_id, 0))

    def read(
        self,
        after: int,
        limit: int,
        selection: Selection,
        partitions: Collection[int] | None = None,
        until: int | None = None,
    ) -> Scan:
        """Read records behind an offset; see `Log.read`."""
        found: list[Record | int] = []
        upto = max(min(self.head() if until is None else until, after + _SCAN), after)
        for offset in range(after + 1, upto + 1):
            record = self.messages.get(offset)
            if record is None or not selection.takes(record):
                continue
            if partitions is None or selection.partition(record) in partitions:
                found.append(record)
                if len(found) >= limit:
                    return Scan(found, offset)
        return Scan(found, upto)

    def apply(self, operations: Sequence[op.Operation], member: Member | None) -> list[Appended]:
        """Apply operations on behalf of a member; return the results of the `Append`s."""
        results: list[Appended] = []
        self._acting = None if member is None else member.id
        for operation in operations:
            if isinstance(operation, op.Append):
                results.append(self._append(*operation))
            elif type(operation) in self._steps:
                self._steps[type(operation)](operation)
            else:
                raise rows.not_an_operation(operation)
        return results

    def _append(
        self, record: Record, queue: str | None, due: float | None, unique: str | None
    ) -> Appended:
        is_delayed = queue == DELAYED
        unique = record.message_id if is_delayed else unique
        known = self.offsets.get(record.message_id)
        if known is None and unique is not None and queue is not None:
            known = self._holder(queue, unique)
        if known is not None:
            return Appended(known, is_duplicate=True)
        offset = self._next("delayed" if is_delayed else "head")
        if not is_delayed:
            record = record._replace(offset=offset)
            self.messages.put(offset, record)
            self.offsets.put(record.message_id, offset)
        row = rows.queued(queue, record, offset, due, unique)
        if queue is not None:
            self.pending[queue].put(offset, row)
        if not is_delayed:
            self.appended.append(Claim(row, record))
        return Appended(offset)

    # -- pending rows ----------------------------------------------------------------------------

    def _put(self, put: op.Put) -> None:
        row = put.row
        stored = self.row(row.subscription, row.offset)
        rows.check_version(row, stored, row.version - 1, self._acting)
        self._check_unique(row)
        if row.state is State.PARKED and not self._has_before(row):
            row = rows.first_of_key(row)
        self._set(row, put.letter, is_whole=put.is_whole)
        if put.promote and stored is not None:
            self._promote(stored)

    def _drop(self, drop: op.Drop) -> None:
        row = self.row(drop.row.subscription, drop.row.offset)
        rows.check_version(drop.row, row, drop.row.version, self._acting)
        if row is None:
            raise rows.row_changed(drop.row)
        cursor = self._cursors.get((row.subscription, row.partition))
        if cursor is not None and row.offset > cursor.acked:
            self._set(rows.done(row))
        else:
            self._delete(row)
        self._promote(row)

    def _check_unique(self, row: Pending) -> None:
        if row.unique is None or row.state is State.DEAD:
            return
        if self._holder(row.subscription, row.unique) not in (None, row.offset):
            raise rows.unique_taken(row)

    def _holder(self, name: str, unique: str) -> int | None:
        """Return the offset of the row that has a unique key and is not dead."""
        return next((row.offset for row in self.rows(name) if row.holds(unique)), None)

    def _has_before(self, row: Pending) -> bool:
        """Tell whether a row of its key is before it."""
        same = self._of_key(row.subscription, row.partition, row.key)
        return bool(same) and same[0].offset < row.offset

    def _set(self, row: Pending, letter: Letter | None = None, *, is_whole: bool = False) -> None:
        self.pending[row.subscription].put(row.offset, row)
        if row.state is State.DONE or (row.state is State.KEPT and letter is None):
            self.letters.drop(row[:2])
        elif letter is not None:
            number, known = self.letters.get(row[:2]) or (self._next("letter"), letter)
            self.letters.put(row[:2], (number, letter if is_whole else letter.after(known)))

    def _delete(self, row: Pending) -> None:
        self.pending[row.subscription].drop(row.offset)
        self.letters.drop(row[:2])

    def _promote(self, done: Pending) -> None:
        """Let the first parked row of a key go, unless another row holds it back."""
        same = self._of_key(done.subscription, done.partition, done.key)
        if not any(row.state in HOLDING for row in same):
            for row in islice((row for row in same if row.state is State.PARKED), 1):
                self._set(rows.promoted(row))

    # -- the other operations --------------------------------------------------------------------

    def _pass(self, operation: op.Pass) -> None:
        cursor, head = operation.cursor, self.head()
        if max(operation.acked, operation.fetched) > head:
            raise rows.beyond_head(cursor.name, operation.fetched, head)
        stored = self._cursors.get(cursor[:2])
        if (
            stored is None
            or (stored.owner, stored.epoch) != (cursor.owner, cursor.epoch)
            or (stored.owner is None and stored.acked != cursor.acked)
            or stored.owner not in (None, self._acting)
        ):
            raise rows.owner_changed(cursor)
        self._move(operation.after._replace(selection=stored.selection))

    def _move(self, cursor: Cursor) -> None:
        """Write a cursor; delete rows of acknowledged messages that it has passed."""
        self._cursors.put(cursor[:2], cursor)
        for row in self.rows(cursor.name):
            is_done = (row.state, row.partition) == (State.DONE, cursor.partition)
            if is_done and row.offset <= cursor.acked:
                self._delete(row)

    def _fence(self, fence: op.Fence) -> None:
        row = self.row(fence.subscription, fence.offset)
        cursor = self._cursors.get((fence.subscription, fence.partition))
        rows.check_fence(fence, row, cursor, self._acting)

    def _seek(self, seek: op.Seek) -> None:
        offset = min(seek.offset, self.head())
        for row in self.rows(seek.name):
            if row.offset > offset and row.state is not State.KEPT:
                self._delete(row)
        for cursor in self.cursors(seek.name):
            epoch = cursor.epoch + 1
            self._move(cursor._replace(acked=offset, fetched=offset, owner=None, epoch=epoch))

    def _remove(self, remove: op.Remove) -> None:
        for row in self.rows(remove.name):
            self._delete(row)
        for cursor in self.cursors(remove.name):
            self._cursors.drop(cursor[:2])

    def _reply(self, reply: op.Reply) -> None:
        if reply.message_id not in self.results:
            result = Result(reply.message_id, reply.body, reply.error, reply.time)
            self.results.put(reply.message_id, result)

    def _save(self, save: op.Save) -> None:
        instance = save.instance
        stored = self.instance(instance.name, instance.key)
        if (0 if stored is None else stored.version) != instance.version - 1:
            raise rows.instance_changed(instance)
        self.instances.put(instance[:2], instance)

    # -- Members ---------------------------------------------------------------------------------

    def has(self, member: Member) -> bool:
        """Tell whether a member exists."""
        return member.id in self._members

    def require(self, member: Member) -> None:
        """Raise unless the member exists."""
        if not self.has(member):
            raise MemberEndedError(member.id)

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
        """Add a member."""
        member = Member(self._next("member"), process, dict(serves), 0)
        self._members.put(member.id, member)
        return member

    def renew(self, member: Member) -> Member:
        """Show that the member is alive; see `Members.renew`."""
        self.require(member)
        renewed = member._replace(renewals=self._members[member.id].renewals + 1)
        self._members.put(member.id, renewed)
        return self._counted(renewed)

    def end(self, member: Member) -> bool:
        """Delete a member that was not renewed since it was read; see `Members.end`."""
        stored = self._members.get(member.id)
        if stored is None or self._counted(stored).renewals != member.renewals:
            return False
        self._members.drop(member.id)
        for row in self.rows(None):
            if row.owner == member.id:
                self._set(rows.in_doubt(row))
        for cursor in self.cursors():
            if cursor.owner == member.id:
                self._cursors.put(cursor[:2], cursor._replace(owner=None))
        return True

    def cursors(self, name: str | None = None) -> list[Cursor]:
        """Return the cursors of one subscription, or of all, by name and partition."""
        found = sorted(self._cursors.items())
        return [cursor for _, cursor in found if name in (None, cursor.name)]

    def open(self, name: str, selection: Selection, start: int) -> list[Cursor]:
        """Return the cursors of a subscription, made if it is new; see `Members.open`."""
        start, members = min(start, self.head()), list(self._members.values())
        found = rows.opened(name, selection, start, self.cursors(name), members)
        for cursor in found:
            self._cursors.put(cursor[:2], cursor)
        return found

    def acquire(
        self, member: Member, name: str, partition: int, selection: Selection
    ) -> Cursor | None:
        """Take a partition that has no owner; see `Members.acquire`."""
        self.require(member)
        cursor = self._cursor(name, partition)
        if cursor.owner is not None:
            return None
        held = {key: same[0].offset for key, same in self._keys(name, partition).items()}
        after = cursor.acked
        while after < cursor.fetched:
            scan = self.read(after, _SCAN, selection, (partition,), cursor.fetched)
            after = scan.upto
            for record in self._unmet(name, scan):
                self._set(rows.doubtful(name, record, partition, selection, held))
        taken = rows.taken(cursor, member)
        self._move(taken)
        return taken

    def _cursor(self, name: str, partition: int) -> Cursor:
        cursor = self._cursors.get((name, partition))
        if cursor is None:
            raise rows.removed(name)
        return cursor

    def _unmet(self, name: str, scan: Scan) -> list[Record]:
        """Return the records that have no row in a subscription."""
        found = (record for record in scan.records if isinstance(record, Record))
        return [record for record in found if record.offset not in self.pending[name]]

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
        if selection is not None or partitions is not None:
            self._cursor(name, 0)
        claims: list[Claim] = []
        for row in self._due(name, now, partitions, alone)[: max(limit, 0)]:
            record = self.record(row)
            assert record is not None  # noqa: S101 (retention leaves what a row needs)
            claims.append(Claim(rows.claimed(row, member, now, alone=alone), record))
            self._set(claims[-1].row)
        if selection is None or len(claims) >= limit or alone:
            return claims
        cursor = self._cursor(name, 0)
        scan = self.read(cursor.acked, limit - len(claims), selection)
        for record in self._unmet(name, scan):
            claims.append(Claim(rows.newly_claimed(name, record, member, now), record))
            self._set(claims[-1].row)
        self.apply([op.Pass(cursor, scan.upto, scan.upto)], member)
        return claims

    # -- Rows ------------------------------------------------------------------------------------

    def rows(self, name: str | None) -> list[Pending]:
        """Return the rows of a subscription, or of all, by offset."""
        tables = list(self.pending.values()) if name is None else [self.pending[name]]
        found = [row for table in tables for row in table.values()]
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
            for row in self.rows(name)
            if row.state in states
            and (row.offset, row.subscription) > start
            and key in (None, row.key)
        )
        return list(islice(found, limit))

    def count(self, name: str | None = None) -> dict[State, int]:
        """Count rows by state."""
        return dict(Counter(row.state for row in self.rows(name)))

    def _keys(self, name: str, partition: int) -> dict[str, list[Pending]]:
        """Return the rows of each key of a partition, by offset."""
        keys: defaultdict[str, list[Pending]] = defaultdict(list)
        for row in self.rows(name):
            if row.key is not None and row.partition == partition:
                keys[row.key].append(row)
        return keys

    def _of_key(self, name: str, partition: int, key: str | None) -> list[Pending]:
        return [] if key is None else self._keys(name, partition).get(key, [])

    def blocked_keys(self, name: str, partition: int) -> set[str]:
        """Return the keys of a partition that have rows."""
        return set(self._keys(name, partition))

    def key_rows(self, name: str, partition: int, key: str) -> KeyRows:
        """Return how many rows a key of a partition has, and the first."""
        found = self._of_key(name, partition, key)
        return KeyRows(found[0].offset if found else None, len(found))

    def _due(
        self, name: str, now: float, partitions: Collection[int] | None, alone: bool | None
    ) -> list[Pending]:
        found = [
            (row.due, row.offset, row)
            for row in self.pending[name].values()
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
        return self.pending[name].get(offset)

    def record(self, row: Pending) -> Record | None:
        """Return the message of a row."""
        return row.body or self.messages.get(row.offset)

    def letter(self, row: Pending) -> Letter | None:
        """Return the letter of a dead row."""
        return self.letters[row[:2]][1] if row[:2] in self.letters else None

    def result(self, message_id: str) -> Result | None:
        """Return the result of an enqueued command."""
        return self.results.get(message_id)

    def results_of(self, message_ids: Collection[str]) -> list[Result]:
        """Return those results of these commands that are there."""
        return [self.results[one] for one in message_ids if one in self.results]

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
