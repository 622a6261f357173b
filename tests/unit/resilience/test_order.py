"""The one stated order of everything around a handler, proved by a trace."""

from __future__ import annotations

from typing import Any

import anyio

from msgbus import Event, Middleware
from msgbus.middleware.chain import CallNext
from msgbus.resilience import CircuitBreakerConfig, RateLimit
from tests.unit.resilience.flaky import Charge, Down, Flaky, Shop, quick


def tracing(trace: list[str], name: str) -> Middleware:
    async def middleware(message: Any, call_next: CallNext) -> Any:
        trace.append(name)
        return await call_next(message)

    return middleware


async def test_middleware_per_message_runs_once_and_per_attempt_at_every_attempt() -> None:
    trace: list[str] = []
    shop = Shop(Flaky(2))
    shop.bus.add_middleware(tracing(trace, "attempt"), per="attempt")
    shop.bus.add_middleware(tracing(trace, "message"), per="message")

    await shop.charge(3)

    assert trace == ["message", "attempt", "attempt", "attempt"]


async def test_the_stated_order() -> None:
    """Message, fallback, retry, breaker, bulkhead, rate limit, timeout, attempt, handler.

    Each stage shows where it stands by what it does to the attempts of one command, and to
    the others that wait beside it.
    """
    trace: list[str] = []

    def fall_back(message: Charge, error: Exception) -> None:
        trace.append(f"fallback {type(error).__name__}")

    shop = Shop(
        Flaky(99),
        retry=quick(2),
        breaker=CircuitBreakerConfig(failure_threshold=3, jitter=0),
        timeout=50.0,
        fallback=fall_back,
    )
    shop.bus.add_middleware(tracing(trace, "message"), per="message")
    shop.bus.add_middleware(tracing(trace, "attempt"), per="attempt")
    shop.handler.errors[:] = [Down("a"), Down("b"), Down("c")]

    await shop.charge(3)
    assert trace == ["message", "attempt", "attempt", "attempt", "fallback Down"]
    assert len(shop.handler.calls) == 3
    # Three attempts were three failures: the breaker stands inside of retry.
    assert shop.bus.stats().circuits == {"charge": "open"}

    trace.clear()
    result = await shop.charge()
    # And outside of the attempt's middleware, which an open circuit never reaches.
    assert trace == ["message", "fallback CircuitOpenError"]
    assert result.attempts == 0


async def test_an_open_circuit_takes_no_slot_and_no_token() -> None:
    # Breaker before bulkhead and rate limit: a refused call does not wait.
    shop = Shop(
        breaker=CircuitBreakerConfig(), bulkhead=1, rate_limit=RateLimit(per_second=0.1, burst=1)
    )
    shop.bus.circuit("charge").force_open()
    for _ in range(10):
        assert (await shop.charge()).attempts == 0
    shop.bus.circuit("charge").reset()

    result = await shop.charge()

    assert result.success
    assert result.duration == 0


async def test_a_call_that_waits_for_a_slot_takes_no_token_yet() -> None:
    # Bulkhead before rate limit: one that is cancelled in the bulkhead's line took no token.
    release = anyio.Event()

    async def charge(command: Charge) -> str:
        if command.number == 1:
            await release.wait()
        return "done"

    shop = Shop(charge, bulkhead=1, rate_limit=RateLimit(per_second=0.1, burst=2))
    async with anyio.create_task_group() as group:
        group.start_soon(shop.bus.execute, Charge(number=1))
        await shop.clock.advance(0)
        with shop.clock.cancel_after(0):
            await shop.bus.execute(Charge(number=2))
        release.set()

    result = await shop.charge()

    assert result.success
    assert result.duration == 0


async def test_the_wait_for_a_token_is_no_part_of_the_timeout() -> None:
    # Rate limit before timeout.
    shop = Shop(timeout=1.0, retry=None, rate_limit=RateLimit(per_second=0.1, burst=1))
    assert (await shop.charge()).success

    result = await shop.charge(10)

    assert result.success
    assert result.duration == 10


async def test_the_middleware_per_attempt_is_inside_the_timeout() -> None:
    shop = Shop(timeout=1.0, retry=None)

    async def slow(message: Any, call_next: CallNext) -> Any:
        await anyio.sleep_forever()

    shop.bus.add_middleware(slow, per="attempt")

    result = await shop.charge(1)

    assert not result.success
    assert result.duration == 1.0


async def test_a_pause_between_attempts_holds_no_slot() -> None:
    # Retry before bulkhead: while one waits to be tried again, another may run.
    shop = Shop(Flaky(1), bulkhead=1, retry=quick(1, initial_delay=100))
    async with anyio.create_task_group() as group:
        group.start_soon(shop.bus.execute, Charge())
        await shop.clock.advance(1)
        second = await shop.bus.execute(Charge())
        assert second.success
        assert second.duration == 0
        await shop.clock.advance(100)

    assert len(shop.handler.calls) == 3


async def test_an_event_goes_through_the_same_order() -> None:
    trace: list[str] = []

    class Shipped(Event):
        pass

    shop = Shop()
    shop.bus.add_middleware(tracing(trace, "message"), per="message")
    shop.bus.add_middleware(tracing(trace, "attempt"), per="attempt")
    shop.bus.subscribe(Shipped, Flaky(2), name="flaky")

    async with shop.bus:
        await shop.bus.publish(Shipped())
        await shop.clock.advance(3)
        await shop.bus.settled()

    assert trace == ["message", "attempt", "attempt", "attempt"]
    assert shop.bus.stats().handlers["flaky"].handled == 1
