"""`bus.transaction()` and who else is there: nested blocks, other tasks, threads, other buses."""

from __future__ import annotations

import contextvars
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from msgbus import Command, MessageBus, PublishStatus
from msgbus.bus.durable.transactions import Transaction
from msgbus.errors import BusStateError
from msgbus.journal.sqlite.journal import SqliteJournal
from msgbus.testing.conformance.journal.tables import statement
from tests.durable_shop import Placed, Seen, records, url_of
from tests.unit.journal.sqlite.files import sql


class Restock(Command[int], name="durable.Restock"):
    pass


class Shop:
    """A bus on a file with a table of the user's, and the proof that it still works."""

    def __init__(self, bus: MessageBus, seen: Seen, path: Path) -> None:
        self.bus = bus
        self.seen = seen
        self._path = path

    @property
    def rows(self) -> list[int]:
        return [row[0] for row in sql(self._path, "SELECT x FROM mine ORDER BY rowid")]

    async def handled(self) -> list[int]:
        await self.bus.settled()
        return self.seen.numbers

    async def works(self) -> None:
        """The next publish is durable and handled, and the file is sound."""
        with anyio.fail_after(20):
            receipt = await self.bus.publish(Placed(number=1000))
            assert receipt.status is PublishStatus.DURABLE
            assert (await self.handled())[-1] == 1000
        assert isinstance(self.bus.journal, SqliteJournal)
        report = await self.bus.journal.verify()
        assert report.is_sound, report


@asynccontextmanager
async def opened(folder: Path) -> AsyncGenerator[Shop]:
    seen = Seen()
    bus = MessageBus(journal=url_of(folder))
    bus.subscribe(Placed, seen, name="seen")
    async with bus:
        await bus.transact(statement("CREATE TABLE mine (x)"))
        shop = Shop(bus, seen, folder / "shop.db")
        yield shop
        await shop.works()


async def write(bus: MessageBus, tx: Transaction, number: int) -> None:
    tx.execute("INSERT INTO mine VALUES (?)", [number])
    await bus.publish(Placed(number=number))


# -- blocks in blocks ------------------------------------------------------------------------------


async def test_a_block_in_a_block_is_refused(tmp_path: Path) -> None:
    async with opened(tmp_path) as shop:
        bus = shop.bus
        async with bus.transaction() as tx:
            await write(bus, tx, 1)
            with pytest.raises(BusStateError, match="inside another one"):
                async with bus.transaction():
                    pass
            await write(bus, tx, 2)

        assert (shop.rows, await shop.handled()) == ([1, 2], [1, 2])
        async with bus.transaction() as tx:
            await write(bus, tx, 3)
        assert (shop.rows, await shop.handled()) == ([1, 2, 3], [1, 2, 3])


async def test_a_handler_that_is_executed_in_a_block_joins_it_and_begins_none(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path) as shop:
        bus = shop.bus

        @bus.handles(Restock)
        async def restock(command: Restock) -> int:
            await bus.publish(Placed(number=1))
            async with bus.transaction():
                return 1

        async with rolled_back(bus):
            result = await bus.execute(Restock())
            assert "inside another one" in str(result.error)

        assert await shop.handled() == []


