"""What the journal in memory does for one call does not grow with what it holds.

Steps of the interpreter are counted, not time.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from types import FrameType
from typing import Any

import pytest

from msgbus.journal import memory
from msgbus.journal.memory import MemoryJournal
from msgbus.journal.operations import Append, Drop, Pass, Put, Seek
from msgbus.journal.records import Cursor, Member, Pending, State
from msgbus.testing.conformance.journal.kit import (
    EVENTS,
    KEYED,
    LETTER,
    SHARED,
    TIME,
    fill,
    make_command,
    make_record,
    make_row,
)

MODULES = memory.__file__.removesuffix(".py")
"""Path at which the modules of the journal in memory begin."""


class Filled:
    """A journal whose subscriptions have many rows, in every state."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.journal = MemoryJournal()

    async def fill(self) -> Filled:
        await fill(self.journal, 2 * self.size)
        self.member: Member = await self.journal.join("process", {})
        self.other: Member = await self.journal.join("process", {})
        for name, selection in (("log", EVENTS), ("shared", SHARED), ("keyed", KEYED)):
            await self.journal.open(name, selection, self.size)
        cursor = await self.journal.acquire(self.member, "log", 0, EVENTS)
        assert cursor is not None
        self.cursor: Cursor = cursor
        await self.journal.commit(
            [one for offset in range(10, self.size) for one in self.rows(offset)], self.member
        )
        return self

    def rows(self, offset: int) -> list[Put]:
        later = TIME + offset
        return [
            Put(make_row("log", offset, State.PARKED if offset > 10 else State.DEAD, key="a")),
            Put(make_row("log", offset + self.size, State.DONE)),
            Put(make_row("keyed", offset, State.DEAD, key=f"key {offset}"), LETTER),
            Put(make_row("shared", offset, due=later, unique=f"unique {offset}")),
            Put(make_row("shared", offset + self.size, due=later, alone=True)),
            Put(make_row("queue", offset, State.CLAIMED, owner=self.member.id)),
        ]

    async def row(self, name: str, offset: int) -> Pending:
        row = await self.journal.row(name, offset)
        assert row is not None
        return row

    async def replace(self, name: str, offset: int) -> None:
        row = await self.row(name, offset)
        await self.journal.commit([Put(row.moved(State.DEAD, time=TIME), promote=True)])

    async def drop(self, name: str, offset: int) -> None:
        await self.journal.commit([Drop(await self.row(name, offset))], self.member)

    async def insert(self, *states: State, **changes: Any) -> None:
        rows = [make_row("log", 3, state, **changes) for state in states]
        await self.journal.commit([Put(row) for row in rows])

    async def enqueue(self) -> None:
        record = make_command(message_id="new")
        await self.journal.commit([Append(record, "shared", unique="unique 20")])

    async def find_next(self) -> None:
        after = await self.row("keyed", 40)
        await self.journal.find("keyed", [State.DEAD, State.PARKED], after=after, limit=3)


CALLS: dict[str, Callable[[Filled], Awaitable[object]]] = {
    "append": lambda one: one.journal.commit([Append(make_record(message_id="new"))]),
    "enqueue": Filled.enqueue,
    "insert": lambda one: one.insert(State.WAITING),
    "park": lambda one: one.insert(State.PARKED, key="a"),
    "insert unique": lambda one: one.insert(State.WAITING, unique="new"),
    "replace": lambda one: one.replace("shared", 20),
    "promote": lambda one: one.drop("log", 10),
    "drop claimed": lambda one: one.drop("queue", 20),
    "pass": lambda one: one.journal.commit([Pass(one.cursor, 9, 9)], one.member),
    "seek": lambda one: one.journal.commit([Seek("shared", 10**9)]),
    "claim": lambda one: one.journal.claim(one.member, "shared", 3, TIME + 10**6),
    "claim alone": lambda one: one.journal.claim(one.member, "shared", 1, TIME + 10**6, alone=True),
    "claim new": lambda one: one.journal.claim(one.member, "shared", 3, 0.0, selection=SHARED),
    "acquire": lambda one: one.journal.acquire(one.member, "shared", 0, SHARED),
    "renew": lambda one: one.journal.renew(one.member),
    "end": lambda one: one.journal.end(one.other),
    "find": lambda one: one.journal.find(None, [State.DEAD, State.WAITING], limit=3),
    "find next": Filled.find_next,
    "count": lambda one: one.journal.count("log"),
    "count all": lambda one: one.journal.count(),
    "key rows": lambda one: one.journal.key_rows("log", 0, "a"),
    "next due": lambda one: one.journal.next_due("shared"),
    "due": lambda one: one.journal.due("shared", TIME + 10**6, 3),
    "message": lambda one: one.journal.message("none"),
    "first": lambda one: one.journal.first(),
}


async def steps(call: Callable[[Filled], Awaitable[object]], size: int) -> int:
    """Count lines, calls and returns in the journal's own modules."""
    filled = await Filled(size).fill()
    count, before = 0, sys.gettrace()

    def trace(frame: FrameType, _event: str, _: object) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.startswith(MODULES):
            return None
        count += 1  # not by opcode: Python 3.12 tells of those now and then only
        return trace

    sys.settrace(trace)
    try:
        await call(filled)
    finally:
        sys.settrace(before)
    assert count > 0
    return count


@pytest.mark.parametrize("name", CALLS)
async def test_a_call_takes_as_many_steps_whatever_the_journal_holds(name: str) -> None:
    assert await steps(CALLS[name], 500) <= await steps(CALLS[name], 60) + 20


async def test_a_call_that_looks_at_all_rows_is_noticed() -> None:
    def look(one: Filled) -> Awaitable[object]:
        return one.journal.blocked_keys("keyed", 0)

    assert await steps(look, 500) > await steps(look, 60) + 400
