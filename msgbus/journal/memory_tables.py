"""Tables of a journal in memory: dictionaries, an index, what undoes a commit, the operations."""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right, insort
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from heapq import merge
from itertools import takewhile
from math import inf
from operator import attrgetter
from types import CoroutineType
from typing import Any, ClassVar, Concatenate, ParamSpec, TypeAlias, TypeVar

from anyio import lowlevel

from msgbus.errors import JournalClosedError, MemberEndedError
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
from msgbus.journal.watch import Watch
from msgbus.runtime.clock import Clock

J = TypeVar("J", bound="MemoryTables")
P = ParamSpec("P")
T = TypeVar("T")
K = TypeVar("K")
Step: TypeAlias = Callable[Concatenate[J, P], T]
Method: TypeAlias = "Callable[Concatenate[J, P], CoroutineType[Any, Any, T]]"
Part: TypeAlias = tuple[object, ...]
Place: TypeAlias = tuple[float, str, int]


def reads(step: Step[J, P, T]) -> Method[J, P, T]:
    """Make a method of a port from one that reads."""

    @wraps(step)
    async def method(self: J, /, *args: P.args, **kwargs: P.kwargs) -> T:
        await lowlevel.checkpoint()
        with self.opened():
            return step(self, *args, **kwargs)

    return method  # type: ignore[return-value]  # mypy and pyright differ on `async def`


