"""Durable subscriptions: what delivering costs beside bare reading, and how long a start takes.

All on files. Throughput is from the start of a new subscription until everything is handled
and its cursor is written. Recovery is from opening the file until the first message is
delivered again, after a process that died with messages in flight.
"""

from __future__ import annotations

import asyncio
import gc
import os
import tempfile
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from benchmarks.rows import Row
from benchmarks.timing import Effort, Measurement, WorkNotDoneError, steady, summarise
from msgbus import Event
from msgbus.journal import MessageCodec, Record, Selection, SqliteJournal
from msgbus.journal.operations import Append, Pass
from msgbus.subscriptions import Delivery, DurableSubscription, Mode, SubscriptionConfig
from msgbus.subscriptions.config import selection_of
from msgbus.testing.conformance.journal.kit import make_record

MESSAGES: Final = 5_000
PAGE: Final = 100
"""Messages a page, where the journal is read bare."""

ALL: Final = Selection()

IN_FLIGHT: Final = 16
LEFT: Final = 50
"""Messages that a process had in flight when it died."""

SIZES: Final = (1_000, 10_000, 100_000, 1_000_000)
FLAT: Final = 2.0
"""Budget: a start that takes longer than this in a longer journal is not flat."""


class Placed(Event, name="bench.Placed"):
    number: int
    customer: str = "a customer"
    lines: tuple[int, ...] = (1, 2, 3)


@asynccontextmanager
async def filled(messages: list[Record]) -> AsyncGenerator[SqliteJournal]:
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=Path.cwd()) as folder:
        async with SqliteJournal(Path(folder) / "journal.db", reserve=0) as journal:
            await append(journal, messages)
            yield journal


async def append(journal: SqliteJournal, records: list[Record]) -> None:
    """In bulk: several calls at once become one group."""
    parts = [records[start : start + 250] for start in range(0, len(records), 250)]
    await asyncio.gather(*(journal.commit([Append(one) for one in part]) for part in parts))


