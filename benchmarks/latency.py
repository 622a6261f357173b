"""How long an idle bus takes to pick up one event: there must be no polling in it."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeAlias

from benchmarks import subjects
from benchmarks.rows import Row
from benchmarks.subjects import Added
from benchmarks.timing import Effort, Measurement, steady, summarise
from msgbus import MessageBus

Send: TypeAlias = Callable[[Any], Awaitable[object]]

SHOTS: Final = 100
"""Single events per repeat; the repeat's time is their median."""


class Stopwatch:
    """A handler that notes when it was called."""

    def __init__(self) -> None:
        self.stopped: float | None = None

    async def handle(self, event: Added) -> None:
        del event
        self.stopped = time.perf_counter()


async def pick_up(send: Send, watch: Stopwatch, shots: int) -> float:
    """Seconds from the call to the handler's first line, the worker being asleep."""
    taken: list[float] = []
    for event in subjects.events(shots):
        for _ in range(3):
            await asyncio.sleep(0)
        watch.stopped = None
        began = time.perf_counter()
        await send(event)
        while watch.stopped is None:  # noqa: ASYNC110 (an event would cost more)
            await asyncio.sleep(0)
        taken.append(watch.stopped - began)
    return statistics.median(taken)


async def idle(effort: Effort) -> Measurement:
    queue: asyncio.Queue[Added] = asyncio.Queue()
    plain, measured = Stopwatch(), Stopwatch()

    async def work() -> None:
        while True:
            await plain.handle(await queue.get())

    task = asyncio.create_task(work())
    async with MessageBus() as bus:
        bus.register_event_handler(Added, measured.handle)
        pairs: list[tuple[float, float]] = []
        with steady():
            for turn in range(effort.repeats + 2):
                first = await pick_up(queue.put, plain, SHOTS)
                second = await pick_up(bus.publish, measured, SHOTS)
                if turn >= 2:  # the first two are the warm-up
                    pairs.append((first, second))
    task.cancel()
    return summarise(pairs)


ROWS: Final = (
    Row(
        name="events.idle",
        title="idle bus picks up one event",
        baseline="idle asyncio.Queue worker",
        measure=idle,
        budget=2,
    ),
)
