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
from msgbus import BusConfig, MessageBus, QueueConfig

QUEUE: Final = "queue.put, get, await"
BOUNDED_QUEUE: Final = "bounded queues, put, get, await"
SAME: Final = Added(left=1, right=2)
FULL_AT: Final = 200
"""Events that a queue holds in the rows about full ones: far fewer than are published."""


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
async def full_queues(handler: Handler, *, handlers: int) -> AsyncGenerator[Run]:
    """Bounded queues, each with its worker, and a publisher that is faster than they are."""
    queues: list[asyncio.Queue[Any]] = [asyncio.Queue(FULL_AT) for _ in range(handlers)]

    async def work(queue: asyncio.Queue[Any]) -> None:
        while True:
            await handler(await queue.get())

    async def run(messages: Sequence[Any]) -> None:
        for message in messages:
            for queue in queues:
                await queue.put(message)
        while not all(queue.empty() for queue in queues):  # noqa: ASYNC110 (as above)
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(work(queue)) for queue in queues]
        await asyncio.sleep(0)
        yield run
        for task in tasks:
            task.cancel()


@asynccontextmanager
async def publish(
    handler: Handler, *, handlers: int = 1, config: BusConfig | None = None
) -> AsyncGenerator[Run]:
    async with MessageBus(config) as bus:
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


@asynccontextmanager
async def publish_again(handler: Handler) -> AsyncGenerator[Run]:
    """One object, again and again."""
    async with MessageBus() as bus:
        bus.register_event_handler(Added, handler)

        async def run(messages: Sequence[Any]) -> None:
            for _ in messages:
                await bus.publish(SAME)
            await bus.settled()

        yield run


def to_full_queues(number: int) -> Row:
    """A publisher in a tight loop, whose queues stay full."""
    baseline = Side(
        open=partial(full_queues, handlers=number),
        build=subjects.events,
        handler=subjects.note,
        calls=number,
    )
    config = BusConfig(queue=QueueConfig(max_size=FULL_AT))
    candidate = Side(
        open=partial(publish, handlers=number, config=config),
        build=subjects.events,
        handler=subjects.note,
        calls=number,
    )
    plural = "s" if number > 1 else ""
    return Row(
        name=f"events.full{number if number > 1 else ''}",
        title=f"publish, full queue{plural}, {number} handler{plural}",
        baseline=BOUNDED_QUEUE,
        measure=partial(compare, baseline, candidate, messages=5_000),
        budget=1.5,
    )


ROWS: Final = (
    row("publish", "publish, 1 handler", to_handlers(1), budget=1.75, aim=1.2),
    row("publish10", "publish, 10 handlers", to_handlers(10), budget=10, aim=8),
    Row(
        name="events.again",
        title="publish, the same object again",
        baseline="publish, a fresh object",
        measure=partial(
            compare,
            to_handlers(1),
            Side(open=publish_again, build=subjects.events, handler=subjects.note),
        ),
        budget=1.15,
    ),
    to_full_queues(1),
    to_full_queues(10),
    row("batch", "publish, batch handler", to_batches(many=False), budget=0.8),
    row("batch_many", "publish_many, batch handler", to_batches(many=True), budget=0.8),
)