async def test_a_block_of_another_bus_inside_does_not_hide_the_outer_one(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    async with opened(tmp_path) as shop, opened(tmp_path / "other") as other:
        async with rolled_back(shop.bus) as tx, other.bus.transaction() as inner:
            await write(other.bus, inner, 1)
            await write(shop.bus, tx, 2)
            await shop.bus.publish(Placed(number=3), delay=5.0)
            await shop.bus.enqueue(Restock())
            await shop.bus.publish_many([Placed(number=4)])
            with pytest.raises(BusStateError, match="relay_once"):
                await shop.bus.relay_once(NoOutbox())
            with pytest.raises(BusStateError, match="inside another one"):
                async with shop.bus.transaction():
                    pass

        assert (other.rows, await other.handled()) == ([1], [1])
        assert (shop.rows, await records(shop.bus)) == ([], [])


@asynccontextmanager
async def rolled_back(
    bus: MessageBus, raised: type[BaseException] = KeyError
) -> AsyncGenerator[Transaction]:
    with pytest.raises(raised):  # noqa: PT012 (what the block raises)
        async with bus.transaction() as tx:
            yield tx
            raise raised


class NoOutbox:
    async def pending(self, limit: int) -> list[Any]:
        return []

    async def done(self, entries: object) -> None:
        pass


# -- other tasks -----------------------------------------------------------------------------------


async def test_tasks_of_a_block_write_together(tmp_path: Path) -> None:
    async with opened(tmp_path) as shop:
        async with shop.bus.transaction() as tx, anyio.create_task_group() as tasks:
            for number in range(5):
                tasks.start_soon(write, shop.bus, tx, number)

        assert sorted(shop.rows) == sorted(await shop.handled()) == list(range(5))
        assert len(tx.receipts) == 5


@pytest.mark.parametrize("fails", [False, True], ids=["committed", "rolled back"])
async def test_a_task_that_outlives_its_block_is_refused(fails: bool, tmp_path: Path) -> None:
    async with opened(tmp_path) as shop:
        bus, ended, refused = shop.bus, anyio.Event(), list[str]()

        async def outlive(tx: Transaction) -> None:
            await ended.wait()
            late: list[Callable[[], Awaitable[object]]] = [
                lambda: bus.publish(Placed(number=99)),
                lambda: bus.publish(Placed(number=99), delay=1.0),
                lambda: bus.publish_many([Placed(number=99)]),
                lambda: bus.enqueue(Restock()),
                lambda: bus.relay_once(NoOutbox()),
                lambda: tx.publish(Placed(number=99)),
                lambda: write(bus, tx, 99),
            ]
            for use in late:
                try:
                    await use()
                except BusStateError as error:
                    refused.append(str(error))
            async with bus.transaction() as own:  # one of its own is clear enough
                await write(bus, own, 2)

        async with anyio.create_task_group() as tasks:
            try:
                async with bus.transaction() as tx:
                    await write(bus, tx, 1)
                    tasks.start_soon(outlive, tx)
                    await anyio.wait_all_tasks_blocked()
                    if fails:
                        raise KeyError
            except KeyError:
                assert fails
            ended.set()

        assert len(refused) == 7
        assert all("has ended" in text for text in refused)
        expected = [2] if fails else [1, 2]
        assert (shop.rows, await shop.handled()) == (expected, expected)
        assert [one.name for one in await records(bus)] == ["durable.Placed"] * len(expected)


async def test_tasks_of_the_bus_that_begin_in_a_block_do_not_belong_to_it(tmp_path: Path) -> None:
    async with opened(tmp_path) as shop:
        bus, again = shop.bus, Seen()

        async def forward(event: Placed) -> None:
            if event.number < 100:
                await bus.publish(Placed(number=event.number + 100))

        async with bus.transaction() as tx:
            bus.subscribe(Placed, forward, name="forward")
            bus.subscribe(Placed, again, durable=False)
            async with bus.session() as session:
                session.subscribe(Placed, forward, durable=False)
                await write(bus, tx, 1)
        await bus.publish(Placed(number=2))

        assert sorted(await shop.handled()) == [1, 2, 101, 102]


# -- threads ---------------------------------------------------------------------------------------


async def test_a_sync_handler_in_a_block_joins_it_from_its_thread(tmp_path: Path) -> None:
    async with opened(tmp_path) as shop:
        bus, portal = shop.bus, shop.bus.portal()

        @bus.handles(Restock)
        def restock(command: Restock) -> int:
            portal.publish(Placed(number=1))
            return 1

        async with rolled_back(bus):
            assert (await bus.execute(Restock())).unwrap() == 1
        assert await shop.handled() == []

        async with bus.transaction():
            await bus.execute(Restock())
        assert await shop.handled() == [1]


async def test_a_thread_that_outlives_its_block_is_refused(tmp_path: Path) -> None:
    async with opened(tmp_path) as shop:
        bus, portal = shop.bus, shop.bus.portal()
        async with bus.transaction():
            context = contextvars.copy_context()

        def publish() -> None:
            context.run(portal.publish, Placed(number=1))

        with pytest.raises(BusStateError, match="has ended"):
            await anyio.to_thread.run_sync(publish)
        assert await shop.handled() == []


# -- how a block ends ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "raised", [KeyboardInterrupt, SystemExit, GeneratorExit, ZeroDivisionError]
)
async def test_a_block_left_by_any_exception_writes_nothing(
    raised: type[BaseException], tmp_path: Path
) -> None:
    async with opened(tmp_path) as shop:
        async with rolled_back(shop.bus, raised) as tx:
            await write(shop.bus, tx, 1)

        assert (shop.rows, await shop.handled()) == ([], [])


async def test_a_block_that_is_cancelled_writes_nothing(tmp_path: Path) -> None:
    async with opened(tmp_path) as shop:
        with anyio.CancelScope() as scope:
            async with shop.bus.transaction() as tx:
                await write(shop.bus, tx, 1)
                scope.cancel()
                await anyio.sleep_forever()

        assert (shop.rows, await shop.handled()) == ([], [])


async def test_a_block_that_is_cancelled_as_it_commits_writes_all_or_nothing(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path) as shop:
        with anyio.CancelScope() as scope:
            async with shop.bus.transaction() as tx:
                await write(shop.bus, tx, 1)
                scope.cancel()  # noticed at the next await, which is the commit

        assert shop.rows == await shop.handled()


async def test_a_block_that_another_task_leaves_writes_nothing(tmp_path: Path) -> None:
    async with opened(tmp_path) as shop:
        tx = shop.bus.transaction()

        async def enter() -> None:
            await tx.__aenter__()
            await write(shop.bus, tx, 1)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(enter)
        with pytest.raises(BusStateError, match="another task"):
            await tx.__aexit__(None, None, None)

        assert (shop.rows, await shop.handled()) == ([], [])


async def test_parameters_are_those_of_the_call(tmp_path: Path) -> None:
    async with opened(tmp_path) as shop:
        row, named = [0], {"x": 0}
        async with shop.bus.transaction() as tx:
            for number in range(3):
                row[0] = named["x"] = number
                tx.execute("INSERT INTO mine VALUES (?)", row)
                tx.execute("INSERT INTO mine VALUES (:x)", named)

        assert shop.rows == [0, 0, 1, 1, 2, 2]
