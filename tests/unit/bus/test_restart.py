"""A bus that was stopped can be started again, on this event loop or another (19a)."""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
import anyio.to_thread
import pytest
from fastapi import FastAPI, Request
from starlette.testclient import TestClient

from msgbus import (
    BusClosedError,
    CallNext,
    Command,
    ConfigurationError,
    MessageBus,
    SessionClosedError,
    per_message,
    per_session,
)
from msgbus.errors import BusStateError, ForeignLoopError
from msgbus.runtime.clock import VirtualClock
from tests.fakes import OrderEvent, OrderPlaced, Recorder, SlowHandler, conserves, let_others_run

TWO_LOOPS = [("asyncio", "asyncio"), ("trio", "trio"), ("asyncio", "trio"), ("trio", "asyncio")]


class Add(Command[int]):
    number: int = 0


class Pool:
    """A resource that knows whether it is open."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.is_open = True


class Pools:
    """Opens a new pool at each start, and remembers all of them."""

    def __init__(self) -> None:
        self.made: list[Pool] = []

    @asynccontextmanager
    async def open(self) -> AsyncGenerator[Pool]:
        pool = Pool(len(self.made))
        self.made.append(pool)
        yield pool
        pool.is_open = False


def run_on(backend: str, function: Callable[[], Awaitable[Any]]) -> Any:
    return anyio.run(function, backend=backend)


# -- the same again ------------------------------------------------------------------------------


async def test_a_stopped_bus_can_be_started_again() -> None:
    seen = Recorder()
    bus = MessageBus()
    bus.subscribe(OrderPlaced, seen)
    bus.register_command_handler(Add, lambda command: command.number + 1, inline=True)

    for number in range(3):
        async with bus:
            await bus.publish(OrderPlaced(number=number))
            assert await bus.call(Add(number=number)) == number + 1
            assert await bus.request(Add(number=number)) == number + 1
            await bus.settled()
        assert not bus.is_running

    assert seen.numbers == [0, 1, 2]
    assert bus.stats().events["OrderPlaced"].admitted == 3


async def test_between_two_runs_a_bus_is_closed() -> None:
    bus = MessageBus()
    bus.subscribe(OrderPlaced, Recorder())
    bus.register_command_handler(Add, lambda command: 1, inline=True)
    await bus.start()
    portal = bus.portal()
    await bus.stop()

    with pytest.raises(BusClosedError, match="Start it again"):
        await bus.publish(OrderPlaced())
    with pytest.raises(BusClosedError):
        await bus.execute(Add())
    with pytest.raises(BusClosedError):
        await bus.publish_many([OrderPlaced()])
    with pytest.raises(BusClosedError):
        await bus.request(Add())
    with pytest.raises(BusClosedError):
        async with bus.session():
            pytest.fail("entered")
    with pytest.raises(BusClosedError):
        bus.portal()
    with pytest.raises(BusClosedError):
        await anyio.to_thread.run_sync(lambda: portal.call(Add()))
    await bus.settled()


@pytest.mark.parametrize(("first", "second"), TWO_LOOPS)
def test_the_second_run_may_be_on_another_event_loop(first: str, second: str) -> None:
    """Everything that waits somewhere is used in both runs."""
    seen, listed = Recorder(), list[int]()
    threads: list[bool] = []
    pools = Pools()
    bus = MessageBus(provide={Pool: pools.open})
    bus.subscribe(OrderPlaced, seen)

    @bus.on(OrderPlaced, batch=True, priority=-1)
    async def listing(events: list[OrderPlaced], pool: Pool) -> None:
        assert pool.is_open
        listed.extend(event.number for event in events)

    @bus.handles(Add)
    def add(command: Add, pool: Pool) -> int:
        threads.append(threading.current_thread() is not threading.main_thread())
        return command.number + pool.number

    async def run() -> list[Any]:
        async with bus, bus.stream(OrderPlaced) as events, bus.session() as session:
            portal = bus.portal()
            values: list[Any] = [await session.call(Add(number=10))]
            values.append(await anyio.to_thread.run_sync(lambda: portal.call(Add(number=20))))
            values.append(await bus.request(Add(number=30)))
            for number in range(3):
                await bus.publish(OrderPlaced(number=number))
            values += [(await anext(events)).number for _ in range(3)]
            await bus.settled(timeout=10)
            return values

    assert run_on(first, run) == [10, 20, 30, 0, 1, 2]
    assert run_on(second, run) == [11, 21, 31, 0, 1, 2]
    assert seen.numbers == listed == [0, 1, 2, 0, 1, 2]
    assert all(threads)
    assert [pool.is_open for pool in pools.made] == [False, False]


def test_one_application_can_be_tested_twice() -> None:
    """With `lifespan=bus.lifespan`, each client being an event loop in a thread of its own."""
    seen = Recorder()
    bus = MessageBus()
    bus.subscribe(OrderPlaced, seen)
    app = FastAPI(lifespan=bus.lifespan)

    @app.post("/orders/{number}")
    async def order(number: int, request: Request) -> int:
        await request.state.bus.publish(OrderPlaced(number=number))
        return number

    for number in (1, 2):
        with TestClient(app) as client:
            assert client.post(f"/orders/{number}").json() == number

    assert seen.numbers == [1, 2]


async def test_a_portal_of_the_first_run_works_in_the_second() -> None:
    bus = MessageBus()
    bus.register_command_handler(Add, lambda command: 7, inline=True)
    async with bus:
        portal = bus.portal()
    async with bus:
        assert await anyio.to_thread.run_sync(lambda: portal.call(Add())) == 7


# -- nothing is delivered twice ------------------------------------------------------------------


async def test_what_a_stop_has_handed_back_is_not_delivered_by_the_next_run() -> None:
    clock = VirtualClock()
    slow = SlowHandler()
    bus = MessageBus(clock=clock)
    bus.subscribe(OrderPlaced, slow)
    await bus.start()
    for number in range(3):
        await bus.publish(OrderPlaced(number=number))
    await bus.publish(OrderPlaced(number=9), delay=5)
    await slow.started.wait()

    report = await bus.stop(0)

    assert (report.abandoned, len(report.leftovers), len(report.scheduled)) == (3, 2, 1)
    assert await bus.stop() is report
    slow.release.set()
    async with bus:
        await clock.advance(10)
        await bus.publish(OrderPlaced(number=5))
        await bus.settled()
    assert slow.begun == [0, 5]
    assert slow.ended == [5]
    stats = bus.stats()
    [handler] = stats.handlers.values()
    assert (handler.handled, handler.abandoned, handler.queued) == (1, 3, 0)
    conserves(bus)
    assert await bus.stop() is not report


async def test_a_handler_that_does_not_end_leaves_the_next_run_alone() -> None:
    bus = MessageBus()
    release, stuck = anyio.Event(), anyio.Event()
    seen: list[int] = []

    @bus.on(OrderPlaced)
    async def stubborn(event: OrderPlaced) -> None:
        if event.number == 0:
            stuck.set()
            with anyio.CancelScope(shield=True):
                while not release.is_set():
                    with suppress(anyio.get_cancelled_exc_class()):
                        await release.wait()
        seen.append(event.number)

    await bus.start()
    await bus.publish(OrderPlaced(number=0))
    await stuck.wait()
    assert (await bus.stop(0)).abandoned == 1

    async with bus:
        await bus.publish(OrderPlaced(number=1))
        await bus.settled()
        assert seen == [1]
        release.set()
        await let_others_run()
        assert seen == [1, 0]
        await bus.publish(OrderPlaced(number=2))
        await bus.settled()
    assert seen == [1, 0, 2]
    [handler] = bus.stats().handlers.values()
    assert (handler.handled, handler.abandoned) == (2, 1)
    conserves(bus)


async def test_streams_and_sessions_end_with_their_run() -> None:
    bus = MessageBus()
    own = Recorder()
    await bus.start()
    session = await bus.session("job").__aenter__()
    session.subscribe(OrderPlaced, own)
    stream = await bus.stream(OrderPlaced).__aenter__()
    await bus.publish(OrderPlaced(number=1))
    await bus.stop()

    assert dict(bus.sessions) == {}
    async with bus:
        await bus.publish(OrderPlaced(number=2))
        with pytest.raises(SessionClosedError):
            await session.publish(OrderPlaced(number=3))
        async with bus.session("job") as again:
            again.subscribe(OrderPlaced, own)
            await again.publish(OrderPlaced(number=4))
        await bus.settled()
        assert [event.number async for event in stream] == [1]
    assert own.numbers == [4]
    await stream.__aexit__(None, None, None)
    await session.close()


# -- what is opened, and what is built -----------------------------------------------------------


async def test_what_handlers_need_is_opened_anew_at_each_start() -> None:
    pools, scoped = Pools(), Pools()
    bus = MessageBus(
        provide={Pool: pools.open, Recorder: Recorder(), SlowHandler: per_session(scoped.open)}
    )
    seen: list[int] = []

    @bus.on(OrderPlaced)
    async def note(event: OrderPlaced, pool: Pool, recorder: Recorder) -> None:
        assert pool.is_open
        await recorder(event)
        seen.append(pool.number)

    for _ in range(2):
        async with bus:
            await bus.publish(OrderPlaced())

    assert seen == [0, 1]
    assert [pool.is_open for pool in pools.made] == [False, False]


async def test_what_can_be_opened_only_once_says_so_at_the_second_start() -> None:
    pools = Pools()
    bus = MessageBus(provide={Pool: pools.open()})
    async with bus:
        pass

    with pytest.raises(ConfigurationError, match="Pass the function itself: open"):
        await bus.start()
    with pytest.raises(BusClosedError):
        await bus.publish(OrderPlaced())


async def test_handlers_and_middleware_may_change_between_two_runs() -> None:
    bus = MessageBus()
    first, second = Recorder(), Recorder()
    subscription = bus.subscribe(OrderPlaced, first)
    passed: list[OrderEvent] = []

    async def note(message: OrderEvent, call_next: CallNext) -> Any:
        passed.append(message)
        return await call_next(message)

    async with bus:
        await bus.publish(OrderPlaced(number=1))
        with pytest.raises(BusStateError, match="once it has stopped"):
            bus.add_middleware(note)
    await subscription.close()
    bus.subscribe(OrderPlaced, second)
    bus.add_middleware(note)
    async with bus:
        await bus.publish(OrderPlaced(number=2))

    assert (first.numbers, second.numbers) == ([1], [2])
    assert [event.number for event in passed] == [2]


async def test_a_handler_is_not_paused_in_the_next_run() -> None:
    bus = MessageBus()
    seen = Recorder()
    subscription = bus.subscribe(OrderPlaced, seen)
    await bus.start()
    subscription.pause()
    await bus.publish(OrderPlaced(number=1))
    assert (await bus.stop(0)).abandoned == 1
    async with bus:
        await bus.publish(OrderPlaced(number=2))
    subscription.pause()
    subscription.resume()
    async with bus:
        await bus.publish(OrderPlaced(number=3))
    assert seen.numbers == [2, 3]


# -- starts that fail, and calls that meet -------------------------------------------------------


async def test_a_start_that_failed_can_be_tried_again_once_mended() -> None:
    seen = Recorder()
    is_down = True

    @asynccontextmanager
    async def open_pool() -> AsyncGenerator[Pool]:
        if is_down:
            raise OSError("no route")
        yield Pool(0)

    bus = MessageBus(provide={Pool: open_pool})
    bus.subscribe(OrderPlaced, seen)
    bus.register_command_handler(Add, lambda command: 7)
    await bus.publish(OrderPlaced(number=1))
    with pytest.raises(OSError, match="no route"):
        await bus.start()
    await bus.publish(OrderPlaced(number=2))
    # As before, it belongs to no event loop.
    assert await anyio.to_thread.run_sync(lambda: run_on("asyncio", lambda: bus.call(Add()))) == 7
    is_down = False
    async with bus:
        pass
    assert seen.numbers == [1, 2]

    is_down = True
    with pytest.raises(OSError, match="no route"):
        await bus.start()
    with pytest.raises(BusClosedError):
        await bus.publish(OrderPlaced(number=3))
    is_down = False
    async with bus:
        await bus.publish(OrderPlaced(number=4))
    assert seen.numbers == [1, 2, 4]


async def test_a_set_up_with_faults_can_be_mended_and_started() -> None:
    bus = MessageBus()

    @bus.handles(Add)
    async def add(command: Add, pool: Pool) -> int:
        return pool.number

    with pytest.raises(ConfigurationError, match="has no provider"):
        await bus.start()
    bus.register_command_handler(Add, lambda command: 1, inline=True, replace=True)
    async with bus:
        assert await bus.call(Add()) == 1


async def test_a_second_start_waits_for_the_one_under_way() -> None:
    pools = Pools()
    opening, go_on = anyio.Event(), anyio.Event()

    @asynccontextmanager
    async def open_slowly() -> AsyncGenerator[Pool]:
        opening.set()
        await go_on.wait()
        async with pools.open() as pool:
            yield pool

    bus = MessageBus(provide={Pool: open_slowly})
    seen: list[str] = []

    async def start() -> None:
        await bus.start()
        seen.append("started")

    async def stop() -> None:
        await bus.stop()
        seen.append("stopped")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(start)
        await opening.wait()
        tasks.start_soon(start)
        await let_others_run()
        assert seen == []
        go_on.set()
    assert seen == ["started", "started"]
    assert len(pools.made) == 1
    await bus.stop()

    seen.clear()
    opening, go_on = anyio.Event(), anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(start)
        await opening.wait()
        tasks.start_soon(stop)
        await let_others_run()
        go_on.set()
    assert sorted(seen) == ["started", "stopped"]
    assert not bus.is_running
    assert [pool.is_open for pool in pools.made] == [False, False]


async def test_a_bus_that_is_stopping_cannot_be_started() -> None:
    slow = SlowHandler()
    bus = MessageBus()
    bus.subscribe(OrderPlaced, slow)
    await bus.start()
    await bus.publish(OrderPlaced())
    await slow.started.wait()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(bus.stop)
        await let_others_run()
        with pytest.raises(BusClosedError, match="it is stopping"):
            await bus.start()
        slow.release.set()
    async with bus:
        assert bus.is_running


async def test_a_bus_that_was_only_stopped_can_be_started() -> None:
    seen = Recorder()
    bus = MessageBus()
    bus.subscribe(OrderPlaced, seen)
    await bus.publish(OrderPlaced(number=1))
    assert (await bus.stop()).abandoned == 1
    async with bus:
        await bus.publish(OrderPlaced(number=2))
    assert seen.numbers == [2]


@pytest.mark.parametrize("library", ["asyncio", "trio"])
def test_a_bus_whose_event_loop_has_gone_can_be_stopped_and_started(library: str) -> None:
    seen = Recorder()
    pools = Pools()
    bus = MessageBus(provide={Pool: pools.open})
    bus.subscribe(OrderPlaced, seen)

    async def begin() -> None:
        await bus.start()

    async def go_on() -> None:
        with pytest.raises(ForeignLoopError, match="has ended without"):
            await bus.start()
        with pytest.raises(ForeignLoopError, match="has ended without"):
            await bus.publish(OrderPlaced(number=1))
        with pytest.raises(ForeignLoopError, match="has ended without"):
            await bus.settled()
        await bus.stop()
        async with bus:
            await bus.publish(OrderPlaced(number=2))

    run_on(library, begin)
    run_on(library, go_on)

    assert seen.numbers == [2]
    assert len(pools.made) == 2


async def test_per_message_providers_are_made_in_every_run() -> None:
    pools = Pools()
    bus = MessageBus(provide={Pool: per_message(pools.open)})

    @bus.handles(Add)
    async def add(command: Add, pool: Pool) -> int:
        return pool.number

    for number in range(2):
        async with bus:
            assert await bus.call(Add()) == number
