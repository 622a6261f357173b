"""The shipped conformance suite on the journals that msgbus has."""

from __future__ import annotations

from pathlib import Path

import pytest

from msgbus.journal import Journal, MemoryJournal, SqliteJournal
from msgbus.runtime.clock import VirtualClock
from msgbus.testing.conformance.journal import DurableConformance, SqlConformance
from msgbus.testing.simulation.processes import Process


class TestMemoryJournal(SqlConformance):
    def make(self, clock: VirtualClock) -> Journal:
        return MemoryJournal(clock=clock)


class TestSqliteJournalInMemory(SqlConformance):
    def make(self, clock: VirtualClock) -> Journal:
        return SqliteJournal("sqlite:///:memory:", clock=clock)


class TestProcess(SqlConformance):
    def make(self, clock: VirtualClock) -> Journal:
        return Process(MemoryJournal(clock=clock), clock).journal


class TestSqliteJournal(SqlConformance, DurableConformance):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.file = tmp_path / "journal.db"

    def make(self, clock: VirtualClock) -> Journal:
        return SqliteJournal(self.file, clock=clock, reserve=0)
