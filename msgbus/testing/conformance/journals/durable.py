"""Conformance tests: journals that outlive the process, and those that run users' SQL."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import Any

from msgbus.errors import CursorError, ForbiddenStatementError
from msgbus.journal import operations as op
from msgbus.journal.records import DeadLetter, Scheduled
from msgbus.runtime.clock import VirtualClock
from msgbus.testing.conformance.journals.kit import (
    TIME,
    Suite,
    expected,
    make_record,
    numbers,
    read_all,
)


class SqlTests(Suite):
    """What a journal must do if users' tables are in its transactions."""

    async def test_a_statement_and_a_message_are_written_together(self) -> None:
        async with self.opened() as journal:
            await journal.commit([op.Sql("CREATE TABLE orders (number INTEGER PRIMARY KEY)")])
            await journal.commit(
                [op.Sql("INSERT INTO orders VALUES (?)", (1,)), op.Append(make_record(1))]
            )

            assert await journal.transact(orders) == [(1,)]
            assert numbers(await read_all(journal)) == [1]

    async def test_a_statement_and_a_message_are_refused_together(self) -> None:
        async with self.opened() as journal:
            await journal.commit([op.Sql("CREATE TABLE orders (number INTEGER PRIMARY KEY)")])
            await journal.commit([op.Sql("INSERT INTO orders VALUES (1)")])

            with expected(sqlite3.IntegrityError):
                await journal.commit(
                    [op.Append(make_record(1)), op.Sql("INSERT INTO orders VALUES (1)")]
                )
            with expected(CursorError):
                await journal.commit(
                    [op.Sql("INSERT INTO orders VALUES (2)"), op.MoveCursor("none", 0)]
                )

            assert await journal.transact(orders) == [(1,)]
            assert await read_all(journal) == []

    async def test_a_function_reads_and_writes_in_one_transaction(self) -> None:
        def reserve(connection: sqlite3.Connection) -> int:
            connection.execute("CREATE TABLE stock (left_over INTEGER)")
            connection.execute("INSERT INTO stock VALUES (5)")
            connection.execute("UPDATE stock SET left_over = left_over - 1")
            left: int = connection.execute("SELECT left_over FROM stock").fetchone()[0]
            return left

        async with self.opened() as journal:
            assert await journal.transact(reserve) == 4

    async def test_a_function_that_raises_leaves_nothing(self) -> None:
        def fail(connection: sqlite3.Connection) -> None:
            connection.execute("INSERT INTO orders VALUES (1)")
            raise KeyError("changed my mind")

        async with self.opened() as journal:
            await journal.commit([op.Sql("CREATE TABLE orders (number INTEGER)")])

            with expected(KeyError):
                await journal.transact(fail)
            with expected(KeyError):
                await journal.commit([op.Append(make_record()), op.Call(fail)])

            assert await journal.transact(orders) == []
            assert await read_all(journal) == []

    async def test_a_function_cannot_end_or_escape_the_transaction(self) -> None:
        async with self.opened() as journal:
            await journal.append([make_record(0)])
            for statement in (
                "COMMIT", "ROLLBACK", "BEGIN", "SAVEPOINT mine", "PRAGMA synchronous = OFF",
                "ATTACH ':memory:' AS other", "DELETE FROM msgbus_messages",
                "DROP TABLE msgbus_messages", "UPDATE msgbus_cursors SET offset = 0",
                "ALTER TABLE msgbus_messages RENAME TO gone",
            ):  # fmt: skip
                with expected(ForbiddenStatementError):
                    await journal.commit([op.Sql(statement)])
            methods: list[Callable[[sqlite3.Connection], object]] = [
                sqlite3.Connection.commit,
                sqlite3.Connection.rollback,
                lambda connection: connection.close(),
            ]
            for method in methods:
                with expected(ForbiddenStatementError):
                    await journal.transact(method)

            assert numbers(await read_all(journal)) == [0]

    async def test_swallowing_the_refusal_does_not_help(self) -> None:
        def sly(connection: sqlite3.Connection) -> None:
            connection.execute("CREATE TABLE sly (x)")
            try:
                connection.execute("COMMIT")
            except sqlite3.DatabaseError:
                return

        async with self.opened() as journal:
            with expected(ForbiddenStatementError):
                await journal.transact(sly)
            with expected(sqlite3.OperationalError):
                await journal.transact(lambda connection: connection.execute("SELECT * FROM sly"))


def orders(connection: sqlite3.Connection) -> list[Any]:
    """All rows of the table `orders`."""
    return connection.execute("SELECT number FROM orders").fetchall()


class DurableTests(Suite):
    """What a journal must do if it outlives the process: `make` opens the same one again."""

    async def test_everything_is_there_again_after_a_restart(self) -> None:
        record = make_record(0, headers={"a": "b"})
        entry = Scheduled("later", 10.0, record, "ship", 2)
        async with self.opened() as journal:
            (ack,) = await journal.append([record])
            lease = await journal.acquire("ship", "a")
            await journal.commit(
                [
                    op.CreateCursor("ship", 0, lease.epoch),
                    op.OpenWindow("ship", ack.offset, lease.epoch),
                    op.CountAttempts("ship", [ack.offset], lease.epoch),
                    op.AddDeadLetter(DeadLetter("ship", record, 1, None, TIME)),
                    op.Mark("ship", record.message_id),
                    op.Schedule(entry),
                    op.OpenTicket("ticket", TIME),
                ]
            )

        async with self.opened() as journal:
            cursor = await journal.cursor("ship")
            assert cursor == ("ship", 0, ack.offset, lease.epoch)
            assert await journal.read(0) == [record._replace(offset=ack.offset)]
            assert await journal.attempts("ship") == {ack.offset: 1}
            assert [letter.record for letter in await journal.dead_letters()] == [record]
            assert await journal.marked("ship", [record.message_id]) == {record.message_id}
            assert await journal.due(10.0, subscription="ship") == [entry]
            assert await journal.lease("ship") == lease
            assert await journal.ticket("ticket") is not None

    async def test_a_message_is_known_again_after_a_restart(self) -> None:
        record = make_record(0)
        async with self.opened() as journal:
            (first,) = await journal.append([record])

        async with self.opened() as journal:
            (again,) = await journal.append([record])

            assert (again.offset, again.duplicate) == (first.offset, True)

    async def test_a_second_journal_on_the_same_data_sees_the_first_ones_messages(self) -> None:
        clock = VirtualClock()
        async with self.opened() as writer, self.opened(clock) as reader:
            (ack,) = await writer.append([make_record(0)])

            assert await reader.wait(0) == ack.offset
            assert numbers(await read_all(reader)) == [0]
