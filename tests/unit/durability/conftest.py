"""A place for a journal that outlives its bus: in memory, and in a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from msgbus.journal import MemoryJournal
from tests.unit.durability.places import Place


@pytest.fixture(params=["memory", "sqlite"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "sqlite":
        return lambda: f"sqlite:///{tmp_path / 'journal.db'}"
    journal = MemoryJournal()
    return lambda: journal