class MemoryTables:
    """What is stored. Only `_set` changes it, so that a commit can be undone."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._watch, self._guard = clock, Watch(clock), threading.RLock()
        self._numbers = Counter[str]()
        """The last number given of each kind; `head` is that of the log."""
        self._log: dict[int, Record] = {}
        self._messages: dict[str, Record] = {}
        self._pending: dict[tuple[str, int], Pending] = {}
        self._index: defaultdict[Part, list[Place]] = defaultdict(list)
        """Rows in the order in which they are looked for; see `_places`."""
        self._letters: dict[tuple[str, int], tuple[int, Letter]] = {}
        """By row, each with its number."""
        self._notes: dict[int, DeliveryRecord] = {}
        self._cursors: dict[tuple[str, int], Cursor] = {}
        self._results: dict[str, Result] = {}
        self._instances: dict[tuple[str, str], Instance] = {}
        self._joined: dict[int, Member] = {}
        self._renewing: dict[int, tuple[float, float, MemoryTables]] = {}
        """Since when and how often members are renewed, until their journal object is closed."""
        self.closed_at = inf
        self._undo: list[Callable[[], object]] = []
        """Takes back what the commit has changed, the last first."""
        self._appended: list[Claim] = []
        """What the commit has appended."""
        self._acting: int | None = None
        """Id of the member on whose behalf operations are applied."""

    @contextmanager
    def opened(self) -> Generator[None]:
        """Keep other threads out; raise if the journal is closed."""
        if self.closed_at < inf:
            message = "The journal in memory is closed. Open another one."
            raise JournalClosedError(message, path=":memory:")
        with self._guard:
            yield

    @contextmanager
    def _undone_if_it_fails(self) -> Generator[None]:
        mark = len(self._undo)
        try:
            yield
        except BaseException:
            for take_back in reversed(self._undo[mark:]):
                take_back()
            del self._undo[mark:]
            raise

    def _set(self, table: dict[K, T], key: K, value: T | None) -> None:
        """Set an entry of a table, or delete it for `None`; keep the index, and how to undo it."""
        known = table.pop(key, None)
        if value is not None:
            table[key] = value
        before, after = _places(known), _places(value)
        for part, place in before - after:
            del self._index[part][bisect_left(self._index[part], place)]
            if not self._index[part]:
                del self._index[part]
        for part, place in after - before:
            insort(self._index[part], place)
        self._undo.append(partial(self._set, table, key, known))

    def _next(self, kind: str) -> int:
        self._set(self._numbers, kind, self._numbers[kind] + 1)
        return self._numbers[kind]

    def _store(self, row: Pending) -> None:
        self._set(self._pending, row[:2], row)

    def _delete(self, row: Pending) -> None:
        self._set(self._pending, row[:2], None)
        self._set(self._letters, row[:2], None)

    def _rows(self, *part: object, after: tuple[object, ...] = ()) -> Iterator[Pending]:
        """Yield the rows of a part of the index, in its order, behind a place."""
        places = self._index.get(part, [])
        for number in range(bisect_right(places, after), len(places)):
            yield self._pending[places[number][1:]]

    def _first(self, *part: object) -> Pending | None:
        return next(self._rows(*part), None)

    def _in_states(
        self, name: str | None, states: Collection[State], after: tuple[object, ...] = ()
    ) -> Iterator[Pending]:
        """Yield rows of a subscription, or of all, by offset and name."""
        parts = [self._rows(name, state, after=after) for state in set(states)]
        return merge(*parts, key=attrgetter("offset", "subscription"))

    def message_of(self, row: Pending) -> Record | None:
        return row.body or self._log.get(row.offset)

    def cursors_of(self, name: str | None = None) -> list[Cursor]:
        return sorted(one for one in self._cursors.values() if name in (None, one.name))

    def _require(self, member: Member) -> None:
        if member.id not in self._joined:
            raise MemberEndedError(member.id)

    # -- operations ------------------------------------------------------------------------------

    def apply_all(
        self, operations: Sequence[op.Operation], member: Member | None = None
    ) -> list[Appended]:
        if member is not None:
            self._require(member)
        self._acting = None if member is None else member.id
        results = [self._apply(operation) for operation in operations]
        return [result for result in results if result is not None]

    def _apply(self, operation: op.Operation) -> Appended | None:
        # Not by `singledispatchmethod`, which keeps every journal alive on Python 3.13.
        step = self._steps.get(type(operation))
        if step is None:
            raise rows.not_an_operation(operation)
        return step(self, operation)

    def _append(self, append: op.Append) -> Appended:
        record, queue, due, unique = append
        unique = record.message_id if queue == DELAYED else unique
        known = self._messages.get(record.message_id) or self._first(queue, "unique", unique)
        if known is not None:
            return Appended(known.offset, is_duplicate=True)
        offset = self._next("delayed" if queue == DELAYED else "head")
        if queue != DELAYED:
            record = record._replace(offset=offset)
            self._set(self._log, offset, record)
            self._set(self._messages, record.message_id, record)
        row = rows.queued(queue, record, offset, due, unique)
        if queue is not None:
            self._store(row)
        if queue != DELAYED:
            self._appended.append(Claim(row, record))
            self._undo.append(self._appended.pop)
        return Appended(offset)

    def _put(self, put: op.Put) -> None:
        row, (name, offset, partition, key, state, *_) = put.row, put.row
        stored = self._pending.get((name, offset))
        rows.check_version(row, stored, row.version - 1, self._acting)
        holder = self._first(name, "unique", row.unique) or row
        if state is not State.DEAD and holder.offset != offset:
            raise rows.unique_taken(row)
        first = self._first(name, "key", partition, key) or row
        if state is State.PARKED and first.offset >= offset:
            row = rows.first_of_key(row)
        self._store(row)
        if state is State.DONE or (state is State.KEPT and put.letter is None):
            self._set(self._letters, row[:2], None)
        elif put.letter is not None:
            number, known = self._letters.get(row[:2]) or (self._next("letter"), put.letter)
            letter = put.letter if put.is_whole else put.letter.after(known)
            self._set(self._letters, row[:2], (number, letter))
        if put.promote and stored is not None:
            self._promote(stored)

    def _drop(self, drop: op.Drop) -> None:
        row = self._pending.get(drop.row[:2])
        rows.check_version(drop.row, row, drop.row.version, self._acting)
        if row is None:
            raise rows.row_changed(drop.row)
        self._delete(row)
        cursor = self._cursors.get((row.subscription, row.partition))
        if cursor is not None and row.offset > cursor.acked:
            self._store(rows.done(row))
        self._promote(row)

    def _promote(self, done: Pending) -> None:
        """Let the first parked row of a key go, unless another row holds it back."""
        part = (done.subscription, "key", done.partition, done.key)
        parked = self._first(*part, State.PARKED)
        if parked is not None and not any(self._first(*part, state) for state in HOLDING):
            self._store(rows.promoted(parked))

    def _fence(self, fence: op.Fence) -> None:
        row = self._pending.get((fence.subscription, fence.offset))
        cursor = self._cursors.get((fence.subscription, fence.partition))
        rows.check_fence(fence, row, cursor, self._acting)

    def _pass(self, operation: op.Pass) -> None:
        cursor, head = operation.cursor, self._numbers["head"]
        if max(operation.acked, operation.fetched) > head:
            raise rows.beyond_head(cursor.name, operation.fetched, head)
        stored = self._cursors.get(cursor[:2])
        if stored is None or (stored.owner, stored.epoch) != (cursor.owner, cursor.epoch):
            raise rows.owner_changed(cursor)
        is_known = stored.owner is not None or stored.acked == cursor.acked
        if not is_known or stored.owner not in (None, self._acting):
            raise rows.owner_changed(cursor)
        self._move(operation.after._replace(selection=stored.selection))

    def _move(self, cursor: Cursor) -> None:
        """Write a cursor; delete rows of acknowledged messages that it has passed."""
        self._set(self._cursors, cursor[:2], cursor)
        done = self._rows(cursor.name, "done", cursor.partition)
        for row in list(takewhile(lambda row: row.offset <= cursor.acked, done)):
            self._delete(row)

    def _seek(self, seek: op.Seek) -> None:
        name, offset = seek.name, min(seek.offset, self._numbers["head"])
        for row in list(self._in_states(name, set(State) - {State.KEPT}, (offset, name, offset))):
            self._delete(row)
        for cursor in self.cursors_of(name):
            epoch = cursor.epoch + 1
            self._move(cursor._replace(acked=offset, fetched=offset, owner=None, epoch=epoch))

    def _remove(self, remove: op.Remove) -> None:
        for row in list(self._in_states(remove.name, set(State))):
            self._delete(row)
        for cursor in self.cursors_of(remove.name):
            self._set(self._cursors, cursor[:2], None)

    def _reply(self, reply: op.Reply) -> None:
        message_id, time, body, error = reply
        result = self._results.get(message_id) or Result(message_id, body, error, time)
        self._set(self._results, message_id, result)

    def _note(self, note: op.Note) -> None:
        self._set(self._notes, self._next("note"), note.delivery)

    def _save(self, save: op.Save) -> None:
        instance = save.instance
        stored = self._instances.get(instance[:2])
        if (0 if stored is None else stored.version) != instance.version - 1:
            raise rows.instance_changed(instance)
        self._set(self._instances, instance[:2], instance)

    _steps: ClassVar[Mapping[type, Callable[[Any, Any], Appended | None]]] = {
        op.Append: _append,
        op.Put: _put,
        op.Drop: _drop,
        op.Fence: _fence,
        op.Pass: _pass,
        op.Seek: _seek,
        op.Remove: _remove,
        op.Reply: _reply,
        op.Note: _note,
        op.Save: _save,
    }


def _places(row: object) -> set[tuple[Part, Place]]:
    """Return which parts of the index list a row, and its place in each."""
    if not isinstance(row, Pending):
        return set()
    name, offset, partition, key, state, _, due, owner, _, alone, *_, unique = row
    parts: dict[Part, bool] = {
        (name, state): True,
        (None, state): True,
        ("owner", owner): owner is not None,
        (name, "done", partition): state is State.DONE,
        (name, "unique", unique): unique is not None and state is not State.DEAD,
        (name, "keyed", partition): key is not None,
        (name, "key", partition, key): key is not None,
        (name, "key", partition, key, state): key is not None,
    }
    by_offset = {(part, (float(offset), name, offset)) for part, listed in parts.items() if listed}
    return by_offset if due is None else {*by_offset, ((name, "due", alone), (due, name, offset))}
