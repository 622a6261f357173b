"""A few messages, handlers and checks that many tests share."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from msgbus import BackpressureStrategy, BusConfig, Command, Event, MessageBus, QueueConfig
from msgbus.runtime.clock import VirtualClock
from msgbus.telemetry.stats import EventHandlerStats, EventTypeStats


class OrderEvent(Event):
    number: int = 0


class OrderPlaced(OrderEvent):
    pass


class OrderShipped(OrderEvent):
    pass


class Recorder:
    """A handler that notes what it saw."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    async def __call__(self, event: OrderEvent) -> None:
        self.numbers.append(event.number)


class SlowHandler:
    """A handler that begins an event and ends it only once `release` is set."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.ended: list[int] = []
        self.started = anyio.Event()
        self.release = anyio.Event()

    async def __call__(self, event: OrderEvent) -> None:
        self.begun.append(event.number)
        self.started.set()
        await self.release.wait()
        self.ended.append(event.number)


class Connections:
    """The connections that sqlite3 makes from now on, to see that they are closed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[sqlite3.Connection] = []
        self._connect = sqlite3.connect
        monkeypatch.setattr(sqlite3, "connect", self._made)

    def _made(self, *arguments: Any, **options: Any) -> sqlite3.Connection:
        connection: sqlite3.Connection = self._connect(*arguments, **options)
        self.made.append(connection)
        return connection

    @property
    def open(self) -> list[sqlite3.Connection]:
        return [one for one in self.made if is_open(one)]


def is_open(connection: sqlite3.Connection) -> bool:
    try:
        return connection.total_changes >= 0
    except sqlite3.ProgrammingError:
        return False


def queue(max_size: int, strategy: BackpressureStrategy = BackpressureStrategy.WAIT) -> QueueConfig:
    return QueueConfig(max_size=max_size, strategy=strategy)


class FullLane:
    """A bus with one handler that hangs on event 0 while event 1 and so on fill its queue."""

    def __init__(
        self,
        max_size: int,
        strategy: BackpressureStrategy = BackpressureStrategy.WAIT,
        *,
        drain_timeout: float = 0,
    ) -> None:
        config = BusConfig(queue=queue(max_size, strategy), drain_timeout=drain_timeout)
        self.bus = MessageBus(config)
        self.max_size = max_size
        self.slow = SlowHandler()
        self.bus.subscribe(OrderPlaced, self.slow, name="slow")
        self.admitted: list[int] = []

    async def fill(self) -> None:
        await self.bus.publish(OrderPlaced(number=0))
        await self.slow.started.wait()
        for number in range(1, self.max_size + 1):
            await self.bus.publish(OrderPlaced(number=number))

    async def publish(self, number: int) -> None:
        await self.bus.publish(OrderPlaced(number=number))
        self.admitted.append(number)

    async def finish(self) -> list[int]:
        self.slow.release.set()
        await self.bus.settled()
        return self.slow.ended

    @property
    def events(self) -> EventTypeStats:
        return self.bus.stats().events["OrderPlaced"]

    @property
    def handler(self) -> EventHandlerStats:
        return self.bus.stats().handlers["slow"]


def conserves(bus: MessageBus) -> None:
    """Every published event, and every (event, handler) pair, has exactly one outcome."""
    stats = bus.stats()
    for event in stats.events.values():
        assert event.published == event.admitted + event.filtered + event.rejected
    for handler in stats.handlers.values():
        counts = (handler.handled, handler.failed, handler.queued, handler.running)
        assert min(counts) >= 0, f"{handler.handler} has a negative count: {counts}"
    pairs_in = sum(event.pairs for event in stats.events.values())
    pairs_out = sum(
        handler.handled
        + handler.failed
        + handler.filtered
        + handler.dropped
        + handler.abandoned
        + handler.queued
        + handler.running
        for handler in stats.handlers.values()
    )
    assert pairs_in == pairs_out, f"{pairs_in} pairs admitted, {pairs_out} accounted for: {stats}"


async def let_others_run() -> None:
    """Give every task enough turns to get as far as it can without time or threads."""
    for _ in range(25):
        await anyio.lowlevel.checkpoint()


def logged(caplog: pytest.LogCaptureFixture, name: str) -> list[Mapping[str, Any]]:
    """The data of all log events of this name."""
    entries = [getattr(record, "msgbus", {}) for record in caplog.records]
    return [entry for entry in entries if entry.get("event") == name]


class Calendar:
    """A bus on virtual time with one handler that notes what it saw."""

    def __init__(self, *, start: float = 1_000_000.0) -> None:
        self.clock = VirtualClock(start)
        self.bus = MessageBus(clock=self.clock)
        self.seen = Recorder()
        self.bus.subscribe(OrderPlaced, self.seen)


class Lists:
    """A batch handler that notes its lists; with `hold`, it ends only once released."""

    def __init__(self, *, hold: bool = False) -> None:
        self.lists: list[list[int]] = []
        self.release = anyio.Event()
        if not hold:
            self.release.set()

    async def __call__(self, events: list[OrderPlaced]) -> None:
        self.lists.append([event.number for event in events])
        await self.release.wait()


class Add(Command[int]):
    left: int
    right: int


class Fail(Command):
    text: str = "boom"


class Added(Event):
    total: int


async def add(command: Add) -> int:
    return command.left + command.right


async def fail(command: Fail) -> None:
    raise ValueError(command.text)


def make_command_bus() -> MessageBus:
    bus = MessageBus()
    bus.register_command_handler(Add, add)
    bus.register_command_handler(Fail, fail)
    return bus
