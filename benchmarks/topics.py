"""What routing by topic costs: warm, cold with few and many patterns, and on the bus.

Lookups are too short for a handler beside them, so these rows check their answers
themselves, once, before anything is timed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import cache, partial
from itertools import count
from typing import Any, Final, TypeAlias

from benchmarks import subjects
from benchmarks.events import to_handlers
from benchmarks.rows import Row
from benchmarks.subjects import Added
from benchmarks.timing import (
    Effort,
    Handler,
    Measurement,
    Run,
    Side,
    WorkNotDoneError,
    compare,
    steady,
    summarise,
)
from msgbus import MessageBus
from msgbus.routing import PatternRouter, Route

Look: TypeAlias = Callable[[str], object]

PATTERNS: Final = (10, 1_000, 100_000)
FEWEST: Final = PATTERNS[0]
LOOKUPS: Final = 1_000
WARM_TOPIC: Final = "shop.eu.orders.placed"

FLAT: Final = 2.0
"""Budget: ten thousand times the patterns may cost no more than this."""

PUBLISHED_ROUTING: Final = 100.0
PUBLISHED_PUBLISH: Final = 1_000.0
"""Microseconds that systems of this kind promise; our budgets are a tenth."""


@cache
def router_of(patterns: int) -> PatternRouter:
    """Patterns of all kinds that real ones have; each topic below matches two of them."""
    router = PatternRouter()
    router.register_route("shop.**", "audit")
    for number in range(patterns - 1):
        region, kind = number % 100, number // 100
        router.register_route(f"shop.r{region}.k{kind}.*", f"endpoint-{number}")
    return router


fresh: Final = count()


def unseen_topics(patterns: int, number: int) -> list[str]:
    """Topics that nobody asked for yet, spread over all patterns."""
    chosen = [index * (patterns - 1) // number for index in range(number)]
    return [f"shop.r{index % 100}.k{index // 100}.x{next(fresh)}" for index in chosen]


def check(found: Sequence[Route], wanted: int) -> None:
    if len(found) != wanted:
        message = f"{len(found)} routes were found, not {wanted}: {found}"
        raise WorkNotDoneError(message)


def seconds(look: Look, topics: Sequence[str]) -> float:
    began = time.perf_counter()
    for topic in topics:
        look(topic)
    return time.perf_counter() - began


async def warm(effort: Effort) -> Measurement:
    """A topic that was asked for before, beside a method with one dict in it."""
    router = router_of(1_000)
    table = {WARM_TOPIC: router.find_route(WARM_TOPIC)}

    def plain(topic: str) -> object:
        return table.get(topic)

    check(router.find_all_routes(WARM_TOPIC), 1)
    topics = [WARM_TOPIC] * LOOKUPS
    pairs: list[tuple[float, float]] = []
    with steady():
        for _ in range(effort.repeats):
            first, second = seconds(plain, topics), seconds(router.find_route, topics)
            pairs.append((first / LOOKUPS, second / LOOKUPS))
    return summarise(pairs)


async def cold(effort: Effort, *, patterns: int) -> Measurement:
    """A topic that nobody asked for, with many patterns and with few."""
    few, many = router_of(FEWEST), router_of(patterns)
    check(many.find_all_routes(*unseen_topics(patterns, 1)), 2)
    pairs: list[tuple[float, float]] = []
    with steady():
        for _ in range(effort.repeats):
            first = seconds(few.find_all_routes, unseen_topics(FEWEST, LOOKUPS))
            second = seconds(many.find_all_routes, unseen_topics(patterns, LOOKUPS))
            pairs.append((first / LOOKUPS, second / LOOKUPS))
    return summarise(pairs)


async def register(effort: Effort, *, patterns: int) -> Measurement:
    """One more route, where there are many and where there are few."""
    few, many = router_of(FEWEST), router_of(patterns)
    with steady():
        pairs = [(register_some(few), register_some(many)) for _ in range(effort.repeats)]
    return summarise(pairs)


def register_some(router: PatternRouter) -> float:
    began = time.perf_counter()
    added = [router.register_route(f"more.m{next(fresh)}.*", "more") for _ in range(100)]
    taken = time.perf_counter() - began
    for route in added:
        router.unregister(route)
    return taken / len(added)


def mixed_topics() -> list[str]:
    """For 1,000 patterns: one topic in twenty-five was never seen before."""
    known, new = unseen_topics(1_000, 50), unseen_topics(1_000, LOOKUPS // 25)
    return [*known, *new, *(known * LOOKUPS)[: LOOKUPS - len(new)]]


def percentile(taken: Sequence[float]) -> float:
    """The 99th, in microseconds."""
    return statistics.quantiles(taken, n=100)[98] * 1e6


def middle(found: Sequence[float]) -> Measurement:
    low, median, high = statistics.quantiles(found, n=4, method="inclusive")
    return Measurement(median, low, high, len(found))


async def routing_percentile(effort: Effort) -> Measurement:
    """Of single lookups."""
    find_route, clock = router_of(1_000).find_route, time.perf_counter
    found: list[float] = []
    with steady():
        for _ in range(effort.repeats):
            taken: list[float] = []
            for topic in mixed_topics():
                began = clock()
                find_route(topic)
                taken.append(clock() - began)
            found.append(percentile(taken))
    return middle(found)


async def publish_percentile(effort: Effort) -> Measurement:
    """Of single publishes, on a bus whose handlers have all been at work."""
    clock = time.perf_counter
    found: list[float] = []
    async with MessageBus() as bus:
        for number in range(1_000):
            bus.subscribe(f"shop.r{number % 100}.k{number // 100}.*", subjects.note)
        for topic in unseen_topics(1_001, 1_000):
            await bus.publish(Added(left=1, right=1), topic=topic)
        with steady():
            for _ in range(effort.repeats):
                await bus.settled()
                topics = mixed_topics()
                taken: list[float] = []
                for event, topic in zip(subjects.events(len(topics)), topics, strict=True):
                    began = clock()
                    await bus.publish(event, topic=topic)
                    taken.append(clock() - began)
                found.append(percentile(taken))
    return middle(found)


# -- on the bus --------------------------------------------------------------------------------


@asynccontextmanager
async def publish_by_topic(handler: Handler, *, topic: str | None) -> AsyncGenerator[Run]:
    async with MessageBus() as bus:
        bus.register_event_handler("added" if topic is None else "shop.*.added", handler)

        async def run(messages: Sequence[Any]) -> None:
            for message in messages:
                await bus.publish(message, topic=topic)
            await bus.settled()

        await run([Added(left=1, right=1)])
        yield run


def by_topic(name: str, title: str, topic: str | None, budget: float) -> Row:
    side = Side(
        open=partial(publish_by_topic, topic=topic), build=subjects.events, handler=subjects.note
    )
    return Row(
        name=f"topics.{name}",
        title=title,
        baseline="publish by class",
        measure=partial(compare, to_handlers(1), side),
        budget=budget,
    )


ROWS: Final = (
    Row(
        name="topics.warm",
        title="find_route, warm",
        baseline="a function with dict.get",
        measure=warm,
        budget=5,
    ),
    *(
        Row(
            name=f"topics.cold_{patterns}",
            title=f"find_all_routes, cold, {patterns:,} patterns",
            baseline=f"the same, {FEWEST} patterns",
            measure=partial(cold, patterns=patterns),
            budget=FLAT,
            heavy=patterns > 1_000,
        )
        for patterns in PATTERNS
    ),
    *(
        Row(
            name=f"topics.register_{patterns}",
            title=f"register_route, {patterns:,} patterns",
            baseline=f"the same, {FEWEST} patterns",
            measure=partial(register, patterns=patterns),
            budget=FLAT,
            heavy=patterns > 1_000,
        )
        for patterns in PATTERNS[1:]
    ),
    Row(
        name="topics.p99",
        title="find_route, p99, 1,000 patterns",
        baseline="a tenth of 0.1 ms",
        measure=routing_percentile,
        budget=PUBLISHED_ROUTING / 10,
        unit="µs",
    ),
    Row(
        name="topics.publish_p99",
        title="publish, topic=, p99, 1,000 patterns",
        baseline="a tenth of 1 ms",
        measure=publish_percentile,
        budget=PUBLISHED_PUBLISH / 10,
        unit="µs",
    ),
    by_topic("publish_class", "publish, topic of the class", None, 1.2),
    by_topic("publish", "publish, topic=", "shop.eu.added", 3),
)
