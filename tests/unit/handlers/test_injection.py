"""Handlers ask for what they need by annotation."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any, Protocol

import anyio
import pytest

from msgbus import (
    Command,
    ConfigurationError,
    Context,
    Event,
    MessageBus,
    per_message,
    per_session,
)
from msgbus.errors import BusNotStartedError, MissingProviderError


class Database:
    def __init__(self, name: str = "db") -> None:
        self.name = name


class Transaction:
    def __init__(self, log: list[str]) -> None:
        self.log = log


class Mailer(Protocol):
    def send(self, text: str) -> str: ...


class LoudMailer:
    def send(self, text: str) -> str:
        return text.upper()


class Ask(Command[str]):
    pass


class Happened(Event):
    pass


async def test_a_value_is_bound_by_its_type() -> None:
    bus = MessageBus(provide={Database: Database("orders")})

    @bus.handles(Ask)
    async def ask(command: Ask, database: Database) -> str:
        return database.name

    assert await bus.call(Ask()) == "orders"


async def test_context_and_dependencies_come_in_any_order() -> None:
    bus = MessageBus(provide={Database: Database()})

    @bus.handles(Ask)
    async def ask(command: Ask, *, database: Database, context: Context, suffix: str = "!") -> str:
        return f"{database.name} {context.handler}{suffix}"

    assert await bus.call(Ask()) == "db ask!"


async def test_a_protocol_is_provided_by_any_object() -> None:
    bus = MessageBus(provide={Mailer: LoudMailer()})

    @bus.handles(Ask)
    async def ask(command: Ask, mailer: Mailer) -> str:
        return mailer.send("hi")

    assert await bus.call(Ask()) == "HI"


async def test_sync_handlers_get_dependencies_too() -> None:
    bus = MessageBus(provide={Database: Database()})

    @bus.handles(Ask)
    def ask(command: Ask, database: Database) -> str:
        return database.name

    assert await bus.call(Ask()) == "db"


async def test_a_resource_opens_at_start_and_closes_after_the_drain() -> None:
    log: list[str] = []

    @asynccontextmanager
    async def open_database() -> AsyncGenerator[Database]:
        log.append("open")
        yield Database()
        log.append("close")

    bus = MessageBus(provide={Database: open_database})

    @bus.on(Happened)
    async def happened(event: Happened, database: Database) -> None:
        await anyio.lowlevel.checkpoint()
        log.append(f"used {database.name}")

    async with bus:
        assert log == ["open"]
        await bus.publish(Happened())

    assert log == ["open", "used db", "close"]


async def test_generators_and_factories_with_dependencies_work() -> None:
    log: list[str] = []

    async def database() -> AsyncIterator[Database]:
        yield Database("made")
        log.append("closed")

    def mailer(source: Database) -> Iterator[LoudMailer]:
        log.append(f"mailer of {source.name}")
        yield LoudMailer()

    bus = MessageBus(provide={Mailer: mailer, Database: database})

    @bus.handles(Ask)
    async def ask(command: Ask, mailer: Mailer) -> str:
        return mailer.send("x")

    async with bus:
        assert await bus.call(Ask()) == "X"

    assert log == ["mailer of made", "closed"]


async def test_an_opened_resource_needs_a_started_bus() -> None:
    bus = MessageBus(provide={Database: Database})

    @bus.handles(Ask)
    async def ask(command: Ask, database: Database) -> str:
        return database.name

    with pytest.raises(BusNotStartedError, match="Start the bus first"):
        await bus.execute(Ask())
    async with bus:
        assert await bus.call(Ask()) == "db"


async def test_a_resource_that_fails_to_open_fails_the_start_and_closes_the_others() -> None:
    log: list[str] = []

    async def database() -> AsyncIterator[Database]:
        yield Database()
        log.append("closed")

    def broken() -> LoudMailer:
        raise ConnectionError("no mail today")

    bus = MessageBus(provide={Database: database, Mailer: broken})

    with pytest.raises(ConnectionError):
        await bus.start()

    assert log == ["closed"]
    assert not bus.is_running


async def test_a_bus_that_could_not_open_a_resource_can_be_started_again() -> None:
    opened: list[Database] = []

    async def database() -> AsyncIterator[Database]:
        opened.append(Database())
        yield opened[-1]

    def mailer() -> LoudMailer:
        if len(opened) < 2:
            raise ConnectionError("no mail yet")
        return LoudMailer()

    bus = MessageBus(provide={Database: database, Mailer: mailer})

    @bus.handles(Ask)
    async def ask(command: Ask, database: Database, mailer: Mailer) -> str:
        return "new" if database is opened[1] else "closed"

    with pytest.raises(ConnectionError):
        await bus.start()
    with anyio.fail_after(5):
        async with bus:
            assert await bus.call(Ask()) == "new"


async def test_a_resource_that_halts_fails_the_start_and_nothing_else() -> None:
    class Halt(BaseException):
        pass

    def halt() -> Database:
        raise Halt

    bus = MessageBus(provide={Database: halt})

    with pytest.raises(Halt):
        await bus.start()
    assert not bus.is_running


async def test_per_message_opens_and_closes_around_each_handling() -> None:
    log: list[str] = []

    async def begin(context: Context) -> AsyncIterator[Transaction]:
        log.append(f"begin for {type(context.message).__name__}")
        try:
            yield Transaction(log)
        except ValueError:
            log.append("rollback")
            raise
        log.append("commit")

    bus = MessageBus(provide={Transaction: per_message(begin)})

    @bus.handles(Ask)
    async def ask(command: Ask, transaction: Transaction) -> str:
        transaction.log.append("work")
        if len(log) > 4:
            raise ValueError
        return "done"

    assert await bus.call(Ask()) == "done"
    assert not (await bus.execute(Ask())).success
    assert log == ["begin for Ask", "work", "commit", "begin for Ask", "work", "rollback"]


async def test_per_session_lives_as_long_as_the_session() -> None:
    log: list[str] = []
    made: list[Database] = []

    async def connect() -> AsyncIterator[Database]:
        log.append("open")
        yield Database()
        log.append("close")

    bus = MessageBus(provide={Database: per_session(connect)})

    @bus.handles(Ask)
    async def ask(command: Ask, database: Database) -> str:
        made.append(database)
        return database.name

    async with bus:
        async with bus.session() as session:
            await session.call(Ask())
            await session.call(Ask())
            assert log == ["open"]
        assert log == ["open", "close"]
        result = await bus.execute(Ask())

    assert made[0] is made[1]
    assert result.error is not None
    assert "no live session" in result.error


async def test_a_session_provides_for_its_own_handlers() -> None:
    bus = MessageBus(provide={Database: Database("bus")})

    async def ask(command: Ask, database: Database) -> str:
        return database.name

    bus.register_command_handler(Ask, ask)
    async with bus, bus.session(provide={Database: Database("session")}) as session:
        assert await session.call(Ask()) == "bus"
        session.register_command_handler(Ask, ask)
        assert await session.call(Ask()) == "session"


class Container:
    """Stands for a dependency-injection container behind the Resolver port."""

    def __init__(self) -> None:
        self.scopes: list[str] = []

    def provides(self, wanted: type) -> bool:
        return wanted is Database

    @asynccontextmanager
    async def open(self, context: Context) -> AsyncGenerator[Any]:
        self.scopes.append(f"open {context.handler}")

        async def get(wanted: type) -> Any:
            return wanted("from container")

        yield get
        self.scopes.append("close")


async def test_a_container_resolves_what_is_not_provided() -> None:
    container = Container()
    bus = MessageBus(resolver=container)

    @bus.handles(Ask)
    async def ask(command: Ask, database: Database) -> str:
        return database.name

    async with bus:
        assert await bus.call(Ask()) == "from container"
    assert container.scopes == ["open ask", "close"]


async def test_optional_dependencies_may_be_missing() -> None:
    bus = MessageBus()

    @bus.handles(Ask)
    async def ask(command: Ask, database: Database | None, mailer: Mailer | None = None) -> str:
        return f"{database} {mailer}"

    assert await bus.call(Ask()) == "None None"


async def test_all_faults_are_listed_at_once_and_nothing_starts() -> None:
    opened: list[str] = []

    def open_transaction(mailer: Mailer) -> Transaction:
        opened.append("opened")
        return Transaction([])

    bus = MessageBus(provide={Transaction: open_transaction})

    @bus.handles(Ask)
    async def ask(command: Ask, database: Database) -> str:
        return ""

    @bus.on(Happened)
    async def happened(event: Happened, transaction: Transaction) -> None:
        pass

    with pytest.raises(ConfigurationError) as caught:
        await bus.start()

    text = str(caught.value)
    assert len(caught.value.faults) == 2
    assert "database: Database" in text
    assert "mailer: Mailer" in text
    assert "provide={Database: ...}" in text
    assert not opened
    assert [fault.subject for fault in bus.check()] == ["ask", "happened"]


async def test_a_missing_provider_before_start_is_a_clear_error() -> None:
    bus = MessageBus()

    @bus.handles(Ask)
    async def ask(command: Ask, database: Database) -> str:
        return ""

    with pytest.raises(MissingProviderError, match="database: Database"):
        await bus.execute(Ask())


def test_factories_that_go_in_circles_are_a_fault() -> None:
    def one(other: Transaction) -> Database:
        return Database()

    def two(one: Database) -> Transaction:
        return Transaction([])

    bus = MessageBus(provide={Database: one, Transaction: two})
    bus.register_command_handler(Ask, needs_database)

    assert ["cycle" in fault.fix for fault in bus.check()] == [True]


async def needs_database(command: Ask, database: Database) -> str:
    return database.name
