"""A bus with a journal: many events to a commit, and history through one handler."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from benchmarks.journal import make_folder
from benchmarks.rows import Row
from benchmarks.timing import Effort, Measurement, WorkNotDoneError, steady, summarise, timed
from msgbus import Event, MessageBus
from msgbus.journal import MessageCodec, Record, Selection

MANY: Final = 2_000
SINGLE: Final = 100
PAST: Final = 20_000
PAGE: Final = 1_000


class ReadingTaken(Event):
    number: int
    celsius: float = 21.5
    place: str = "greenhouse"


def build(number: int) -> list[ReadingTaken]:
    return [ReadingTaken(number=index) for index in range(number)]


@asynccontextmanager
async def durable_bus(folder: Path) -> AsyncGenerator[MessageBus]:
    """A bus whose journal is a file; nobody handles anything."""
    async with MessageBus(journal=f"sqlite:///{folder / 'journal.db'}") as bus:
        yield bus


async def head(bus: MessageBus) -> int:
    assert bus.journal is not None
    return await bus.journal.head()


async def publish_many(effort: Effort) -> Measurement:
    """The same bus and file by turns; each side waits until all it published is safe."""
    pairs: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=Path.cwd()) as folder:
        async with durable_bus(make_folder(folder, "bus")) as bus:

            async def one_by_one(events: Sequence[ReadingTaken]) -> None:
                for event in events:
                    await bus.publish(event)

            async def all_at_once(events: Sequence[ReadingTaken]) -> None:
                await bus.publish_many(events)

            with steady():
                for _ in range(max(3, effort.repeats // 4)):
                    single = await timed(one_by_one, build, SINGLE)
                    many = await timed(all_at_once, build, MANY)
                    pairs.append((single / SINGLE, many / MANY))
            expected = len(pairs) * (SINGLE + MANY)
            if await head(bus) != expected:
                message = f"{expected} events were published, and {await head(bus)} are there."
                raise WorkNotDoneError(message)
    return summarise(pairs)


async def replay(effort: Effort) -> Measurement:
    """Against reading and decoding the same file, which is the least that it takes."""
    pairs: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=Path.cwd()) as folder:
        async with durable_bus(make_folder(folder, "bus")) as bus:
            journal = bus.journal
            assert journal is not None
            await bus.publish_many(build(PAST))
            codec, everything = MessageCodec([ReadingTaken]), Selection()
            shown = 0

            async def handler(event: ReadingTaken) -> None:
                nonlocal shown
                shown += event.number >= 0

            async def read(_: object) -> None:
                after = 0
                while after < PAST:
                    scan = await journal.read(after, PAGE, everything)
                    for record in scan.records:
                        assert isinstance(record, Record)
                        codec.decode(record)
                    after = scan.upto

            async def show(_: object) -> None:
                await bus.replay(1, to=handler)

            with steady():
                for _ in range(max(3, effort.repeats // 4)):
                    plain = await timed(read, range, 1)
                    replayed = await timed(show, range, 1)
                    pairs.append((plain / PAST, replayed / PAST))
            if shown != len(pairs) * PAST:
                message = f"{len(pairs) * PAST} events were to be shown, and {shown} were."
                raise WorkNotDoneError(message)
    return summarise(pairs)


ROWS: Final = (
    Row(
        name="history.replay",
        title="bus.replay, one event",
        baseline="journal.read and decode",
        measure=replay,
        budget=3.0,
        heavy=True,
    ),
    Row(
        name="history.publish_many",
        title="publish_many, durable, one event of many",
        baseline="bus.publish, durable, one by one",
        measure=publish_many,
        budget=0.2,
        heavy=True,
    ),
)
