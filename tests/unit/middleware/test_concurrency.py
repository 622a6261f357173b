"""ConcurrencyLimitMiddleware: excess messages wait in order."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from msgbus import Command, CommandResult, ConfigurationError, Event, MessageBus
from msgbus.middleware import ConcurrencyLimitMiddleware


class Work(Command):
    number: int = 0
    tenant: str = "a"


class Outer(Command[int]):
    children: int = 1
    tenant: str = "a"


class Done(Event):
    tenant: str = "a"


def by_tenant(message: Any) -> str | None:
    tenant: str = message.tenant
    return tenant or None


async def let_all_run() -> None:
    for _ in range(20):
        await checkpoint()


class Shop:
    """A handler that holds every command until it is let go, and counts them."""

    def __init__(self, limit: int, **options: Any) -> None:
        self.middleware = ConcurrencyLimitMiddleware(limit, **options)
        self.bus = MessageBus(middleware=[self.middleware])
        self.began: list[int] = []
        self.running = 0
        self.peak = 0
        self.results: list[CommandResult[None]] = []
        self._go_on: dict[int, anyio.Event] = {}
        self.bus.register_command_handler(Work, self.work)

    async def work(self, command: Work) -> None:
        self.began.append(command.number)
        self.running += 1
        self.peak = max(self.peak, self.running)
        try:
            await self._gate(command.number).wait()
        finally:
            self.running -= 1

    def _gate(self, number: int) -> anyio.Event:
        return self._go_on.setdefault(number, anyio.Event())

    def let_go(self, *numbers: int) -> None:
        for number in numbers:
            self._gate(number).set()

    async def execute(self, command: Work) -> None:
        self.results.append(await self.bus.execute(command))


async def test_no_more_than_the_limit_run_at_once() -> None:
    shop = Shop(2)

    async with anyio.create_task_group() as group:
        for number in range(5):
            group.start_soon(shop.execute, Work(number=number))
        await let_all_run()
        assert shop.running == 2
        shop.let_go(*range(5))

    assert shop.peak == 2
    assert len(shop.results) == 5


async def test_those_who_wait_are_served_in_order_of_arrival() -> None:
    shop = Shop(1)
    shop.let_go(*range(10))

    async with anyio.create_task_group() as group:
        for number in range(10):
            group.start_soon(shop.execute, Work(number=number))
            await checkpoint()

    assert shop.began == sorted(shop.began)
    assert len(shop.began) == 10


async def test_a_free_slot_goes_to_the_first_that_waits() -> None:
    shop = Shop(1)

    async with anyio.create_task_group() as group:
        for number in range(3):
            group.start_soon(shop.execute, Work(number=number))
            await let_all_run()
        shop.let_go(0)
        await let_all_run()
        assert shop.began == [0, 1]
        shop.let_go(1, 2)


async def test_a_failure_releases_the_slot() -> None:
    bus = MessageBus(middleware=[ConcurrencyLimitMiddleware(1)])

    @bus.handles(Work)
    async def fail(command: Work) -> None:
        raise ValueError("no")

    results = [await bus.execute(Work()) for _ in range(3)]

    assert [type(result.exception) for result in results] == [ValueError] * 3


@pytest.mark.parametrize("cancelled", [0, 1, 2], ids=["running", "first waiting", "last waiting"])
async def test_cancelling_one_lets_the_others_move_up(cancelled: int) -> None:
    shop = Shop(1)
    scopes = [anyio.CancelScope() for _ in range(3)]

    async def execute(number: int) -> None:
        with scopes[number]:
            await shop.execute(Work(number=number))

    async with anyio.create_task_group() as group:
        for number in range(3):
            group.start_soon(execute, number)
            await let_all_run()
        scopes[cancelled].cancel()
        await let_all_run()
        shop.let_go(0, 1, 2)

    assert len(shop.results) == 2
    assert shop.peak == 1


async def test_one_cancelled_as_it_gets_its_slot_passes_it_on() -> None:
    shop = Shop(1)
    scope = anyio.CancelScope()

    async def execute_and_cancel() -> None:
        with scope:
            await shop.execute(Work(number=1))

    async with anyio.create_task_group() as group:
        group.start_soon(shop.execute, Work(number=0))
        await let_all_run()
        group.start_soon(execute_and_cancel)
        await let_all_run()
        group.start_soon(shop.execute, Work(number=2))
        await let_all_run()
        shop.let_go(0, 1, 2)
        scope.cancel()

    assert 2 in shop.began
    assert shop.peak == 1


async def test_each_key_has_slots_of_its_own() -> None:
    shop = Shop(1, key=by_tenant)

    async with anyio.create_task_group() as group:
        for number, tenant in enumerate("aabb"):
            group.start_soon(shop.execute, Work(number=number, tenant=tenant))
            await let_all_run()
        assert shop.began == [0, 2]
        shop.let_go(*range(4))

    assert sorted(shop.began) == [0, 1, 2, 3]


async def test_a_key_of_none_is_not_limited() -> None:
    shop = Shop(1, key=by_tenant)

    async with anyio.create_task_group() as group:
        for number in range(3):
            group.start_soon(shop.execute, Work(number=number, tenant=""))
        await let_all_run()
        assert shop.running == 3
        shop.let_go(*range(3))


class Key:
    """A key that can be watched: the limit is the last to hold it."""


def watched_keys() -> tuple[Callable[[Any], Key], list[weakref.ref[Key]]]:
    refs: list[weakref.ref[Key]] = []

    def make(message: Any) -> Key:
        key = Key()
        refs.append(weakref.ref(key))
        return key

    return make, refs


async def test_keys_that_nobody_uses_are_forgotten() -> None:
    make_key, refs = watched_keys()
    shop = Shop(1, key=make_key)
    shop.let_go(0)

    for _ in range(10):
        await shop.execute(Work())
    gc.collect()

    assert [ref() for ref in refs] == [None] * 10


async def test_keys_are_forgotten_after_a_cancelled_call_too() -> None:
    make_key, refs = watched_keys()
    shop = Shop(1, key=make_key)

    async with anyio.create_task_group() as group:
        group.start_soon(shop.execute, Work())
        await let_all_run()
        assert refs[0]() is not None
        group.cancel_scope.cancel()
    gc.collect()

    assert refs[0]() is None


def nest(shop: Shop) -> None:
    """A command whose handler sends `children` others and waits for them."""

    @shop.bus.handles(Outer)
    async def outer(command: Outer) -> int:
        async with anyio.create_task_group() as group:
            for number in range(command.children):
                group.start_soon(shop.execute, Work(number=number, tenant=command.tenant))
        return command.children


async def test_a_nested_command_runs_on_the_slot_of_the_handler_that_waits_for_it() -> None:
    shop = Shop(1)
    nest(shop)
    shop.let_go(0)

    result = await shop.bus.execute(Outer())

    assert result.value == 1


async def test_nested_commands_borrow_that_slot_one_at_a_time() -> None:
    shop = Shop(1)
    nest(shop)
    shop.let_go(*range(5))

    result = await shop.bus.execute(Outer(children=5))

    assert result.value == 5
    assert sorted(shop.began) == [0, 1, 2, 3, 4]
    assert shop.peak == 1


async def test_nested_commands_take_free_slots_too() -> None:
    shop = Shop(3)
    nest(shop)

    async with anyio.create_task_group() as group:
        group.start_soon(shop.bus.execute, Outer(children=5))
        await let_all_run()
        assert shop.running == 3
        shop.let_go(*range(5))

    assert shop.peak == 3


async def test_commands_nested_in_all_slots_at_once_do_not_wait_for_each_other() -> None:
    shop = Shop(2)
    nest(shop)
    shop.let_go(*range(3))
    values: list[int | None] = []

    async def execute() -> None:
        values.append((await shop.bus.execute(Outer(children=3))).value)

    async with anyio.create_task_group() as group:
        for _ in range(4):
            group.start_soon(execute)

    assert values == [3] * 4
    assert shop.peak <= 2


async def test_an_event_handler_on_a_lane_is_limited_too() -> None:
    bus = MessageBus(middleware=[ConcurrencyLimitMiddleware(1)])
    running = 0
    peak = 0

    async def handle(event: Done) -> None:
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        await checkpoint()
        running -= 1

    for name in ("one", "two", "three"):
        bus.register_event_handler(Done, handle, name=name)

    async with bus:
        for _ in range(3):
            await bus.publish(Done())
        await bus.settled()

    assert peak == 1
    assert sum(stats.handled for stats in bus.stats().handlers.values()) == 9


def test_a_limit_below_one_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="limit must be at least 1"):
        ConcurrencyLimitMiddleware(0)
