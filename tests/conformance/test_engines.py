"""The shipped conformance suite on the engines that msgbus has."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from itertools import count
from pathlib import Path

import pytest

from msgbus._next.conformance.damage import DamagedTests, ErasedTests
from msgbus._next.conformance.engine import EngineConformance
from msgbus._next.conformance.invariants import broken_invariants
from msgbus._next.conformance.kit import EVENTS, LETTER, fill, join, make_row, take
from msgbus._next.journal.memory import MemoryJournal
from msgbus._next.journal.operations import Pass, Put
from msgbus._next.journal.ports import Journal
from msgbus._next.journal.records import State
from msgbus._next.journal.sqlite.journal import SqliteJournal
from tests.counts import ENGINE_SEEDS


class TestMemoryEngine(EngineConformance, ErasedTests):
    def make(self) -> Journal:
        return MemoryJournal()

    def beside(self, journal: Journal) -> Journal:
        assert isinstance(journal, MemoryJournal)
        return journal.beside()

    async def erase(self, journal: Journal, offset: int) -> None:
        assert isinstance(journal, MemoryJournal)
        del journal._tables.messages[offset]  # pyright: ignore[reportPrivateUsage]


class TestSqliteEngine(EngineConformance, ErasedTests, DamagedTests):
    seeds = range(20, 20 + ENGINE_SEEDS)

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.files = (tmp_path / f"journal{number}.db" for number in count())

    def make(self) -> Journal:
        return SqliteJournal(next(self.files))

    def beside(self, journal: Journal) -> Journal:
        assert isinstance(journal, SqliteJournal)
        return SqliteJournal(journal.path)

    async def erase(self, journal: Journal, offset: int) -> None:
        execute(journal, f"DELETE FROM msgbus_messages WHERE offset = {offset}")

    async def damage(self, journal: Journal, offset: int) -> None:
        execute(journal, f"UPDATE msgbus_messages SET payload = x'00' WHERE offset = {offset}")


def execute(journal: Journal, statement: str) -> None:
    assert isinstance(journal, SqliteJournal)
    with closing(sqlite3.connect(journal.path)) as connection, connection:
        assert connection.execute(statement).rowcount == 1


class TestBrokenInvariants:
    async def test_a_journal_at_work_breaks_none(self) -> None:
        async with MemoryJournal() as journal:
            assert await broken_invariants(journal, {"orders": EVENTS}) == []
            await fill(journal, 3)
            cursor = await take(journal, await join(journal), "orders", EVENTS)
            rows = [
                make_row("orders", 1, State.DEAD, key=""),
                make_row("orders", 2, State.PARKED, key=""),
            ]
            await journal.commit([*(Put(row, LETTER) for row in rows), Pass(cursor, 2, 3)])

            assert await broken_invariants(journal, {"orders": EVENTS}) == []

    async def test_each_is_found(self) -> None:
        async with MemoryJournal() as journal:
            await fill(journal, 4)
            cursor = await take(journal, await join(journal), "orders", EVENTS)
            dead = make_row("orders", 4, State.DEAD)
            await journal.commit([Put(dead, LETTER), Pass(cursor, 2, 1)])
            rows = [
                make_row("orders", 1, State.PARKED, key=""),
                make_row("orders", 2, State.CLAIMED, owner=99),
                make_row("orders", 3, State.PARKED),
                make_row("orders", 4, State.DONE, key=""),
                make_row("orders", 9, State.DEAD, partition=1),
                make_row("queue", 1, unique="a"),
                make_row("queue", 2, unique="a", due=None),
            ]
            tables = journal._tables  # pyright: ignore[reportPrivateUsage]
            tables.pending.update({(row.subscription, row.offset): row for row in rows})

            found = await broken_invariants(journal, {"orders": EVENTS})

            assert len(found) == 13, "\n".join(found)
