"""A bus closes the journal that it has opened, however it ends, and none that it was given."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from msgbus import BusConfig, ConfigurationError, MessageBus
from msgbus.errors import DeadLetterStoreError, JournalClosedError
from msgbus.journal.memory import MemoryJournal
from msgbus.journal.ports import Journal
from msgbus.journal.records import State
from msgbus.resilience import MemoryDeadLetterStore, ResilientMessageBus, SqliteDeadLetterStore
from tests.durable_shop import Placed, Seen, journal_of, url_of
from tests.fakes import Connections


@pytest.mark.parametrize("url", ["memory:", "sqlite:///:memory:", "file"])
async def test_a_bus_closes_the_journal_that_it_has_opened(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connections = Connections(monkeypatch)
    bus = MessageBus(journal=url_of(tmp_path) if url == "file" else url)
    bus.subscribe(Placed, Seen())
    async with bus:
        await bus.publish(Placed())
        await bus.settled()
        journal = journal_of(bus)

        assert (connections.open != []) is (url != "memory:")

    assert connections.open == []
    with pytest.raises(JournalClosedError):
        await journal.head()


async def test_a_bus_that_was_never_started_closes_the_journal_when_it_is_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connections = Connections(monkeypatch)
    bus = MessageBus(journal="sqlite:///:memory:")
    await bus.publish(Placed())
    assert connections.open != []
    await bus.stop()

    assert connections.open == []


async def test_a_bus_leaves_the_journal_that_it_was_given_open() -> None:
    async with MemoryJournal() as journal:
        async with MessageBus(journal=journal) as bus:
            await bus.publish(Placed())

        assert await journal.head() == 1


async def test_a_bus_that_cannot_start_closes_its_journal(monkeypatch: pytest.MonkeyPatch) -> None:
    connections = Connections(monkeypatch)
    bus = MessageBus(BusConfig(require_ack="fsync"), journal="sqlite:///:memory:")
    with pytest.raises(ConfigurationError, match="require_ack='fsync'"):
        await bus.start()

    assert connections.made != []
    assert connections.open == []


async def test_a_bus_whose_dead_letters_fail_at_the_end_closes_its_journal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Broken:
        """A store that cannot flush, as a disk that is gone."""

        def __init__(self) -> None:
            self._inner = MemoryDeadLetterStore()

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

        async def flush(self) -> None:
            raise DeadLetterStoreError("The disk is gone.")

    connections = Connections(monkeypatch)
    store: Any = Broken()
    bus = ResilientMessageBus(journal="sqlite:///:memory:", dead_letters=store)
    await bus.start()
    assert connections.open != []

    with pytest.raises(DeadLetterStoreError, match="The disk is gone"):
        await bus.stop()

    assert connections.open == []


async def test_a_bus_whose_journal_fails_at_the_end_closes_everything_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        """A journal that cannot count what waits in it."""

        def __init__(self, inner: Journal) -> None:
            self._inner = inner
            self.is_gone = False

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

        async def count(self, name: str | None = None) -> dict[State, int]:
            if self.is_gone:
                raise RuntimeError("The network is gone.")
            return await self._inner.count(name)

    async def pack(event: Placed, folder: Folder) -> None:
        assert folder.is_open

    connections = Connections(monkeypatch)
    folder = Folder()
    async with MemoryJournal() as journal:
        broken = Broken(journal)
        bus = ResilientMessageBus(
            journal=cast("Journal", broken),
            dead_letters=SqliteDeadLetterStore(tmp_path / "letters.db"),
            provide={Folder: folder.opened},
        )
        bus.subscribe(Placed, pack)
        await bus.start()
        broken.is_gone = True

        with pytest.raises(RuntimeError, match="The network is gone"):
            await bus.stop()

        assert not folder.is_open
        assert connections.open == []
        assert await journal.head() == 0  # it is ours, and still open


class Folder:
    is_open = False

    @asynccontextmanager
    async def opened(self) -> AsyncGenerator[Folder]:
        self.is_open = True
        yield self
        self.is_open = False
