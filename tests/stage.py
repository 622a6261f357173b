"""A journal on virtual time, processes that can die, and subscriptions on them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from inspect import iscoroutinefunction
from typing import Any, NamedTuple, cast

import anyio

from msgbus.errors import JournalFullError
from msgbus.journal import (
    Appended,
    Cursor,
    Journal,
    Letter,
    Member,
    MemoryJournal,
    Pending,
    Record,
    State,
)
from msgbus.journal.operations import Append, Operation
from msgbus.resilience import RetryConfig
from msgbus.runtime.clock import VirtualClock
from msgbus.subscriptions import Consume, DurableSubscription, SubscriptionConfig
from msgbus.testing.conformance.journal.kit import make_record
from msgbus.testing.simulation.processes import Process

QUICK = RetryConfig(max_retries=2, initial_delay=0.1, jitter=False)
WRITES = ("commit", "claim", "open", "acquire", "join", "renew", "end")
OPEN = (State.WAITING, State.CLAIMED, State.PARKED)


class Handler:
    """Notes what it was given; fails as it is told to."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []
        self.handled: list[int] = []
        self.failures: dict[int, int] = {}
        """How often a message of this number is to fail; -1 for always."""
        self.error: Exception = ValueError("no")
        self.hangs: set[int] = set()
        self.release = anyio.Event()
        self.now: Callable[[], float] = lambda: 0.0
        self.times: list[float] = []

    async def __call__(self, record: Record, attempt: int) -> None:
        number = record.json()["number"]
        self.seen.append((number, attempt))
        self.times.append(self.now())
        if number in self.hangs:
            await self.release.wait()
        left = self.failures.get(number, 0)
        if left:
            self.failures[number] = left - 1
            raise self.error
        self.handled.append(number)

    @property
    def numbers(self) -> list[int]:
        return [number for number, _ in self.seen]

    def attempts(self, number: int) -> list[int]:
        return [attempt for seen, attempt in self.seen if seen == number]


class DeadMessage(NamedTuple):
    """A dead letter of a subscription, with its row and its message."""

    row: Pending
    letter: Letter
    record: Record

    @property
    def number(self) -> int:
        return int(self.record.json()["number"])

    @property
    def error(self) -> str:
        return self.row.error or ""


class CommitsOf:
    """A journal that counts its commits."""

    def __init__(self, inner: Journal) -> None:
        self._inner = inner
        self.count = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    @property
    def journal(self) -> Journal:
        return cast("Journal", self)

    async def commit(
        self, operations: Sequence[Operation], member: Member | None = None
    ) -> list[Appended]:
        self.count += 1
        return await self._inner.commit(operations, member)


class Calls:
    """Knows which calls of journals are under way, but for those that wait for a change."""

    def __init__(self) -> None:
        self.under_way = 0
        self._ended = anyio.Event()

    def end(self) -> None:
        self.under_way -= 1
        self._ended.set()

    async def ended(self) -> None:
        """Return once none is under way."""
        while self.under_way:
            self._ended = anyio.Event()
            await self._ended.wait()


class Disk:
    """The disk of a process: nothing can be written while it is full."""

    def __init__(self) -> None:
        self.is_full = False

    def write(self, method: str) -> None:
        """Fail if a method of the journal writes, and there is no room."""
        if self.is_full and method in WRITES:
            message = "No space left."
            raise JournalFullError(message)


class CallsOf:
    """A journal whose calls are known, on a disk that may be full."""

    def __init__(self, inner: Journal, calls: Calls, disk: Disk | None = None) -> None:
        self._inner = inner
        self._calls = calls
        self._disk = disk or Disk()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not iscoroutinefunction(found) or name == "changed":
            return found

        async def call(*args: Any, **options: Any) -> Any:
            self._disk.write(name)
            self._calls.under_way += 1
            try:
                return await found(*args, **options)
            finally:
                self._calls.end()

        return call