def repeats_of(effort: Effort) -> int:
    return max(3, effort.repeats // 6)


# -- throughput ----------------------------------------------------------------------------


class Counter:
    """A handler that does nothing, and knows when it is done."""

    def __init__(self) -> None:
        self.handled = 0
        self.done = asyncio.Event()

    async def __call__(self, _record: Record, _attempt: int) -> None:
        self.handled += 1
        if self.handled == MESSAGES:
            self.done.set()

    def check(self) -> None:
        if self.handled != MESSAGES:
            message = f"{MESSAGES} messages are in the journal, {self.handled} were handled."
            raise WorkNotDoneError(message)


async def read_bare(journal: SqliteJournal) -> float:
    handler, start = Counter(), 0
    gc.collect()
    began = time.perf_counter()
    while (scan := await journal.read(start, PAGE, ALL)).records:
        for record in scan.records:
            assert isinstance(record, Record)
            await handler(record, 1)
        start = scan.upto
    took = time.perf_counter() - began
    handler.check()
    return took / MESSAGES


async def subscribe(journal: SqliteJournal, name: str, config: SubscriptionConfig) -> float:
    handler = Counter()
    subscription = DurableSubscription(journal, name, handler, config)
    gc.collect()
    began = time.perf_counter()
    await subscription.start()
    await subscription.caught_up()
    await handler.done.wait()  # at most once, the cursor is ahead of the handler
    took = time.perf_counter() - began
    handler.check()
    await subscription.close()
    return took / MESSAGES


def throughput(mode: Mode, delivery: Delivery) -> Row:
    in_flight = 1 if mode is Mode.EXCLUSIVE else IN_FLIGHT
    config = SubscriptionConfig(mode=mode, delivery=delivery, max_in_flight=in_flight)

    async def measure(effort: Effort) -> Measurement:
        records = [make_record(place, key=f"k{place % 50}") for place in range(MESSAGES)]
        pairs: list[tuple[float, float]] = []
        async with filled(records) as journal:
            with steady():
                for turn in range(repeats_of(effort)):
                    plain = await read_bare(journal)
                    pairs.append((plain, await subscribe(journal, f"{turn}", config)))
        return summarise(pairs)

    words = f"{mode.value.replace('_', '-')}, {delivery.value.replace('_', ' ')}"
    return Row(
        name=f"subscriptions.{mode.value}.{delivery.value}",
        title=f"subscription, {words}",
        baseline="reading the journal in pages",
        measure=measure,
        heavy=True,
    )


# -- replay --------------------------------------------------------------------------------


async def replay(effort: Effort) -> Measurement:
    """Records read and made into messages again, against payloads read and nothing else."""
    codec = MessageCodec([Placed])
    records = [codec.encode(Placed(number=place), time=time.time()) for place in range(MESSAGES)]
    pairs: list[tuple[float, float]] = []
    async with filled(records) as journal:
        with steady():
            for _ in range(repeats_of(effort)):
                plain = await read_payloads(journal)
                pairs.append((plain, await read_messages(journal, codec)))
    return summarise(pairs)


async def read_payloads(journal: SqliteJournal) -> float:
    gc.collect()
    began = time.perf_counter()
    found, _ = await journal.transact(
        lambda connection: connection.execute("SELECT payload FROM msgbus_messages").fetchall()
    )
    took = time.perf_counter() - began
    if len(found) != MESSAGES:
        message = f"{len(found)} payloads were read."
        raise WorkNotDoneError(message)
    return took / MESSAGES


async def read_messages(journal: SqliteJournal, codec: MessageCodec) -> float:
    start = last = 0
    gc.collect()
    began = time.perf_counter()
    while (scan := await journal.read(start, 1_000, ALL)).records:
        for record in scan.records:
            assert isinstance(record, Record)
            last += isinstance(codec.decode(record), Placed)
        start = scan.upto
    took = time.perf_counter() - began
    if last != MESSAGES:
        text = f"{last} messages were decoded."
        raise WorkNotDoneError(text)
    return took / MESSAGES


# -- recovery ------------------------------------------------------------------------------


class Ended:
    """A file that a process has left with messages in flight, as often as one likes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._times = 0

    async def fill(self, number: int) -> None:
        async with SqliteJournal(self._path, reserve=0) as journal:
            payload = os.urandom(20)
            for start in range(0, number, 10_000):
                count = min(10_000, number - start)
                await append(journal, [make_record(n, payload=payload) for n in range(count)])
            if await journal.head() != number:
                text = f"{await journal.head()} messages were appended, not {number}."
                raise WorkNotDoneError(text)

    async def recover(self) -> float:
        """Seconds from opening the file until a message is delivered."""
        self._times += 1
        name = f"reader-{self._times}"
        async with SqliteJournal(self._path, reserve=0) as journal:
            head, selection = await journal.head(), selection_of(SubscriptionConfig())
            await journal.open(name, selection, head - LEFT)
            member = await journal.join("benchmark", {name: selection.text})
            cursor = await journal.acquire(member, name, 0, selection)
            assert cursor is not None
            await journal.commit([Pass(cursor, head - LEFT, head)], member)
            await journal.end(member)
        delivered = asyncio.Event()

        async def deliver(_record: Record, _attempt: int) -> None:
            delivered.set()

        gc.collect()
        began = time.perf_counter()
        async with SqliteJournal(self._path, reserve=0) as journal:
            subscription = DurableSubscription(journal, name, deliver)
            await subscription.start()
            await delivered.wait()
            took = time.perf_counter() - began
            subscription.engine.abort()
        return took


def recovery(number: int) -> Row:
    async def measure(effort: Effort) -> Measurement:
        with tempfile.TemporaryDirectory(prefix=".bench-", dir=Path.cwd()) as folder:
            small, large = (Ended(Path(folder) / f"{name}.db") for name in ("small", "large"))
            await small.fill(SIZES[0])
            await large.fill(number)
            with steady():
                pairs = [
                    (await small.recover(), await large.recover())
                    for _ in range(repeats_of(effort))
                ]
        return summarise(pairs)

    return Row(
        name=f"subscriptions.recovery.{number}",
        title=f"recovery, {number:,} messages",
        baseline=f"recovery, {SIZES[0]:,} messages",
        measure=measure,
        budget=FLAT,
        heavy=True,
    )


ROWS: Final = (
    *(throughput(mode, delivery) for mode in Mode for delivery in Delivery),
    Row(
        name="subscriptions.replay",
        title="replay, 1,000 a page",
        baseline="SELECT payload",
        measure=replay,
        heavy=True,
    ),
    *(recovery(number) for number in SIZES),
)
