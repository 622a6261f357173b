"""Steps of a random history: messages are appended, and rows claimed, settled and replayed."""

from __future__ import annotations

from random import Random

from msgbus.errors import StaleError
from msgbus.journal.operations import Append, Drop, Operation, Put, Reply
from msgbus.journal.ports import Claim, Journal
from msgbus.journal.records import DELAYED, Pending, Record, State
from msgbus.testing.conformance.journal.kit import (
    LETTER,
    STATES,
    TIME,
    cursor_of,
    expected,
    make_command,
    make_record,
)
from msgbus.testing.conformance.journal.model import (
    ALL,
    QUEUE,
    SELECTIONS,
    HistoryModel,
    HistoryWorker,
)


class RowHistory(HistoryModel):
    """Two processes, and their steps that need no partition."""

    def __init__(self, seed: int, journal: Journal, other: Journal) -> None:
        super().__init__(journal)
        self._random = Random(seed)
        self._workers = [HistoryWorker(journal), HistoryWorker(other)]
        self._now: float = TIME

    # -- appending -------------------------------------------------------------------------------

    def _make(self) -> Record:
        choose = self._random.choice
        return make_record(
            message_id=f"{self._random.getrandbits(64):x}",  # it chooses the partition
            key=choose([None, "a", "b", "c"]),
            name=choose("ab"),
            topic=choose(["some", "some", "none"]),
        )

    async def publish(self, worker: HistoryWorker) -> None:
        records = [self._make() for _ in range(self._random.randint(1, 5))]
        results = await worker.journal.commit([Append(record) for record in records])
        for record, result in zip(records, results, strict=True):
            self.note(record, result.offset)

    async def enqueue(self, worker: HistoryWorker) -> None:
        command, due = make_command(), self._now + self._random.choice([-1, 5])
        unique = self._random.choice([None, "a", "b"])
        holder = await self._holder(worker, unique)
        (result,) = await worker.journal.commit([Append(command, QUEUE, due, unique)])
        assert result.is_duplicate is (holder is not None)
        if holder is None:
            self.taken[QUEUE][result.offset] = command._replace(offset=result.offset)
        else:
            assert result.offset == holder.offset

    async def _holder(self, worker: HistoryWorker, unique: str | None) -> Pending | None:
        """Return the command that has a unique key, if one has."""
        rows = await worker.journal.find(QUEUE, STATES, limit=ALL)
        return next((row for row in rows if unique is not None and row.holds(unique)), None)

    async def delay(self, worker: HistoryWorker) -> None:
        record = self._make()
        await worker.journal.commit([Append(record, queue=DELAYED, due=self._now + 5)])
        self.delayed.add(record.message_id)

    async def publish_delayed(self, worker: HistoryWorker) -> None:
        for row in await worker.journal.due(DELAYED, self._now, 2):
            assert row.body is not None
            (result,) = await worker.journal.commit([Append(row.body), Drop(row)])
            self.note(row.body, result.offset)

    # -- rows ------------------------------------------------------------------------------------

    async def claim(self, worker: HistoryWorker) -> None:
        due = [
            name for name in (*SELECTIONS, QUEUE) if await worker.journal.due(name, self._now, 1)
        ]
        name = self._random.choice(["shared", *due])
        has_suspects = (await worker.journal.next_due(name)).has_suspects
        alone = has_suspects and self._random.random() < 0.7
        await self._claim(worker, name, self._random.randint(1, 4), alone)

    async def _claim(self, worker: HistoryWorker, name: str, limit: int, alone: bool) -> int:
        has_owners = name not in ("shared", QUEUE)
        owned = [partition for one, partition in worker.windows if one == name]
        claims = await worker.journal.claim(
            worker.member,
            name,
            limit,
            self._now,
            selection=SELECTIONS[name] if name == "shared" else None,
            partitions=owned if has_owners else None,
            alone=alone,
        )
        assert len(claims) <= limit
        for claim in claims:
            assert claim.row.owner == worker.member.id
            self.deliver(worker, name, claim.record)
        worker.claims += claims
        return len(claims)

    async def resolve(self, worker: HistoryWorker) -> None:
        if worker.claims:
            await self._resolve(worker, self._random.choice(worker.claims))

    async def _resolve(self, worker: HistoryWorker, claim: Claim) -> None:
        worker.claims.remove(claim)
        row, now = claim.row, self._now
        choice = self._random.randrange(8)
        if choice < 4:
            await self._acknowledge(worker, row)
        elif choice < 6:
            due = now + self._random.randint(0, 20)
            retry = row.moved(State.WAITING, time=now, due=due, attempt=row.attempt + 1)
            await worker.commit(Put(retry))
        elif choice == 6:
            await worker.commit(Put(row.moved(State.WAITING, time=now, due=0.0)))
        else:
            passes = row.subscription == QUEUE or not SELECTIONS[row.subscription].parks
            key = None if passes else row.key
            dead = row.moved(State.DEAD, time=now, key=key)
            await worker.commit(Put(dead, LETTER, promote=passes))

    async def _acknowledge(self, worker: HistoryWorker, row: Pending) -> None:
        name = row.subscription
        operations: list[Operation] = [Drop(row)]
        is_done = False
        if name == QUEUE:
            operations.append(Reply(self.taken[name][row.offset].message_id, self._now))
        elif SELECTIONS[name].keeps_done:
            operations = [Put(row.moved(State.KEPT, time=self._now, key=None), promote=True)]
        else:
            cursor = await cursor_of(worker.journal, name, row.partition)
            is_done = row.offset > cursor.acked
        await worker.commit(*operations)
        with expected(StaleError):
            await worker.commit(*operations)
        self.acked[name].add(row.offset)
        left = await worker.journal.row(name, row.offset)
        is_kept = left is not None and left.state is State.KEPT
        assert is_kept or (left is not None) is is_done, left
        if is_kept:
            self.kept.add((name, row.offset))

    async def _dead(self, worker: HistoryWorker) -> Pending | None:
        rows = await worker.journal.find(None, [State.DEAD], limit=ALL)
        return self._random.choice(rows) if rows else None

    async def replay(self, worker: HistoryWorker) -> None:
        if (row := await self._dead(worker)) is not None:
            await self._replay(worker, row)

    async def _replay(self, worker: HistoryWorker, row: Pending) -> None:
        replay = Put(row.moved(State.WAITING, time=self._now, due=0.0, attempt=0))
        if row.subscription == QUEUE and await self._holder(worker, row.unique) is not None:
            with expected(StaleError):
                await worker.commit(replay)
        else:
            await worker.commit(replay)
        assert await worker.journal.letter(row) == LETTER

    async def discard(self, worker: HistoryWorker) -> None:
        if (row := await self._dead(worker)) is not None:
            await self._acknowledge(worker, row)
