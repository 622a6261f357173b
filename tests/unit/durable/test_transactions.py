"""Rows and events in one commit: both are there, or neither is."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from msgbus import (
    BackpressureStrategy,
    BusConfig,
    ConfigurationError,
    MessageBus,
    PublishStatus,
    QueueConfig,
)
from msgbus.errors import BusStateError, ForbiddenStatementError, TransactionRefusedError
from tests.durable_shop import Placed, Seen, recorded, url_of
from tests.fakes import SlowHandler, conserves

SQL = "sqlite:///:memory:"
STOCK = "CREATE TABLE stock (sku TEXT PRIMARY KEY, left INTEGER NOT NULL)"
TEA = "INSERT INTO stock VALUES ('tea', 1)"


async def stock(bus: MessageBus) -> dict[str, int]:
    def read(connection: sqlite3.Connection) -> dict[str, int]:
        return dict(connection.execute("SELECT sku, left FROM stock ORDER BY sku").fetchall())

    return await bus.transact(read)


async def write(
    bus: MessageBus, statement: str, *events: Placed, then: Exception | None = None
) -> None:
    async with bus.transaction() as tx:
        tx.execute(statement)
        for event in events:
            await bus.publish(event)
        if then is not None:
            raise then


async def test_rows_and_events_are_written_together(tmp_path: Path) -> None:
    bus = MessageBus(journal=url_of(tmp_path))
    seen = Seen()
    bus.subscribe(Placed, seen, durable=False)

    async with bus:
        async with bus.transaction() as tx:
            tx.execute(STOCK)
            await tx.execute("INSERT INTO stock VALUES (:sku, :left)", {"sku": "tea", "left": 3})
            receipt = await bus.publish(Placed(number=1))
            assert receipt.status is PublishStatus.ACCEPTED
            assert await recorded(bus) == []
        await bus.settled()

        assert await stock(bus) == {"tea": 3}
        assert seen.numbers == [1]
        (committed,) = tx.receipts
        assert (committed.status, committed.offset) == (PublishStatus.DURABLE, 1)


async def test_a_block_that_raises_writes_nothing() -> None:
    bus = MessageBus(journal=SQL)
    seen = Seen()
    bus.subscribe(Placed, seen, durable=False)

    async with bus:
        await bus.transact(lambda connection: connection.execute(STOCK))
        with pytest.raises(KeyError):
            await write(bus, TEA, Placed(), then=KeyError())
        await bus.settled()

        assert await stock(bus) == {}
        assert (await recorded(bus), seen.numbers) == ([], [])
        conserves(bus)


async def test_a_statement_that_fails_takes_the_events_with_it() -> None:
    bus = MessageBus(journal=SQL)
    seen = Seen()
    bus.subscribe(Placed, seen, durable=False)

    async with bus:
        with pytest.raises(sqlite3.OperationalError, match="no such table"):
            await write(bus, "INSERT INTO nowhere VALUES (1)", Placed())
        await bus.settled()

        assert (await recorded(bus), seen.numbers) == ([], [])
        conserves(bus)


async def test_an_event_that_is_refused_takes_the_rows_with_it() -> None:
    config = BusConfig(
        queue=QueueConfig(max_size=1, strategy=BackpressureStrategy.REJECT_NEW), drain_timeout=0
    )
    bus = MessageBus(config, journal=SQL)
    slow = SlowHandler()

    @bus.on(Placed, durable=False)
    async def handle(event: Placed) -> None:
        slow.started.set()
        await slow.release.wait()

    async with bus:
        await bus.transact(lambda connection: connection.execute(STOCK))
        await bus.publish(Placed())
        await slow.started.wait()
        with pytest.raises(TransactionRefusedError, match="Placed was refused"):
            await write(bus, TEA, Placed(), Placed())

        assert await stock(bus) == {}
        assert len(await recorded(bus)) == 1
        slow.release.set()
        await bus.settled()
        conserves(bus)


async def test_more_events_than_a_queue_holds_do_not_wait_for_themselves() -> None:
    bus = MessageBus(BusConfig(queue=QueueConfig(max_size=3)), journal=SQL)
    seen = Seen()
    bus.subscribe(Placed, seen, durable=False)

    async with bus:
        async with bus.transaction():
            for number in range(10):
                await bus.publish(Placed(number=number))
        await bus.settled()

    assert seen.numbers == list(range(10))


async def test_a_transaction_is_used_once_and_inside_its_block() -> None:
    async with MessageBus(journal=SQL) as bus:
        tx = bus.transaction()
        with pytest.raises(BusStateError, match="not open"):
            tx.execute("SELECT 1")
        async with tx:
            pass
        with pytest.raises(BusStateError, match="used once"):
            await tx.__aenter__()
        async with bus.transaction() as tx:
            with pytest.raises(BusStateError, match="not inside a durable handler"):
                tx.acknowledge()


async def test_a_function_in_the_transaction_cannot_end_it() -> None:
    async with MessageBus(journal=SQL) as bus:
        with pytest.raises(ForbiddenStatementError):
            await bus.transact(lambda connection: connection.execute("COMMIT"))


async def test_without_a_journal_there_are_none() -> None:
    bus = MessageBus()
    with pytest.raises(ConfigurationError, match=r"bus\.transaction\(\) needs a journal"):
        bus.transaction()
    with pytest.raises(ConfigurationError, match="has none"):
        await bus.transact(lambda _: None)
    assert bus.journal is None
