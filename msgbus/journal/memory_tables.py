"""Tables of a journal in memory: dictionaries, an index, an undo log, and the operations."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from msgbus.errors import MemberEndedError
from msgbus.journal import operations as op, rows
from msgbus.journal.ports import Claim
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
    State,
)

K = TypeVar("K")
V = TypeVar("V")


class MemoryTables:
    """The tables; what a commit does to them is undone if it fails."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}
        """The last number of each kind."""
        self.messages: dict[int, Record] = {}
        self.pending: defaultdict[str, dict[int, Pending]] = defaultdict(dict)
        self.letters: dict[tuple[str, int], tuple[int, Letter]] = {}
        """Each with its number."""
        self.notes: dict[int, DeliveryRecord] = {}
        self.undo: list[Callable[[], object]] = []
        """Takes back what the commit has changed, the last first."""
        self.appended: list[Claim] = []
        """What the commit has appended."""
        self.joined: dict[int, Member] = {}
        self._acting: int | None = None
        """Id of the member on whose behalf operations are applied."""
        self._offsets: dict[str, int] = {}
        self._index: defaultdict[tuple[object, ...], list[tuple[float, int]]] = defaultdict(list)
        """Offsets of rows, each behind what it is sorted by; see `_entries`."""
        self._cursors: dict[tuple[str, int], Cursor] = {}
        self._results: dict[str, Result] = {}
        self._instances: dict[tuple[str, str], Instance] = {}
        self._steps: dict[type, Callable[[Any], Appended | None]] = {
            op.Append: self._append,
            op.Put: self._put,
            op.Drop: self._drop,
            op.Pass: self._pass,
            op.Fence: self._fence,
            op.Seek: self._seek,
            op.Remove: self._remove,
            op.Reply: self._reply,
            op.Note: lambda note: self.write(self.notes, self._next("note"), note.delivery),
            op.Save: self._save,
        }

    # -- one commit ------------------------------------------------------------------------------

    @contextmanager
    def undone_if_it_fails(self) -> Generator[None]:
        """Undo the changes of a block that raises."""
        mark, count = len(self.undo), len(self.appended)
        try:
            yield
        except BaseException:
            for take_back in reversed(self.undo[mark:]):
                take_back()
            del self.undo[mark:], self.appended[count:]
            raise

    def write(self, table: dict[K, V], key: K, value: V | None) -> None:
        """Set an entry of a table, or delete it for `None`."""
        known = table.pop(key, None)
        if value is not None:
            table[key] = value
        if value is not known:
            self.undo.append(partial(self.write, table, key, known))

    def _next(self, kind: str) -> int:
        self.write(self.numbers, kind, self.numbers.get(kind, 0) + 1)
        return self.numbers[kind]

    def _set(self, row: Pending) -> None:
        self._place(row.subscription, row.offset, row)

    def _delete(self, row: Pending) -> None:
        self._place(row.subscription, row.offset, None)
        self.write(self.letters, row[:2], None)

    def _place(self, name: str, offset: int, row: Pending | None) -> None:
        """Write or delete a row, and its entries in the index."""
        table = self.pending[name]
        known = table.pop(offset, None)
        for where, entry in _entries(known):
            del self._index[where][bisect_left(self._index[where], entry)]
            if not self._index[where]:
                del self._index[where]
        for where, entry in _entries(row):
            insort(self._index[where], entry)
        if row is not None:
            table[offset] = row
        self.undo.append(partial(self._place, name, offset, known))

    def _found(self, *where: object) -> Sequence[tuple[float, int]]:
        """Return a part of the index, sorted."""
        return self._index.get(where, ())

    def _first(self, default: int, *where: object) -> int:
        """Return the first offset in a part of the index, or the default if there is none."""
        found = self._found(*where)
        return found[0][1] if found else default

    # -- what the operations, the ports and the questions have in common -------------------------

    def record(self, row: Pending) -> Record | None:
        """Return the message of a row."""
        return row.body or self.messages.get(row.offset)

    def rows(self, name: str | None = None) -> list[Pending]:
        """Return the rows of a subscription, or of all, by offset."""
        tables = list(self.pending.values()) if name is None else [self.pending[name]]
        found = [row for table in tables for row in table.values()]
        return sorted(found, key=lambda row: (row.offset, row.subscription))

    def head(self) -> int:
        """Return the highest offset ever given; see `Log.head`."""
        return self.numbers.get("head", 0)

    def row(self, name: str, offset: int) -> Pending | None:
        """Return one row."""
        return self.pending[name].get(offset)

    def cursors(self, name: str | None = None) -> list[Cursor]:
        """Return the cursors of one subscription, or of all; see `Members.cursors`."""
        return sorted(one for one in self._cursors.values() if name in (None, one.name))

    def require(self, member: Member) -> None:
        """Raise unless a member exists."""
        if member.id not in self.joined:
            raise MemberEndedError(member.id)

    # -- operations ------------------------------------------------------------------------------

    def apply(self, operations: Sequence[op.Operation], member: Member | None) -> list[Appended]:
        """Apply operations on behalf of a member; return the results of the `Append`s."""
        if member is not None:
            self.require(member)
        self._acting = None if member is None else member.id
        results: list[Appended | None] = []
        for operation in operations:
            step = self._steps.get(type(operation))
            if step is None:
                raise rows.not_an_operation(operation)
            results.append(step(operation))
        return [result for result in results if result is not None]

    def _append(self, append: op.Append) -> Appended:
        record, queue, due, unique = append
        is_delayed = queue == DELAYED
        unique = record.message_id if is_delayed else unique
        known = self._offsets.get(record.message_id, 0)
        if queue is not None and not known:
            known = self._first(0, queue, "unique", unique)
        if known:
            return Appended(known, is_duplicate=True)
        offset = self._next("delayed" if is_delayed else "head")
        if not is_delayed:
            record = record._replace(offset=offset)
            self.write(self.messages, offset, record)
            self.write(self._offsets, record.message_id, offset)
        row = rows.queued(queue, record, offset, due, unique)
        if queue is not None:
            self._set(row)
        if not is_delayed:
            self.appended.append(Claim(row, record))
        return Appended(offset)

    # -- operations on rows ----------------------------------------------------------------------

    def _put(self, put: op.Put) -> None:
        row, (name, offset, partition, key, state, *_) = put.row, put.row
        stored = self.row(name, offset)
        rows.check_version(row, stored, row.version - 1, self._acting)
        holder = self._first(offset, name, "unique", row.unique)
        if state is not State.DEAD and holder != offset:
            raise rows.unique_taken(row)
        if state is State.PARKED and self._first(offset, name, "key", partition, key) >= offset:
            row = rows.first_of_key(row)
        self._set(row)
        if state is State.DONE or (state is State.KEPT and put.letter is None):
            self.write(self.letters, row[:2], None)
        elif put.letter is not None:
            number, known = self.letters.get(row[:2]) or (self._next("letter"), put.letter)
            letter = put.letter if put.is_whole else put.letter.after(known)
            self.write(self.letters, row[:2], (number, letter))
        if put.promote and stored is not None:
            self._promote(stored)

    def _drop(self, drop: op.Drop) -> None:
        row = self.row(drop.row.subscription, drop.row.offset)
        rows.check_version(drop.row, row, drop.row.version, self._acting)
        if row is None:
            raise rows.row_changed(drop.row)
        self._delete(row)
        cursor = self._cursors.get((row.subscription, row.partition))
        if cursor is not None and row.offset > cursor.acked:
            self._set(rows.done(row))
        self._promote(row)

    def _promote(self, done: Pending) -> None:
        """Let the first parked row of a key go, unless another row holds it back."""
        name, _, partition, key = done[:4]
        if key is not None and not self._found(name, "holding", partition, key):
            same = (self.pending[name][one] for _, one in self._found(name, "key", partition, key))
            for row in islice((row for row in same if row.state is State.PARKED), 1):
                self._set(rows.promoted(row))

    def _fence(self, fence: op.Fence) -> None:
        row = self.row(fence.subscription, fence.offset)
        cursor = self._cursors.get((fence.subscription, fence.partition))
        rows.check_fence(fence, row, cursor, self._acting)

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
        self.write(self._cursors, cursor[:2], cursor)
        done = self._found(cursor.name, "done", cursor.partition)
        for _, offset in done[: bisect_right(done, (0.0, cursor.acked))]:
            self._delete(self.pending[cursor.name][offset])

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
            self.write(self._cursors, cursor[:2], None)

    def _reply(self, reply: op.Reply) -> None:
        message_id, time, body, error = reply
        if message_id not in self._results:
            self.write(self._results, message_id, Result(message_id, body, error, time))

    def _save(self, save: op.Save) -> None:
        instance = save.instance
        stored = self._instances.get(instance[:2])
        if (0 if stored is None else stored.version) != instance.version - 1:
            raise rows.instance_changed(instance)
        self.write(self._instances, instance[:2], instance)


def _entries(row: Pending | None) -> Iterator[tuple[tuple[object, ...], tuple[float, int]]]:
    """Return where a row is found in the index, and by what it is sorted there."""
    if row is None:
        return
    name, offset, partition, key, state, _, due, _, _, alone, *_, unique = row
    if due is not None:
        yield (name, "due", alone), (due, offset)
    if key is not None:
        yield (name, "key", partition, key), (0.0, offset)
        if state in HOLDING:
            yield (name, "holding", partition, key), (0.0, offset)
    if state is State.DONE:
        yield (name, "done", partition), (0.0, offset)
    if unique is not None and state is not State.DEAD:
        yield (name, "unique", unique), (0.0, offset)
