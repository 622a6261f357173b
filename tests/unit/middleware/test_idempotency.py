"""IdempotencyMiddleware: each handler handles each key once."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from msgbus import (
    Command,
    CommandResult,
    ConfigurationError,
    Event,
    HandlerRegistry,
    MessageBus,
)
from msgbus.errors import MiddlewareError
from msgbus.middleware import IdempotencyMiddleware
from msgbus.runtime.clock import VirtualClock


class Pay(Command[int]):
    order: str = "o-1"


class Paid(Event):
    order: str = "o-1"


def by_order(message: Any) -> str | None:
    order: str = message.order
    return order or None


class Till:
    """A handler whose first calls wait to be let go, and that says how often it ran."""

    def __init__(self) -> None:
        self.calls = 0
        self.began = anyio.Event()
        self.go_on = anyio.Event()
        self.fail_first = False

    async def __call__(self, command: Pay) -> int:
        self.calls += 1
        number = self.calls
        self.began.set()
        await self.go_on.wait()
        if self.fail_first and number == 1:
            raise ConnectionError("till is closed")
        return number


class Callers:
    """Runs commands at the same time and keeps their results in order of their end."""

    def __init__(self, bus: MessageBus) -> None:
        self._bus = bus
        self.results: list[CommandResult[int]] = []

    async def execute(self, command: Pay) -> None:
        self.results.append(await self._bus.execute(command))

    @property
    def values(self) -> list[int | None]:
        return [result.value for result in self.results]


def till_bus(middleware: IdempotencyMiddleware) -> tuple[MessageBus, Till, Callers]:
    bus = MessageBus(middleware=[middleware])
    till = Till()
    bus.register_command_handler(Pay, till)
    return bus, till, Callers(bus)


async def let_all_run() -> None:
    for _ in range(10):
        await checkpoint()


async def test_the_same_message_is_handled_once_and_answered_twice() -> None:
    bus, till, _ = till_bus(IdempotencyMiddleware())
    till.go_on.set()
    command = Pay()

    first = await bus.execute(command)
    second = await bus.execute(command)

    assert (first.value, second.value) == (1, 1)
    assert till.calls == 1


async def test_equal_messages_are_different_messages() -> None:
    bus, till, _ = till_bus(IdempotencyMiddleware())
    till.go_on.set()

    await bus.execute(Pay())
    await bus.execute(Pay())

    assert till.calls == 2


async def test_a_key_of_ones_own_makes_equal_messages_duplicates() -> None:
    bus, till, _ = till_bus(IdempotencyMiddleware(key=by_order))
    till.go_on.set()

    values = [(await bus.execute(Pay(order=order))).value for order in ("a", "b", "a")]

    assert values == [1, 2, 1]


async def test_a_key_of_none_is_never_a_duplicate() -> None:
    bus, till, _ = till_bus(IdempotencyMiddleware(key=by_order))
    till.go_on.set()
    command = Pay(order="")

    values = [(await bus.execute(command)).value for _ in range(2)]

    assert values == [1, 2]


async def test_a_duplicate_that_comes_meanwhile_waits_and_shares_the_value() -> None:
    _, till, callers = till_bus(IdempotencyMiddleware(key=by_order))

    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(callers.execute, Pay())
        await till.began.wait()
        await let_all_run()
        assert callers.results == []
        till.go_on.set()

    assert callers.values == [1, 1, 1]
    assert till.calls == 1


async def test_another_key_does_not_wait() -> None:
    _, till, callers = till_bus(IdempotencyMiddleware(key=by_order))

    async with anyio.create_task_group() as group:
        group.start_soon(callers.execute, Pay(order="a"))
        group.start_soon(callers.execute, Pay(order="b"))
        await let_all_run()
        assert till.calls == 2
        till.go_on.set()

    assert sorted(callers.values, key=str) == [1, 2]


async def test_a_failure_is_not_remembered() -> None:
    bus, till, _ = till_bus(IdempotencyMiddleware())
    till.fail_first = True
    till.go_on.set()
    command = Pay()

    first = await bus.execute(command)
    second = await bus.execute(command)

    assert isinstance(first.exception, ConnectionError)
    assert second.value == 2


async def test_one_of_those_who_wait_takes_over_when_the_first_fails() -> None:
    _, till, callers = till_bus(IdempotencyMiddleware(key=by_order))
    till.fail_first = True

    async with anyio.create_task_group() as group:
        for _ in range(4):
            group.start_soon(callers.execute, Pay())
        await let_all_run()
        till.go_on.set()

    assert [result.success for result in callers.results].count(False) == 1
    assert [value for value in callers.values if value is not None] == [2, 2, 2]
    assert till.calls == 2


async def test_cancelling_the_first_lets_one_of_those_who_wait_take_over() -> None:
    _, till, callers = till_bus(IdempotencyMiddleware(key=by_order))
    first_scope = anyio.CancelScope()

    async def first() -> None:
        with first_scope:
            await callers.execute(Pay())

    async with anyio.create_task_group() as group:
        group.start_soon(first)
        await till.began.wait()
        group.start_soon(callers.execute, Pay())
        group.start_soon(callers.execute, Pay())
        await let_all_run()
        first_scope.cancel()
        await let_all_run()
        till.go_on.set()

    assert callers.values == [2, 2]


async def test_cancelling_one_who_waits_leaves_the_others_alone() -> None:
    _, till, callers = till_bus(IdempotencyMiddleware(key=by_order))
    waiting_scope = anyio.CancelScope()

    async def waiting() -> None:
        with waiting_scope:
            await callers.execute(Pay())

    async with anyio.create_task_group() as group:
        group.start_soon(callers.execute, Pay())
        await till.began.wait()
        group.start_soon(waiting)
        group.start_soon(callers.execute, Pay())
        await let_all_run()
        waiting_scope.cancel()
        await let_all_run()
        till.go_on.set()

    assert callers.values == [1, 1]
    assert till.calls == 1


async def test_only_so_many_keys_are_remembered() -> None:
    bus, till, _ = till_bus(IdempotencyMiddleware(key=by_order, max_size=2))
    till.go_on.set()

    values = [(await bus.execute(Pay(order=order))).value for order in "abcba"]

    assert values == [1, 2, 3, 2, 4]


async def test_the_key_used_longest_ago_is_forgotten_first() -> None:
    bus, till, _ = till_bus(IdempotencyMiddleware(key=by_order, max_size=2))
    till.go_on.set()

    values = [(await bus.execute(Pay(order=order))).value for order in "abacab"]

    assert values == [1, 2, 1, 3, 1, 4]


async def test_those_who_wait_get_the_value_even_if_it_is_forgotten_at_once() -> None:
    _, till, callers = till_bus(IdempotencyMiddleware(key=by_order, max_size=1))

    async with anyio.create_task_group() as group:
        for order in "aabb":
            group.start_soon(callers.execute, Pay(order=order))
        await let_all_run()
        till.go_on.set()

    assert till.calls == 2
    assert sorted(callers.values, key=str) == [1, 1, 2, 2]


async def test_a_key_is_forgotten_after_its_time() -> None:
    clock = VirtualClock()
    bus = MessageBus(clock=clock, middleware=[IdempotencyMiddleware(ttl=60)])
    till = Till()
    till.go_on.set()
    bus.register_command_handler(Pay, till)
    command = Pay()

    first = await bus.execute(command)
    await clock.advance(59)
    second = await bus.execute(command)
    await clock.advance(1)
    third = await bus.execute(command)

    assert [first.value, second.value, third.value] == [1, 1, 2]


async def test_a_clock_of_its_own_decides_when_a_key_is_forgotten() -> None:
    clock = VirtualClock()
    bus, till, _ = till_bus(IdempotencyMiddleware(ttl=60, clock=clock))
    till.go_on.set()
    command = Pay()

    await bus.execute(command)
    await clock.advance(60)
    await bus.execute(command)

    assert till.calls == 2


async def test_each_handler_of_an_event_handles_it_once() -> None:
    bus = MessageBus(middleware=[IdempotencyMiddleware()])
    handled: list[str] = []

    @bus.on(Paid)
    async def send_receipt(event: Paid) -> None:
        handled.append("receipt")

    @bus.on(Paid)
    async def count(event: Paid) -> None:
        handled.append("count")

    event = Paid()
    async with bus:
        await bus.publish(event)
        await bus.publish(event)
        await bus.settled()

    assert sorted(handled) == ["count", "receipt"]


async def test_two_handlers_of_one_name_are_two_handlers() -> None:
    bus = MessageBus(middleware=[IdempotencyMiddleware()])
    handled: list[str] = []
    for place in ("here", "there"):
        registry = HandlerRegistry()

        @registry.on(Paid)
        async def record(event: Paid, place: str = place) -> None:
            handled.append(place)

        bus.include(registry)

    async with bus:
        await bus.publish(Paid())
        await bus.settled()

    assert sorted(handled) == ["here", "there"]


async def test_a_handler_that_would_wait_for_itself_is_told_so() -> None:
    bus = MessageBus(middleware=[IdempotencyMiddleware(key=by_order)])
    inner: list[CommandResult[int]] = []

    @bus.handles(Pay)
    async def pay_again(command: Pay) -> int:
        inner.append(await bus.execute(Pay()))
        return 1

    outer = await bus.execute(Pay())

    assert outer.value == 1
    assert isinstance(inner[0].exception, MiddlewareError)
    assert "wait for itself" in str(inner[0].exception)


@pytest.mark.parametrize("argument", ["max_size", "ttl"])
def test_sizes_and_times_must_be_above_zero(argument: str) -> None:
    arguments: dict[str, Any] = {argument: 0}

    with pytest.raises(ConfigurationError, match=f"{argument} must be above 0"):
        IdempotencyMiddleware(**arguments)
