"""RateLimitMiddleware: token-bucket rate limiting; excess messages wait in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import pytest

from msgbus import (
    Command,
    CommandResult,
    ConfigurationError,
    Event,
    HandlerTimeoutError,
    MessageBus,
)
from msgbus.middleware import RateLimitMiddleware
from msgbus.runtime.clock import VirtualClock


class Call(Command):
    number: int = 0
    tenant: str = "a"


class Called(Event):
    tenant: str = "a"


def by_tenant(message: Any) -> str | None:
    tenant: str = message.tenant
    return tenant or None


class Line:
    """A bus behind a rate limit, and when its commands were handled."""

    def __init__(self, per_second: float, **options: Any) -> None:
        self.clock = VirtualClock()
        self._start = self.clock.now()
        self.middleware = RateLimitMiddleware(per_second, **options)
        self.bus = MessageBus(clock=self.clock, middleware=[self.middleware])
        self.handled: list[tuple[int, float]] = []
        self.results: list[CommandResult[None]] = []

        @self.bus.handles(Call)
        async def handle(command: Call) -> None:
            self.handled.append((command.number, self.seconds))

    @property
    def seconds(self) -> float:
        return round(self.clock.now() - self._start, 3)

    @property
    def numbers(self) -> list[int]:
        return [number for number, _ in self.handled]

    async def execute(self, command: Call, timeout: float | None = None) -> None:
        self.results.append(await self.bus.execute(command, timeout=timeout))

    async def run(self, *commands: Call, seconds: float = 100) -> None:
        """Execute all at once and let time pass."""
        async with anyio.create_task_group() as group:
            for command in commands:
                group.start_soon(self.execute, command)
                await self.clock.advance(0)
            await self.clock.advance(seconds)


async def test_a_burst_passes_at_once_and_the_rest_at_the_rate() -> None:
    line = Line(2, burst=3)

    await line.run(*[Call(number=number) for number in range(6)])

    assert line.handled == [(0, 0.0), (1, 0.0), (2, 0.0), (3, 0.5), (4, 1.0), (5, 1.5)]


async def test_a_burst_is_one_seconds_worth_unless_given() -> None:
    line = Line(3)

    await line.run(*[Call() for _ in range(5)])

    assert [seconds for _, seconds in line.handled] == [0, 0, 0, 0.333, 0.667]


async def test_a_rate_below_one_a_second_still_lets_one_through_at_once() -> None:
    line = Line(0.1)

    await line.run(Call(), Call())

    assert [seconds for _, seconds in line.handled] == [0, 10]


async def test_tokens_come_back_with_time_but_never_more_than_the_burst() -> None:
    line = Line(1, burst=2)

    await line.run(Call(), Call(), seconds=1000)
    await line.run(*[Call() for _ in range(3)])

    assert [seconds for _, seconds in line.handled] == [0, 0, 1000, 1000, 1001]


async def test_those_who_wait_are_served_in_order_of_arrival() -> None:
    line = Line(1, burst=1)

    await line.run(*[Call(number=number) for number in range(20)])

    assert line.numbers == list(range(20))


async def test_a_newcomer_does_not_overtake_the_line() -> None:
    line = Line(1, burst=1)

    async with anyio.create_task_group() as group:
        for number in range(3):
            group.start_soon(line.execute, Call(number=number))
            await line.clock.advance(0.9)
        await line.clock.advance(100)

    assert line.handled == [(0, 0.0), (1, 1.0), (2, 2.0)]


async def test_one_who_needs_few_tokens_does_not_overtake_one_who_waits_for_many() -> None:
    clock = VirtualClock()
    start = clock.now()
    middleware = RateLimitMiddleware(1, burst=3, clock=clock)
    handled: list[tuple[int, float]] = []

    async def record(events: list[Called]) -> None:
        handled.append((len(events), clock.now() - start))

    async def hand_over(count: int) -> None:
        await middleware([Called() for _ in range(count)], record)

    async with anyio.create_task_group() as group:
        for count in (3, 3, 1):
            group.start_soon(hand_over, count)
            await clock.advance(1)
        await clock.advance(100)

    assert handled == [(3, 0.0), (3, 3.0), (1, 4.0)]


@pytest.mark.parametrize("rate", [3, 7, 30, 333, 12_345])
async def test_in_the_long_run_the_rate_is_kept(rate: int) -> None:
    line = Line(rate, burst=1)

    await line.run(*[Call() for _ in range(100)])

    assert len(line.handled) == 100
    assert line.handled[-1][1] == pytest.approx(99 / rate, abs=0.001)


async def cancel_one_that_waits(which: int) -> Line:
    """Four commands at one a second, of which one leaves the line at once."""
    line = Line(1, burst=1)
    scopes = [anyio.CancelScope() for _ in range(4)]

    async def execute(number: int) -> None:
        with scopes[number]:
            await line.execute(Call(number=number))

    async with anyio.create_task_group() as group:
        for number in range(4):
            group.start_soon(execute, number)
            await line.clock.advance(0)
        scopes[which].cancel()
        await line.clock.advance(100)
    return line


@pytest.mark.parametrize("which", [1, 2, 3])
async def test_one_that_is_cancelled_while_it_waits_takes_no_token(which: int) -> None:
    line = await cancel_one_that_waits(which)

    assert [seconds for _, seconds in line.handled] == [0, 1, 2]
    assert line.numbers == [number for number in range(4) if number != which]


async def test_a_failed_call_has_used_its_token() -> None:
    line = Line(1, burst=1)

    @line.bus.handles(Call, replace=True)
    async def fail(command: Call) -> None:
        line.handled.append((command.number, line.seconds))
        raise ValueError("no")

    await line.run(Call(), Call())

    assert [seconds for _, seconds in line.handled] == [0, 1]


async def test_each_key_has_a_rate_of_its_own() -> None:
    line = Line(1, burst=1, key=by_tenant)

    await line.run(
        Call(number=1, tenant="a"),
        Call(number=2, tenant="a"),
        Call(number=3, tenant="b"),
        Call(number=4, tenant="b"),
    )

    assert line.handled == [(1, 0.0), (3, 0.0), (2, 1.0), (4, 1.0)]


async def test_a_key_of_none_is_not_limited() -> None:
    line = Line(1, burst=1, key=by_tenant)

    await line.run(*[Call(tenant="") for _ in range(5)])

    assert [seconds for _, seconds in line.handled] == [0] * 5


async def test_the_key_used_longest_ago_is_forgotten_and_begins_anew() -> None:
    line = Line(0.01, burst=1, key=by_tenant, max_keys=2)

    for number, tenant in enumerate("abca"):
        await line.run(Call(number=number, tenant=tenant), seconds=0)

    assert line.handled == [(0, 0.0), (1, 0.0), (2, 0.0), (3, 0.0)]


async def test_a_key_that_is_used_again_is_kept() -> None:
    line = Line(0.01, burst=2, key=by_tenant, max_keys=2)

    await line.run(
        *[Call(number=number, tenant=tenant) for number, tenant in enumerate("abaca")], seconds=100
    )

    assert line.handled == [(0, 0.0), (1, 0.0), (2, 0.0), (3, 0.0), (4, 100.0)]


async def test_a_key_that_somebody_waits_for_is_never_forgotten() -> None:
    line = Line(1, burst=1, key=by_tenant, max_keys=1)

    await line.run(
        Call(number=1, tenant="a"),
        Call(number=2, tenant="a"),
        Call(number=3, tenant="b"),
        Call(number=4, tenant="a"),
    )

    assert line.handled == [(1, 0.0), (3, 0.0), (2, 1.0), (4, 2.0)]


async def test_a_wait_beyond_the_deadline_fails_at_once() -> None:
    line = Line(1, burst=1)
    failed_at = -1.0

    async with anyio.create_task_group() as group:
        for number in (1, 2):
            group.start_soon(line.execute, Call(number=number))
            await line.clock.advance(0)
        await line.execute(Call(number=3), 1.5)
        failed_at = line.seconds
        await line.clock.advance(10)

    failed = line.results[-2]
    assert isinstance(failed.exception, HandlerTimeoutError)
    assert "rate limit" in failed.exception.__notes__[0]
    assert failed_at == 0
    assert line.numbers == [1, 2]


async def test_a_wait_within_the_deadline_is_waited_for() -> None:
    line = Line(1, burst=1)

    async with anyio.create_task_group() as group:
        group.start_soon(line.execute, Call(number=1))
        await line.clock.advance(0)
        group.start_soon(line.execute, Call(number=2), 1.5)
        await line.clock.advance(10)

    assert line.handled == [(1, 0.0), (2, 1.0)]


async def test_a_clock_of_its_own_decides_the_pace() -> None:
    clock = VirtualClock()
    bus = MessageBus(middleware=[RateLimitMiddleware(1, burst=1, clock=clock)])
    handled: list[float] = []

    @bus.handles(Call)
    async def handle(command: Call) -> None:
        handled.append(clock.now())

    async with anyio.create_task_group() as group:
        group.start_soon(bus.execute, Call())
        group.start_soon(bus.execute, Call())
        await clock.advance(1)

    assert handled[1] - handled[0] == 1


async def lists_of(count: int, options: dict[str, Any], tenant: Callable[[int], str]) -> list[Any]:
    """When a batch handler got its lists, of which the first has `count` events."""
    clock = VirtualClock()
    start = clock.now()
    bus = MessageBus(clock=clock, middleware=[RateLimitMiddleware(1, **options)])
    handled: list[tuple[int, float]] = []

    @bus.on(Called, batch=True)
    async def record(events: list[Called]) -> None:
        handled.append((len(events), clock.now() - start))

    for number in range(count):
        await bus.publish(Called(tenant=tenant(number)))
    async with bus:
        await clock.advance(0)
        await bus.publish(Called())
        await clock.advance(100)
        await bus.settled()
    return handled


async def test_a_list_takes_a_token_for_each_event() -> None:
    assert await lists_of(3, {"burst": 3}, lambda _: "a") == [(3, 0.0), (1, 1.0)]


async def test_a_list_larger_than_the_burst_leaves_a_debt() -> None:
    assert await lists_of(5, {"burst": 2}, lambda _: "a") == [(5, 0.0), (1, 4.0)]


async def test_a_list_takes_tokens_of_each_key_in_it() -> None:
    options = {"burst": 2, "key": by_tenant}

    handled = await lists_of(4, options, lambda number: "ab"[number % 2])

    assert handled == [(4, 0.0), (1, 1.0)]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"per_second": 0}, "per_second must be above 0"),
        ({"per_second": 1, "max_keys": 0}, "max_keys must be above 0"),
        ({"per_second": 1, "burst": 0.5}, "burst must be at least 1"),
    ],
    ids=["per_second", "max_keys", "burst"],
)
def test_numbers_that_are_too_small_are_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        RateLimitMiddleware(**arguments)
