"""All stores keep the promises of every store of dead letters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from msgbus.journal import Journal, MemoryJournal, SqliteJournal
from msgbus.resilience import (
    DeadLetterStore,
    JournalDeadLetterStore,
    MemoryDeadLetterStore,
    SqliteDeadLetterStore,
)
from msgbus.runtime.clock import VirtualClock
from msgbus.testing.conformance.dead_letters import CHECKS, Check


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_the_memory_store(check: Check) -> None:
    def make(**options: Any) -> DeadLetterStore:
        return MemoryDeadLetterStore(**options)

    await check(make)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_the_sqlite_store(check: Check, tmp_path: Path) -> None:
    made = 0

    def make(**options: Any) -> DeadLetterStore:
        nonlocal made
        made += 1
        return SqliteDeadLetterStore(tmp_path / f"letters-{made}.db", **options)

    await check(make)


@pytest.mark.parametrize("kind", ["memory", "file", "file in memory"])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_the_store_in_a_journal(check: Check, kind: str, tmp_path: Path) -> None:
    journals: list[Journal] = []

    def make(**options: Any) -> DeadLetterStore:
        if kind == "memory":
            journal: Journal = MemoryJournal(clock=VirtualClock())
        elif kind == "file":
            journal = SqliteJournal(tmp_path / f"{len(journals)}.db", reserve=0)
        else:
            journal = SqliteJournal("sqlite:///:memory:")
        journals.append(journal)
        return JournalDeadLetterStore(journal, **options)

    try:
        await check(make)
    finally:
        for journal in journals:
            await journal.close()
