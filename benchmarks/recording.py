"""A bus that records everything: what that costs a command, over time and in a burst, and what
a durable publish costs on top of the journal."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from benchmarks.journal import (
    EACH,
    Append,
    called,
    compare,
    journal,
    make_folder,
)
from benchmarks.rows import Row
from benchmarks.timing import Effort, Measurement, WorkNotDoneError, steady, summarise, timed
from msgbus import Command, Event, MessageBus
from msgbus.journal import Record

COMMANDS: Final = 5_000
BURST: Final = 1_000


class Measure(Command[int]):
    number: int
    place: str = "greenhouse"


class ReadingTaken(Event):
    number: int
    text: str = "x" * 260


def build(number: int) -> list[Measure]:
    return [Measure(number=index) for index in range(number)]


def counting(bus: MessageBus) -> MessageBus:
    @bus.handles(Measure)
    async def measure(command: Measure) -> int:
        return command.number

    return bus


async def record(effort: Effort, number: int, *, to_the_end: bool) -> Measurement:
    """The same commands on a plain bus and on one that records them, by turns.

    To the end: until all of it is in the file. Otherwise: what their caller waits for.
    """
    pairs: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=Path.cwd()) as folder:
        url = f"sqlite:///{make_folder(folder, 'bus') / 'journal.db'}"
        async with counting(MessageBus()) as plain, counting(MessageBus(journal=url)) as bus:

            async def execute(commands: Sequence[Measure]) -> None:
                for command in commands:
                    await plain.execute(command)

            async def execute_recorded(commands: Sequence[Measure]) -> None:
                for command in commands:
                    await bus.execute(command)
                if to_the_end:
                    await bus.settled()

            with steady():
                for _ in range(max(3, effort.repeats // 4)):
                    first = await timed(execute, build, number)
                    second = await timed(execute_recorded, build, number)
                    pairs.append((first / number, second / number))
                    await bus.settled()
            assert bus.journal is not None
            if await bus.journal.head() != len(pairs) * number:
                message = "Not every command was recorded."
                raise WorkNotDoneError(message)
    return summarise(pairs)


async def sustained(effort: Effort) -> Measurement:
    return await record(effort, COMMANDS, to_the_end=True)


async def burst(effort: Effort) -> Measurement:
    return await record(effort, BURST, to_the_end=False)


@asynccontextmanager
async def through_a_bus(folder: Path) -> AsyncGenerator[tuple[Append, Callable[[], Any]]]:
    async with MessageBus(journal=f"sqlite:///{folder / 'journal.db'}") as bus:
        assert bus.journal is not None

        async def append(_: Record) -> None:
            await bus.publish(ReadingTaken(number=1))

        yield append, bus.journal.head


def publish(publishers: int) -> Row:
    async def measure(effort: Effort) -> Measurement:
        return await compare(journal, through_a_bus, publishers, EACH[publishers], effort)

    return Row(
        name=f"recording.publish.{publishers}",
        title=f"bus.publish, durable, {called(publishers)}",
        baseline="SqliteJournal.append of the same size",
        measure=measure,
        budget=2.5,
        heavy=True,
    )


ROWS: Final = (
    Row(
        name="recording.execute",
        title='execute, record="all", until it is written',
        baseline="execute without a journal",
        measure=sustained,
        budget=25.0,
        heavy=True,
    ),
    Row(
        name="recording.burst",
        title=f'execute, record="all", a burst of {BURST:,}',
        baseline="execute without a journal",
        measure=burst,
        heavy=True,
    ),
    *(publish(publishers) for publishers in (1, 100, 1_000)),
)
