"""Conformance tests: SQL of the user in the journal's own transactions (`Tables`)."""

from __future__ import annotations

import sqlite3
from abc import ABC
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any, Protocol, cast

from msgbus.errors import ForbiddenStatementError, MemberEndedError, StaleError
from msgbus.journal.operations import Append, Drop
from msgbus.journal.ports import Journal, Tables
from msgbus.testing.conformance.journal.kit import (
    JournalSuite,
    end,
    expected,
    fill,
    join,
    make_record,
    make_row,
    numbers,
    read_all,
)


class SqlJournal(Journal, Tables, Protocol):
    """A journal that runs SQL of the user."""


def statement(sql: str, *values: object) -> Callable[[Any], list[Any]]:
    """Make a function that runs one statement, and returns its rows."""

    def run(connection: Any) -> list[Any]:
        rows: list[Any] = connection.execute(sql, values).fetchall()
        return rows

    return run


ORDERS = statement("SELECT number FROM orders")


class SqlConformance(JournalSuite, ABC):
    """Tests of a journal with users' tables in its transactions; SQLite's dialect and errors."""

    @asynccontextmanager
    async def with_orders(self) -> AsyncGenerator[SqlJournal]:
        """Open a new journal with a table `orders`."""
        async with self.opened() as opened:
            journal = cast("SqlJournal", opened)
            await journal.transact(statement("CREATE TABLE orders (number INTEGER PRIMARY KEY)"))
            yield journal

    async def test_a_statement_and_a_message_are_written_together(self) -> None:
        async with self.with_orders() as journal:
            insert = statement("INSERT INTO orders VALUES (?)", 1)
            found, appended = await journal.transact(insert, [Append(make_record(1))])

            assert found == []
            assert [one.offset for one in appended] == [1]
            assert await journal.transact(ORDERS) == ([(1,)], [])
            assert numbers(await read_all(journal)) == [1]

    async def test_a_statement_and_a_message_are_refused_together(self) -> None:
        async with self.with_orders() as journal:
            insert = statement("INSERT INTO orders VALUES (1)")
            await journal.transact(insert)

            with expected(sqlite3.IntegrityError):
                await journal.transact(insert, [Append(make_record(1))])
            with expected(StaleError):
                await journal.transact(
                    statement("INSERT INTO orders VALUES (2)"),
                    [Append(make_record(2)), Drop(make_row("orders", 1))],
                )

            assert await journal.transact(ORDERS) == ([(1,)], [])
            assert await read_all(journal) == []

    async def test_a_function_reads_and_writes_in_one_transaction(self) -> None:
        def reserve(connection: Any) -> int:
            connection.execute("INSERT INTO orders VALUES (5)")
            connection.execute("UPDATE orders SET number = number - 1")
            left: int = connection.execute("SELECT number FROM orders").fetchone()[0]
            return left

        async with self.with_orders() as journal:
            assert await journal.transact(reserve) == (4, [])

    async def test_a_function_that_raises_leaves_nothing(self) -> None:
        def fail(connection: Any) -> None:
            connection.execute("INSERT INTO orders VALUES (1)")
            message = "changed my mind"
            raise KeyError(message)

        async with self.with_orders() as journal:
            with expected(KeyError):
                await journal.transact(fail)
            with expected(KeyError):
                await journal.transact(fail, [Append(make_record())])

            assert await journal.transact(ORDERS) == ([], [])
            assert await read_all(journal) == []

    async def test_a_transaction_of_an_ended_member_is_refused(self) -> None:
        async with self.with_orders() as journal:
            member = await join(journal)
            await end(journal, member)

            with expected(MemberEndedError):
                await journal.transact(statement("INSERT INTO orders VALUES (1)"), member=member)

            assert await journal.transact(ORDERS) == ([], [])

    async def test_a_function_cannot_end_or_escape_the_transaction(self) -> None:
        async with self.with_orders() as journal:
            await fill(journal, 1)
            for sql in (
                "COMMIT", "ROLLBACK", "BEGIN", "SAVEPOINT mine", "PRAGMA synchronous = OFF",
                "ATTACH ':memory:' AS other", "DELETE FROM msgbus_messages",
                "DROP TABLE msgbus_messages", "UPDATE msgbus_subscriptions SET acked = 0",
                "ALTER TABLE msgbus_messages RENAME TO gone",
            ):  # fmt: skip
                with expected(ForbiddenStatementError):
                    await journal.transact(statement(sql))
            methods: list[Callable[[Any], object]] = [
                lambda connection: connection.commit(),
                lambda connection: connection.rollback(),
                lambda connection: connection.close(),
            ]
            for method in methods:
                with expected(ForbiddenStatementError):
                    await journal.transact(method)

            assert numbers(await read_all(journal)) == [0]

    async def test_swallowing_the_refusal_does_not_help(self) -> None:
        def sly(connection: Any) -> None:
            connection.execute("INSERT INTO orders VALUES (1)")
            try:
                connection.execute("COMMIT")
            except ForbiddenStatementError:
                return

        async with self.with_orders() as journal:
            with expected(ForbiddenStatementError):
                await journal.transact(sly)

            assert await journal.transact(ORDERS) == ([], [])
