"""MessageDispatchEngine: failures are isolated, and each is reported."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest

from msgbus.routing import (
    DispatchResult,
    DispatchRoute,
    DispatchStatus,
    EventEnvelope,
    MessageCategory,
    MessageDispatchEngine,
)
from msgbus.runtime.clock import VirtualClock

EVENT = MessageCategory.EVENT
TOPIC = "shop.events.orders"
ENVELOPE = EventEnvelope({"number": 1})


async def works(envelope: EventEnvelope[Any]) -> str:
    return "out.works"


async def fails(envelope: EventEnvelope[Any]) -> str:
    message = "cannot reach https://bob:hunter2@example.org"
    raise ConnectionError(message)


async def hangs(envelope: EventEnvelope[Any]) -> None:
    await anyio.sleep_forever()


async def skips(envelope: EventEnvelope[Any]) -> DispatchResult:
    return DispatchResult(status=DispatchStatus.SKIPPED, topic=TOPIC)


def engine_of(
    *dispatchers: Callable[[Any], Awaitable[Any]], **options: Any
) -> MessageDispatchEngine:
    engine = MessageDispatchEngine(**options)
    for number, dispatcher in enumerate(dispatchers):
        name = f"{dispatcher.__name__}-{number}"
        engine.register_dispatcher(name, dispatcher, EVENT)
        engine.register_route(DispatchRoute(f"to-{name}", "shop.**", EVENT, name))
    engine.freeze()
    return engine


async def dispatch_and_wait(
    engine: MessageDispatchEngine, clock: VirtualClock, seconds: float
) -> DispatchResult:
    results: list[DispatchResult] = []

    async def dispatch() -> None:
        results.append(await engine.dispatch(TOPIC, ENVELOPE))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(dispatch)
        await clock.advance(seconds)
    return results[0]


async def test_a_partial_failure_does_not_look_like_a_total_one() -> None:
    partial = await engine_of(works, fails, works).dispatch(TOPIC, ENVELOPE)
    total = await engine_of(fails, fails).dispatch(TOPIC, ENVELOPE)

    assert partial.status is DispatchStatus.PARTIAL
    assert total.status is DispatchStatus.HANDLER_ERROR
    assert [outcome.status.value for outcome in partial.outcomes] == [
        "success",
        "handler_error",
        "success",
    ]
    assert [outcome.dispatcher_id for outcome in partial.failed] == ["fails-1"]
    assert partial.outputs == ["out.works", "out.works"]
    assert partial.is_error()
    assert not partial.is_successful()


async def test_an_error_is_told_without_its_secrets() -> None:
    engine = engine_of(fails)

    result = await engine.dispatch(TOPIC, ENVELOPE)

    told = f"{result!r} {result.error_message} {result.outcomes} {engine.get_structured_metrics()}"
    assert "hunter2" not in told
    assert result.error_message == (
        "fails-0: ConnectionError: cannot reach https://bob:[redacted]@example.org"
    )
    assert isinstance(result.outcomes[0].exception, ConnectionError)


async def test_dispatchers_run_side_by_side() -> None:
    met = 0
    all_there = anyio.Event()

    async def meet(envelope: EventEnvelope[Any]) -> None:
        nonlocal met
        met += 1
        if met == 3:
            all_there.set()
        await all_there.wait()

    result = await engine_of(meet, meet, meet).dispatch(TOPIC, ENVELOPE)

    assert result.is_successful()


async def test_a_slow_dispatcher_is_out_of_time_and_the_others_are_not() -> None:
    clock = VirtualClock()

    result = await dispatch_and_wait(engine_of(works, hangs, timeout=5, clock=clock), clock, 5)

    assert result.status is DispatchStatus.PARTIAL
    assert result.outcomes[1].status is DispatchStatus.TIMEOUT
    assert result.outcomes[1].duration_ms == pytest.approx(5000)
    assert result.requires_retry()


async def test_a_dispatcher_may_have_its_own_time() -> None:
    clock = VirtualClock()
    engine = MessageDispatchEngine(timeout=1, clock=clock)
    for name, seconds in (("short", 0.5), ("usual", None), ("long", 3.0)):
        engine.register_dispatcher(name, hangs, EVENT, timeout=seconds)
        engine.register_route(DispatchRoute(name, "shop.**", EVENT, name))
    engine.freeze()

    result = await dispatch_and_wait(engine, clock, 3)

    assert result.status is DispatchStatus.TIMEOUT
    assert [round(outcome.duration_ms) for outcome in result.outcomes] == [500, 1000, 3000]


async def test_real_time_runs_out_too() -> None:
    engine = engine_of(hangs, works, timeout=0.001)
    alone = engine_of(hangs, timeout=0.001)

    assert (await engine.dispatch(TOPIC, ENVELOPE)).status is DispatchStatus.PARTIAL
    assert (await alone.dispatch(TOPIC, ENVELOPE)).status is DispatchStatus.TIMEOUT


async def test_a_timeout_error_of_the_dispatchers_own_is_no_lack_of_time() -> None:
    async def raises(envelope: EventEnvelope[Any]) -> None:
        raise TimeoutError

    result = await engine_of(raises).dispatch(TOPIC, ENVELOPE)

    assert result.status is DispatchStatus.HANDLER_ERROR


async def test_time_and_errors_together_are_an_error() -> None:
    result = await engine_of(hangs, fails, timeout=0.001).dispatch(TOPIC, ENVELOPE)

    assert result.status is DispatchStatus.HANDLER_ERROR
    assert not result.requires_retry()


async def test_those_that_skip_have_no_say_unless_all_do() -> None:
    assert (await engine_of(skips, works).dispatch(TOPIC, ENVELOPE)).is_successful()
    assert (await engine_of(skips, fails).dispatch(TOPIC, ENVELOPE)).status is (
        DispatchStatus.HANDLER_ERROR
    )
    assert (await engine_of(skips, skips).dispatch(TOPIC, ENVELOPE)).status is (
        DispatchStatus.SKIPPED
    )


async def test_a_cancelled_dispatch_ends_its_dispatchers_and_is_counted() -> None:
    ended: list[str] = []

    async def waits(envelope: EventEnvelope[Any]) -> None:
        try:
            await anyio.sleep_forever()
        finally:
            ended.append("waits")

    engine = engine_of(works, waits, waits)
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.dispatch, TOPIC, ENVELOPE)
            await anyio.wait_all_tasks_blocked()
            scope.cancel()

    metrics = engine.get_structured_metrics()
    assert ended == ["waits", "waits"]
    assert metrics.cancelled_dispatches == 1
    assert metrics.total_dispatches == 1
    assert metrics.dispatcher_metrics["works-0"].success_count == 1
    assert metrics.dispatcher_executions == 1


@pytest.mark.asyncio_only("only asyncio lets a cancellation escape from a task of one's own")
async def test_a_stray_cancellation_is_the_dispatchers_own_failure() -> None:
    async def awaits_a_cancelled_task(envelope: EventEnvelope[Any]) -> None:
        task = asyncio.ensure_future(asyncio.sleep(60))
        task.cancel()
        await task

    result = await engine_of(awaits_a_cancelled_task, works).dispatch(TOPIC, ENVELOPE)
    alone = await engine_of(awaits_a_cancelled_task).dispatch(TOPIC, ENVELOPE)

    assert result.status is DispatchStatus.PARTIAL
    assert alone.status is DispatchStatus.HANDLER_ERROR


@pytest.mark.asyncio_only("asyncio has its own way to limit time")
async def test_a_dispatcher_that_ignores_its_time_limit_leaves_no_cancellation_behind() -> None:
    async def stubborn(envelope: EventEnvelope[Any]) -> str:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            return "out.late"
        return "out.never"

    async def translates(envelope: EventEnvelope[Any]) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            raise LookupError from None

    late = await engine_of(stubborn, timeout=0.001).dispatch(TOPIC, ENVELOPE)
    other = await engine_of(translates, timeout=0.001).dispatch(TOPIC, ENVELOPE)

    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    assert late.outputs == ["out.late"]
    assert other.status is DispatchStatus.HANDLER_ERROR


@pytest.mark.asyncio_only("asyncio has its own way to limit time")
async def test_a_cancellation_from_outside_is_no_lack_of_time() -> None:
    engine = engine_of(hangs, timeout=60)
    task = asyncio.ensure_future(engine.dispatch(TOPIC, ENVELOPE))
    await asyncio.sleep(0)
    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task

    assert engine.get_structured_metrics().cancelled_dispatches == 1


def test_the_statuses_say_what_to_do() -> None:
    s = DispatchStatus
    errors = {s.PARTIAL, s.NO_DISPATCHER, s.HANDLER_ERROR, s.TIMEOUT, s.INVALID_MESSAGE}

    assert {status for status in s if status.is_successful()} == {s.SUCCESS}
    assert {status for status in s if status.is_error()} == errors | {s.PUBLISH_FAILED}
    assert {status for status in s if status.requires_retry()} == {s.TIMEOUT, s.PUBLISH_FAILED}
    assert {status for status in s if not status.is_terminal()} == {s.ROUTED}


def test_a_result_counts_its_own_outputs() -> None:
    with pytest.raises(ValueError, match="output_count=2"):
        DispatchResult(status=DispatchStatus.SUCCESS, topic=TOPIC, outputs=["a"], output_count=2)
