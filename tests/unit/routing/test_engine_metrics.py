"""MessageDispatchEngine: its counters are exact, from any number of threads and loops."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import trio

from msgbus.routing import (
    DispatchRoute,
    DispatchStatus,
    EventEnvelope,
    MessageCategory,
    MessageDispatchEngine,
)
from msgbus.runtime.clock import VirtualClock
from tests.counts import DISPATCHES_A_THREAD
from tests.evidence import Evidence

EVENT = MessageCategory.EVENT
TOPIC = "shop.events.orders"
ENVELOPE = EventEnvelope({"number": 1})
BUCKETS = [1, 5, 10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10000]


class Odd(Exception):  # noqa: N818
    """Raised for every third message."""


async def works(envelope: EventEnvelope[Any]) -> None:
    pass


async def fails_on_thirds(envelope: EventEnvelope[int]) -> None:
    if envelope.payload % 3 == 0:
        raise Odd


def engine_of(dispatchers: dict[str, Any], **options: Any) -> MessageDispatchEngine:
    engine = MessageDispatchEngine(**options)
    for name, dispatcher in dispatchers.items():
        engine.register_dispatcher(name, dispatcher, EVENT)
        engine.register_route(DispatchRoute(name, "shop.**", EVENT, name))
    engine.freeze()
    return engine


async def test_each_dispatcher_has_its_own_numbers() -> None:
    engine = engine_of({"good": works, "bad": fails_on_thirds})

    for number in range(1, 7):
        await engine.dispatch(TOPIC, EventEnvelope(number))

    good, bad = engine.get_dispatcher_metrics("good"), engine.get_dispatcher_metrics("bad")
    assert good is not None
    assert bad is not None
    assert (good.execution_count, good.success_count, good.error_count) == (6, 6, 0)
    assert (bad.execution_count, bad.success_count, bad.error_count) == (6, 4, 2)
    assert bad.error_rate == pytest.approx(1 / 3)
    assert good.success_rate == 1
    assert bad.last_error_message == "Odd"
    assert good.last_error_message is None
    assert good.last_executed_at is not None
    assert engine.get_dispatcher_metrics("ghost") is None


async def test_the_whole_engine_has_its_numbers() -> None:
    engine = engine_of({"good": works, "bad": fails_on_thirds})

    for number in range(1, 7):
        await engine.dispatch(TOPIC, EventEnvelope(number))
    await engine.dispatch("bank.commands.x", ENVELOPE)

    metrics = engine.get_structured_metrics()
    assert metrics.total_dispatches == 7
    assert metrics.successful_dispatches == 4
    assert metrics.partial_dispatches == 2
    assert metrics.failed_dispatches == metrics.no_dispatcher_count == 1
    assert metrics.dispatcher_executions == 12
    assert metrics.success_rate == pytest.approx(4 / 7)
    assert metrics.error_rate == pytest.approx(3 / 7)
    assert metrics.category_metrics == {"event": 6, "command": 1, "intent": 0, "projection": 0}
    assert sum(metrics.latency_histogram.values()) == 7
    assert metrics.min_latency_ms <= metrics.avg_latency_ms <= metrics.max_latency_ms


def test_an_engine_that_did_nothing_has_zeros() -> None:
    engine = engine_of({"good": works})

    metrics = engine.get_structured_metrics()
    good = engine.get_dispatcher_metrics("good")

    assert (metrics.total_dispatches, metrics.success_rate, metrics.avg_latency_ms) == (0, 0, 0)
    assert good is not None
    assert (good.execution_count, good.error_rate, good.last_executed_at) == (0, 0, None)


async def test_durations_fall_into_the_buckets_of_the_histogram() -> None:
    clock = VirtualClock()
    milliseconds = [0.5, 0.9, 1.5, 9.9, 11, 9_999, 10_001]

    async def takes(envelope: EventEnvelope[float]) -> None:
        await clock.advance(envelope.payload / 1000)

    engine = engine_of({"takes": takes}, clock=clock, timeout=None)
    for duration in milliseconds:
        await engine.dispatch(TOPIC, EventEnvelope(duration))

    metrics = engine.get_dispatcher_metrics("takes")
    assert metrics is not None
    names = [*(f"le_{bound}ms" for bound in BUCKETS), "gt_10000ms"]
    assert list(metrics.latency_histogram) == names
    filled = {name: count for name, count in metrics.latency_histogram.items() if count}
    assert filled == {
        "le_1ms": 2, "le_5ms": 1, "le_10ms": 1, "le_25ms": 1, "le_10000ms": 1, "gt_10000ms": 1,
    }  # fmt: skip
    assert metrics.max_latency_ms == pytest.approx(10_001)
    assert metrics.min_latency_ms == pytest.approx(0.5)
    assert metrics.avg_latency_ms == pytest.approx(sum(milliseconds) / 7)


async def test_the_cache_of_answers_is_bounded() -> None:
    engine = engine_of({"good": works}, cache_size=10)

    for number in range(100):
        assert (await engine.dispatch(f"shop.{number}", ENVELOPE)).is_successful()

    assert len(vars(engine)["_frozen"].cache) <= 10


@pytest.mark.stress("routing")
def test_eight_threads_with_loops_of_both_kinds_count_exactly(evidence: Evidence) -> None:
    threads, each = 8, DISPATCHES_A_THREAD
    engine = MessageDispatchEngine()
    engine.register_dispatcher("good", works, EVENT)
    engine.register_dispatcher("bad", fails_on_thirds, EVENT)
    engine.register_route(DispatchRoute("all", "shop.**", EVENT, "good"))
    engine.register_route(DispatchRoute("some", "shop.events.0", EVENT, "bad"))
    engine.freeze()
    start = threading.Barrier(threads)
    partial = [0] * threads

    async def send(place: int) -> None:
        for number in range(each):
            result = await engine.dispatch(f"shop.events.{number % 10}", EventEnvelope(number))
            partial[place] += result.status is DispatchStatus.PARTIAL

    def run(place: int) -> None:
        start.wait(30)
        if place % 4 == 0:
            trio.run(send, place)
        else:
            asyncio.run(send(place))

    workers = [threading.Thread(target=run, args=(place,)) for place in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()

    metrics = engine.get_structured_metrics()
    failures = len([number for number in range(0, each, 10) if number % 3 == 0])
    assert partial == [failures] * threads
    assert metrics.total_dispatches == threads * each
    assert metrics.partial_dispatches == threads * failures
    assert metrics.successful_dispatches == threads * (each - failures)
    assert metrics.dispatcher_metrics["good"].success_count == threads * each
    assert metrics.dispatcher_metrics["bad"].execution_count == threads * each // 10
    assert metrics.dispatcher_metrics["bad"].error_count == threads * failures
    assert sum(metrics.latency_histogram.values()) == threads * each
    assert metrics.category_metrics["event"] == threads * each
    evidence("dispatches from 8 threads, all counted", dispatches=threads * each, lost=0)


def test_sync_dispatchers_serve_several_loops_at_once() -> None:
    threads, each = 4, 50

    def block(envelope: EventEnvelope[Any]) -> None:
        pass

    engine = engine_of({"sync": block}, max_threads=3)

    async def send() -> None:
        for _ in range(each):
            await engine.dispatch(TOPIC, ENVELOPE)

    workers = [threading.Thread(target=lambda: asyncio.run(send())) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()

    assert engine.get_structured_metrics().successful_dispatches == threads * each
