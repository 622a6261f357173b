"""Processes on one journal in memory, on one virtual clock."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import anyio.lowlevel
from uuid_utils import uuid7

from msgbus.handlers.delivery import Poison
from msgbus.journal.memory import MemoryJournal
from msgbus.journal.operations import Append, Reply
from msgbus.journal.records import Kind, Order, Pending, Record, Selection, State
from msgbus.runtime.clock import VirtualClock
from msgbus.subscriptions.in_flight import InFlight
from msgbus.subscriptions.loop import SubscriptionLoop
from msgbus.subscriptions.loops import PartitionedLoop, SharedLoop
from msgbus.subscriptions.members import Membership
from msgbus.subscriptions.partitioned import PartitionedState
from msgbus.subscriptions.progress import is_done
from msgbus.subscriptions.rules import DeliveryRules
from msgbus.subscriptions.shared import SharedState

Handler = Callable[["Process", InFlight], Awaitable[None]]
TTL = 4.0


def make_record(
    number: int, key: str | None = None, *, name: str = "E", kind: Kind = Kind.EVENT
) -> Record:
    message_id = str(uuid7())
    return Record(
        message_id,
        name,
        1,
        name.lower(),
        key,
        kind,
        1_000_000.0,
        message_id,
        None,
        message_id,
        0,
        None,
        {},
        b"%d" % number,
    )


def number_of(one: InFlight) -> int:
    return int(one.record.payload)


@dataclass
class Retries:
    """Three attempts; the pause is given."""

    pauses: float = 0.1
    in_process: float = 5.0
    attempts: int = 3

    def pause(self, attempt: int, error: BaseException | None) -> float | None:
        return self.pauses if attempt < self.attempts else None


@dataclass(eq=False)
class Process:
    """One process: its own journal object, membership and subscription."""

    number: int
    journal: MemoryJournal
    membership: Membership
    loop: SubscriptionLoop[Any]
    is_dead: bool = False
    handled: list[tuple[str | None, int]] = field(default_factory=list)

    @property
    def numbers(self) -> list[int]:
        return [number for _, number in self.handled]


class Cluster:
    """Processes that serve one subscription `s`, or the queue `commands:C`."""

    def __init__(self, mode: str, **options: Any) -> None:
        self.mode = mode
        self.clock = VirtualClock()
        self.journal = MemoryJournal(clock=self.clock)
        self.processes: list[Process] = []
        self.handler: Handler = handle
        self.running: Counter[str | None] = Counter()
        self.overlaps: list[str | None] = []
        self.attempts: dict[int, list[int]] = defaultdict(list)
        self.retry = options.pop("retry", Retries())
        self.on_poison = options.pop("on_poison", Poison.DEAD_LETTER)
        self.parks = options.pop("parks", False)
        self.partitions = options.pop("partitions", 4)
        self.text = options.pop("text", "")
        self.keeps_done = options.pop("keeps_done", False)
        self.rate_limit: float | None = options.pop("rate_limit", None)
        self.burst: int = options.pop("burst", 1)
        self.max_in_flight = options.pop("max_in_flight", 1 if mode == "exclusive" else 4)
        self.options = options

    @property
    def name(self) -> str:
        return "commands:C" if self.mode == "queue" else "s"

    @property
    def selection(self) -> Selection:
        order = {"exclusive": Order.LOG, "key_shared": Order.KEY}.get(self.mode, Order.NONE)
        return Selection(
            kind=Kind.COMMAND if self.mode == "queue" else Kind.EVENT,
            order=order,
            partitions=self.partitions if order is Order.KEY else 1,
            parks=self.parks,
            keeps_done=self.keeps_done,
            text=self.text,
        )

    # -- processes -------------------------------------------------------------------------------

    def make(self, *, is_serving: bool = True) -> Process:
        number = len(self.processes)
        journal = self.journal.beside()
        membership = Membership(journal, self.clock, ttl=TTL, process=f"host:{number}:")
        rules = DeliveryRules(
            retry=self.retry,
            on_poison=self.on_poison,
            rate_limit=self.rate_limit,
            burst=self.burst,
        )
        options = {"max_in_flight": self.max_in_flight, **self.options}
        process: Process

        async def deliver(one: InFlight) -> Reply | None:
            return await self._deliver(process, one)

        loop: SubscriptionLoop[Any]
        if self.selection.order is Order.NONE:
            shared = SharedState(
                self.name, self.selection, self.clock, is_queue=self.mode == "queue", **options
            )
            loop = SharedLoop(journal, shared, deliver, rules, membership.gate)
        else:
            owned = PartitionedState(self.name, self.selection, self.clock, **options)
            loop = PartitionedLoop(journal, owned, deliver, rules, membership.gate)
        process = Process(number, journal, membership, loop)
        if is_serving:
            membership.add(loop)
        self.processes.append(process)
        return process

    async def start(self, count: int = 1) -> list[Process]:
        started = [self.make() for _ in range(count)]
        for process in started:
            await process.membership.start()
        return started

    async def _deliver(self, process: Process, one: InFlight) -> Reply | None:
        key = one.key
        self.attempts[number_of(one)].append(one.attempt)
        self.running[key] += 1
        if key is not None and self.running[key] > 1:
            self.overlaps.append(key)
        try:
            await self.handler(process, one)
        finally:
            self.running[key] -= 1
        process.handled.append((one.record.key, number_of(one)))
        if self.mode == "queue":
            return Reply(one.record.message_id, self.clock.time(), b"done")
        return None

    async def kill(self, process: Process) -> None:
        """End a process as `kill -9` does: nothing more is written by it."""
        process.is_dead = True
        process.journal.freeze()
        process.membership.abandon()
        await self.turns(5)

    # -- messages and time -----------------------------------------------------------------------

    async def publish(self, *messages: tuple[int, str | None] | int, by: int | None = 0) -> None:
        journal = self.journal if by is None else self.processes[by].journal
        for message in messages:
            number, key = message if isinstance(message, tuple) else (message, None)
            if self.mode == "queue":
                record = make_record(number, name="C", kind=Kind.COMMAND)
                await journal.commit([Append(record, self.name)])
            else:
                await journal.commit([Append(make_record(number, key))])

    @property
    def handled(self) -> list[int]:
        return sorted(number for one in self.processes for number in one.numbers)

    async def turns(self, count: int = 200) -> None:
        for _ in range(count):
            await anyio.lowlevel.checkpoint()

    async def until(self, is_so: Callable[[], bool], within: float = 60.0) -> None:
        """Let virtual time pass until `is_so`."""
        end = self.clock.now() + within
        while not is_so():
            assert self.clock.now() < end, f"not within {within} virtual seconds"
            await self.clock.advance(0.05)
            await self.turns(20)

    async def until_handled(self, *numbers: int, within: float = 60.0) -> None:
        await self.until(lambda: set(numbers) <= set(self.handled), within)

    async def settled(self) -> None:
        """Let what is settled be written."""
        for _ in range(4):
            await self.clock.advance(0.3)
            await self.turns()

    async def is_done(self, upto: int, *, later: float = 0.0) -> bool:
        now = self.clock.time() + later
        return await is_done(self.journal, self.name, self.selection, upto, now)

    async def rows(self, *states: State) -> list[Pending]:
        return await self.journal.find(self.name, states or tuple(State), limit=1000)

    async def stop(self) -> None:
        for process in self.processes:
            process.membership.abandon()
        await self.turns(5)


async def handle(process: Process, one: InFlight) -> None:
    """Handle a message at once."""


@asynccontextmanager
async def cluster(mode: str, count: int = 1, **options: Any) -> AsyncGenerator[Cluster]:
    """Processes that are started, and stopped at the end."""
    made = Cluster(mode, **options)
    await made.start(count)
    try:
        yield made
    finally:
        with anyio.CancelScope(shield=True):
            await made.stop()