class Stage:
    def __init__(self, make: Callable[[VirtualClock], Journal], clock: VirtualClock) -> None:
        self._make = make
        self._first = make(clock)
        self._journals = [self._first]
        self._calls = Calls()
        self.shared = cast("Journal", CallsOf(self._first, self._calls))
        """The journal of the process that the test runs in."""
        self.clock = clock
        self.processes: list[Process] = []
        self.open: list[DurableSubscription] = []

    def process(self, disk: Disk | None = None) -> Process:
        """Another process, with a journal object and maybe a disk of its own."""
        first = self._first
        journal = first.beside() if isinstance(first, MemoryJournal) else self._make(self.clock)
        self._journals.append(journal)
        process = Process(cast("Journal", CallsOf(journal, self._calls, disk)), self.clock)
        self.processes.append(process)
        return process

    async def append(self, *numbers: int, **changes: Any) -> list[int]:
        now = self.clock.time()
        records = [make_record(number, **{"time": now, **changes}) for number in numbers]
        return [one.offset for one in await self.shared.commit([*map(Append, records)])]

    async def append_keyed(self, *pairs: tuple[int, str]) -> None:
        await self.shared.commit([Append(make_record(number, key=key)) for number, key in pairs])

    def make(
        self,
        consume: Consume,
        *,
        name: str = "receipts",
        process: Process | None = None,
        source: dict[str, Any] | None = None,
        **config: Any,
    ) -> DurableSubscription:
        journal = self.shared if process is None else process.journal
        subscription = DurableSubscription(
            journal,
            name,
            consume,
            SubscriptionConfig.model_validate({"retry": QUICK, **config}),
            clock=self.clock,
            **(source or {}),
        )
        self.open.append(subscription)
        if process is not None:
            process.on_death.append(subscription.engine.abort)
        return subscription

    async def start(self, consume: Consume, **options: Any) -> DurableSubscription:
        subscription = self.make(consume, **options)
        await subscription.start()
        return subscription

    async def until(self, is_so: Callable[[], bool], *, within: float = 120.0) -> None:
        """Let time pass in small steps until something is so.

        It stands still while a journal is at work: its threads live in real time, and on a busy
        machine the clock would be far ahead of them.
        """
        end = self.clock.now() + within
        while not is_so():
            assert self.clock.now() < end, f"not so within {within:g} s"
            await self._calls.ended()
            await self.clock.advance(0.05)

    async def written(self) -> None:
        """Let what is settled be written."""
        await self.quiet(0.05)

    async def quiet(self, step: float = 0.0) -> None:
        """Let all run until it waits for time or news, while a few steps of time pass."""
        for _ in range(6):
            await self._calls.ended()
            await self.clock.advance(step)
        await self._calls.ended()

    # -- what the journal has --------------------------------------------------------------------

    async def position(self, name: str = "receipts") -> int:
        """The offset up to which everything is done, as far as it is written."""
        cursors = await self.cursors(name)
        selection = next(one.engine.selection for one in self.open if one.name == name)
        rows = {row.offset for row in await self.rows(*OPEN, name=name)}
        scan = await self.shared.read(0, 10_000, selection)
        for record in scan.records:
            assert isinstance(record, Record)
            cursor = cursors[selection.partition(record)]
            if record.offset > cursor.acked or record.offset in rows:
                return record.offset - 1
        return await self.shared.head()

    async def cursors(self, name: str = "receipts") -> list[Cursor]:
        found = await self.shared.cursors(name)
        assert found
        return found

    async def rows(self, *states: State, name: str = "receipts") -> list[Pending]:
        return await self.shared.find(name, states or tuple(State), limit=10_000)

    async def letters(self, name: str = "receipts") -> list[DeadMessage]:
        found: list[DeadMessage] = []
        for row in await self.rows(State.DEAD, name=name):
            letter, record = await self.shared.letter(row), await self.shared.record(row)
            assert letter is not None
            assert record is not None
            found.append(DeadMessage(row, letter, record))
        return found

    async def scheduled(self, name: str = "receipts") -> int:
        """How many messages wait for a retry, or behind one."""
        return len(await self.rows(State.WAITING, State.PARKED, name=name))

    async def close(self) -> None:
        for subscription in self.open:
            subscription.engine.abort()
        for process in self.processes:
            process.die()
        for journal in self._journals:
            await journal.close()


@asynccontextmanager
async def stage(
    make: Callable[[VirtualClock], Journal], start: float = 1_000_000.0
) -> AsyncGenerator[Stage]:
    built = Stage(make, VirtualClock(start))
    try:
        yield built
    finally:
        with anyio.CancelScope(shield=True):
            await built.close()
