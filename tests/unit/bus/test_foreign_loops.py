"""A bus belongs to the event loop it was started on; other threads use its portal (19.13)."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from msgbus import (
    BusPortal,
    Command,
    CommandResultEvent,
    Context,
    MessageBus,
    MissingHandlerError,
)
from msgbus.errors import ForeignLoopError
from msgbus.middleware import (
    ConcurrencyLimitMiddleware,
    IdempotencyMiddleware,
    RateLimitMiddleware,
)
from tests.fakes import OrderPlaced, OrderShipped, Recorder, SlowHandler, conserves

pytestmark = pytest.mark.parametrize("library", ["asyncio", "trio"])


class Add(Command[int]):
    number: int = 0


class Ship(Command[None]):
    pass


async def elsewhere(library: str, function: Callable[[], Awaitable[Any]]) -> Any:
    """What `function` gives on an event loop of another thread."""
    return await anyio.to_thread.run_sync(partial(anyio.run, function, backend=library))


async def refused(library: str, *functions: Callable[[], Awaitable[Any]]) -> None:
    async def call() -> None:
        for function in functions:
            with pytest.raises(ForeignLoopError, match=r"portal = bus\.portal\(\)"):
                await function()

    with anyio.fail_after(20):
        await elsewhere(library, call)


async def test_a_publish_from_another_loop_is_refused_before_anything_is_queued(
    library: str,
) -> None:
    first, second = Recorder(), Recorder()
    bus = MessageBus()
    bus.subscribe(OrderPlaced, first)
    bus.subscribe(OrderShipped, first)
    bus.subscribe(OrderShipped, second)
    async with bus:
        event = OrderPlaced(number=1)
        for kind in (OrderPlaced, OrderShipped):
            # New: no worker is there yet. Then: its worker sleeps.
            await refused(library, partial(bus.publish, kind(number=1)))
            await bus.publish(kind(number=2))
            await bus.settled()
            await refused(library, partial(bus.publish, kind(number=1)))
        await refused(
            library,
            lambda: bus.publish(event),
            lambda: bus.publish(OrderPlaced(), headers={"a": "b"}),
            lambda: bus.publish(OrderPlaced(), delay=1),
            lambda: bus.publish_many([OrderPlaced()]),
        )
        await bus.settled()
        assert (first.numbers, second.numbers) == ([2, 2], [2])
        portal = bus.portal()
        await anyio.to_thread.run_sync(lambda: portal.publish(event))
        await bus.settled()
        assert first.numbers == [2, 2, 1]
        conserves(bus)


async def test_all_that_would_wait_for_the_bus_is_refused_on_another_loop(library: str) -> None:
    bus = MessageBus()
    bus.register_command_handler(Add, lambda command: 1, inline=True)
    async with bus:
        subscription = bus.subscribe(OrderPlaced, Recorder())
        await refused(
            library,
            bus.start,
            bus.stop,
            bus.settled,
            bus.session().__aenter__,
            bus.stream(OrderPlaced).__aenter__,
            subscription.close,
            lambda: bus.request(Add()),
            lambda: bus.execute(Add(), timeout=1),
            lambda: bus.publish(OrderPlaced(), wait=True),
            lambda: bus.expect(OrderPlaced),
        )
        assert bus.is_running
        assert await bus.call(Add()) == 1


async def test_an_event_that_a_busy_handler_takes_from_another_loop_is_handled(
    library: str,
) -> None:
    """Whether each is refused or taken is a matter of luck; taken and not handled is none."""
    seen: list[int] = []
    bus = MessageBus()

    @bus.on(OrderPlaced)
    async def note(event: OrderPlaced) -> None:
        seen.append(event.number)

    taken: list[int] = []

    async def send() -> None:
        for number in range(1, 3000):
            try:
                receipt = await bus.publish(OrderPlaced(number=number))
            except ForeignLoopError:
                continue
            if receipt.accepted:
                taken.append(number)

    async with bus:
        async with anyio.create_task_group() as tasks:
            done = anyio.Event()

            async def foreign() -> None:
                await elsewhere(library, send)
                done.set()

            tasks.start_soon(foreign)
            while not done.is_set():
                await bus.publish(OrderPlaced(number=0))
                await anyio.lowlevel.checkpoint()
        with anyio.fail_after(20):
            await bus.settled()
        assert [number for number in seen if number] == taken
        conserves(bus)


async def test_a_full_queue_refuses_another_loop(library: str) -> None:
    slow = SlowHandler()
    bus = MessageBus()
    bus.subscribe(OrderPlaced, slow, queue=None)
    async with bus:
        await bus.publish(OrderPlaced(number=1))
        await slow.started.wait()

        async def fill() -> int:
            for number in range(2, 100_000):
                try:
                    await bus.publish(OrderPlaced(number=number))
                except ForeignLoopError:
                    return number
            raise AssertionError

        with anyio.fail_after(20):
            last = await elsewhere(library, fill)
        slow.release.set()
        await bus.settled()
        assert slow.ended == list(range(1, last))
        conserves(bus)


async def test_a_command_runs_in_its_callers_task_and_may_not_send_from_there(
    library: str,
) -> None:
    bus = MessageBus()
    results: list[CommandResultEvent] = []

    @bus.handles(Add)
    async def add(command: Add) -> int:
        await anyio.lowlevel.checkpoint()
        return command.number + 1

    @bus.handles(Ship)
    async def ship(command: Ship, context: Context) -> None:
        await context.publish(OrderShipped())

    async def call() -> tuple[int, BaseException | None]:
        shipped = await bus.execute(Ship())
        return await bus.call(Add(number=1)), shipped.exception

    async with bus:
        with pytest.raises(ForeignLoopError):
            await elsewhere(library, lambda: bus.execute(Add()))  # not prepared on its own loop
        await bus.call(Add())
        await bus.execute(Ship())
        value, error = await elsewhere(library, call)
        assert value == 2
        assert isinstance(error, ForeignLoopError)

        async def note(event: CommandResultEvent) -> None:
            results.append(event)

        subscription = bus.subscribe(CommandResultEvent, note)
        await bus.call(Add())
        await refused(library, lambda: bus.execute(Add()))
        await bus.settled()
        assert [result.success for result in results] == [True]
        await subscription.close()
        await bus.call(Add())

    async def missing() -> None:
        with pytest.raises(MissingHandlerError):
            await MessageBus().execute(Add())

    await elsewhere(library, missing)


async def test_a_wait_for_all_work_hears_of_a_command_on_another_loop(library: str) -> None:
    bus = MessageBus()
    begun, over = anyio.Event(), anyio.Event()
    portal: list[BusPortal] = []
    go_on = threading.Event()

    @bus.handles(Add)
    async def add(command: Add) -> int:
        if command.number:
            portal[0].wait(tell)
            go_on.wait()  # blocks its own loop alone
        return 1

    async def tell() -> None:
        begun.set()

    async with bus, anyio.create_task_group() as tasks:
        portal.append(bus.portal())
        await bus.call(Add())
        tasks.start_soon(elsewhere, library, lambda: bus.call(Add(number=1)))
        await begun.wait()

        async def settle() -> None:
            await bus.settled()
            over.set()

        tasks.start_soon(settle)
        await anyio.lowlevel.checkpoint()
        assert not over.is_set()
        go_on.set()
        with anyio.fail_after(20):
            await over.wait()


@pytest.mark.parametrize(
    "middleware",
    [ConcurrencyLimitMiddleware(1), RateLimitMiddleware(1000), IdempotencyMiddleware()],
    ids=lambda middleware: type(middleware).__name__,
)
async def test_a_middleware_that_may_wait_refuses_another_loop(
    middleware: Any, library: str
) -> None:
    bus = MessageBus(middleware=[middleware])
    bus.register_command_handler(Add, lambda command: 1, inline=True)
    async with bus:
        assert await bus.call(Add()) == 1
        await refused(library, lambda: bus.call(Add()))


async def test_a_sync_handler_is_refused_on_another_loop(library: str) -> None:
    bus = MessageBus()
    bus.register_command_handler(Add, lambda command: 1)
    async with bus:
        assert await bus.call(Add()) == 1
        await refused(library, lambda: bus.call(Add()))


async def test_before_the_start_and_after_the_stop_any_loop_will_do(library: str) -> None:
    seen = Recorder()
    bus = MessageBus()
    bus.subscribe(OrderPlaced, seen)
    bus.register_command_handler(Add, lambda command: 1)

    async def send() -> int:
        await bus.publish(OrderPlaced(number=1))
        return await bus.call(Add())

    assert await elsewhere(library, send) == 1
    assert await bus.call(Add()) == 1
    async with bus:
        pass

    async def again() -> None:
        async with bus:
            await send()

    await elsewhere(library, again)
    assert seen.numbers == [1, 1]
