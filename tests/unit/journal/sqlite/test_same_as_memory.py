"""Random operations give the same on SQLite as on the journal in memory, errors included."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import pytest

from msgbus.errors import MsgBusError
from msgbus.journal.memory import MemoryJournal
from msgbus.journal.operations import (
    Append,
    Drop,
    Fence,
    Operation,
    Pass,
    Put,
    Remove,
    Reply,
    Save,
    Seek,
)
from msgbus.journal.ports import Journal
from msgbus.journal.records import (
    DELAYED,
    Cursor,
    Instance,
    Member,
    Order,
    Pending,
    Record,
    Selection,
    State,
)
from msgbus.journal.sqlite.journal import SqliteJournal
from msgbus.testing.conformance.journal.kit import (
    LETTER,
    TIME,
    make_command,
    make_record,
    make_row,
    snapshot,
)

T = TypeVar("T")

SELECTIONS: Final = {
    "log": Selection(),
    "keyed": Selection(order=Order.KEY, partitions=2, parks=True),
    "shared": Selection(order=Order.NONE),
}
QUEUE: Final = "commands:shop.Pack"
NAMES: Final = [*SELECTIONS, QUEUE, DELAYED]
STEPS: Final = 120


class Twins:
    """Two journals that get the same calls and must give the same answers."""

    def __init__(self, seed: int, journals: Sequence[Journal]) -> None:
        self._random = random.Random(seed)
        self._journals = journals
        self._members: list[Member] = []
        self._records: list[Record] = []
        self._rows: list[Pending] = []
        self._cursors: list[Cursor] = []
        self.refused = 0

    async def same(self, call: Callable[[Journal], Awaitable[Any]], what: object) -> Any:
        """Call both; an error counts as an answer, by its class."""
        answers: list[Any] = []
        for journal in self._journals:
            try:
                answers.append(await call(journal))
            except MsgBusError as error:
                answers.append(type(error))
        assert answers[0] == answers[1], what
        self.refused += isinstance(answers[0], type)
        return None if isinstance(answers[0], type) else answers[0]

    # -- choices ---------------------------------------------------------------------------------

    def chance(self, share: float) -> bool:
        return self._random.random() < share

    def one(self, values: Sequence[T]) -> T:
        return self._random.choice(values)

    def member(self) -> Member:
        return self.one(self._members[-3:])

    def record(self) -> Record:
        if self._records and self.chance(0.15):
            return self.one(self._records)
        number = len(self._records)
        make = make_command if self.chance(0.2) else make_record
        record = make(number, message_id=f"id{number}", key=self.one([None, "a", "b", "c"]))
        self._records.append(record)
        return record

    def row(self) -> Pending:
        """Choose a known row, now and then an old version of it, or make a new one."""
        if self._rows and self.chance(0.75):
            return self.one(self._rows)
        state = self.one([State.WAITING, State.PARKED, State.DEAD, State.DONE])
        return make_row(
            self.one(list(SELECTIONS)),
            self._random.randint(1, 12),
            state,
            partition=self._random.randint(0, 1),
            key=self.one([None, "a", "b", ""]),
            version=0,
            unique=self.one([None, None, "u"]),
            alone=self.chance(0.2),
        )

    def operation(self) -> Operation:
        common: list[Callable[[], Operation]] = [self.append, self.drop, self.move] * 2
        return self.one([*common, self.put, self.put, self.put, self.fence, self.rare])()

    def rare(self) -> Operation:
        version, wake = self.one([1, 2, 3]), self.one([None, TIME])
        choices: list[Operation] = [
            Seek(self.one(NAMES), self._random.randint(0, 20)),
            Remove(self.one(NAMES)),
            Reply(self.one(["x", "y"]), TIME, self.one([b"1", None]), "no"),
            Save(Instance("timer", self.one("ab"), b"s", wake, version)),
        ]
        return self.one(choices)

    def drop(self) -> Drop:
        return Drop(self.row())

    def append(self) -> Append:
        queue = self.one([None, None, QUEUE, DELAYED])
        unique = None if queue is None else self.one([None, "u"])
        return Append(self.record(), queue, self.one([None, TIME]), unique)

    def put(self) -> Put:
        row = self.row()
        state = self.one([one for one in State if one is not State.DAMAGED])
        owner = self.member().id if state is State.CLAIMED else None
        due = TIME if state is State.WAITING else None
        key = row.key or "a" if state is State.PARKED else row.key
        moved = row.moved(state, time=TIME, owner=owner, due=due, key=key)
        if state in (State.DONE, State.KEPT):
            return Put(moved._replace(key=None), promote=self.chance(0.4))
        return Put(moved, LETTER if self.chance(0.3) else None, promote=self.chance(0.4))

    def move(self) -> Operation:
        if not self._cursors:
            return self.append()
        cursor = self.one(self._cursors)
        acked = self._random.randint(0, 12)
        return Pass(cursor, acked, acked + self.one([0, 0, 3]), release=self.chance(0.1))

    def fence(self) -> Fence:
        row = self.row()
        version = self.one([None, row.version])
        epoch = self._random.randint(0, 2)
        return Fence(row.subscription, row.offset, row.partition, epoch, version)

    # -- steps -----------------------------------------------------------------------------------

    async def commit(self) -> None:
        operations = [self.operation() for _ in range(self.one([1, 1, 2, 3, 6]))]
        member = self.one([None, self.member(), self.member()])
        await self.same(lambda journal: journal.commit(operations, member), operations)

    async def claim(self) -> None:
        member, name = self.member(), self.one(NAMES)
        alone = self.chance(0.3)
        partitions: list[int] | None = self.one([None, None, [0], [1], []])
        selection = SELECTIONS["shared"] if name == "shared" and self.chance(0.8) else None
        limit = self._random.randint(1, 5)
        if await self.lacks_message(name):
            return
        await self.same(
            lambda journal: journal.claim(
                member,
                name,
                limit,
                TIME,
                selection=selection,
                partitions=partitions,
                alone=alone,
            ),
            ("claim", name, limit, partitions, alone),
        )

    async def lacks_message(self, name: str) -> bool:
        """Tell whether a row has no message: what is made of it is the engine's own affair."""
        (memory, _) = self._journals
        rows = await memory.find(name, [State.WAITING], limit=1000)
        return None in [await memory.record(row) for row in rows]

    async def join(self) -> None:
        serves = {name: "" for name in SELECTIONS if self.chance(0.5)}
        self._members.append(await self.same(lambda journal: journal.join("p", serves), "join"))

    async def renew(self) -> None:
        member = self.member()
        await self.same(lambda journal: journal.renew(member), "renew")

    async def end(self) -> None:
        member = self.member()
        await self.same(lambda journal: journal.end(member), "end")

    async def open(self) -> None:
        name, start = self.one(list(SELECTIONS)), self._random.randint(0, 9)
        await self.same(lambda journal: journal.open(name, SELECTIONS[name], start), "open")

    async def acquire(self) -> None:
        member, name = self.member(), self.one(["log", "keyed"])
        partition = self._random.randint(0, SELECTIONS[name].partitions - 1)
        await self.same(
            lambda journal: journal.acquire(member, name, partition, SELECTIONS[name]),
            ("acquire", name, partition),
        )

    async def look(self) -> None:
        name, partition = self.one(NAMES), self._random.randint(0, 1)
        row, limit = self.row(), self._random.randint(1, 4)
        states = self._random.sample(list(State), self._random.randint(1, 4))
        after, key = self.one([None, row]), self.one([None, "a"])
        partitions = self.one([None, [partition], []])
        selection = self.one(list(SELECTIONS.values()))
        calls: list[Callable[[Journal], Awaitable[Any]]] = [
            lambda journal: journal.blocked_keys(name, partition),
            lambda journal: journal.next_due(name, partitions),
            lambda journal: journal.due(name, TIME, limit),
            lambda journal: journal.find(name, states, key=key, after=after, limit=limit),
            lambda journal: journal.find(None, states, after=after, limit=limit),
            lambda journal: journal.count(name),
            lambda journal: journal.read(limit, limit, selection, [partition]),
            lambda journal: journal.instance("timer", "a"),
            lambda journal: journal.result("x"),
        ]
        for number, call in enumerate(calls):
            await self.same(call, ("look", number))

    async def run(self, steps: int) -> None:
        choices: list[Callable[[], Awaitable[None]]] = [self.commit] * 8
        choices += [self.claim] * 3 + [self.acquire] * 2
        choices += [self.join, self.renew, self.end, self.open, self.look]
        for step in (self.join, self.open, self.open, self.open):
            await step()
        for _ in range(steps):
            await self.one(choices)()
            await self.same(snapshot, "snapshot")
            memory = self._journals[0]
            found = await memory.find(None, list(State), limit=1000)
            self._rows = found + self._random.sample(self._rows, min(3, len(self._rows)))
            self._cursors = await memory.cursors()


@pytest.mark.parametrize("seed", range(12))
async def test_the_same_calls_give_the_same_answers(tmp_path: Path, seed: int) -> None:
    async with MemoryJournal() as memory, SqliteJournal(tmp_path / "journal.db") as journal:
        twins = Twins(seed, (memory, journal))
        await twins.run(STEPS)

        assert twins.refused > 10
