"""Conformance tests: random histories of two processes keep the invariants and lose nothing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import final

from msgbus.errors import StaleError
from msgbus.journal.operations import Append, Drop, Fence, Operation, Pass, Put, Seek
from msgbus.journal.ports import Journal
from msgbus.journal.records import Cursor, Record, State
from msgbus.testing.conformance.journal.kit import (
    LETTER,
    SETTLED,
    STATES,
    JournalSuite,
    expected,
    make_record,
)
from msgbus.testing.conformance.journal.model import (
    ALL,
    QUEUE,
    SELECTIONS,
    HistoryWorker,
    PartitionWindow,
)
from msgbus.testing.conformance.journal.row_steps import RowHistory


@final
class RandomHistory(RowHistory):
    """Random steps of two processes, beside a model of what was acknowledged."""

    def __init__(self, seed: int, journal: Journal, other: Journal) -> None:
        super().__init__(seed, journal, other)
        self._steps: list[tuple[Callable[[HistoryWorker], Awaitable[None]], int]] = [
            (self.publish, 12),
            (self.enqueue, 3),
            (self.delay, 1),
            (self.publish_delayed, 2),
            (self.acquire, 10),
            (self.fetch, 16),
            (self.handle, 12),
            (self.handle_with_effect, 4),
            (self.move_cursor, 6),
            (self.set_aside, 12),
            (self.claim, 16),
            (self.resolve, 16),
            (self.replay, 3),
            (self.discard, 2),
            (self.intrude, 3),
            (self.release, 1),
            (self.renew, 1),
            (self.end, 1),
            (self.seek, 2),
        ]

    async def run(self, steps: int) -> None:
        """Do random steps, then handle everything that is left; check on the way."""
        for worker in self._workers:
            await worker.join()
        for name, selection in SELECTIONS.items():
            await self.journal.open(name, selection, 0)
        choices, weights = zip(*self._steps, strict=True)
        for number in range(steps):
            self._now += 1
            (step,) = self._random.choices(choices, weights)
            try:
                await step(self._random.choice(self._workers))
                if number % 50 == 49:
                    await self.check()
            except Exception as error:
                error.add_note(f"step {number}: {step.__name__}")
                raise
        await self.finish()

    # -- partitions ------------------------------------------------------------------------------

    async def acquire(self, worker: HistoryWorker) -> None:
        name = self._random.choice([name for name in SELECTIONS if name != "shared"])
        partition = self._random.randrange(SELECTIONS[name].partitions)
        await self._acquire(worker, name, partition)

    async def _acquire(self, worker: HistoryWorker, name: str, partition: int) -> None:
        cursor = await worker.journal.acquire(worker.member, name, partition, SELECTIONS[name])
        owners = [one for one in self._workers if (name, partition) in one.windows]
        assert (cursor is None) is bool(owners), f"partition {partition} of {name} has two owners"
        if cursor is not None:
            worker.windows[name, partition] = PartitionWindow(cursor)
            await self._check_done(worker, cursor)

    async def _check_done(self, worker: HistoryWorker, cursor: Cursor) -> None:
        """Check that no row is left of what is done and passed by the cursor."""
        for row in await worker.journal.find(cursor.name, [State.DONE], limit=ALL):
            assert row.partition != cursor.partition or row.offset > cursor.acked, row

    def _window(self, worker: HistoryWorker) -> PartitionWindow | None:
        windows = list(worker.windows.values())
        return self._random.choice(windows) if windows else None

    async def fetch(self, worker: HistoryWorker) -> None:
        for window in worker.windows.values():
            await self._fetch(worker, window, self._random.randint(1, 6))

    async def _fetch(self, worker: HistoryWorker, window: PartitionWindow, limit: int) -> None:
        name, partition = window.cursor.name, window.cursor.partition
        selection, journal = SELECTIONS[name], worker.journal
        scan = await journal.read(window.cursor.fetched, limit, selection, [partition])
        blocked = await journal.blocked_keys(name, partition)
        assert blocked.isdisjoint(window.keys())
        for one in self._workers:  # what others are to be parked behind may go now
            for claim in [claim for claim in one.claims if claim.row.key in blocked]:
                if claim.row.subscription == name and self._random.random() < 0.3:
                    await self._resolve(one, claim)
        parked: list[Operation] = []
        fetched: dict[int, Record] = {}
        for record in scan.records:
            assert isinstance(record, Record)
            if await journal.row(name, record.offset) is not None:
                continue
            if selection.order_key(record) in blocked:
                parked.append(Put(self.make_row(name, record, State.PARKED)))
            else:
                fetched[record.offset] = record
        window.records.update(fetched)
        await self._pass(worker, window, parked, fetched=scan.upto)

    async def _pass(
        self,
        worker: HistoryWorker,
        window: PartitionWindow,
        operations: list[Operation],
        asided: set[int] | None = None,
        fetched: int | None = None,
    ) -> None:
        """Write operations with the cursor, and note what is acknowledged by that."""
        gone = asided or set()
        move = window.pass_without(gone, fetched)
        await worker.commit(*operations, move)
        window.cursor = move.after
        await self._check_done(worker, window.cursor)
        passed = {offset for offset in window.handled if offset <= move.acked}
        self.acked[window.cursor.name] |= passed
        window.handled -= passed | gone
        for offset in passed | gone:
            del window.records[offset]

    def _next(self, worker: HistoryWorker, window: PartitionWindow) -> Record | None:
        """Choose a message that is the first of its key."""
        if not (first := window.first_of_keys()):
            return None
        record = self._random.choice(first)
        self.deliver(worker, window.cursor.name, record)
        return record

    async def handle(self, worker: HistoryWorker) -> None:
        for window in worker.windows.values():
            if (record := self._next(worker, window)) is not None:
                await self._handled(worker, window, record)

    async def _handled(
        self, worker: HistoryWorker, window: PartitionWindow, record: Record
    ) -> None:
        """Leave it to the cursor to pass a message, or write its row."""
        if SELECTIONS[window.cursor.name].keeps_done:
            await self._settle(worker, window, record, State.KEPT)
        else:
            window.handled.add(record.offset)

    async def handle_with_effect(self, worker: HistoryWorker) -> None:
        window = self._window(worker)
        if window is not None and (record := self._next(worker, window)) is not None:
            is_kept = SELECTIONS[window.cursor.name].keeps_done
            await self._settle(worker, window, record, State.KEPT if is_kept else State.DONE)

    async def _settle(
        self, worker: HistoryWorker, window: PartitionWindow, record: Record, state: State
    ) -> None:
        name, partition = window.cursor.name, window.cursor.partition
        fence = Fence(name, record.offset, partition, window.cursor.epoch)
        await worker.commit(fence, Put(self.make_row(name, record, state)))
        with expected(StaleError):
            await worker.commit(fence)
        del window.records[record.offset]
        self.acked[name].add(record.offset)
        if state is State.KEPT:
            self.kept.add((name, record.offset))

    async def move_cursor(self, worker: HistoryWorker) -> None:
        window = self._window(worker)
        if window is not None:
            await self._pass(worker, window, [])

    async def set_aside(self, worker: HistoryWorker) -> None:
        window = self._window(worker)
        if window is None or (record := self._next(worker, window)) is None:
            return
        name = window.cursor.name
        selection = SELECTIONS[name]
        state = self._random.choice([State.WAITING, State.DEAD])
        row = self.make_row(name, record, state)._replace(attempt=1)
        if state is State.WAITING:
            row = row._replace(due=self._now + self._random.randint(0, 5))
        behind = window.behind(record) if selection.holds(state) else []
        parked = [Put(self.make_row(name, one, State.PARKED)) for one in behind]
        before = window.handled_before(record)
        done = [Put(self.make_row(name, one, State.DONE)) for one in before]
        self.acked[name].update(one.offset for one in before)
        asided = {record.offset, *(one.offset for one in behind + before)}
        letter = LETTER if state is State.DEAD else None
        await self._pass(worker, window, [Put(row, letter), *parked, *done], asided)

    async def release(self, worker: HistoryWorker) -> None:
        window = self._window(worker)
        if window is None:
            return
        await self._pass(worker, window, [])
        cursor = window.cursor
        await worker.commit(Pass(cursor, cursor.acked, cursor.fetched, release=True))
        with expected(StaleError):
            await worker.commit(Pass(cursor, cursor.acked, cursor.fetched))
        del worker.windows[cursor.name, cursor.partition]

    # -- members and seeks -----------------------------------------------------------------------

    async def renew(self, worker: HistoryWorker) -> None:
        worker.member = await worker.journal.renew(worker.member)

    def _other(self, worker: HistoryWorker) -> HistoryWorker:
        return self._workers[worker is self._workers[0]]

    async def intrude(self, worker: HistoryWorker) -> None:
        """Try to write what belongs to the other process."""
        owner = self._other(worker)
        foreign: list[Operation] = []
        for row in [claim.row for claim in owner.claims]:
            foreign += [Drop(row), Put(row.moved(State.WAITING, time=self._now, due=0.0))]
            foreign.append(Fence(row.subscription, row.offset, version=row.version))
        for (name, partition), window in owner.windows.items():
            for offset in window.open_offsets():
                foreign.append(Fence(name, offset, partition, window.cursor.epoch))
        for operation in foreign:
            with expected(StaleError):
                await worker.commit(operation)
            with expected(StaleError):
                await owner.journal.commit([operation])

    async def end(self, worker: HistoryWorker) -> None:
        """Let the other process end this one, which does not know it."""
        other = self._other(worker)
        assert await other.journal.end(worker.member)
        for window in worker.windows.values():
            with expected(StaleError):
                await worker.journal.commit([window.pass_without(set())])
        for claim in worker.claims:
            with expected(StaleError):
                await worker.journal.commit([Drop(claim.row)])
        with expected(StaleError):
            await worker.commit(Append(make_record()))
        await worker.join()

    async def seek(self, worker: HistoryWorker) -> None:
        name = self._random.choice(list(SELECTIONS))
        target = self._random.randint(0, await worker.journal.head() + 2)
        await worker.commit(Seek(name, target))
        for one in self._workers:
            for key in [key for key in one.windows if key[0] == name]:
                with expected(StaleError):
                    await one.commit(one.windows.pop(key).pass_without(set()))
            lost = [
                claim
                for claim in one.claims
                if claim.row.subscription == name and claim.row.offset > target
            ]
            for claim in lost:
                one.claims.remove(claim)
                with expected(StaleError):
                    await one.commit(Drop(claim.row))
        rows = await worker.journal.find(name, STATES, limit=ALL)
        done = {row.offset for row in rows if row.state in SETTLED}
        skipped = {offset for offset in self.taken[name] if offset <= target}
        self.acked[name] = skipped.difference(row.offset for row in rows) | done
        await self.check()

    # -- checks ----------------------------------------------------------------------------------

    async def finish(self) -> None:
        """Handle all that is left, in a single process; nothing must stay behind."""
        first, second = self._workers
        await self.end(second)
        self._now += 1_000
        for name, selection in SELECTIONS.items():
            for partition in range(selection.partitions):
                if name != "shared" and (name, partition) not in first.windows:
                    await self._acquire(first, name, partition)
        await self.check()
        is_busy = True
        while is_busy:
            await self.publish_delayed(first)
            is_busy = await self._work(first)
        await self.check()
        for name, taken in self.taken.items():
            left = sorted(set(taken) - self.acked[name])
            assert left == [], f"{name} never got {left}"

    async def _work(self, worker: HistoryWorker) -> bool:
        for row in await worker.journal.find(None, [State.DEAD], limit=ALL):
            await self._replay(worker, row)
        count = len(worker.claims)
        for name in (*SELECTIONS, QUEUE):
            for alone in (False, True):
                count += await self._claim(worker, name, 100, alone)
        for claim in worker.claims:
            await self._acknowledge(worker, claim.row)
        worker.claims = []
        for window in worker.windows.values():
            before = window.cursor.acked
            await self._fetch(worker, window, 100)
            while (record := self._next(worker, window)) is not None:
                await self._handled(worker, window, record)
            await self._pass(worker, window, [])
            count += window.cursor.acked - before
        return count > 0


class HistoryTests(JournalSuite):
    """Whatever happens, each message is acknowledged, ahead of the cursor, or in one row."""

    seeds = range(20)
    """One history for each; fewer if the engine writes to a disk."""
    steps = 300

    async def test_random_histories_keep_the_invariants(self) -> None:
        for seed in self.seeds:
            async with self.both() as (journal, other):
                try:
                    await RandomHistory(seed, journal, other).run(self.steps)
                except Exception as error:
                    error.add_note(f"seed {seed}")
                    raise
