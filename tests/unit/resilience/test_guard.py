"""What stands around a handler of a resilient bus: retry, limits, fallback, in one order."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
import tenacity

from msgbus import (
    Command,
    CommandResultEvent,
    CommandStartedEvent,
    Context,
    HandlerTimeoutError,
    MissingHandlerError,
    Refusal,
    RetryScheduledEvent,
    current_context,
)
from msgbus.middleware.chain import CallNext
from msgbus.resilience import CircuitBreakerConfig, RateLimit, RetryAttempt
from tests.fakes import logged
from tests.unit.resilience.flaky import Charge, Down, Flaky, Paid, Shop, fails_with, quick


class OutOfStock(Refusal):
    pass


# -- retry -----------------------------------------------------------------------------------


async def test_a_handler_is_retried_until_it_works() -> None:
    shop = Shop(Flaky(2))

    result = await shop.charge(1 + 2)

    assert result.value == "done"
    assert result.attempts == 3
    assert result.duration == 3.0


async def test_a_handler_that_never_works_fails_with_its_last_error() -> None:
    shop = Shop(Flaky(9))

    result = await shop.charge(1 + 2 + 4)

    fails_with(result, Down)
    assert result.error == "Down: no 3"
    assert result.attempts == 4
    assert shop.bus.stats().commands["charge"].failed == 1
    assert shop.bus.stats().commands["charge"].sent == 1


async def test_without_retry_there_is_one_attempt() -> None:
    shop = Shop(Flaky(9), retry=None)

    result = await shop.charge()

    fails_with(result, Down)
    assert result.attempts == 1


@pytest.mark.parametrize("breaker", [None, CircuitBreakerConfig()])
async def test_hook_log_event_and_sleep_see_the_same_delay(
    breaker: CircuitBreakerConfig | None, caplog: pytest.LogCaptureFixture
) -> None:
    hooked: list[RetryAttempt] = []
    told: list[RetryScheduledEvent] = []
    shop = Shop(Flaky(2), retry=quick(jitter=True, on_retry=hooked.append), breaker=breaker)
    caplog.set_level("INFO", logger="msgbus")
    began = shop.clock.now()

    @shop.bus.on(RetryScheduledEvent)
    async def note(event: RetryScheduledEvent) -> None:
        told.append(event)

    async with shop.bus:
        result = await shop.charge(10)
        await shop.bus.settled()

    delays = [attempt.delay for attempt in hooked]
    assert [attempt.attempt for attempt in hooked] == [1, 2]
    assert [attempt.handler for attempt in hooked] == ["charge", "charge"]
    assert [str(attempt.error) for attempt in hooked] == ["no 0", "no 1"]
    assert [type(attempt.message) for attempt in hooked] == [Charge, Charge]
    assert 0.5 <= delays[0] <= 1.5
    assert 1.0 <= delays[1] <= 3.0
    entries = logged(caplog, "retry_scheduled")
    assert [entry["delay"] for entry in entries] == delays
    assert [entry["attempt"] for entry in entries] == [1, 2]
    assert [event.delay for event in told] == delays
    assert [event.attempt for event in told] == [1, 2]
    assert [event.failed_id for event in told] == [result.command_id] * 2
    assert told[0].error == "Down: no 0"
    assert result.duration == pytest.approx(sum(delays))
    assert shop.clock.now() == began + 10


async def test_a_broken_hook_breaks_no_retry(caplog: pytest.LogCaptureFixture) -> None:
    def hook(attempt: RetryAttempt) -> None:
        raise ValueError(attempt.attempt)

    shop = Shop(Flaky(1), retry=quick(on_retry=hook))

    result = await shop.charge(1)

    assert result.value == "done"
    assert [entry["error"] for entry in logged(caplog, "retry_hook_failed")] == ["ValueError: 1"]


@pytest.mark.parametrize("error", [OutOfStock("none left"), MissingHandlerError(Charge)])
async def test_permanent_errors_are_not_retried(error: Exception) -> None:
    shop = Shop(Flaky(0, error))

    result = await shop.charge()

    assert result.exception is error
    assert result.attempts == 1


async def test_the_callers_deadline_ends_the_retries() -> None:
    shop = Shop(Flaky(9))

    result = await shop.charge(3, timeout=3.0)

    # Attempts at 0 and 1; the next would begin at 3, when nobody waits any more.
    fails_with(result, Down)
    assert result.attempts == 2


async def test_strategies_of_tenacity_work_on_the_bus() -> None:
    retry = quick(stop=tenacity.stop_after_attempt(5), wait=tenacity.wait_fixed(7))
    shop = Shop(Flaky(4), retry=retry)

    result = await shop.charge(28)

    assert result.value == "done"
    assert result.duration == 28


async def test_a_cancelled_command_is_neither_retried_nor_counted_by_the_breaker() -> None:
    shop = Shop(breaker=CircuitBreakerConfig(failure_threshold=1))
    calls: list[int] = []

    class Hang(Command[None]):
        pass

    @shop.bus.handles(Hang)
    async def hang(command: Hang) -> None:
        calls.append(1)
        await anyio.sleep_forever()

    async with anyio.create_task_group() as group:
        group.start_soon(shop.bus.execute, Hang())
        await shop.clock.advance(1)
        group.cancel_scope.cancel()

    assert calls == [1]
    assert shop.bus.circuit("hang").failures == 0
    assert shop.bus.stats().circuits["hang"] == "closed"


async def test_started_and_result_are_told_once_per_command_not_per_attempt() -> None:
    shop = Shop(Flaky(2))
    told: list[str] = []

    @shop.bus.on(CommandStartedEvent)
    async def started(event: CommandStartedEvent) -> None:
        told.append("started")

    @shop.bus.on(CommandResultEvent)
    async def ended(event: CommandResultEvent) -> None:
        told.append(f"success={event.success}")

    async with shop.bus:
        await shop.charge(3)
        await shop.bus.settled()

    assert told == ["started", "success=True"]


# -- attempts and what they emit -------------------------------------------------------------


async def test_the_handler_sees_the_number_of_its_attempt() -> None:
    seen: list[int] = []

    async def charge(command: Charge, context: Context) -> str:
        seen.append(context.attempt)
        if len(seen) < 3:
            raise Down
        return "done"

    result = await Shop(charge).charge(3)

    assert seen == [1, 2, 3]
    assert result.attempts == 3


@pytest.mark.parametrize("breaker", [None, CircuitBreakerConfig()])
async def test_what_a_failed_attempt_emitted_is_forgotten(
    breaker: CircuitBreakerConfig | None,
) -> None:
    paid: list[int] = []

    async def charge(command: Charge, context: Context) -> str:
        context.emit(Paid(number=context.attempt))
        if context.attempt < 3:
            raise Down
        return "done"

    shop = Shop(charge, breaker=breaker)

    @shop.bus.on(Paid)
    async def note(event: Paid) -> None:
        paid.append(event.number)

    async with shop.bus:
        await shop.charge(3)
        await shop.bus.settled()

    assert paid == [3]


async def test_what_a_fallback_covers_for_emits_nothing() -> None:
    paid: list[int] = []

    async def charge(command: Charge, context: Context) -> str:
        context.emit(Paid(number=1))
        raise Down

    shop = Shop(charge, retry=None, fallback="later")

    @shop.bus.on(Paid)
    async def note(event: Paid) -> None:
        paid.append(event.number)

    async with shop.bus:
        result = await shop.charge()
        await shop.bus.settled()

    assert result.value == "later"
    assert paid == []


async def test_what_middleware_per_message_emitted_outlives_a_failed_attempt() -> None:
    paid: list[int] = []

    async def announce(message: Any, call_next: CallNext) -> Any:
        context = current_context()
        if context is not None and isinstance(message, Charge):
            context.emit(Paid(number=100))
        return await call_next(message)

    shop = Shop(Flaky(2))
    shop.bus.add_middleware(announce, per="message")

    @shop.bus.on(Paid)
    async def note(event: Paid) -> None:
        paid.append(event.number)

    async with shop.bus:
        await shop.charge(3)
        await shop.bus.settled()

    assert paid == [100]


# -- limits ----------------------------------------------------------------------------------


async def test_a_timeout_is_per_attempt_and_is_retried() -> None:
    begun: list[float] = []
    shop = Shop(timeout=5.0)

    class Slow(Command[str]):
        pass

    @shop.bus.handles(Slow)
    async def slow(command: Slow) -> str:
        begun.append(shop.clock.now())
        if len(begun) < 3:
            await anyio.sleep_forever()
        return "done"

    started = shop.clock.now()
    async with anyio.create_task_group() as group:
        group.start_soon(shop.bus.execute, Slow())
        await shop.clock.advance(13)

    assert [moment - started for moment in begun] == [0, 6, 13]


async def test_the_handlers_own_timeout_comes_first() -> None:
    shop = Shop(timeout=5.0, retry=None)

    class Slow(Command[str]):
        pass

    async def hang(command: Slow) -> str:
        await anyio.sleep_forever()
        return "never"

    shop.bus.register_command_handler(Slow, hang, timeout=2.0)
    results: list[Any] = []

    async def execute() -> None:
        results.append(await shop.bus.execute(Slow()))

    async with anyio.create_task_group() as group:
        group.start_soon(execute)
        await shop.clock.advance(2)

    fails_with(results[0], HandlerTimeoutError)
    assert results[0].duration == 2.0
    assert "2 s per attempt" in shop.bus.describe(Slow)


async def test_a_bulkhead_bounds_the_calls_at_once() -> None:
    running, most = [0], [0]

    async def charge(command: Charge) -> str:
        running[0] += 1
        most[0] = max(most[0], running[0])
        await shop.clock.sleep(1)
        running[0] -= 1
        return "done"

    shop = Shop(charge, bulkhead=2)

    async with anyio.create_task_group() as group:
        for _ in range(6):
            group.start_soon(shop.bus.execute, Charge())
        await shop.clock.advance(3)

    assert most == [2]
    assert shop.bus.stats().commands["charge"].sent == 6


@pytest.mark.parametrize("limit", [2.0, RateLimit(per_second=2)])
async def test_a_rate_limit_lets_so_many_begin_per_second(limit: float | RateLimit) -> None:
    begun: list[float] = []

    async def charge(command: Charge) -> str:
        begun.append(shop.clock.now())
        return "done"

    shop = Shop(charge, rate_limit=limit)
    started = shop.clock.now()

    async with anyio.create_task_group() as group:
        for _ in range(6):
            group.start_soon(shop.bus.execute, Charge())
        await shop.clock.advance(2)

    assert [moment - started for moment in begun] == [0, 0, 0.5, 1.0, 1.5, 2.0]


async def test_every_attempt_takes_a_token_of_the_rate_limit() -> None:
    shop = Shop(Flaky(2), rate_limit=RateLimit(per_second=0.1, burst=1))

    result = await shop.charge(20)

    assert result.duration == 20
    assert result.attempts == 3
