"""Handlers ask for what they need by annotation."""

import asyncio
from collections.abc import AsyncIterator

from msgbus import Command, MessageBus, per_message


class AddUser(Command[int]):
    """Add a user; the reply is how many there are."""

    name: str


class Database:
    """Lives as long as the bus."""

    users = 0


class Transaction:
    """Lives for one message; is kept only if the handler succeeds."""

    added = 0


async def open_database() -> AsyncIterator[Database]:
    yield Database()
    print("database closed")


async def begin(database: Database) -> AsyncIterator[Transaction]:
    transaction = Transaction()
    yield transaction
    database.users += transaction.added  # not reached if the handler raised


bus = MessageBus(provide={Database: open_database, Transaction: per_message(begin)})


@bus.handles(AddUser)
async def add_user(command: AddUser, transaction: Transaction, database: Database) -> int:
    transaction.added = 1
    if not command.name:
        raise ValueError("a user needs a name")
    return database.users + 1


async def main() -> None:
    async with bus:
        for name in ("ann", "", "bob"):
            print(await bus.execute(AddUser(name=name)))


asyncio.run(main())
# Output:
# > <AddUser result: value=1>
# > <AddUser result: error='ValueError: a user needs a name'>
# > <AddUser result: value=2>
# > database closed
