"""Durable appends: the journal beside a bare file, and beside other stores in a file.

All of them go through the same harness: so many publishers on one event loop, each of which
appends a message and waits until it is safe before it appends the next. The bare file is the
limit: one thread that joins what has arrived, writes it with a checksum and syncs.
"""

from __future__ import annotations

import asyncio
import os
import struct
import tempfile
import zlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, TypeAlias

from benchmarks.rows import Row
from benchmarks.timing import (
    Effort,
    Measurement,
    WorkNotDoneError,
    as_speed,
    steady,
    summarise,
    timed,
)
from msgbus.journal import Record, SqliteJournal, operations
from msgbus.testing.conformance.journal import make_record

Append: TypeAlias = Callable[[Record], Awaitable[object]]
Store: TypeAlias = Callable[[Path], AbstractAsyncContextManager[tuple[Append, Callable[[], Any]]]]
"""Opens a store in a folder: how to append, and how to count what is in it."""

PACKAGES: Final = ("aiosqlite", "huey", "litequeue", "persist-queue")
PAYLOAD: Final = 300
PUBLISHERS: Final = (1, 100, 1_000)
GROUP: Final = 1_000
EACH: Final = {1: 200, 100: 20, 1_000: 5}
"""Messages of each publisher in one timing."""

SLOW: Final = {1: 100, 100: 5, 1_000: 1}
"""The same, for stores that sync once for every message."""


def build(number: int) -> list[Record]:
    return [make_record(index, payload=os.urandom(PAYLOAD)) for index in range(number)]


async def publish(append: Append, publishers: int, records: Sequence[Record]) -> None:
    async def publisher(first: int) -> None:
        # In turns, so that ids come in the order of time, as they do in a program.
        for record in records[first::publishers]:
            await append(record)

    await asyncio.gather(*(publisher(first) for first in range(publishers)))


# -- stores --------------------------------------------------------------------------------


