"""Simulation of durable subscriptions with seeded faults, on virtual time.

```text
python -m msgbus.testing.simulation.simulation --seeds 1000 --from 0
```

The real subscriptions run, on a journal in memory whose commits are split in two: other tasks run
between the moment when a commit is written and the moment when its process hears of it, as with a
journal that writes on a thread of its own. Faults are crashes at any of these moments, members that
others end, failing commits and failing handlers. A seed gives the same run every time.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from random import Random
from typing import Any, Final, final

import anyio
import anyio.lowlevel

from msgbus.errors import JournalError
from msgbus.journal.memory import MemoryJournal
from msgbus.journal.operations import Append, Reply
from msgbus.journal.records import Kind, Order, Record, Selection, State
from msgbus.runtime.clock import VirtualClock
from msgbus.subscriptions.in_flight import InFlight
from msgbus.subscriptions.loop import SubscriptionLoop
from msgbus.subscriptions.loops import PartitionedLoop, SharedLoop
from msgbus.subscriptions.members import Membership
from msgbus.subscriptions.partitioned import PartitionedState
from msgbus.subscriptions.rules import DeliveryRules
from msgbus.subscriptions.shared import SharedState

TTL: Final = 4.0
SETTLE: Final = 200.0
"""Virtual seconds that a run gets to settle."""

Sabotage = Callable[["SimulatedProcess"], object]
"""Breaks a process on purpose, to show that the checks find it."""


@final
@dataclass(frozen=True)
class Plan:
    """Subscription, messages and faults that a seed draws."""

    seed: int
    mode: str
    processes: int
    messages: int
    keys: int
    max_in_flight: int
    parks: bool
    crash: float
    """Probability of a crash around a commit."""
    failed_commit: float
    failure: float
    """Probability that an attempt fails."""
    poison: frozenset[int]
    """Messages whose every attempt fails."""
    killers: frozenset[int]
    """Messages whose every attempt ends the process."""
    ended: int
    """Members that are ended though they are alive."""
    leaves: int
    """Processes that stop cleanly."""


def draw(seed: int) -> Plan:
    """Draw the plan of a seed."""
    chance = Random(f"plan {seed}")
    messages = chance.randint(10, 60)
    return Plan(
        seed=seed,
        mode=chance.choice(["exclusive", "key_shared", "shared", "queue"]),
        processes=chance.randint(1, 3),
        messages=messages,
        keys=chance.choice([1, 3, 8]),
        max_in_flight=chance.choice([1, 2, 5]),
        parks=chance.random() < 0.3,
        crash=chance.choice([0.0, 0.0, 0.01, 0.04]),
        failed_commit=chance.choice([0.0, 0.0, 0.02]),
        failure=chance.choice([0.0, 0.1]),
        poison=_some(chance, messages),
        killers=_some(chance, messages),
        ended=chance.choice([0, 1, 4]),
        leaves=chance.choice([0, 1, 2]),
    )


def _some(chance: Random, messages: int) -> frozenset[int]:
    count = chance.choice([0, 0, 1, 2])
    return frozenset(chance.randrange(messages) for _ in range(count))


@final
class SimulatedRetries:
    """Four attempts, with short pauses and pauses that are kept in the journal."""

    in_process = 1.0

    def pause(self, attempt: int, error: BaseException | None) -> float | None:
        """Return the pause after an attempt."""
        del error
        return {1: 0.1, 2: 3.0, 3: 0.5}.get(attempt, None if attempt else 0.0)


@final
class SimulatedTurn:
    """Faults in the middle of the commits of one process."""

    def __init__(self, process: SimulatedProcess) -> None:
        self._lock = anyio.Lock()
        self._process = process

    @asynccontextmanager
    async def __call__(self) -> AsyncGenerator[Callable[[], None]]:
        """Let other tasks run, or end the process, after the commit was written."""
        process = self._process
        async with self._lock:
            yield self._write
            for _ in range(process.simulation.chance.choice([0, 1, 2, 5])):
                await anyio.lowlevel.checkpoint()
            process.simulation.maybe_crash(process)
            if process.is_dead:
                await anyio.sleep_forever()

    def _write(self) -> None:
        """Fail the commit, or end the process before it is written."""
        process = self._process
        process.simulation.maybe_crash(process)
        if process.is_dead:
            raise JournalError("the process has ended")
        if process.simulation.rolls(process.simulation.plan.failed_commit):
            raise JournalError("the disk failed")


@final
class SimulatedProcess:
    """One process from its start to its end."""

    def __init__(self, simulation: DeliverySimulation, number: int) -> None:
        self.simulation = simulation
        self.number = number
        self.is_dead = False
        self.is_started = False
        self.journal = simulation.journal.beside(SimulatedTurn(self))
        self.membership = Membership(
            self.journal, simulation.clock, ttl=TTL, process=f"simulated:{number}:"
        )
        self.loop = self._make_loop()
        self.membership.add(self.loop)

    def _make_loop(self) -> SubscriptionLoop[Any]:
        plan, clock = self.simulation.plan, self.simulation.clock
        selection = self.simulation.selection
        rules, gate = DeliveryRules(retry=SimulatedRetries()), self.membership.gate
        name, limit = self.simulation.name, plan.max_in_flight
        if selection.order is Order.NONE:
            is_queue = plan.mode == "queue"
            shared = SharedState(name, selection, clock, max_in_flight=limit, is_queue=is_queue)
            return SharedLoop(self.journal, shared, self._deliver, rules, gate)
        limit = 1 if plan.mode == "exclusive" else limit
        owned = PartitionedState(name, selection, clock, max_in_flight=limit)
        return PartitionedLoop(self.journal, owned, self._deliver, rules, gate)

    async def _deliver(self, one: InFlight) -> Reply | None:
        return await self.simulation.handle(self, one)

    def die(self) -> None:
        """End as by `kill -9`: nothing more is written or handled."""
        self.is_dead = True
        self.membership.abandon()
        self.journal.freeze()


@final
@dataclass
class RunHistory:
    """Events of one run."""

    keys: dict[int, str] = field(default_factory=dict[int, str])
    handled: list[int] = field(default_factory=list[int])
    effects: Counter[int] = field(default_factory=Counter[int])
    """How often a message had an effect in the commit that acknowledged it."""
    dead: set[int] = field(default_factory=set[int])
    overlaps: int = 0
    deaths: int = 0
    ended: int = 0
    reordered: int = 0
    is_settled: bool = False
    left: dict[str, int] = field(default_factory=dict[str, int])
    """Rows that are left, by state."""


@final
class DeliverySimulation:
    """One run of one plan."""

    name: Final = "simulated"

    def __init__(self, plan: Plan, sabotage: Sabotage | None = None) -> None:
        self.plan = plan
        self.history = RunHistory()
        self.chance = Random(f"run {plan.seed}")
        self.clock = VirtualClock()
        self.journal = MemoryJournal(clock=self.clock)
        self.processes: list[SimulatedProcess] = []
        self._sabotage = sabotage
        self._count = 0
        self._running: list[InFlight] = []
        self._injects_faults = True

    @property
    def selection(self) -> Selection:
        """The selection of the subscription."""
        mode = self.plan.mode
        order = {"exclusive": Order.LOG, "key_shared": Order.KEY}.get(mode, Order.NONE)
        return Selection(
            kind=Kind.COMMAND if mode == "queue" else Kind.EVENT,
            names={"Message"},
            order=order,
            partitions=4 if order is Order.KEY else 1,
            parks=self.plan.parks and order is not Order.NONE,
        )

    def rolls(self, probability: float) -> bool:
        """Tell whether a fault happens now."""
        return self._injects_faults and self.chance.random() < probability

    # -- the run ---------------------------------------------------------------------------------

    async def run(self) -> RunHistory:
        """Inject faults, then let the subscription settle."""
        try:
            await self._inject_faults()
            self._injects_faults = False
            await self._settle()
        finally:
            for process in list(self.processes):
                process.die()
            await self.clock.advance(0)
        return self.history

    async def _inject_faults(self) -> None:
        plan, chance = self.plan, self.chance
        published, ended, leaves = 0, plan.ended, plan.leaves
        for _ in range(3000):
            if published >= plan.messages and not ended and not leaves:
                return
            await self.clock.advance(chance.choice([0.0, 0.0, 0.05, 0.3, 2.0]))
            roll = chance.random()
            if len(self.processes) < plan.processes and roll < 0.4:
                await self._start()
            elif roll < 0.7 and published < plan.messages:
                published += await self._publish(published)
            elif roll < 0.8 and ended:
                ended -= await self._end_a_member()
            elif roll < 0.85 and leaves and self.processes:
                leaves -= 1
                await self._leave(chance.choice(self.processes))

    async def _start(self) -> None:
        self._count += 1
        process = SimulatedProcess(self, self._count)
        if self._sabotage is not None:
            self._sabotage(process)
        self.processes.append(process)
        try:
            await self._unless_dead(process, process.membership.start())
            process.is_started = True
        except JournalError:
            self._crash(process)

    def maybe_crash(self, process: SimulatedProcess) -> None:
        """End the process, maybe; never while it starts, which this task waits for."""
        if process.is_started and not process.is_dead and self.rolls(self.plan.crash):
            self._crash(process)

    def _crash(self, process: SimulatedProcess) -> None:
        if not process.is_dead:
            self.history.deaths += 1
            self.processes.remove(process)
            process.die()

    async def _leave(self, process: SimulatedProcess) -> None:
        stopping = asyncio.create_task(process.membership.stop(5.0))
        for _ in range(400):
            if stopping.done() or process.is_dead:
                break
            await self.clock.advance(0.1)
        if process.is_dead:
            stopping.cancel()
        elif stopping.exception() is not None:
            self._crash(process)
        else:
            self.processes.remove(process)
            process.die()

    async def _end_a_member(self) -> int:
        members = await self.journal.members()
        if not members:
            return 0
        self.history.ended += 1
        return int(await self.journal.end(self.chance.choice(members)))

    async def _publish(self, first: int) -> int:
        count = min(self.chance.randint(1, 8), self.plan.messages - first)
        by = self.chance.choice([*(process for process in self.processes), None])
        journal = self.journal if by is None or by.is_dead else by.journal
        for number in range(first, first + count):
            record = self._record(number)
            queue = self.name if self.plan.mode == "queue" else None
            try:
                await self._unless_dead(by, journal.commit([Append(record, queue)]))
            except JournalError:
                await self.journal.commit([Append(record, queue)])  # its id is known by then
        return count

    async def _unless_dead(self, by: SimulatedProcess | None, work: Any) -> None:
        """Wait for a commit of a process, which may end in the middle of it."""
        task = asyncio.ensure_future(work)
        while not task.done():
            await asyncio.sleep(0)
            if by is not None and by.is_dead:
                task.cancel()
                raise JournalError("the process has ended")
        await task

    def _record(self, number: int) -> Record:
        key = f"k{self.chance.randrange(self.plan.keys)}"
        self.history.keys[number] = key
        kind = Kind.COMMAND if self.plan.mode == "queue" else Kind.EVENT
        name = f"m{number}"
        return Record(
            message_id=name,
            name="Message",
            version=1,
            topic="message",
            key=key,
            kind=kind,
            time=self.clock.time(),
            correlation_id=name,
            causation_id=None,
            root_id=name,
            depth=0,
            session_id=None,
            headers={},
            payload=b"{}",
        )

    # -- handlers --------------------------------------------------------------------------------

    async def handle(self, process: SimulatedProcess, one: InFlight) -> Reply | None:
        """Handle one message: wait, fail, end the process, or have an effect."""
        number = int(one.record.message_id[1:])
        self._running.append(one)
        try:
            self.history.overlaps += await self._overlaps(one)
            return await self._handle(process, one, number)
        finally:
            self._running.remove(one)

    async def _overlaps(self, one: InFlight) -> bool:
        """Tell whether another message of its order is being handled by a living member."""
        if one.key is None:
            return False
        members = {member.id for member in await self.journal.members()}
        others = [other for other in self._running if other is not one and other.key == one.key]
        return any({one.member.id, other.member.id} <= members for other in others)

    async def _handle(self, process: SimulatedProcess, one: InFlight, number: int) -> Reply | None:
        chance, plan = self.chance, self.plan
        if chance.random() < 0.6:
            await self.clock.sleep(chance.choice([0.001, 0.05, 0.4]))
        if number in plan.killers:
            self._crash(process)
            await anyio.sleep_forever()
        if number in plan.poison or self.rolls(plan.failure):
            raise ValueError(f"message {number} fails")
        await self._check_order(number)
        if chance.random() < 0.5 and plan.mode != "queue":
            await self._acknowledge(process, one, number)
        self.history.handled.append(number)
        if plan.mode == "queue":
            return Reply(one.record.message_id, self.clock.time(), b"null")
        return None

    async def _acknowledge(self, process: SimulatedProcess, one: InFlight, number: int) -> None:
        """Have an effect in the commit that acknowledges the message."""
        self._count += 1
        name = f"e{number}-{self._count}"
        effect = one.record._replace(message_id=name, name="Effect", kind=Kind.CONTROL)
        operations = [Append(effect), *one.acknowledgement(self.clock.time())]
        await process.journal.commit(operations, one.member)
        process.loop.state.acknowledged_in_commit(one)

    async def _effects(self) -> Counter[int]:
        """Count the effects that were written, by message."""
        scan = await self.journal.read(0, 10_000, Selection(kind=Kind.CONTROL))
        effects = [one for one in scan.records if isinstance(one, Record)]
        return Counter(int(one.message_id[1:].partition("-")[0]) for one in effects)

    async def _check_order(self, number: int) -> None:
        mode, keys = self.plan.mode, self.history.keys
        if mode not in {"exclusive", "key_shared"}:
            return
        exempt = self.plan.poison | self.plan.killers
        earlier = {
            other
            for other in range(number)
            if other not in exempt and (mode == "exclusive" or keys[other] == keys[number])
        }
        handled = {*self.history.handled, *await self._effects(), *await self._dead()}
        self.history.reordered += not earlier <= handled

    async def _dead(self) -> set[int]:
        """Return the messages that are dead-lettered now."""
        rows = await self.journal.find(self.name, (State.DEAD,), limit=1000)
        records = [await self.journal.record(row) for row in rows]
        return {int(record.message_id[1:]) for record in records if record is not None}

    # -- the end ---------------------------------------------------------------------------------

    async def _settle(self) -> None:
        end = self.clock.now() + SETTLE
        while self.clock.now() < end and not self.history.is_settled:
            if not self.processes:
                await self._start()
            await self.clock.advance(1.0)
            self.history.is_settled = await self._is_settled()
        self.history.dead = await self._dead()
        self.history.effects = await self._effects()
        counts = await self.journal.count(self.name)
        self.history.left = {state.value: count for state, count in counts.items()}

    async def _is_settled(self) -> bool:
        """Tell whether nothing is left to do; cursors first, as a take-over makes rows of them."""
        selection = self.selection
        is_blocked = selection.parks and selection.order is Order.LOG and await self._dead()
        for cursor in await self.journal.cursors(self.name):
            scan = await self.journal.read(cursor.acked, 1, selection, [cursor.partition])
            if scan.records and not is_blocked:
                return False
        parked = State.PARKED if selection.parks else None
        counts = await self.journal.count(self.name)
        if any(state not in {State.DEAD, parked} for state in counts):
            return False
        return not any(process.loop.state.in_flight for process in self.processes)


@final
@dataclass(frozen=True)
class Broken:
    """Promises that a run has broken; all zero if none was."""

    lost: int
    """Messages that were neither handled nor dead-lettered nor parked."""
    effects_twice: int
    reordered: int
    overlaps: int
    innocents: int
    """Messages that were dead-lettered and are neither poison nor killers."""
    unsettled: int

    @property
    def is_clean(self) -> bool:
        """Whether nothing was broken."""
        return not any(vars(self).values())


def check(plan: Plan, history: RunHistory) -> Broken:
    """Compare a history with the promises."""
    expected = set(range(plan.messages))
    parked = history.left.get("parked", 0)
    missing = expected - set(history.handled) - set(history.effects) - history.dead
    guilty = plan.poison | plan.killers
    is_blocked = plan.parks and plan.mode == "exclusive" and bool(history.dead)
    # A message that runs alone is charged for the end of its process, whoever caused it.
    has_other_ends = plan.failure or plan.crash or plan.ended
    return Broken(
        lost=0 if is_blocked else max(len(missing) - parked, 0),
        effects_twice=sum(count > 1 for count in history.effects.values()),
        reordered=history.reordered,
        overlaps=history.overlaps,
        innocents=0 if has_other_ends else len(history.dead - guilty),
        unsettled=int(not history.is_settled),
    )


def simulate(seed: int, sabotage: Sabotage | None = None) -> tuple[Broken, RunHistory]:
    """Run the plan of a seed."""
    plan = draw(seed)
    history = asyncio.run(DeliverySimulation(plan, sabotage).run())
    return check(plan, history), history


# -- on the command line -------------------------------------------------------------------------

_MODULE: Final = "msgbus.testing.simulation.simulation"


def _one(seed: int) -> tuple[int, Broken, int, int]:
    logging.getLogger("msgbus").disabled = True  # the faults cause many warnings
    broken, history = simulate(seed)
    return seed, broken, len(history.handled), history.deaths


def _all(seeds: Sequence[int], jobs: int) -> Iterator[tuple[int, Broken, int, int]]:
    if jobs == 1:
        yield from map(_one, seeds)
        return
    with get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap(_one, seeds, chunksize=8)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run many seeds; return 1 if one of them broke a promise."""
    parser = argparse.ArgumentParser(prog=f"python -m {_MODULE}")
    parser.add_argument("--seeds", type=int, default=200, help="how many seeds to run")
    parser.add_argument("--from", dest="first", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=1, help="processes to run them in")
    options = parser.parse_args(arguments)
    failed = handled = deaths = 0
    for seed, broken, done, died in _all(
        range(options.first, options.first + options.seeds), options.jobs
    ):
        handled += done
        deaths += died
        if not broken.is_clean:
            failed += 1
            sys.stdout.write(
                f"seed {seed} ({draw(seed).mode}) broke a promise: {broken}\n"
                f"  replay with: python -m {_MODULE} --seeds 1 --from {seed}\n"
            )
            sys.stdout.flush()
    sys.stdout.write(
        f"{options.seeds} seeds, {handled} messages handled, {deaths} processes killed: "
        f"{failed} seeds failed\n"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
