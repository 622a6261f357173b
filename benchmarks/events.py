"""What an event costs, from its publishing until it is handled, on top of a queue and a task."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, Final

from benchmarks import subjects
from benchmarks.rows import Row
from benchmarks.subjects import Added
from benchmarks.timing import Handler, Run, Side, compare
from msgbus import MessageBus

QUEUE: Final = "queue.put, get, await"


@asynccontextmanager
async def queue_and_worker(handler: Handler) -> AsyncGenerator[Run]:
    queue: asyncio.Queue[Any] = asyncio.Queue()

    async def work() -> None:
        while True:
            await handler(await queue.get())

    async def run(messages: Sequence[Any]) -> None:
        for message in messages:
            await queue.put(message)
        # Cheaper than task_done and join: the handler never waits, so an empty queue
        # means that all is done.
        while not queue.empty():  # noqa: ASYNC110 (an event would cost more)
            await asyncio.sleep(0)

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    yield run
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


@asynccontextmanager
async def publish(handler: Handler, *, handlers: int = 1) -> AsyncGenerator[Run]:
    async with MessageBus() as bus:
        for number, each in enumerate(subjects.copies(handler, handlers)):
            bus.register_event_handler(Added, each, name=f"note-{number}")

        async def run(messages: Sequence[Any]) -> None:
            for message in messages:
                await bus.publish(message)
            await bus.settled()

        yield run


@asynccontextmanager
async def publish_to_batches(handler: Handler, *, many: bool) -> AsyncGenerator[Run]:
    async with MessageBus() as bus:
        bus.register_event_handler(Added, handler, batch=True)

        async def run(messages: Sequence[Any]) -> None:
            if many:
                await bus.publish_many(messages)
            else:
                for message in messages:
                    await bus.publish(message)
            await bus.settled()

        yield run


BASELINE: Final = Side(open=queue_and_worker, build=subjects.events, handler=subjects.note)


def row(name: str, title: str, candidate: Side, *, budget: float, aim: float | None = None) -> Row:
    return Row(
        name=f"events.{name}",
        title=title,
        baseline=QUEUE,
        measure=partial(compare, BASELINE, candidate),
        budget=budget,
        aim=aim,
    )


def to_handlers(number: int) -> Side:
    return Side(
        open=partial(publish, handlers=number),
        build=subjects.events,
        handler=subjects.note,
        calls=number,
    )


def to_batches(*, many: bool) -> Side:
    return Side(
        open=partial(publish_to_batches, many=many),
        build=subjects.events,
        handler=subjects.note_all,
    )


ROWS: Final = (
    row("publish", "publish, 1 handler", to_handlers(1), budget=1.75, aim=1.2),
    row("publish10", "publish, 10 handlers", to_handlers(10), budget=10, aim=8),
    row("batch", "publish, batch handler", to_batches(many=False), budget=0.8),
    row("batch_many", "publish_many, batch handler", to_batches(many=True), budget=0.8),
)
