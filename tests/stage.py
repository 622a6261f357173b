"""A journal on virtual time, processes that can die, and subscriptions on them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from inspect import iscoroutinefunction
from typing import Any, cast

import anyio

from msgbus.journal import Ack, Journal, Record
from msgbus.journal.operations import Operation
from msgbus.runtime.clock import VirtualClock
from msgbus.subscriptions import (
    Deliver,
    DurableSubscription,
    RetryTiers,
    SubscriptionConfig,
)
from msgbus.testing.conformance.journal import make_record
from msgbus.testing.simulation.processes import Process

QUICK = RetryTiers(max_attempts=3, initial_delay=0.1, exponential_base=2.0, jitter=False)


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

    def tries(self, number: int) -> list[int]:
        return [attempt for seen, attempt in self.seen if seen == number]


class CommitsOf:
    """A journal that notes what was committed together."""

    def __init__(self, inner: Journal) -> None:
        self._inner = inner
        self.kinds: list[set[type]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    @property
    def journal(self) -> Journal:
        return cast("Journal", self)

    async def commit(self, operations: Sequence[Operation]) -> list[Ack]:
        self.kinds.append({type(operation) for operation in operations})
        return await self._inner.commit(operations)


class CallsOf:
    """A journal that knows which calls are under way, but for those that wait for a change."""

    def __init__(self, inner: Journal) -> None:
        self._inner = inner
        self._under_way = 0
        self._ended = anyio.Event()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not iscoroutinefunction(found) or name in {"wait", "changed"}:
            return found

        async def call(*args: Any, **kwargs: Any) -> Any:
            self._under_way += 1
            try:
                return await found(*args, **kwargs)
            finally:
                self._under_way -= 1
                self._ended.set()

        return call

    async def ended(self) -> None:
        """Return once none is under way."""
        while self._under_way:
            self._ended = anyio.Event()
            await self._ended.wait()


class Stage:
    def __init__(self, journal: Journal, clock: VirtualClock) -> None:
        self._calls = CallsOf(journal)
        self.shared = cast("Journal", self._calls)
        self.clock = clock
        self.processes: list[Process] = []
        self.open: list[DurableSubscription] = []

    def process(self) -> Process:
        process = Process(self.shared, self.clock)
        self.processes.append(process)
        return process

    async def append(self, *numbers: int, **changes: Any) -> list[int]:
        now = self.clock.time()
        records = [make_record(number, **{"time": now, **changes}) for number in numbers]
        return [ack.offset for ack in await self.shared.append(records)]

    async def append_keyed(self, *pairs: tuple[int, str]) -> None:
        await self.shared.append([make_record(number, key=key) for number, key in pairs])

    def make(
        self,
        deliver: Deliver,
        *,
        name: str = "receipts",
        process: Process | None = None,
        source: dict[str, Any] | None = None,
        on_stall: Callable[[Any], object] | None = None,
        on_dead_letter: Callable[..., Sequence[Operation]] | None = None,
        chance: Callable[[], float] = lambda: 0.5,
        **config: Any,
    ) -> DurableSubscription:
        journal = self.shared if process is None else process.journal
        subscription = DurableSubscription(
            journal,
            name,
            deliver,
            SubscriptionConfig.model_validate({"retry": QUICK, **config}),
            clock=self.clock,
            on_stall=on_stall,
            on_dead_letter=on_dead_letter,
            chance=chance,
            **(source or {}),
        )
        self.open.append(subscription)
        if process is not None:
            process.on_death.append(subscription.engine.abort)
        return subscription

    async def start(self, deliver: Deliver, **options: Any) -> DurableSubscription:
        subscription = self.make(deliver, **options)
        await subscription.start()
        return subscription

    async def until(self, is_so: Callable[[], bool], *, within: float = 120.0) -> None:
        """Let time pass in small steps until something is so.

        It stands still while the journal is at work: its threads live in real time, and on a busy
        machine the clock would be far ahead of them.
        """
        end = self.clock.now() + within
        while not is_so():
            assert self.clock.now() < end, f"not so within {within:g} s"
            await self._calls.ended()
            await self.clock.advance(0.05)

    async def position(self, name: str = "receipts") -> int:
        cursor = await self.shared.cursor(name)
        assert cursor is not None
        return cursor.offset


@asynccontextmanager
async def stage(
    make: Callable[[VirtualClock], Journal], start: float = 1_000_000.0
) -> AsyncGenerator[Stage]:
    clock = VirtualClock(start)
    journal = make(clock)
    built = Stage(journal, clock)
    try:
        yield built
    finally:
        for subscription in built.open:
            subscription.engine.abort()
        for process in built.processes:
            process.die()
        await journal.close()
