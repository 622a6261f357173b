"""`MemoryJournal`: a journal in plain Python that ends with its process."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial, wraps
from heapq import merge
from itertools import islice
from math import inf
from types import CoroutineType
from typing import Any, Concatenate, Final, ParamSpec, Protocol, Self, TypeAlias, TypeVar, final

import anyio
import anyio.lowlevel

from msgbus.errors import JournalClosedError, StaleError
from msgbus.journal import memory_questions as questions, operations as op, rows
from msgbus.journal.memory_tables import MemoryTables
from msgbus.journal.ports import Claim, CommitParticipant, Due, KeyRows, Scan
from msgbus.journal.records import (
    Appended,
    Cursor,
    Instance,
    Letter,
    Member,
    Pending,
    Promises,
    Record,
    Result,
    Selection,
    State,
)
from msgbus.journal.watch import Watch
from msgbus.runtime.clock import Clock, SystemClock
from msgbus.runtime.event_loop import Runtime, current_runtime

P = ParamSpec("P")
T = TypeVar("T")
Partitions: TypeAlias = Collection[int] | None
Calls: TypeAlias = list[Callable[[], object] | None]
Rides: TypeAlias = list[tuple[CommitParticipant, bool]]

_PROMISES: Final = Promises(
    survives_kill=False,
    survives_power_cut=False,
    survives_node_loss=False,
    dedupe_window=None,
    failover=0.5,
    is_ordered=True,
)
_SCAN: Final = 5_000
"""Messages that one read looks at."""


@final
class _Steps(MemoryTables):
    """What the ports ask of the tables; `MemoryJournal` makes its methods of these."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.lock = threading.RLock()
        self.watch = Watch(clock)
        self.clock = clock
        self.renewals: dict[int, tuple[float, float]] = {}
        """Since when, and how often, members are renewed by themselves; never undone."""

    # -- Log -------------------------------------------------------------------------------------

    def first(self) -> int:
        return min(self.messages, default=self.head() + 1)

    def offset_at(self, time: float) -> int:
        found = (offset for offset, record in self.messages.items() if record.time >= time)
        return min(found, default=self.head() + 1)

    def message(self, message_id: str) -> Record | None:
        return self.messages.get(self._offsets.get(message_id, 0))

    def read(
        self, after: int, limit: int, selection: Selection, partitions: Partitions = None
    ) -> Scan:
        upto = max(min(self.head(), after + _SCAN), after)
        found = list(islice(self._selected(after, upto, selection, partitions), max(limit, 1)))
        return Scan(found, found[-1].offset if len(found) >= limit else upto)

    def _selected(
        self, after: int, upto: int, selection: Selection, partitions: Partitions
    ) -> Iterator[Record]:
        for offset in range(after + 1, upto + 1):
            record = self.messages.get(offset)
            if record is None or not selection.takes(record):
                continue
            if partitions is None or selection.partition(record) in partitions:
                yield record

    # -- Members ---------------------------------------------------------------------------------

    def members(self) -> list[Member]:
        return [self._counted(member) for member in sorted(self.joined.values())]

    def _counted(self, member: Member) -> Member:
        """Add the renewals that another engine's thread would have written."""
        since, every = self.renewals.get(member.id, (0.0, inf))
        count = int((self.clock.now() - since) / every)
        return member._replace(renewals=member.renewals + count)

    def renew_every(self, member: int, every: float) -> None:
        """Renew a member by itself from now on; no more with `inf`."""
        if member in self.joined:
            self.joined[member] = self._counted(self.joined[member])
        self.renewals[member] = (self.clock.now(), every)

    def join(self, process: str, serves: Mapping[str, str]) -> Member:
        member = Member(self._next("member"), process, dict(serves), 0)
        self.write(self.joined, member.id, member)
        return member

    def renew(self, member: Member) -> Member:
        self.require(member)
        renewed = member._replace(renewals=self.joined[member.id].renewals + 1)
        self.write(self.joined, member.id, renewed)
        return self._counted(renewed)

    def end(self, member: Member) -> bool:
        found = [one.renewals for one in self.members() if one.id == member.id]
        if found != [member.renewals]:
            return False
        self.write(self.joined, member.id, None)
        for row in self.rows():
            if row.owner == member.id:
                self._set(rows.in_doubt(row))
        for cursor in self.cursors():
            if cursor.owner == member.id:
                self.write(self._cursors, cursor[:2], cursor._replace(owner=None))
        return True

    def open(self, name: str, selection: Selection, start: int) -> list[Cursor]:
        start = min(start, self.head())
        found = rows.opened(name, selection, start, self.cursors(name), self.members())
        for cursor in found:
            self.write(self._cursors, cursor[:2], cursor)
        return found

    def _cursor(self, name: str, partition: int) -> Cursor:
        cursor = self._cursors.get((name, partition))
        if cursor is None:
            raise rows.removed(name)
        return cursor

    def acquire(
        self, member: Member, name: str, partition: int, selection: Selection
    ) -> Cursor | None:
        self.require(member)
        cursor = self._cursor(name, partition)
        if cursor.owner is not None:
            return None
        keys = self.blocked_keys(name, partition)
        held = {key: self._first(0, name, "key", partition, key) for key in keys}
        for record in self._selected(cursor.acked, cursor.fetched, selection, (partition,)):
            if record.offset not in self.pending[name]:
                self._set(rows.doubtful(name, record, partition, selection, held))
        taken = rows.taken(cursor, member)
        self._move(taken)
        return taken

    # -- Deliveries ------------------------------------------------------------------------------

    def claim(
        self,
        member: Member,
        name: str,
        limit: int,
        now: float,
        *,
        selection: Selection | None = None,
        partitions: Partitions = None,
        alone: bool = False,
    ) -> list[Claim]:
        self.require(member)
        if selection is not None or partitions is not None:
            self._cursor(name, 0)
        claims: list[Claim] = []
        for row in islice(self._due(name, now, partitions, alone), max(limit, 0)):
            record = self.record(row)
            assert record is not None  # noqa: S101 (retention leaves what a row needs)
            claims.append(Claim(rows.claimed(row, member, now, alone=alone), record))
        if selection is not None and len(claims) < limit and not alone:
            cursor = self._cursor(name, 0)
            scan = self.read(cursor.acked, limit - len(claims), selection)
            claims += [
                Claim(rows.newly_claimed(name, one, member, now), one)
                for one in scan.records
                if isinstance(one, Record) and one.offset not in self.pending[name]
            ]
            self.apply([op.Pass(cursor, scan.upto, scan.upto)], member)
        for claim in claims:
            self._set(claim.row)
        return claims

    # -- Rows ------------------------------------------------------------------------------------

    def find(
        self,
        name: str | None,
        states: Collection[State],
        *,
        key: str | None = None,
        after: Pending | None = None,
        limit: int = 100,
    ) -> list[Pending]:
        start = (-1, "") if after is None else (after.offset, after.subscription)
        found = (row for row in self.rows(name) if row.state in states and key in (None, row.key))
        return list(islice((row for row in found if (row.offset, row.subscription) > start), limit))

    def count(self, name: str | None = None) -> dict[State, int]:
        return dict(Counter(row.state for row in self.rows(name)))

    def blocked_keys(self, name: str, partition: int) -> set[str]:
        keys = {row.key for row in self.rows(name) if row.partition == partition}
        return {key for key in keys if key is not None}

    def key_rows(self, name: str, partition: int, key: str) -> KeyRows:
        found = self._found(name, "key", partition, key)
        return KeyRows(found[0][1] if found else None, len(found))

    def _due(
        self, name: str, now: float, partitions: Partitions, *alone: bool
    ) -> Iterator[Pending]:
        """Return waiting rows, the longest overdue first, of those that run alone or not."""
        for due, offset in merge(*(self._found(name, "due", one) for one in alone)):
            row = self.pending[name][offset]
            if due > now:
                return
            if partitions is None or row.partition in partitions:
                yield row

    def next_due(self, name: str, partitions: Partitions = None) -> Due:
        first = next(self._due(name, inf, partitions, False, True), None)
        suspect = next(self._due(name, inf, partitions, True), None)
        return Due(None if first is None else first.due, suspect is not None)

    def due(self, name: str, now: float, limit: int = 100) -> list[Pending]:
        return list(islice(self._due(name, now, None, False, True), limit))

    def letter(self, row: Pending) -> Letter | None:
        return self.letters[row[:2]][1] if row[:2] in self.letters else None

    def result(self, message_id: str) -> Result | None:
        return self._results.get(message_id)

    def results(self, message_ids: Collection[str]) -> list[Result]:
        return [self._results[one] for one in message_ids if one in self._results]

    def instance(self, name: str, key: str) -> Instance | None:
        return self._instances.get((name, key))

    def due_instances(self, now: float, limit: int = 100) -> list[Instance]:
        stored = self._instances.values()
        found = [(one.wake, one) for one in stored if one.wake is not None and one.wake <= now]
        return [one for _, one in sorted(found)][:limit]