@asynccontextmanager
async def segment(folder: Path) -> AsyncGenerator[tuple[Append, Callable[[], Any]]]:
    """A file, a thread, and one sync for all that has arrived meanwhile."""
    loop = asyncio.get_running_loop()
    file = os.open(folder / "segment", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    waiting: list[tuple[bytes, asyncio.Future[None]]] = []
    flushing: asyncio.Task[None] | None = None
    written = 0

    def write(payloads: list[bytes]) -> None:
        parts = [struct.pack("<II", len(one), zlib.crc32(one)) + one for one in payloads]
        os.write(file, b"".join(parts))
        os.fdatasync(file)

    async def flush() -> None:
        nonlocal written, flushing
        while waiting:
            group = waiting[:GROUP]
            del waiting[:GROUP]
            await loop.run_in_executor(thread, write, [payload for payload, _ in group])
            written += len(group)
            for _, future in group:
                future.set_result(None)
        flushing = None

    async def append(record: Record) -> None:
        nonlocal flushing
        future = loop.create_future()
        waiting.append((record.payload, future))
        if flushing is None:
            flushing = loop.create_task(flush())
        await future

    with ThreadPoolExecutor(1) as thread:
        yield append, lambda: written
    os.close(file)


@asynccontextmanager
async def journal(folder: Path) -> AsyncGenerator[tuple[Append, Callable[[], Any]]]:
    async with SqliteJournal(folder / "journal.db") as opened:

        async def append(record: Record) -> None:
            await opened.commit([operations.Append(record)])

        yield append, opened.head


@asynccontextmanager
async def aiosqlite(folder: Path) -> AsyncGenerator[tuple[Append, Callable[[], Any]]]:
    """As most programs use it: a transaction for every message, as durable as the journal."""
    async with import_module("aiosqlite").connect(folder / "aiosqlite.db") as database:
        await database.execute("PRAGMA journal_mode = WAL")
        await database.execute("PRAGMA synchronous = FULL")
        await database.execute("CREATE TABLE messages (id INTEGER PRIMARY KEY, payload BLOB)")
        lock = asyncio.Lock()

        async def append(record: Record) -> None:
            async with lock:
                await database.execute(
                    "INSERT INTO messages (payload) VALUES (?)", (record.payload,)
                )
                await database.commit()

        async def count() -> int:
            async with database.execute("SELECT count(*) FROM messages") as cursor:
                (found,) = await cursor.fetchone()
            return int(found)

        yield append, count


@asynccontextmanager
async def persist_queue(folder: Path) -> AsyncGenerator[tuple[Append, Callable[[], Any]]]:
    loop = asyncio.get_running_loop()
    queue = import_module("persistqueue").SQLiteQueue(
        str(folder), multithreading=True, auto_commit=True
    )
    with ThreadPoolExecutor(1) as thread:

        async def append(record: Record) -> None:
            await loop.run_in_executor(thread, queue.put, record.payload)

        yield append, lambda: queue.size
        queue.close()


@asynccontextmanager
async def litequeue(folder: Path) -> AsyncGenerator[tuple[Append, Callable[[], Any]]]:
    """With its own setting, which does not sync at commit: a power cut may lose messages."""
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(1) as thread:
        make = partial(import_module("litequeue").LiteQueue, str(folder / "litequeue.db"))
        queue = await loop.run_in_executor(thread, make)

        async def append(record: Record) -> None:
            await loop.run_in_executor(thread, queue.put, record.payload.hex())

        async def count() -> int:
            return int(await loop.run_in_executor(thread, queue.qsize))

        yield append, count
        await loop.run_in_executor(thread, queue.close)


# -- measuring -----------------------------------------------------------------------------


async def compare(
    baseline: Store, candidate: Store, publishers: int, each: int, effort: Effort
) -> Measurement:
    """By turns, in one process, on files in one folder of the working disk."""
    number = publishers * each
    pairs: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=Path.cwd()) as folder:
        async with (
            baseline(make_folder(folder, "baseline")) as (plain, count_plain),
            candidate(make_folder(folder, "candidate")) as (measured, count_measured),
        ):
            run_plain = partial(publish, plain, publishers)
            run_measured = partial(publish, measured, publishers)
            with steady():
                for _ in range(max(3, effort.repeats // 4)):
                    first = await timed(run_plain, build, number)
                    second = await timed(run_measured, build, number)
                    pairs.append((first / number, second / number))
            for count in (count_plain, count_measured):
                await check(count, len(pairs) * number)
    return summarise(pairs)


def make_folder(parent: str, name: str) -> Path:
    folder = Path(parent) / name
    folder.mkdir()
    return folder


async def check(count: Callable[[], Any], expected: int) -> None:
    found = count()
    if asyncio.iscoroutine(found):
        found = await found
    if found != expected:
        message = f"{expected} messages were appended, and {found} are there."
        raise WorkNotDoneError(message)


def called(publishers: int) -> str:
    return "1 publisher" if publishers == 1 else f"{publishers:,} publishers"


def against_segment(publishers: int) -> Row:
    async def measure(effort: Effort) -> Measurement:
        return as_speed(await compare(segment, journal, publishers, EACH[publishers], effort))

    return Row(
        name=f"journal.append.{publishers}",
        title=f"speed of SqliteJournal.append, {called(publishers)}",
        baseline="a bare file, one sync per group",
        measure=measure,
        budget=0.45 if publishers == 1_000 else None,
        aim=0.55 if publishers == 1_000 else None,
        is_speed=True,
        heavy=True,
    )


def against_peer(name: str, store: Store, module: str, publishers: int) -> Row:
    async def measure(effort: Effort) -> Measurement | None:
        if find_spec(module) is None:
            return None
        return await compare(store, journal, publishers, SLOW[publishers], effort)

    return Row(
        name=f"journal.{name}.{publishers}",
        title=f"SqliteJournal.append, {called(publishers)}, {name}",
        baseline="the same with another store",
        measure=measure,
        # At least ten times as fast.
        budget=0.1 if (name, publishers) == ("aiosqlite", 1_000) else None,
        heavy=True,
    )


STORES: Final[tuple[tuple[str, Store, str], ...]] = (
    ("aiosqlite", aiosqlite, "aiosqlite"),
    ("persist-queue", persist_queue, "persistqueue"),
    ("litequeue", litequeue, "litequeue"),
)
ROWS: Final = (
    *(against_segment(publishers) for publishers in PUBLISHERS),
    *(against_peer(*store, publishers) for store in STORES for publishers in PUBLISHERS),
)
