"""A bus whose disk is full: every call ends in a value or an error, and nothing is lost."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from msgbus import BusConfig, Command, Event, MessageBus
from msgbus.errors import DeadLetterStoreError, JournalError, JournalFullError
from msgbus.journal import Retention, SqliteJournal
from msgbus.resilience import SqliteDeadLetterStore
from tests.integration.disk import Disk, small_disk
from tests.unit.resilience.test_letters import about

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

MEGABYTE = 1024 * 1024
BOUND = 10.0
"""Seconds in which every call has to end: twice what is promised."""


class Placed(Event, name="full.Placed"):
    number: int
    text: str = ""


class Pack(Command[int], name="full.Pack"):
    number: int


@pytest.fixture
def disk(tmp_path: Path) -> Generator[Disk]:
    with small_disk(tmp_path / "disk", 24 * MEGABYTE) as disk:
        yield disk


class Shop:
    """A bus with a durable handler and a command, and what they have done."""

    def __init__(self, disk: Disk, journal: SqliteJournal) -> None:
        self.disk = disk
        self.journal = journal
        config = BusConfig(record="all", record_buffer=20)
        self.bus = MessageBus(config=config, journal=journal)
        self.handled: list[int] = []
        self.packed: list[int] = []
        self.bus.on(Placed, durable="orders")(self._handle)
        self.bus.handles(Pack)(self._pack)
        self.acked: list[int] = []

    async def _handle(self, event: Placed) -> None:
        self.handled.append(event.number)

    async def _pack(self, command: Pack) -> int:
        self.packed.append(command.number)
        return command.number

    async def publish(self, number: int, text: str = "") -> None:
        await self.bus.publish(Placed(number=number, text=text))
        self.acked.append(number)

    async def fill(self) -> None:
        """Publish until the journal takes nothing more."""
        self.disk.fill()
        number = 1_000
        with suppress(JournalFullError):
            while number < 5_000:
                await self.publish(number, "x" * 20_000)
                number += 1
        assert number < 5_000


@asynccontextmanager
async def shop_on(disk: Disk, **options: Any) -> AsyncGenerator[Shop]:
    async with SqliteJournal(disk.folder / "shop.db", **options) as journal:
        shop = Shop(disk, disk.bound(journal))
        async with shop.bus:
            yield shop
            disk.free()


async def ended(call: Callable[[], Awaitable[Any]]) -> object:
    """Return the value or the error of a call, which must end in time."""
    began = time.monotonic()
    try:
        with anyio.fail_after(2 * BOUND):
            return await call()
    except JournalError as error:
        return error
    finally:
        assert time.monotonic() - began < BOUND


async def test_every_call_on_a_full_disk_ends_in_a_value_or_an_error(disk: Disk) -> None:
    async with shop_on(disk) as shop:
        bus = shop.bus
        await shop.publish(1)
        await bus.settled()
        await shop.fill()

        for call in (
            lambda: bus.publish(Placed(number=2, text="y" * 20_000)),
            lambda: bus.publish_many([Placed(number=n, text="y" * 20_000) for n in range(50)]),
            lambda: bus.publish(Placed(number=3, text="y" * 20_000), delay=60),
            lambda: bus.enqueue(Pack(number=4)),
            lambda: bus.transact(lambda db: db.execute("CREATE TABLE orders (id INTEGER)")),
        ):
            found = await ended(call)
            assert isinstance(found, JournalFullError), found
            assert "shop.db" in str(found)
            assert "Free space" in str(found)
        await shop.fill()
        assert isinstance(await ended(bus.settled), JournalFullError | None)
        for number in range(200):  # ten times what the buffer of records holds
            found = await ended(partial(bus.call, Pack(number=number)))
            assert found == number
        disk.free()
        await shop.publish(5)
        await bus.settled(timeout=BOUND)

        assert set(shop.acked) == set(shop.handled)
        assert (await shop.journal.verify()).is_sound


async def test_a_bus_whose_disk_is_full_stops_in_time(disk: Disk) -> None:
    async with shop_on(disk) as shop:
        await shop.fill()

        report = await ended(shop.bus.stop)

        assert not isinstance(report, Exception)
        disk.free()
    shop = Shop(disk, SqliteJournal(disk.folder / "shop.db"))
    async with shop.journal, shop.bus:
        await shop.bus.settled(timeout=BOUND)
        assert (await shop.journal.verify()).is_sound


async def test_retries_and_dead_letters_wait_for_room(disk: Disk) -> None:
    failing = [True]
    async with shop_on(disk) as shop:

        @shop.bus.on(Placed, durable="picky")
        async def fail(event: Placed) -> None:
            if failing[0]:
                raise ValueError(event.number)

        await shop.fill()
        failing[0] = False
        disk.free()
        await shop.bus.settled(timeout=BOUND)

        assert set(shop.acked) == set(shop.handled)
        assert (await shop.journal.verify()).is_sound


async def test_a_new_journal_on_a_full_disk_is_a_clear_error(disk: Disk) -> None:
    if not disk.is_real:
        return
    path = disk.folder / "new.db"
    disk.fill()

    with pytest.raises(JournalFullError, match=r"new\.db"):
        SqliteJournal(path)

    disk.free()
    async with SqliteJournal(path) as journal:
        assert (await journal.verify()).is_sound


async def test_a_journal_is_opened_on_a_full_disk_in_the_space_of_its_reserve(disk: Disk) -> None:
    if not disk.is_real:
        return
    path = disk.folder / "shop.db"
    async with SqliteJournal(path, retention=Retention(max_count=10)) as journal:
        await journal.commit([])
    disk.fill()

    async with SqliteJournal(path, retention=Retention(max_count=10)) as journal:
        assert (await journal.verify()).is_sound
        assert not path.with_name("shop.db-reserve").exists()


async def test_a_backup_onto_a_full_disk_names_the_backup_and_leaves_nothing(
    disk: Disk, tmp_path: Path
) -> None:
    if not disk.is_real:
        return
    async with SqliteJournal(tmp_path / "shop.db", reserve=0) as journal:
        disk.fill()

        with pytest.raises(JournalFullError, match=r"disk/copy\.db"):
            await journal.backup(disk.folder / "copy.db")

        assert [one.name for one in disk.folder.iterdir()] == ["other"]
        disk.free()
        await journal.backup(disk.folder / "copy.db")


async def test_letters_on_a_full_disk_are_told_as_refused(disk: Disk) -> None:
    if not disk.is_real:
        return
    store = SqliteDeadLetterStore(disk.folder / "letters.db")
    await store.open()
    disk.fill()

    letter = about(Placed(number=1, text="x" * 9_000_000))
    assert store.add(letter) is None
    with anyio.fail_after(BOUND):
        with suppress(DeadLetterStoreError):
            await store.flush()
    assert store.size() == 0
    disk.free()
    await store.close()
