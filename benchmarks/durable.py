"""Durable events from their publisher to their handler, beside queues that do the same work.

The work of a message is the same on all sides: it is made, stored, taken out, handled by a
function that does nothing, and acknowledged. huey commits with a sync, as the bus does;
litequeue has no such setting, and does not sync at commit.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

from benchmarks.rows import Row
from benchmarks.timing import (
    Effort,
    Measurement,
    WorkNotDoneError,
    as_speed,
    steady,
    summarise,
)
from msgbus import Event, MessageBus
from msgbus.subscriptions import Mode

Work: TypeAlias = Callable[[Path, int], Awaitable[float]]
"""Does the work of so many messages in a new folder, and returns the seconds it took."""

CUSTOMER: Final = "a customer"
TURN: Final = 20
"""Messages of a turn of the sequential publisher."""

WARM_UP: Final = 300
"""Messages after which the write-ahead log of each side has its size."""

MANY: Final = 9_000
FEW: Final = 1_500
"""Messages of litequeue, which needs longer for each the more it has."""

SYNCED: Final = 400
IN_FLIGHT: Final = 16
PUBLISHERS: Final = 100
HUEY: Final = "huey, SqliteHuey with fsync"
LITEQUEUE: Final = "litequeue, put, pop and done"
COUNTERS: Final = Path("/proc/self/io")
"""Where Linux counts what a process writes."""


class OrderPlaced(Event, name="bench.OrderPlaced"):
    number: int
    customer: str = CUSTOMER


@contextmanager
def new_folder() -> Generator[Path]:
    """A folder on the working disk."""
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=Path.cwd()) as folder:
        yield Path(folder)


def bus_of(folder: Path) -> MessageBus:
    return MessageBus(journal=f"sqlite:///{folder / 'journal.db'}")


# -- one sequential publisher ------------------------------------------------------------------


class Queue(NamedTuple):
    """An open queue, with a handler that counts."""

    publish: Callable[[int], Awaitable[None]]
    """Publishes so many messages, one after another."""

    finish: Callable[[], Awaitable[None]]
    """Returns when all that was published is handled."""

    handled: Callable[[], int]


@asynccontextmanager
async def through_journal() -> AsyncGenerator[Queue]:
    published = handled = 0
    done = asyncio.Event()

    async def handle(event: OrderPlaced) -> None:
        nonlocal handled
        del event
        handled += 1
        if handled == published:
            done.set()

    async def publish(number: int) -> None:
        nonlocal published
        published += number
        done.clear()
        for place in range(number):
            await bus.publish(OrderPlaced(number=place))

    async def finish() -> None:
        await done.wait()

    with new_folder() as folder:
        bus = bus_of(folder)
        bus.subscribe(OrderPlaced, handle, durable="orders")
        async with bus:
            yield Queue(publish, finish, lambda: handled)
            await bus.settled()


@asynccontextmanager
async def through_huey() -> AsyncGenerator[Queue]:
    handled = 0
    with new_folder() as folder:
        queue = import_module("huey").SqliteHuey(filename=str(folder / "huey.db"), fsync=True)

        @queue.task()  # type: ignore[untyped-decorator]  # it has no types
        def place_order(number: int, customer: str) -> None:
            nonlocal handled
            del number, customer
            handled += 1

        async def publish(number: int) -> None:
            for place in range(number):
                place_order(place, CUSTOMER)

        async def finish() -> None:
            while (task := queue.dequeue()) is not None:
                queue.execute(task)

        yield Queue(publish, finish, lambda: handled)
        queue.storage.close()


async def turn(queue: Queue, *, is_handled: bool) -> float:
    """Seconds a message until all are published, or also handled."""
    gc.collect()
    began = time.perf_counter()
    await queue.publish(TURN)
    if is_handled:
        await queue.finish()
    took = time.perf_counter() - began
    await queue.finish()
    return took / TURN


async def by_turns(effort: Effort, *, is_handled: bool) -> Measurement | None:
    """Both open at once: a turn begins with what the one before has left."""
    if find_spec("huey") is None:
        return None
    pairs: list[tuple[float, float]] = []
    async with through_huey() as plain, through_journal() as measured:
        queues = (plain, measured)
        for queue in queues:
            await queue.publish(WARM_UP)
            await queue.finish()
        with steady():
            for number in range(effort.repeats):
                first, second = queues[:: -1 if number % 2 else 1]
                seconds = {one: await turn(one, is_handled=is_handled) for one in (first, second)}
                pairs.append((seconds[plain], seconds[measured]))
        for queue in queues:
            check(queue.handled(), WARM_UP + len(pairs) * TURN)
    return as_speed(summarise(pairs))


def sequential(name: str, title: str, budget: float, aim: float, *, is_handled: bool) -> Row:
    return Row(
        name=f"durable.{name}",
        title=title,
        baseline=HUEY,
        measure=partial(by_turns, is_handled=is_handled),
        budget=budget,
        aim=aim,
        is_speed=True,
        heavy=True,
    )


# -- many at once ------------------------------------------------------------------------------


async def litequeue(folder: Path, number: int) -> float:
    queue = import_module("litequeue").LiteQueue(folder / "litequeue.db")
    handled = 0
    began = time.perf_counter()
    for place in range(number):
        queue.put(json.dumps({"number": place, "customer": CUSTOMER}))
    while (message := queue.pop()) is not None:
        handled += 1
        queue.done(message.message_id)
    took = time.perf_counter() - began
    queue.close()
    check(handled, number)
    return took


async def through_bus(
    folder: Path, number: int, *, mode: Mode, publish: Callable[[MessageBus, int], Awaitable[None]]
) -> float:
    handled = 0

    async def handle(event: OrderPlaced) -> None:
        nonlocal handled
        del event
        handled += 1

    bus = bus_of(folder)
    options: dict[str, Any] = {} if mode is Mode.EXCLUSIVE else {"max_in_flight": IN_FLIGHT}
    bus.subscribe(OrderPlaced, handle, durable="orders", mode=mode, **options)
    async with bus:
        await bus.settled()
        began = time.perf_counter()
        await publish(bus, number)
        await bus.settled()
        took = time.perf_counter() - began
    check(handled, number)
    return took


async def at_once(bus: MessageBus, number: int) -> None:
    await bus.publish_many(OrderPlaced(number=place) for place in range(number))


async def by_publishers(bus: MessageBus, number: int) -> None:
    numbers = iter(range(number))

    async def publisher() -> None:
        for place in numbers:
            await bus.publish(OrderPlaced(number=place))

    await asyncio.gather(*(publisher() for _ in range(PUBLISHERS)))


def check(handled: int, number: int) -> None:
    if handled != number:
        message = f"{number} messages were published, {handled} were handled."
        raise WorkNotDoneError(message)


async def on_new_files(plain: Work, measured: Work, effort: Effort) -> Measurement:
    """Each turn on files of its own: what is in them already would count."""
    pairs: list[tuple[float, float]] = []
    with steady():
        for turn in range(max(3, effort.repeats // 6)):
            works = [(plain, FEW), (measured, MANY)]
            seconds: list[float] = []
            for work, number in reversed(works) if turn % 2 else works:
                with new_folder() as folder:
                    seconds.append(await work(folder, number) / number)
            first, second = reversed(seconds) if turn % 2 else seconds
            pairs.append((first, second))
    return as_speed(summarise(pairs))


def in_bulk(
    name: str,
    title: str,
    publish: Callable[[MessageBus, int], Awaitable[None]],
    mode: Mode,
    budget: float,
    aim: float,
) -> Row:
    async def measure(effort: Effort) -> Measurement | None:
        if find_spec("litequeue") is None:
            return None
        return await on_new_files(
            litequeue, partial(through_bus, mode=mode, publish=publish), effort
        )

    return Row(
        name=f"durable.{name}",
        title=title,
        baseline=LITEQUEUE,
        measure=measure,
        budget=budget,
        aim=aim,
        is_speed=True,
        heavy=True,
    )


# -- bytes written -----------------------------------------------------------------------------


def bytes_written() -> int:
    """What this process has given to the system to be written, to files of any kind."""
    lines = dict(line.split(": ") for line in COUNTERS.read_text().splitlines())
    return int(lines["wchar"])


async def bytes_of(number: int) -> float:
    """Kilobytes of one message, with its share of what goes from the log into the file."""
    async with through_journal() as queue:
        await queue.publish(WARM_UP)
        await queue.finish()
        before = bytes_written()
        await queue.publish(number)
        await queue.finish()
        return (bytes_written() - before) / number / 1_000


async def volume(effort: Effort) -> Measurement | None:
    if not COUNTERS.exists():
        return None
    found = sorted([await bytes_of(1_000) for _ in range(max(3, effort.processes // 3))])
    return Measurement(
        value=found[len(found) // 2], low=found[0], high=found[-1], repeats=len(found)
    )


async def sync(effort: Effort) -> Measurement:
    """Microseconds until the disk has some bytes: how the other figures are to be read."""
    with new_folder() as folder, (folder / "file").open("wb", buffering=0) as file:
        found: list[float] = []
        for _ in range(effort.repeats * 5):
            began = time.perf_counter()
            file.write(bytes(SYNCED))
            os.fdatasync(file.fileno())
            found.append((time.perf_counter() - began) * 1e6)
    low, middle, high = statistics.quantiles(found, n=4)
    return Measurement(middle, low=low, high=high, repeats=len(found))


ROWS: Final = (
    Row(
        name="durable.sync",
        title=f"write and sync {SYNCED} bytes: each row that follows depends on it",
        baseline="",
        measure=sync,
        unit="µs",
    ),
    sequential(
        "handled",
        "speed of 1 publisher, published and handled",
        0.9,
        1.2,
        is_handled=True,
    ),
    sequential("publish", "speed of 1 publisher, published", 0.45, 0.6, is_handled=False),
    in_bulk(
        "exclusive", "speed of publish_many and handled, exclusive", at_once, Mode.EXCLUSIVE, 8, 10
    ),
    in_bulk(
        "shared",
        f"speed of publish_many and handled, shared, {IN_FLIGHT} in flight",
        at_once,
        Mode.SHARED,
        6,
        8,
    ),
    in_bulk(
        "publishers",
        f"speed of {PUBLISHERS} publishers, published and handled",
        by_publishers,
        Mode.EXCLUSIVE,
        4.5,
        6,
    ),
    Row(
        name="durable.bytes",
        title="written a message, 1 publisher, handled",
        baseline="",
        measure=volume,
        budget=20,
        aim=10,
        unit="kB",
        heavy=True,
    ),
)
