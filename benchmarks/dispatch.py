"""What the dispatch engine and requests cost, beside bare awaits and the plain bus.

Systems of this kind promise routing under 0.1 ms, more than 10,000 messages a second and a
publish under 1 ms. The budgets in microseconds below are a tenth of that.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final

from benchmarks import commands, subjects
from benchmarks.commands import bare, execute
from benchmarks.events import to_handlers
from benchmarks.rows import Row
from benchmarks.timing import Effort, Handler, Measurement, Run, Side, compare, steady
from benchmarks.topics import PUBLISHED_PUBLISH, PUBLISHED_ROUTING, middle, percentile
from msgbus import MessageBus
from msgbus.routing import (
    CorrelationManager,
    DispatchRoute,
    Endpoint,
    EventEnvelope,
    MessageCategory,
    MessageDispatchEngine,
    MessageRouter,
)

TOPIC: Final = "shop.events.added"
SHOTS: Final = 1_000
PUBLISHED_RATE: Final = 10_000.0
"""Messages a second that systems of this kind promise."""


def envelopes(number: int) -> Sequence[EventEnvelope[Any]]:
    return [EventEnvelope(event) for event in subjects.events(number)]


def engine_of(
    handler: Handler, dispatchers: int, logger: logging.Logger | None = None
) -> MessageDispatchEngine:
    engine = MessageDispatchEngine(logger=logger)
    for number, each in enumerate(subjects.copies(handler, dispatchers)):
        name = f"note-{number}"
        engine.register_dispatcher(name, each, MessageCategory.EVENT)
        engine.register_route(DispatchRoute(name, "shop.**", MessageCategory.EVENT, name))
    engine.freeze()
    return engine


def logger_at(level: int) -> logging.Logger:
    """A logger that formats what it is given, and writes it nowhere."""
    logger = logging.Logger(f"benchmark-{level}", level)  # noqa: LOG001 (nobody else's)
    logger.addHandler(logging.NullHandler())
    return logger


@asynccontextmanager
async def dispatch(
    handler: Handler, *, dispatchers: int, logger: logging.Logger | None = None
) -> AsyncGenerator[Run]:
    engine = engine_of(handler, dispatchers, logger)

    async def run(messages: Sequence[Any]) -> None:
        for message in messages:
            await engine.dispatch(TOPIC, message)

    yield run


@asynccontextmanager
async def bare_awaits(handler: Handler, *, number: int) -> AsyncGenerator[Run]:
    handlers = {TOPIC: subjects.copies(handler, number)}

    async def run(messages: Sequence[Any]) -> None:
        for message in messages:
            for each in handlers[TOPIC]:
                await each(message)

    yield run


@asynccontextmanager
async def request(handler: Handler) -> AsyncGenerator[Run]:
    async with MessageBus() as bus:
        bus.register_command_handler(subjects.Add, handler)

        async def run(messages: Sequence[Any]) -> None:
            for message in messages:
                await bus.request(message)

        yield run


@asynccontextmanager
async def request_by_topic(handler: Handler) -> AsyncGenerator[Run]:
    router = MessageRouter()

    async def work(envelope: EventEnvelope[Any]) -> int:
        total: int = await handler(envelope.payload)
        return total

    for name in ("a", "b", "c"):
        router.endpoints.register(Endpoint(name, work, group="workers"))
    router.routes.register_route("shop.**", "workers")

    async def run(messages: Sequence[Any]) -> None:
        for message in messages:
            await router.request(TOPIC, message)

    yield run


@asynccontextmanager
async def correlate(handler: Handler) -> AsyncGenerator[Run]:
    manager = CorrelationManager()

    async def run(messages: Sequence[Any]) -> None:
        for message in messages:

            async def send(request_id: str, message: Any = message) -> None:
                manager.reply(request_id, await handler(message))

            await manager.request(send)

    yield run


def side(open: Callable[..., Any], number: int = 1) -> Side:  # noqa: A002
    return Side(open=open, build=envelopes, handler=subjects.note, calls=number)


def asking(open: Callable[..., Any]) -> Side:  # noqa: A002
    return Side(open=open, build=subjects.commands, handler=subjects.add)


def dispatching(number: int) -> Side:
    return side(partial(dispatch, dispatchers=number), number)


async def each(effort: Effort, call: Callable[[], Awaitable[object]]) -> list[list[float]]:
    """Seconds of single calls, a list for each repeat."""
    clock = time.perf_counter
    found: list[list[float]] = []
    await call()
    with steady():
        for _ in range(effort.repeats):
            taken: list[float] = []
            for _ in range(SHOTS):
                began = clock()
                await call()
                taken.append(clock() - began)
            found.append(taken)
    return found


async def routing_percentile(effort: Effort) -> Measurement:
    """From the topic to the list of dispatchers, among 1,000 routes."""
    engine = MessageDispatchEngine()
    for number in range(1_000):
        name = f"d{number}"
        engine.register_dispatcher(name, subjects.note, MessageCategory.EVENT)
        engine.register_route(DispatchRoute(name, f"shop.*.{name}", MessageCategory.EVENT, name))
    engine.freeze()
    envelope = envelopes(1)[0]

    async def call() -> None:
        engine.dispatchers_for("shop.eu.d500", envelope)

    return middle([percentile(taken) for taken in await each(effort, call)])


async def dispatch_percentile(effort: Effort) -> Measurement:
    engine = engine_of(subjects.note, 1)
    envelope = envelopes(1)[0]
    found = await each(effort, lambda: engine.dispatch(TOPIC, envelope))
    return middle([percentile(taken) for taken in found])


async def rate(effort: Effort, *, opened: Callable[..., Any], asks: bool) -> Measurement:
    """Thousands of messages a second, as the time of one in microseconds."""
    found: list[float] = []
    build, handler = (subjects.commands, subjects.add) if asks else (envelopes, subjects.note)
    async with opened(handler) as run:
        await run(build(SHOTS))
        with steady():
            for _ in range(effort.repeats):
                messages = build(SHOTS)
                began = time.perf_counter()
                await run(messages)
                found.append((time.perf_counter() - began) / SHOTS * 1e6)
    return middle(found)


def row(
    name: str, title: str, baseline: str, sides: tuple[Side, Side], budget: float | None = None
) -> Row:
    return Row(
        name=f"dispatch.{name}",
        title=title,
        baseline=baseline,
        measure=partial(compare, *sides),
        budget=budget,
    )


def absolute(name: str, title: str, baseline: str, measure: Any, budget: float) -> Row:
    return Row(
        name=f"dispatch.{name}",
        title=title,
        baseline=baseline,
        measure=measure,
        budget=budget,
        unit="µs",
    )


A_TENTH_OF_RATE: Final = 1e6 / PUBLISHED_RATE / 10

ROWS: Final = (
    row(
        "one",
        "dispatch, 1 dispatcher",
        "a bare await of each",
        (side(partial(bare_awaits, number=1)), dispatching(1)),
        80,
    ),
    row(
        "ten",
        "dispatch, 10 dispatchers",
        "a bare await of each",
        (side(partial(bare_awaits, number=10), 10), dispatching(10)),
        150,
    ),
    row(
        "one_bus",
        "dispatch, 1 dispatcher",
        "publish, as many handlers",
        (to_handlers(1), dispatching(1)),
    ),
    row(
        "ten_bus",
        "dispatch, 10 dispatchers",
        "publish, as many handlers",
        (to_handlers(10), dispatching(10)),
    ),
    row(
        "logged",
        "dispatch, logged at level info",
        "the same, level off",
        (
            side(partial(dispatch, dispatchers=1, logger=logger_at(logging.CRITICAL))),
            side(partial(dispatch, dispatchers=1, logger=logger_at(logging.INFO))),
        ),
    ),
    row("correlate", "a correlated reply", commands.BARE, (asking(bare), asking(correlate))),
    row("request_bare", "bus.request", commands.BARE, (asking(bare), asking(request))),
    row("request", "bus.request", "bus.execute", (asking(execute), asking(request))),
    row(
        "endpoints",
        "request to 3 endpoints by topic",
        "bus.execute",
        (asking(execute), asking(request_by_topic)),
    ),
    absolute(
        "routing_p99",
        "routing, p99, 1,000 routes",
        "a tenth of 0.1 ms",
        routing_percentile,
        PUBLISHED_ROUTING / 10,
    ),
    absolute(
        "p99",
        "dispatch until handled, p99",
        "a tenth of 1 ms",
        dispatch_percentile,
        PUBLISHED_PUBLISH / 10,
    ),
    absolute(
        "rate",
        "dispatch, time for one message",
        "ten times 10,000 messages/s",
        partial(rate, opened=partial(dispatch, dispatchers=1), asks=False),
        A_TENTH_OF_RATE,
    ),
    absolute(
        "request_rate",
        "bus.request, time for one round trip",
        "10,000 messages/s",
        partial(rate, opened=request, asks=True),
        1e6 / PUBLISHED_RATE,
    ),
)