class Turn(Protocol):
    """Faults of a simulation in the middle of commits."""

    lock: anyio.Lock

    def write(self) -> None:
        """Raise a `JournalError` to fail the commit."""
        ...

    async def between(self) -> None:
        """Let other tasks run: the commit is written, and its process has not heard of it."""
        ...


def _method(
    step: Callable[Concatenate[_Steps, P], T], *, writes: bool = False
) -> Callable[Concatenate[MemoryJournal, P], CoroutineType[Any, Any, T]]:
    """Make a method of the journal from one of the tables; a commit of its own if it `writes`."""

    @wraps(step)
    async def method(self: MemoryJournal, /, *args: P.args, **kwargs: P.kwargs) -> T:
        await anyio.lowlevel.checkpoint()
        tables = self.open_tables()
        if writes:
            return await self.write(partial(step, tables, *args, **kwargs))
        with tables.lock:
            return step(tables, *args, **kwargs)

    return method  # type: ignore[return-value]  # mypy and pyright differ on `async def`


@final
class MemoryJournal:
    """A journal in memory, for tests and for work that may be lost.

    Args:
        clock: Time for waiting and for renewals.
        member_ttl: Seconds without a renewal after which others end a member.
    """

    def __init__(
        self,
        *,
        clock: Clock | None = None,
        member_ttl: float | None = None,
        _tables: _Steps | None = None,
        _turn: Turn | None = None,
    ) -> None:
        self.promises: Final = _PROMISES
        self.member_ttl = member_ttl
        self._tables = _tables or _Steps(clock or SystemClock())
        self._turn = _turn
        self._lock = nullcontext() if _turn is None else _turn.lock
        self._participants: Sequence[CommitParticipant] = ()
        self._member: Member | None = None
        self._on_lost: dict[int, Callable[[], object] | None] = {}
        """What to call when a member that joined here was ended by others."""
        self._runtime: Runtime | None = None
        self._commits = 0
        """Commits made through this journal object."""
        self._is_closed = False

    def beside(self, turn: Turn | None = None) -> MemoryJournal:
        """Return another journal object on the same tables, as another process would have."""
        return MemoryJournal(member_ttl=self.member_ttl, _tables=self._tables, _turn=turn)

    read = _method(_Steps.read)
    head = _method(_Steps.head)
    first = _method(_Steps.first)
    offset_at = _method(_Steps.offset_at)
    message = _method(_Steps.message)
    end = _method(_Steps.end, writes=True)
    renew = _method(_Steps.renew, writes=True)
    members = _method(_Steps.members)
    open = _method(_Steps.open, writes=True)
    cursors = _method(_Steps.cursors)
    acquire = _method(_Steps.acquire, writes=True)
    claim = _method(_Steps.claim, writes=True)
    find = _method(_Steps.find)
    count = _method(_Steps.count)
    blocked_keys = _method(_Steps.blocked_keys)
    key_rows = _method(_Steps.key_rows)
    next_due = _method(_Steps.next_due)
    due = _method(_Steps.due)
    row = _method(_Steps.row)
    record = _method(_Steps.record)
    letter = _method(_Steps.letter)
    result = _method(_Steps.result)
    results = _method(_Steps.results)
    instance = _method(_Steps.instance)
    due_instances = _method(_Steps.due_instances)

    find_messages = _method(questions.find_messages)
    flow = _method(questions.flow)
    deliveries = _method(questions.deliveries)
    delivery_counts = _method(questions.delivery_counts)
    letter_groups = _method(questions.letter_groups)
    find_letters = _method(questions.find_letters)
    count_letters = _method(questions.count_letters)
    total_letters = _method(questions.total_letters)
    last_letter = _method(questions.last_letter)

    def count_dead(self) -> int:
        """Return the number of dead letters at once; see `Letters.count_dead`."""
        with self._tables.lock:
            return self.open_tables().count().get(State.DEAD, 0)

    async def commit(
        self, operations: Sequence[op.Operation], member: Member | None = None
    ) -> list[Appended]:
        """Apply all of this or nothing; see `Log.commit`."""
        # In the order of the calls: nothing is let in between before it is written.
        await anyio.lowlevel.checkpoint_if_cancelled()
        appended = await self.write(partial(self.open_tables().apply, operations, member))
        await anyio.lowlevel.cancel_shielded_checkpoint()
        return appended

    async def changed(
        self, since: int, timeout: float | None = None, *, others: bool = False
    ) -> int:
        """Return a number that grows with commits; see `Log.changed`."""
        await anyio.lowlevel.checkpoint()
        watch = self.open_tables().watch

        def count() -> int:
            return watch.version - (self._commits if others else 0)

        await watch.until(lambda: count() != since, timeout)
        return count()

    async def join(
        self,
        process: str,
        serves: Mapping[str, str],
        *,
        every: float | None = None,
        on_lost: Callable[[], object] | None = None,
    ) -> Member:
        """Become a member; see `Members.join`."""
        await anyio.lowlevel.checkpoint()
        self._runtime = current_runtime(self._runtime)
        member = await self.write(partial(self.open_tables().join, process, serves))
        # Only now: nobody ends a member that is renewed and that nobody knows of.
        self._on_lost[member.id] = on_lost
        self._tables.renew_every(member.id, inf if every is None else every)
        return member

    def attach(self, participants: Sequence[CommitParticipant], member: Member | None) -> None:
        """Let these ride in every commit; see `Deliveries.attach`."""
        self._runtime = current_runtime(self._runtime)
        self._participants, self._member = tuple(participants), member

    def freeze(self) -> None:
        """Take nothing more and renew no member, as if the process had ended."""
        self._is_closed, self._participants = True, ()
        for member in self._on_lost:
            self._tables.renew_every(member, inf)

    async def close(self) -> None:
        """Take nothing more; other journal objects on the same tables go on."""
        self.freeze()

    async def __aenter__(self) -> Self:
        """Return the journal itself."""
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Close it."""
        await self.close()

    # -- the commit ------------------------------------------------------------------------------

    def open_tables(self) -> _Steps:
        """Return the tables, unless the journal is closed."""
        if self._is_closed:
            message = "The journal in memory is closed. Open another one."
            raise JournalClosedError(message, path=":memory:")
        return self._tables

    async def write(self, work: Callable[[], T]) -> T:
        """Run `work` and what rides with it as one commit; for the methods above."""
        async with self._lock:
            rides, calls = Rides(), Calls()
            try:
                with self._tables.lock:
                    value = self._commit(work, rides, calls)
            except BaseException:
                self._finish([(participant, False) for participant, _ in rides], calls)
                raise
            if self._turn is not None:
                await self._turn.between()
            self._finish(rides, calls)
            return value

    def _commit(self, work: Callable[[], T], rides: Rides, calls: Calls) -> T:
        tables, before = self._tables, self._tables.head()
        tables.undo, tables.appended = [], []
        calls += [self._on_lost.pop(one) for one in self._on_lost.keys() - tables.joined]
        with tables.undone_if_it_fails():
            value = work()
            if self._member is not None and self._member.id not in tables.joined:
                self._participants, self._member = (), None
            for participant in self._participants:
                rides.append((participant, True))
                try:
                    with tables.undone_if_it_fails():
                        tables.apply(participant.operations(tables.appended, before), self._member)
                except StaleError:
                    rides[-1] = (participant, False)
            if self._turn is not None:
                self._turn.write()
        for one in self._on_lost.keys() - tables.joined:
            del self._on_lost[one]  # this commit has ended it, no other process
        return value

    def _finish(self, rides: Rides, calls: Calls) -> None:
        calls += [participant.committed(is_kept) for participant, is_kept in rides]
        for call in filter(None, calls):
            if self._runtime is None or self._runtime.is_running_here():
                call()
            else:
                self._runtime.call_soon(call)
        self._commits += 1
        self._tables.watch.tell(self._tables.head())
