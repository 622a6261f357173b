"""Every test of the engine runs on both journals, and on asyncio and trio."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from msgbus.journal import Journal, MemoryJournal, SqliteJournal
from msgbus.runtime.clock import VirtualClock

MakeJournal = Callable[[VirtualClock], Journal]


@pytest.fixture(params=["memory", "sqlite"])
def make_journal(request: pytest.FixtureRequest, tmp_path: Path) -> MakeJournal:
    if request.param == "memory":
        return lambda clock: MemoryJournal(clock=clock)
    return lambda clock: SqliteJournal(tmp_path / "journal.db", clock=clock, reserve=0)
