"""`MemoryJournal`: a journal in plain Python that ends with its process.

This is what every engine has to do. A method of a port is a look-up, or a commit in which the
subscriptions of the process ride. What is promised is said in `ports` and `operations`; tables and
operations are in `memory_tables`, guards that all engines share in `rows`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from copy import copy
from functools import partial, wraps
from heapq import merge
from itertools import islice, takewhile
from math import inf
from operator import attrgetter
from typing import Final, Self, TypeAlias, final
from uuid import uuid4

from anyio import lowlevel

from msgbus.errors import StaleError
from msgbus.journal import operations as op, rows
from msgbus.journal.memory_questions import MemoryQuestions
from msgbus.journal.memory_tables import Method, P, Step, T, reads
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
from msgbus.runtime.clock import Clock, SystemClock
from msgbus.runtime.event_loop import Runtime, current_runtime

Ints: TypeAlias = Collection[int] | None
Turn: TypeAlias = Callable[[], AbstractAsyncContextManager[Callable[[], object] | None]]


def _commits(step: Step[MemoryJournal, P, T]) -> Method[MemoryJournal, P, T]:
    """Make a method of a port from one that writes: each call is a commit."""

    @wraps(step)
    async def method(self: MemoryJournal, /, *args: P.args, **kwargs: P.kwargs) -> T:
        await lowlevel.checkpoint()
        return await self.write(partial(step, self, *args, **kwargs))

    return method  # type: ignore[return-value]  # as `reads`


@final
class MemoryJournal(MemoryQuestions):
    """A journal in memory, for tests and for work that may be lost.

    Args:
        clock: Time for waiting and for renewals.
        member_ttl: Seconds without a renewal after which others end a member.
    """

    def __init__(self, *, clock: Clock | None = None, member_ttl: float | None = None) -> None:
        super().__init__(clock or SystemClock())
        self.id: Final = uuid4().hex
        self.promises: Final = Promises(dedupe_window=None, failover=0.5, is_ordered=True)
        self.member_ttl = member_ttl
        self.begin(nullcontext)

    def begin(self, turn: Turn) -> None:
        """Set what each process has for itself."""
        self._turn, self._commits, self.closed_at = turn, 0, inf
        self._runtime: Runtime | None = None
        self._participants: Sequence[CommitParticipant] = ()
        self._member: Member | None = None
        self._on_lost: dict[int, Callable[[], object]] = {}
        """What to call when a member that joined here was ended by others."""

    def beside(self, turn: Turn = nullcontext) -> MemoryJournal:
        """Return another journal object on the same tables, as another process would have.

        Args:
            turn: Entered for each commit. What it yields is called before the end of the commit
                and may fail it; until it exits, its process does not hear of the commit.
        """
        other = copy(self)
        other.begin(turn)
        return other

    def freeze(self) -> None:
        """Take nothing more and renew no member, as if the process had ended."""
        self.closed_at, self._participants, self._on_lost = self._clock.now(), (), {}

    async def close(self) -> None:
        """Take nothing more; other journal objects on the same tables go on."""
        self.freeze()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    # -- the commit ------------------------------------------------------------------------------

    async def write(self, work: Callable[[], T]) -> T:
        """Run `work` and what rides with it as one commit."""
        asked, kept = list[CommitParticipant](), dict[int, bool]()
        async with self._turn() as flush:
            try:
                with self.opened():
                    self._undo, self._appended = [], []
                    with self._undone_if_it_fails():
                        value = work()
                        self._ride(asked, kept)
                        if flush is not None:
                            flush()
            except BaseException:
                self._finish(asked, kept)
                raise
        self._finish(asked, kept)
        return value

    def _ride(self, asked: list[CommitParticipant], kept: dict[int, bool]) -> None:
        if self._member is not None and self._member.id not in self._joined:
            self._participants, self._member = (), None
        before = self._numbers["head"] - len(self._appended)
        for number, participant in enumerate(self._participants):
            asked.append(participant)
            with suppress(StaleError), self._undone_if_it_fails():
                self._set(kept, number, True)
                self.apply_all(participant.operations(self._appended, before), self._member)

    def _finish(self, asked: list[CommitParticipant], kept: Collection[int]) -> None:
        lost = [member for member in self._on_lost if member not in self._joined]
        calls = [self._on_lost.pop(member) for member in lost]
        ends = [participant.committed(number in kept) for number, participant in enumerate(asked)]
        for call in (*calls, *filter(None, ends)):
            if self._runtime is None or self._runtime.is_running_here():
                call()
            else:
                self._runtime.call_soon(call)
        self._commits += 1
        self._watch.tell(self._numbers["head"])

    # -- Log -------------------------------------------------------------------------------------

    async def commit(
        self, operations: Sequence[op.Operation], member: Member | None = None
    ) -> list[Appended]:
        # In the order of the calls: nothing is let in between before it is written.
        await lowlevel.checkpoint_if_cancelled()
        appended = await self.write(partial(self.apply_all, operations, member))
        await lowlevel.cancel_shielded_checkpoint()
        return appended

    def _read(self, after: int, limit: int, selection: Selection, partitions: Ints = None) -> Scan:
        upto = max(min(self._numbers["head"], after + 5_000), after)
        found = self._selected(after, upto, selection, partitions)
        records = list(islice(found, max(limit, 1)))
        return Scan(records, records[-1].offset if len(records) >= limit else upto)

    read = reads(_read)

    def _selected(
        self, after: int, upto: int, selection: Selection, partitions: Ints
    ) -> Iterator[Record]:
        for offset in range(after + 1, upto + 1):
            record = self._log.get(offset)
            if record is None or not selection.takes(record):
                continue
            if partitions is None or selection.partition(record) in partitions:
                yield record

    @reads
    def head(self) -> int:
        return self._numbers["head"]

    @reads
    def first(self) -> int:
        return next(iter(self._log), self._numbers["head"] + 1)

    @reads
    def offset_at(self, time: float) -> int:
        found = (offset for offset, record in self._log.items() if record.time >= time)
        return next(found, self._numbers["head"] + 1)

    @reads
    def message(self, message_id: str) -> Record | None:
        return self._messages.get(message_id)

    async def changed(
        self, since: int, timeout: float | None = None, *, others: bool = False
    ) -> int:
        await lowlevel.checkpoint()

        def count() -> int:
            with self.opened():
                return self._watch.version - (self._commits if others else 0)

        await self._watch.until(lambda: count() != since, timeout)
        return count()

    # -- Members ---------------------------------------------------------------------------------

    @_commits
    def join(
        self,
        process: str,
        serves: Mapping[str, str],
        *,
        every: float | None = None,
        on_lost: Callable[[], object] | None = None,
    ) -> Member:
        self._runtime = current_runtime(self._runtime)
        member = Member(self._next("member"), process, dict(serves), 0)
        self._set(self._joined, member.id, member)
        self._set(self._renewing, member.id, (self._clock.now(), every or inf, self))
        self._set(self._on_lost, member.id, on_lost or (lambda: None))
        return member

    @_commits
    def renew(self, member: Member) -> Member:
        self._require(member)
        renewed = member._replace(renewals=self._joined[member.id].renewals + 1)
        self._set(self._joined, member.id, renewed)
        return self._counted(renewed)

    def _counted(self, member: Member) -> Member:
        """Add the renewals that another engine would have written by itself."""
        since, every, journal = self._renewing[member.id]
        count = int((min(self._clock.now(), journal.closed_at) - since) / every)
        return member._replace(renewals=member.renewals + count)

    @reads
    def members(self) -> list[Member]:
        return [self._counted(member) for member in sorted(self._joined.values())]

    @_commits
    def end(self, member: Member) -> bool:
        stored = self._joined.get(member.id)
        if stored is None or self._counted(stored).renewals != member.renewals:
            return False
        self._set(self._joined, member.id, None)
        self._set(self._on_lost, member.id, None)
        for row in list(self._rows("owner", member.id)):
            self._store(rows.in_doubt(row))
        for cursor in self.cursors_of():
            if cursor.owner == member.id:
                self._set(self._cursors, cursor[:2], cursor._replace(owner=None))
        return True

    @_commits
    def open(self, name: str, selection: Selection, start: int) -> list[Cursor]:
        start, members = min(start, self._numbers["head"]), list(self._joined.values())
        cursors = rows.opened(name, selection, start, self.cursors_of(name), members)
        for cursor in cursors:
            self._set(self._cursors, cursor[:2], cursor)
        return cursors

    cursors = reads(MemoryQuestions.cursors_of)

    @_commits
    def acquire(
        self, member: Member, name: str, partition: int, selection: Selection
    ) -> Cursor | None:
        self._require(member)
        cursor = self._cursors.get((name, partition))
        if cursor is None:
            raise rows.removed(name)
        if cursor.owner is not None:
            return None
        held: dict[str, int] = {}
        for row in self._rows(name, "keyed", partition):
            held.setdefault(row.key or "", row.offset)
        for record in self._selected(cursor.acked, cursor.fetched, selection, (partition,)):
            if (name, record.offset) not in self._pending:
                self._store(rows.doubtful(name, record, partition, selection, held))
        taken = rows.taken(cursor, member)
        self._move(taken)
        return taken

    # -- Deliveries ------------------------------------------------------------------------------

    def attach(self, participants: Sequence[CommitParticipant], member: Member | None) -> None:
        self._runtime = current_runtime(self._runtime)
        self._participants, self._member = tuple(participants), member

    @_commits
    def claim(
        self,
        member: Member,
        name: str,
        limit: int,
        now: float,
        *,
        selection: Selection | None = None,
        partitions: Ints = None,
        alone: bool = False,
    ) -> list[Claim]:
        self._require(member)
        cursor = self._cursors.get((name, 0))
        if cursor is None and (selection is not None or partitions is not None):
            raise rows.removed(name)
        claims = [
            Claim(rows.claimed(row, member, now, alone=alone), row.body or self._log[row.offset])
            for row in islice(self._due(name, now, partitions, alone), max(limit, 0))
        ]
        if cursor is not None and selection is not None and len(claims) < limit and not alone:
            scan = self._read(cursor.acked, limit - len(claims), selection)
            claims += [
                Claim(rows.newly_claimed(name, one, member, now), one)
                for one in scan.records
                if isinstance(one, Record) and (name, one.offset) not in self._pending
            ]
            self._move(cursor._replace(acked=scan.upto, fetched=scan.upto))
        for claim in claims:
            self._store(claim.row)
        return claims

    # -- Rows ------------------------------------------------------------------------------------

    @reads
    def find(
        self,
        name: str | None,
        states: Collection[State],
        *,
        key: str | None = None,
        after: Pending | None = None,
        limit: int = 100,
    ) -> list[Pending]:
        place = () if after is None else (after.offset, *after[:2])
        found = self._in_states(name, states, place)
        return list(islice((row for row in found if key in (None, row.key)), limit))

    @reads
    def count(self, name: str | None = None) -> dict[State, int]:
        sizes = {state: len(self._index.get((name, state), ())) for state in State}
        return {state: size for state, size in sizes.items() if size}

    @reads
    def blocked_keys(self, name: str, partition: int) -> set[str]:
        return {row.key or "" for row in self._rows(name, "keyed", partition)}

    @reads
    def key_rows(self, name: str, partition: int, key: str) -> KeyRows:
        places = self._index.get((name, "key", partition, key), [])
        return KeyRows(places[0][2] if places else None, len(places))

    def _due(self, name: str, now: float, partitions: Ints, *alone: bool) -> Iterator[Pending]:
        """Yield rows that are due, the longest overdue first, of those that run alone or not."""
        waiting = [self._rows(name, "due", one) for one in alone]
        found = merge(*waiting, key=attrgetter("due", "offset"))
        due = takewhile(lambda row: row.due is not None and row.due <= now, found)
        return (row for row in due if partitions is None or row.partition in partitions)

    @reads
    def next_due(self, name: str, partitions: Ints = None) -> Due:
        first = next(self._due(name, inf, partitions, False, True), None)
        suspect = next(self._due(name, inf, partitions, True), None)
        damaged = [row.partition for row in self._rows(name, State.DAMAGED)]
        count = sum(partitions is None or number in partitions for number in damaged)
        return Due(None if first is None else first.due, suspect is not None, count)

    @reads
    def due(self, name: str, now: float, limit: int = 100) -> list[Pending]:
        return list(islice(self._due(name, now, None, False, True), limit))

    @reads
    def row(self, name: str, offset: int) -> Pending | None:
        return self._pending.get((name, offset))

    record = reads(MemoryQuestions.message_of)

    @reads
    def letter(self, row: Pending) -> Letter | None:
        return self._letters.get(row[:2], (0, None))[1]

    @reads
    def result(self, message_id: str) -> Result | None:
        return self._results.get(message_id)

    @reads
    def results(self, message_ids: Collection[str]) -> list[Result]:
        return [self._results[one] for one in message_ids if one in self._results]

    @reads
    def instance(self, name: str, key: str) -> Instance | None:
        return self._instances.get((name, key))

    @reads
    def due_instances(self, now: float, limit: int = 100) -> list[Instance]:
        stored = self._instances.values()
        found = [one for one in stored if one.wake is not None and one.wake <= now]
        return sorted(found, key=attrgetter("wake", "name", "key"))[:limit]
