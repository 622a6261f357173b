"""Both stores keep the promises of every store of dead letters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from msgbus.resilience import DeadLetterStore, MemoryDeadLetterStore, SqliteDeadLetterStore
from msgbus.testing.dead_letters import CHECKS, Check


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
