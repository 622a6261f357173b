"""A scenario of everything that a durable bus does, in which any one call can be made to fail."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final, TypeVar, final

import anyio
import anyio.to_thread

from msgbus import BusConfig, Command, Event, MessageBus, PublishStatus, Subscription
from msgbus.bus.durable.tickets import Ticket
from msgbus.errors import JournalError, JournalFullError, TicketFailedError
from msgbus.handlers.delivery import Mode
from msgbus.journal import Retention
from msgbus.journal.records import Record, State
from msgbus.journal.sqlite.journal import SqliteJournal
from msgbus.resilience import RetryConfig
from msgbus.runtime.clock import VirtualClock
from msgbus.subscriptions.attempts import AGAIN
from msgbus.testing.conformance.journal.tables import statement

T = TypeVar("T")

PATIENCE: Final = 60.0
"""Real seconds after which something hangs."""


class Placed(Event, name="faults.Placed", key="sku"):
    sku: str = "tea"
    number: int = 0


class Pack(Command[int], name="faults.Pack"):
    number: int = 0


class FailedError(Exception):
    """What a handler of the scenario raises."""


# -- which call fails, and how ---------------------------------------------------------------------


def _sqlite(kind: type[sqlite3.Error], text: str, code: int) -> sqlite3.Error:
    error = kind(text)
    error.sqlite_errorcode = code
    return error


def _io() -> BaseException:
    return _sqlite(sqlite3.OperationalError, "disk I/O error", sqlite3.SQLITE_IOERR)


def _full() -> BaseException:
    return _sqlite(sqlite3.OperationalError, "database or disk is full", sqlite3.SQLITE_FULL)


def _odd() -> BaseException:
    return sqlite3.DatabaseError("something else")


CALLBACK_FAULTS: Final[dict[str, tuple[Callable[[], BaseException], bool]]] = {
    one.__name__: (one, False)
    for one in (ValueError, RuntimeError, MemoryError, StopIteration, OSError)
}

FAULTS: Final[dict[str, tuple[Callable[[], BaseException], bool]]] = {
    "I/O error": (_io, False),
    "I/O error, rolled back": (_io, True),
    "full": (_full, False),
    "full, rolled back": (_full, True),
    "database error": (_odd, False),
    "out of memory": (MemoryError, False),
    "interrupted": (KeyboardInterrupt, False),
}
"""What is raised, and whether SQLite has rolled back by itself before."""


@final
class Trap:
    """Counts calls by what is called, and makes one of them fail.

    Args:
        what: What is to fail: the text of a statement, or the name of a callback.
        at: Which of these calls, from 1 on.
        fault: How; one of `FAULTS`.
        of_readers: Whether calls of the connections that read count, or those of the writer.
    """

    def __init__(
        self, what: str = "", at: int = 1, fault: str = "I/O error", *, of_readers: bool = False
    ) -> None:
        self.calls: Counter[str] = Counter()
        self.is_armed = False
        self.is_sprung = False
        self._what = what
        self._at = at
        self._make, self._rolls_back = {**FAULTS, **CALLBACK_FAULTS}[fault]
        self._of_readers = of_readers
        self._has_writer = False

    def step(self, what: str, connection: sqlite3.Connection | None = None) -> None:
        """Note a call; raise if it is the one."""
        if not self.is_armed:
            return
        self.calls[what] += 1
        if what != self._what or self.calls[what] != self._at:
            return
        self.is_sprung = True
        if self._rolls_back and connection is not None and connection.in_transaction:
            sqlite3.Connection.execute(connection, "ROLLBACK")
        raise self._make()

    def connect(self, path: str, lock_timeout: float) -> sqlite3.Connection:
        """Open a connection whose calls are counted."""
        connection = sqlite3.connect(
            path,
            timeout=lock_timeout,
            isolation_level=None,
            check_same_thread=False,
            factory=TrappedConnection,
        )
        is_writer, self._has_writer = not self._has_writer, True
        if is_writer is not self._of_readers:
            connection.trap = self
        return connection


class TrappedConnection(sqlite3.Connection):
    """Tells its trap of every call."""

    trap = Trap()

    def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
        self.trap.step(sql, self)
        return super().execute(sql, parameters)

    def executemany(self, sql: str, parameters: Any, /) -> sqlite3.Cursor:
        self.trap.step(sql, self)
        return super().executemany(sql, parameters)

    def cursor(self, factory: Any = sqlite3.Cursor) -> Any:
        self.trap.step("cursor()", self)
        return super().cursor(factory)

    def set_authorizer(self, authorizer_callback: Any) -> None:
        self.trap.step("set_authorizer()", self)
        super().set_authorizer(authorizer_callback)


# -- the scenario ----------------------------------------------------------------------------------


class Signing:
    """A codec that may fail."""

    def __init__(self, trap: Trap) -> None:
        self._trap = trap

    def encode(self, payload: bytes, associated: bytes) -> bytes:
        self._trap.step("codec.encode")
        return blake2b(associated + payload, digest_size=8).digest() + payload

    def decode(self, payload: bytes, associated: bytes) -> bytes:
        self._trap.step("codec.decode")
        if payload[:8] != blake2b(associated + payload[8:], digest_size=8).digest():
            raise ValueError("this is not what was written here")
        return payload[8:]


@final
class Scenario:
    """A bus on a file, its callers, and what has to be true whatever has failed."""

    def __init__(self, folder: Path, sql: Trap, callbacks: Trap | None = None) -> None:
        self.path = folder / "shop.db"
        self.clock = VirtualClock()
        self.errors: list[BaseException] = []
        self.handled: dict[str, Counter[int]] = {name: Counter() for name in _MODES}
        self.packed: Counter[int] = Counter()
        self._sql = sql
        self.callbacks = callbacks or Trap()
        self.packed_dead = False
        """Whether the handler of the command has failed for good."""
        self._codec = None if callbacks is None else Signing(callbacks)
        self._failing = {2: 1, 3: 99}
        """How often the handlers of the first subscription fail, by number."""
        self.acknowledged: set[int] = set()

    # -- callers -------------------------------------------------------------------------------

    async def call(self, what: Callable[[], Awaitable[T]]) -> T:
        """Try, and try again, as after one fault everything has to work."""
        for _ in range(2):
            try:
                with anyio.fail_after(PATIENCE):
                    return await what()
            except TimeoutError:
                raise
            except (Exception, KeyboardInterrupt) as error:
                self.errors.append(error)
                if isinstance(error, JournalFullError):  # it is looked at again after a pause
                    await self.clock.advance(AGAIN)
        raise AssertionError(f"It does not work again: {self.errors}.")

    async def publish(self, bus: MessageBus, *numbers: int, delay: float | None = None) -> None:
        for number in numbers:
            event = Placed(number=number, sku=f"sku {number % 2}")
            receipt = await self.call(partial(bus.publish, event, delay=delay))
            assert receipt.status is PublishStatus.DURABLE
            self.acknowledged.add(number)

    async def transaction(self, bus: MessageBus, number: int) -> None:
        event = Placed(number=number)

        async def write() -> None:
            async with bus.transaction() as tx:
                tx.execute("INSERT INTO mine VALUES (?)", [number])
                await bus.publish(event)

        await self.call(write)
        self.acknowledged.add(number)

    async def _answer(self, ticket: Ticket[int]) -> bool:
        """Get the answer of a command; return whether it is that its handler has failed."""
        try:
            with anyio.fail_after(PATIENCE):
                assert await ticket.result() == 70
        except TicketFailedError:
            assert self.callbacks.is_sprung
            return True
        except JournalError as error:
            self.errors.append(error)
            return await self._answer(ticket)
        return False

    async def until(self, condition: Callable[[], bool]) -> None:
        """Let virtual time pass until something is so."""
        with anyio.fail_after(PATIENCE):
            while not condition():
                await self.clock.advance(0.25)
                await anyio.to_thread.run_sync(int)  # lets the journal's thread have its turn

    async def settled(self, bus: MessageBus) -> None:
        """Let virtual time pass until everything that was acknowledged is handled."""
        is_settled = False

        async def settle() -> None:
            nonlocal is_settled
            await self.call(bus.settled)
            is_settled = True

        await self.until(self._is_handled)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(settle)
            await self.until(lambda: is_settled)

    def _is_handled(self) -> bool:
        return all(self.acknowledged - {3} <= set(handled) for handled in self.handled.values())

    def _insert(self, db: sqlite3.Connection) -> None:
        db.execute("INSERT INTO mine VALUES (6)")
        self.callbacks.step("function of transact")

    # -- the bus -------------------------------------------------------------------------------

    def _handler(self, name: str) -> Callable[[Placed], Awaitable[None]]:
        async def handle(event: Placed) -> None:
            if self._failing.get(event.number, 0) > 0 and (name == _FIRST or event.number == 3):
                self._failing[event.number] -= 1
                raise FailedError
            self.handled[name][event.number] += 1
            self.callbacks.step(f"handler {name}")

        return handle

    def make(self, journal: SqliteJournal) -> tuple[MessageBus, Subscription]:
        """Make the bus and its handlers."""
        bus = MessageBus(BusConfig(drain_timeout=1), journal=journal, clock=self.clock)
        retry = RetryConfig(max_retries=3, initial_delay=2.0, jitter=False)

        async def watch(message: Any, call_next: Callable[[Any], Awaitable[Any]]) -> Any:
            self.callbacks.step("middleware, before")
            value = await call_next(message)
            self.callbacks.step("middleware, after")
            return value

        def key(record: Record) -> str | None:
            self.callbacks.step("key")
            return record.key

        def wanted(event: Event) -> bool:
            self.callbacks.step("filter")
            return isinstance(event, Placed)

        bus.add_middleware(watch)
        subscriptions = [
            bus.subscribe(
                Placed,
                self._handler(name),
                durable=name,
                mode=mode,
                retry=retry,
                key=key if mode is Mode.KEY_SHARED else None,
                filter=wanted if mode is Mode.KEY_SHARED else None,
            )
            for name, mode in _MODES.items()
        ]

        @bus.handles(Pack)
        async def pack(command: Pack) -> int:
            self.packed[command.number] += 1
            self.callbacks.step("handler of a command")
            return command.number * 10

        return bus, subscriptions[0]

    async def run(self) -> None:
        """Do everything once."""
        with anyio.fail_after(10 * PATIENCE):
            async with SqliteJournal(
                self.path,
                clock=self.clock,
                codec=self._codec,
                reserve=0,
                _connect=self._sql.connect,
            ) as journal:
                await journal.transact(statement("CREATE TABLE mine (x UNIQUE)"))
                bus, first = self.make(journal)
                async with bus:
                    await self._work(bus, first, journal)
                    self._sql.is_armed = self.callbacks.is_armed = False
                    await self._check(bus, journal)
            async with SqliteJournal(self.path, codec=self._codec) as again:
                report = await again.verify()
                assert report.is_sound, report

    async def _work(self, bus: MessageBus, first: Subscription, journal: SqliteJournal) -> None:
        self._sql.is_armed = self.callbacks.is_armed = True
        await self.publish(bus, 1, 2, 3, 4)
        await self.transaction(bus, 5)
        await self.call(lambda: bus.transact(self._insert))
        command = Pack(number=7)
        ticket = await self.call(lambda: bus.enqueue(command))
        await self.publish(bus, 8, delay=5.0)
        await self.settled(bus)
        self.packed_dead = await self._answer(ticket)
        before = self.handled[_FIRST][1]
        await self.call(lambda: first.seek(0))
        await self.until(lambda: self.handled[_FIRST][1] > before)
        await self.settled(bus)
        async with anyio.create_task_group() as tasks:
            for number in range(20, 26):
                tasks.start_soon(self.publish, bus, number)
            tasks.start_soon(self.transaction, bus, 26)
        await self.settled(bus)
        await self.call(lambda: journal.trim(Retention(max_count=4)))
        await self.publish(bus, 30)
        await self.settled(bus)

    async def _check(self, bus: MessageBus, journal: SqliteJournal) -> None:
        """Everything is there once, nothing is half done, and the next publish works."""
        head = await journal.head()
        await self.publish(bus, 31)
        await self.settled(bus)
        assert await journal.head() == head + 1 == len(self.acknowledged) + 1  # and a command
        assert await bus.transact(statement("SELECT x FROM mine ORDER BY x")) == [(5,), (6,), (26,)]
        dead = await journal.find(None, [State.DEAD])
        queues = {"commands:faults.Pack"} if self.packed_dead else set[str]()
        assert {row.subscription for row in dead} == {*_MODES, *queues}
        assert self.packed[7] >= 1 or self.packed_dead
        report = await journal.verify()
        assert report.is_sound, report
        rest = await journal.count()
        assert set(rest) <= {State.DEAD}, rest


_MODES: Final = {mode.value: mode for mode in Mode}
_FIRST: Final = "exclusive"
