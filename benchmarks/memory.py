"""What one waiting event takes beside the event itself."""

from __future__ import annotations

import asyncio
import tracemalloc
from typing import Final

from benchmarks import subjects
from benchmarks.rows import Row
from benchmarks.subjects import Added
from benchmarks.timing import Effort, Measurement
from msgbus import MessageBus, QueueConfig

EVENTS: Final = 50_000


async def queued(effort: Effort) -> Measurement:
    """Bytes per event while the handler is held up; the events exist before the count."""
    del effort
    gate = asyncio.Event()
    begun = asyncio.Event()

    async def hold_up(event: Added) -> None:
        del event
        begun.set()
        await gate.wait()

    bus = MessageBus()
    bus.register_event_handler(Added, hold_up, queue=QueueConfig(max_size=2 * EVENTS))
    async with bus:
        await bus.publish(subjects.events(1)[0])
        await begun.wait()
        waiting = subjects.events(EVENTS)
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            for event in waiting:
                await bus.publish(event)
            after, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
            gate.set()
    each = (after - before) / EVENTS
    return Measurement(value=each, low=each, high=each, repeats=1)


ROWS: Final = (
    Row(
        name="memory.queued",
        title="memory per queued event",
        baseline="",
        measure=queued,
        budget=16,
        unit="B",
    ),
)
