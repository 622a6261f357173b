"""Where the buses of one test keep their journal: in memory, or in a file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import anyio
import pytest

from msgbus import MessageBus
from msgbus.journal.memory import MemoryJournal, Turn
from msgbus.journal.ports import Journal
from msgbus.runtime.clock import VirtualClock
from tests.durable_shop import url_of
from tests.unit.durable.places import Place


class Site:
    """One journal on virtual time, and as many buses on it as a test wants."""

    def __init__(self, path: Path | None) -> None:
        self.clock = VirtualClock()
        self._path = path
        self._memory = None if path is not None else MemoryJournal(clock=self.clock)

    @property
    def has_tables(self) -> bool:
        """Whether the journal runs SQL."""
        return self._path is not None

    @property
    def journal(self) -> str | Journal:
        """One for each bus: in memory, another journal object on the same tables."""
        return url_of(self._path) if self._path is not None else self.beside()

    def beside(self, turn: Turn = nullcontext) -> MemoryJournal:
        """A journal object of another process."""
        assert self._memory is not None
        return self._memory.beside(turn)

    def close(self) -> None:
        if self._memory is not None:
            anyio.run(self._memory.close)

    def bus(self, *arguments: Any, **options: Any) -> MessageBus:
        options.setdefault("journal", self.journal)
        return MessageBus(*arguments, clock=self.clock, **options)


@pytest.fixture(params=["memory", "file"])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path if request.param == "file" else None)
    yield made
    made.close()


@pytest.fixture
def memory() -> Iterator[Site]:
    made = Site(None)
    yield made
    made.close()


@pytest.fixture(params=["memory", "sqlite"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """A journal that outlives its bus, in real time."""
    if request.param == "sqlite":
        yield lambda: f"sqlite:///{tmp_path / 'journal.db'}"
        return
    journal = MemoryJournal()
    yield journal.beside
    anyio.run(journal.close)
