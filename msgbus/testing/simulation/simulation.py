"""Simulation of durable subscriptions with seeded faults, on virtual time.

```text
python -m msgbus.testing.simulation.simulation --seeds 1000 --from 0
```

The real subscriptions run, on a journal in memory; only time and chance are simulated. Faults are
crashes, lost leases and failing handlers. A seed gives the same run every time, so a failing one
can be replayed.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from multiprocessing import get_context
from random import Random
from typing import Final, final

from msgbus.journal.memory import MemoryJournal
from msgbus.journal.records import Kind, Record
from msgbus.runtime.clock import VirtualClock
from msgbus.subscriptions.subscription import DurableSubscription
from msgbus.testing.simulation.checks import SimulatedAttempt, SimulationHistory, Violations, check
from msgbus.testing.simulation.processes import Process
from msgbus.testing.simulation.scenarios import Scenario, draw

NAME: Final = "simulated"
SETTLE_SECONDS: Final = 7200.0
"""Virtual seconds that a run gets to settle."""

STUCK_SECONDS: Final = 300.0
"""Virtual seconds without a delivery after which a run is stuck; no backoff is as long."""

Sabotage = Callable[[DurableSubscription], object]
"""Breaks a subscription on purpose, to test that the checks find it."""


@final
class _ProcessRun:
    """One process from its start to its end."""

    def __init__(self, number: int, process: Process, subscription: DurableSubscription) -> None:
        self.number = number
        self.process = process
        self.subscription = subscription


@final
class Simulation:
    """One run of one scenario."""

    def __init__(self, scenario: Scenario, sabotage: Sabotage | None = None) -> None:
        self.scenario = scenario
        self.history = SimulationHistory()
        self._sabotage = sabotage
        self._chance = Random(f"run {scenario.seed}")
        self._jitter = Random(f"jitter {scenario.seed}")
        self._clock = VirtualClock()
        self._journal = MemoryJournal(clock=self._clock)
        self._runs: list[_ProcessRun] = []
        self._count = 0
        self._injects_faults = True

    async def run(self) -> SimulationHistory:
        """Inject faults, then let the subscriptions settle."""
        try:
            for _ in range(self.scenario.processes):
                await self._start_process()
            await self._inject_faults()
            await self._settle()
        finally:
            for run in self._runs:
                run.process.die()
            await self._clock.advance(0)
            await self._journal.close()
        return self.history

    # -- processes -----------------------------------------------------------------------------

    async def _start_process(self) -> None:
        self._count += 1
        number = self._count
        process = Process(self._journal, self._clock)
        process.before_commit = process.after_commit = lambda _: self._maybe_crash(run)
        subscription = DurableSubscription(
            process.journal,
            NAME,
            lambda record, attempt: self._handle(run, record, attempt),
            self.scenario.config,
            clock=self._clock,
            chance=self._jitter.random,
        )
        run = _ProcessRun(number, process, subscription)
        process.on_death.append(subscription.engine.abort)
        for extra in range(1, self.scenario.consumers):
            subscription.add_consumer(
                f"{NAME}-{extra}",
                lambda record, attempt: self._handle(run, record, attempt),
            )
        if self._sabotage is not None:
            self._sabotage(subscription)
        self._runs.append(run)
        await subscription.start()

    def _maybe_crash(self, run: _ProcessRun) -> None:
        # Not while it starts: `start` runs in the task of the simulation itself.
        is_running = run.subscription.engine.is_running
        if (
            self._injects_faults
            and is_running
            and self._chance.random() < self.scenario.commit_crash
        ):
            self._crash(run)

    def _crash(self, run: _ProcessRun) -> None:
        if run in self._runs:
            self.history.deaths += 1
            self._end(run)

    async def _close(self, run: _ProcessRun, timeout: float) -> None:
        """End a process cleanly."""
        closing = asyncio.create_task(run.subscription.close(timeout))
        while not closing.done():
            await self._clock.advance(0.1)
        self.history.left += closing.result()
        self.history.closes += 1
        if run in self._runs:  # it may have died while it closed
            self._end(run)

    def _end(self, run: _ProcessRun) -> None:
        self._runs.remove(run)
        counts = run.subscription.progress().counts
        self.history.timeouts += counts.timed_out
        self.history.dropped += counts.dropped
        run.process.die()

    # -- handlers ------------------------------------------------------------------------------

    async def _handle(self, run: _ProcessRun, record: Record, attempt: int) -> None:
        scenario, chance = self.scenario, self._chance
        number = int(record.message_id[1:])
        epoch = run.subscription.engine.epoch
        one = SimulatedAttempt(run.number, epoch, number, attempt, self._delivered_at(run, record))
        self.history.begun.append(one)
        if number in scenario.killers:
            self._crash(run)
            await self._clock.sleep(SETTLE_SECONDS)
        if chance.random() < scenario.hang:
            await self._clock.sleep((scenario.config.ack_timeout or 0.0) * 3)
        elif chance.random() < 0.7:
            await self._clock.sleep(chance.choice([0.001, 0.01, 0.3]))
        if number in scenario.poison or chance.random() < scenario.failure:
            message = f"message {number} fails"
            raise ValueError(message)
        self.history.handled.append(one)

    def _delivered_at(self, run: _ProcessRun, record: Record) -> float:
        """Get the time of delivery: a few steps ago, and time may have passed."""
        entry = run.subscription.engine.desk.window.get(record.offset)
        timeout = self.scenario.config.ack_timeout
        if entry is None or timeout is None:
            return self._clock.now()
        return entry.deadline - timeout

    # -- faults --------------------------------------------------------------------------------

    async def _inject_faults(self) -> None:
        scenario, chance = self.scenario, self._chance
        crashes, freezes, closes = scenario.crashes, scenario.freezes, scenario.closes
        while len(self.history.published) < scenario.messages or crashes or freezes or closes:
            await self._clock.advance(chance.choice([0.0, 0.01, 0.2, 1.0, 6.0]))
            await self._look()
            roll = chance.random()
            if roll < 0.5:
                await self._publish(chance.randint(1, 10))
            elif roll < 0.7 and crashes and self._runs:
                crashes -= 1
                self._crash(chance.choice(self._runs))
            elif roll < 0.8 and freezes and self._runs:
                freezes -= 1
                self.history.freezes += 1
                chance.choice(self._runs).process.freeze()
            elif roll < 0.85 and closes and self._runs:
                closes -= 1
                await self._close(chance.choice(self._runs), chance.choice([0.0, 3.0]))
            elif len(self._runs) < scenario.processes:
                await self._start_process()
        self._injects_faults = False

    async def _publish(self, count: int) -> None:
        published = self.history.published
        keys = self.scenario.keys
        for _ in range(min(count, self.scenario.messages - len(published))):
            number = len(published)
            key = f"k{self._chance.randrange(keys)}" if keys else None
            published[number] = key
            name = f"m{number}"
            record = Record(
                message_id=name,
                name="simulated.Message",
                version=1,
                topic="simulated",
                key=key,
                kind=Kind.EVENT,
                time=self._clock.time(),
                correlation_id=name,
                causation_id=None,
                root_id=name,
                depth=0,
                session_id=None,
                headers={},
                payload=b"{}",
            )
            await self._journal.append([record])

    async def _look(self) -> None:
        cursor = await self._journal.cursor(NAME)
        self.history.positions.append(0 if cursor is None else cursor.offset)

    async def _settle(self) -> None:
        history = self.history
        history.head = await self._journal.head()
        end = self._clock.now() + SETTLE_SECONDS
        begun, since = -1, 0.0
        while self._clock.now() < end:
            if begun != len(history.begun):
                begun, since = len(history.begun), self._clock.now()
            elif self._clock.now() - since > STUCK_SECONDS:
                break
            if not self._runs:
                await self._start_process()
            await self._clock.advance(1.0)
            await self._look()
            progress = [run.subscription.progress() for run in self._runs]
            is_busy = any(each.scheduled or each.buffered for each in progress)
            due = await self._journal.next_due(subscription=NAME)
            if history.positions[-1] >= history.head and due is None and not is_busy:
                history.is_settled = True
                break
        for run in self._runs:
            counts = run.subscription.progress().counts
            history.timeouts += counts.timed_out
            history.dropped += counts.dropped
        letters = await self._journal.dead_letters(NAME, limit=10_000)
        history.dead_lettered = {int(letter.record.message_id[1:]) for letter in letters}


def simulate(seed: int, sabotage: Sabotage | None = None) -> tuple[Violations, SimulationHistory]:
    """Run the scenario of a seed; return violations and history."""
    scenario = draw(seed)
    history = asyncio.run(Simulation(scenario, sabotage).run())
    return check(scenario, history), history


# -- on the command line ---------------------------------------------------------------------


def _one(seed: int) -> tuple[int, Violations, int, int]:
    # The faults cause many warnings, all of them expected.
    logger = logging.getLogger("msgbus")
    was_disabled, logger.disabled = logger.disabled, True
    try:
        violations, history = simulate(seed)
    finally:
        logger.disabled = was_disabled
    return seed, violations, len(history.handled), history.deaths


def _all(seeds: Sequence[int], jobs: int) -> Iterator[tuple[int, Violations, int, int]]:
    if jobs == 1:
        yield from map(_one, seeds)
        return
    with get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap(_one, seeds, chunksize=8)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run many seeds; 1 if one of them broke a promise."""
    parser = argparse.ArgumentParser(prog="python -m msgbus.testing.simulation.simulation")
    parser.add_argument("--seeds", type=int, default=200, help="how many seeds to run")
    parser.add_argument("--from", dest="first", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=1, help="processes to run them in")
    options = parser.parse_args(arguments)
    seeds = range(options.first, options.first + options.seeds)
    failed = handled = deaths = 0
    for seed, violations, done, died in _all(seeds, options.jobs):
        handled += done
        deaths += died
        if not violations.is_clean:
            failed += 1
            broken = {name: count for name, count in asdict(violations).items() if count}
            sys.stdout.write(
                f"seed {seed} broke a promise: {broken}\n  replay it with: "
                f"python -m msgbus.testing.simulation.simulation --seeds 1 --from {seed}\n"
            )
            sys.stdout.flush()
    sys.stdout.write(
        f"{len(seeds)} seeds, {handled} messages handled, {deaths} processes killed: "
        f"{failed} seeds failed\n"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
