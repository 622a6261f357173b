"""`MemoryJournal`: a journal in plain Python that ends with its process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from types import CoroutineType
from typing import Any, Concatenate, Final, ParamSpec, Protocol, Self, TypeVar, final

import anyio
import anyio.lowlevel

from msgbus.errors import JournalClosedError, MemberEndedError, StaleError
from msgbus.journal import memory_letters, memory_questions
from msgbus.journal.memory_tables import MemoryTables
from msgbus.journal.operations import Operation
from msgbus.journal.ports import CommitParticipant
from msgbus.journal.records import Appended, Member, Promises, State
from msgbus.runtime.clock import Clock, SystemClock
from msgbus.runtime.event_loop import Runtime, current_runtime

P = ParamSpec("P")
T = TypeVar("T")

_PROMISES: Final = Promises(
    survives_kill=False,
    survives_power_cut=False,
    survives_node_loss=False,
    dedupe_window=None,
    failover=0.5,
    is_ordered=True,
)


class Turn(Protocol):
    """Faults of a simulation in the middle of commits."""

    lock: anyio.Lock

    def write(self) -> None:
        """Raise a `JournalError` to fail the commit."""
        ...

    async def between(self) -> None:
        """Let other tasks run: the commit is written, and its process has not heard of it."""
        ...


Riders = list[tuple[CommitParticipant, bool]]
Calls = list[Callable[[], object] | None]


def _reads(
    step: Callable[Concatenate[MemoryTables, P], T],
) -> Callable[Concatenate[MemoryJournal, P], CoroutineType[Any, Any, T]]:
    """Make a method of the journal that reads."""

    @wraps(step)
    async def read(self: MemoryJournal, /, *args: P.args, **kwargs: P.kwargs) -> T:
        tables = await self.enter()
        with tables.lock:
            return step(tables, *args, **kwargs)

    return read  # type: ignore[return-value]  # mypy and pyright differ on `async def`


def _writes(
    step: Callable[Concatenate[MemoryTables, P], T],
) -> Callable[Concatenate[MemoryJournal, P], CoroutineType[Any, Any, T]]:
    """Make a method of the journal that is a commit of its own."""

    @wraps(step)
    async def write(self: MemoryJournal, /, *args: P.args, **kwargs: P.kwargs) -> T:
        tables = await self.enter()
        return await self.write(lambda: step(tables, *args, **kwargs))

    return write  # type: ignore[return-value]  # as above


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
        _tables: MemoryTables | None = None,
        _turn: Turn | None = None,
    ) -> None:
        self.member_ttl = member_ttl
        self._clock = clock or SystemClock()
        self._turn = _turn
        self._tables = _tables or MemoryTables(self._clock)
        self._participants: Sequence[CommitParticipant] = ()
        self._member: Member | None = None
        self._on_lost: dict[int, Callable[[], object] | None] = {}
        self._leaving: int | None = None
        """Id of the member that this journal object has ended last."""
        self._runtime: Runtime | None = None
        self._commits = 0
        """Commits made through this journal object."""
        self._is_closed = False

    @property
    def promises(self) -> Promises:
        """What a commit has reached when it returns."""
        return _PROMISES

    def beside(self, turn: Turn | None = None) -> MemoryJournal:
        """Return another journal object on the same tables, as another process would have.

        Args:
            turn: Lets a simulation fail commits, and run other tasks in the middle of them.
        """
        return MemoryJournal(
            clock=self._clock, member_ttl=self.member_ttl, _tables=self._tables, _turn=turn
        )

    def __repr__(self) -> str:
        return "<MemoryJournal>"

    # -- Log, Members, Deliveries and Rows -------------------------------------------------------

    read = _reads(MemoryTables.read)
    head = _reads(MemoryTables.head)
    first = _reads(MemoryTables.first)
    offset_at = _reads(MemoryTables.offset_at)
    message = _reads(MemoryTables.message)
    renew = _writes(MemoryTables.renew)
    members = _reads(MemoryTables.members)
    open = _writes(MemoryTables.open)
    cursors = _reads(MemoryTables.cursors)
    acquire = _writes(MemoryTables.acquire)
    claim = _writes(MemoryTables.claim)
    find = _reads(MemoryTables.find)
    count = _reads(MemoryTables.count)
    blocked_keys = _reads(MemoryTables.blocked_keys)
    key_rows = _reads(MemoryTables.key_rows)
    next_due = _reads(MemoryTables.next_due)
    due = _reads(MemoryTables.due)
    row = _reads(MemoryTables.row)
    record = _reads(MemoryTables.record)
    letter = _reads(MemoryTables.letter)
    result = _reads(MemoryTables.result)
    results = _reads(MemoryTables.results_of)
    instance = _reads(MemoryTables.instance)
    due_instances = _reads(MemoryTables.due_instances)

    # -- Questions and Letters -------------------------------------------------------------------

    find_messages = _reads(memory_questions.find_messages)
    flow = _reads(memory_questions.flow)
    deliveries = _reads(memory_questions.deliveries)
    delivery_counts = _reads(memory_questions.delivery_counts)
    letter_groups = _reads(memory_questions.letter_groups)
    find_letters = _reads(memory_letters.find_letters)
    count_letters = _reads(memory_letters.count_letters)
    total_letters = _reads(memory_letters.total_letters)
    last_letter = _reads(memory_letters.last_letter)

    def count_dead(self) -> int:
        """Return the number of dead letters at once; see `Letters.count_dead`."""
        tables = self._open_tables()
        with tables.lock:
            return tables.count().get(State.DEAD, 0)

    async def commit(
        self, operations: Sequence[Operation], member: Member | None = None
    ) -> list[Appended]:
        """Apply all of this or nothing; see `Log.commit`."""
        # In the order of the calls: nothing is let in between before it is written.
        await anyio.lowlevel.checkpoint_if_cancelled()
        tables = self._open_tables()

        def work() -> list[Appended]:
            if member is not None:
                tables.require(member)
            return tables.apply(operations, member)

        appended = await self.write(work)
        await anyio.lowlevel.cancel_shielded_checkpoint()
        return appended

    async def changed(
        self, since: int, timeout: float | None = None, *, others: bool = False
    ) -> int:
        """Return a number that grows with commits; see `Log.changed`."""
        watch = (await self.enter()).watch

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
        tables = await self.enter()
        self._runtime = current_runtime(self._runtime)
        member = await self.write(lambda: tables.join(process, serves))
        self._on_lost[member.id] = on_lost
        if every is not None:
            tables.renewed[member.id] = (self._clock.now(), every)
        return member

    async def end(self, member: Member) -> bool:
        """Delete a member that was not renewed since it was read; see `Members.end`."""
        tables = await self.enter()
        self._leaving = member.id
        is_ended = await self.write(lambda: tables.end(member))
        if is_ended:
            self._on_lost.pop(member.id, None)
        else:
            self._leaving = None
        return is_ended

    def attach(self, participants: Sequence[CommitParticipant], member: Member | None) -> None:
        """Let these ride in every commit; see `Deliveries.attach`."""
        self._runtime = current_runtime(self._runtime)
        self._participants = tuple(participants)
        self._member = member

    async def close(self) -> None:
        """Take nothing more; other journal objects on the same tables go on."""
        self.freeze()

    def freeze(self) -> None:
        """Take nothing more and renew no member, as if the process had ended."""
        self._is_closed = True
        self._participants = ()
        for member in self._on_lost:
            self._tables.stop_renewing(member)

    async def __aenter__(self) -> Self:
        """Return the journal itself."""
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Close it."""
        await self.close()

    # -- the commit ------------------------------------------------------------------------------

    async def enter(self) -> MemoryTables:
        """Return the tables, after a checkpoint; for the methods above."""
        await anyio.lowlevel.checkpoint()
        return self._open_tables()

    def _open_tables(self) -> MemoryTables:
        if self._is_closed:
            message = "The journal in memory is closed. Open another one."
            raise JournalClosedError(message, path=":memory:")
        return self._tables

    async def write(self, work: Callable[[], T]) -> T:
        """Run `work` and what rides with it as one commit; for the methods above."""
        if self._turn is None:
            value, riders, calls = self._commit(work)
            self._finish(riders, calls)
            return value
        async with self._turn.lock:
            value, riders, calls = self._commit(work)
            await self._turn.between()
            self._finish(riders, calls)
            return value

    def _commit(self, work: Callable[[], T]) -> tuple[T, Riders, Calls]:
        tables = self._tables
        riders: Riders = []
        calls: Calls = []
        with tables.lock:
            tables.appended, before = [], tables.head()
            try:
                with tables.undone_if_it_fails():
                    value = work()
                    self._ride(before, riders, calls)
                    if self._turn is not None:
                        self._turn.write()
            except BaseException as error:
                if isinstance(error, MemberEndedError):
                    self._lose(error.member_id, calls)
                self._finish([(participant, False) for participant, _ in riders], calls)
                raise
            tables.keep()
        return value, riders, calls

    def _ride(self, before: int, riders: Riders, calls: Calls) -> None:
        tables = self._tables
        if self._member is not None and not tables.has(self._member):
            self._lose(self._member.id, calls)
        for participant in self._participants:
            riders.append((participant, True))
            try:
                with tables.undone_if_it_fails():
                    tables.apply(participant.operations(tables.appended, before), self._member)
            except StaleError:
                riders[-1] = (participant, False)

    def _finish(self, riders: Riders, calls: Calls) -> None:
        calls += [participant.committed(is_kept) for participant, is_kept in riders]
        for call in calls:
            if call is not None and (self._runtime is None or self._runtime.is_running_here()):
                call()
            elif call is not None and self._runtime is not None:
                self._runtime.call_soon(call)
        self._commits += 1
        self._tables.watch.tell(self._tables.head())

    def _lose(self, member: int, calls: Calls) -> None:
        if self._member is not None and self._member.id == member:
            self._participants, self._member = (), None
        if member != self._leaving:  # else it ends itself, so nothing is lost
            calls.append(self._on_lost.pop(member, None))
