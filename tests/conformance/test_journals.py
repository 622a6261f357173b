"""The shipped conformance suite on the journals that msgbus has."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from itertools import count
from pathlib import Path

import pytest

from msgbus.journal.memory import MemoryJournal
from msgbus.journal.operations import Pass, Put
from msgbus.journal.ports import Journal
from msgbus.journal.records import State
from msgbus.journal.sqlite.journal import SqliteJournal
from msgbus.journal.sqlite.schema import write_meta
from msgbus.runtime.clock import SystemClock
from msgbus.testing.conformance.journal import (
    DamageConformance,
    DurableConformance,
    ErasedConformance,
    JournalConformance,
    LetterConformance,
    QuestionConformance,
    SqlConformance,
    broken_invariants,
)
from msgbus.testing.conformance.journal.kit import EVENTS, LETTER, fill, join, make_row, take
from msgbus.testing.conformance.journal.letters import LetterTests
from msgbus.testing.conformance.journal.queues import QueueTests
from msgbus.testing.conformance.journal.rows import RowTests
from msgbus.testing.simulation.processes import Process
from tests.counts import ENGINE_SEEDS
from tests.unit.journal.sqlite.sealing import Sealing


class TestMemoryJournal(
    JournalConformance, QuestionConformance, LetterConformance, ErasedConformance
):
    def make(self) -> Journal:
        return MemoryJournal()

    def beside(self, journal: Journal) -> Journal:
        assert isinstance(journal, MemoryJournal)
        return journal.beside()

    async def erase(self, journal: Journal, offset: int) -> None:
        assert isinstance(journal, MemoryJournal)
        del journal._log[offset]  # pyright: ignore[reportPrivateUsage]


class TestProcess(JournalConformance, QuestionConformance):
    """A process of the simulation has a journal as good as any."""

    def make(self) -> Journal:
        self.inner = MemoryJournal()
        return Process(self.inner, SystemClock()).journal

    def beside(self, journal: Journal) -> Journal:
        return Process(self.inner.beside(), SystemClock()).journal


class TestSqliteJournalInMemory(QuestionConformance, LetterConformance, SqlConformance):
    """It has one connection only; there is nothing beside it."""

    def make(self) -> Journal:
        return SqliteJournal("sqlite:///:memory:")

    def beside(self, journal: Journal) -> Journal:
        raise NotImplementedError


class TestSqliteJournal(
    JournalConformance,
    QuestionConformance,
    LetterConformance,
    SqlConformance,
    DurableConformance,
    ErasedConformance,
    DamageConformance,
):
    seeds = range(20, 20 + ENGINE_SEEDS)

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.files = (tmp_path / f"journal{number}.db" for number in count())

    def make(self) -> Journal:
        return SqliteJournal(next(self.files), reserve=0)

    def beside(self, journal: Journal) -> Journal:
        assert isinstance(journal, SqliteJournal)
        return SqliteJournal(journal.path, reserve=0)

    async def erase(self, journal: Journal, offset: int) -> None:
        execute(journal, f"DELETE FROM msgbus_messages WHERE offset = {offset}")
        assert isinstance(journal, SqliteJournal)
        with closing(sqlite3.connect(journal.path)) as connection, connection:
            write_meta(connection, "trimmed", str(offset))

    async def damage(self, journal: Journal, offset: int) -> None:
        execute(journal, f"UPDATE msgbus_messages SET payload = x'00' WHERE offset = {offset}")


class TestSqliteJournalWithCodec(
    RowTests, LetterTests, QueueTests, QuestionConformance, LetterConformance, DurableConformance
):
    """What is stored through a codec is read as it was written."""

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.files = (tmp_path / f"journal{number}.db" for number in count())

    def make(self) -> Journal:
        return SqliteJournal(next(self.files), reserve=0, codec=Sealing())

    def beside(self, journal: Journal) -> Journal:
        assert isinstance(journal, SqliteJournal)
        return SqliteJournal(journal.path, reserve=0, codec=Sealing())


def execute(journal: Journal, statement: str) -> None:
    assert isinstance(journal, SqliteJournal)
    with closing(sqlite3.connect(journal.path)) as connection, connection:
        assert connection.execute(statement).rowcount == 1


class TestBrokenInvariants:
    async def test_a_journal_at_work_breaks_none(self) -> None:
        async with MemoryJournal() as journal:
            assert await broken_invariants(journal, {"orders": EVENTS}) == []
            await fill(journal, 3)
            member = await join(journal)
            cursor = await take(journal, member, "orders", EVENTS)
            rows = [
                make_row("orders", 1, State.DEAD, key=""),
                make_row("orders", 2, State.PARKED, key=""),
            ]
            await journal.commit([*(Put(row, LETTER) for row in rows), Pass(cursor, 2, 3)], member)

            assert await broken_invariants(journal, {"orders": EVENTS}) == []

    async def test_each_is_found(self) -> None:
        async with MemoryJournal() as journal:
            await fill(journal, 4)
            member = await join(journal)
            cursor = await take(journal, member, "orders", EVENTS)
            dead = make_row("orders", 4, State.DEAD)
            await journal.commit([Put(dead, LETTER), Pass(cursor, 2, 1)], member)
            rows = [
                make_row("orders", 1, State.PARKED, key=""),
                make_row("orders", 2, State.CLAIMED, owner=99),
                make_row("orders", 3, State.PARKED),
                make_row("orders", 4, State.DONE, key=""),
                make_row("orders", 9, State.DEAD, partition=1),
                make_row("queue", 1, unique="a"),
                make_row("queue", 2, unique="a", due=None),
            ]
            for row in rows:
                journal._store(row)  # pyright: ignore[reportPrivateUsage]

            found = await broken_invariants(journal, {"orders": EVENTS})

            assert len(found) == 13, "\n".join(found)
