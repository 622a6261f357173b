"""Sync handlers that call sync handlers through the portal: the pool is never exhausted."""

from __future__ import annotations

import threading

import anyio
import anyio.to_thread
import pytest

from msgbus import BusConfig, Command, CommandResult, HandlerTimeoutError, MessageBus
from msgbus.errors import MessageDepthError
from tests.fakes import let_others_run


class Outer(Command[str]):
    number: int = 0


class Middle(Command[str]):
    number: int = 0


class Inner(Command[str]):
    number: int = 0


def small_bus(threads: int = 1) -> MessageBus:
    return MessageBus(BusConfig(max_threads=threads))


async def test_a_sync_handler_calls_another_with_one_thread_in_all() -> None:
    """Point 11: it does so in its own thread, which is waiting."""
    bus = small_bus()
    threads: list[int] = []

    @bus.handles(Outer)
    def outer(command: Outer) -> str:
        threads.append(threading.get_ident())
        return f"outer of {bus.portal().call(Inner())}"

    @bus.handles(Inner)
    def inner(command: Inner) -> str:
        threads.append(threading.get_ident())
        return "inner"

    async with bus:
        with anyio.fail_after(10):
            assert await bus.call(Outer()) == "outer of inner"

    assert len(threads) == 2
    assert len(set(threads)) == 1
    assert threading.get_ident() not in threads


async def test_many_nested_calls_at_once_need_no_more_threads_than_there_are() -> None:
    """Point 11: three levels, ten callers, two threads."""
    bus = small_bus(2)
    threads: set[int] = set()

    @bus.handles(Outer)
    def outer(command: Outer) -> str:
        threads.add(threading.get_ident())
        return f"outer {bus.portal().call(Middle(number=command.number))}"

    @bus.handles(Middle)
    def middle(command: Middle) -> str:
        threads.add(threading.get_ident())
        return f"middle {bus.portal().call(Inner(number=command.number))}"

    @bus.handles(Inner)
    def inner(command: Inner) -> str:
        threads.add(threading.get_ident())
        return f"inner {command.number}"

    answers: dict[int, str] = {}

    async def ask(number: int) -> None:
        answers[number] = await bus.call(Outer(number=number))

    async with bus:
        with anyio.fail_after(20):
            async with anyio.create_task_group() as group:
                for number in range(10):
                    group.start_soon(ask, number)

    assert answers == {number: f"outer middle inner {number}" for number in range(10)}
    assert len(bus.stats().commands) == 3


async def test_an_async_handler_between_two_sync_ones_changes_nothing() -> None:
    """Point 11: also where it calls several at once."""
    bus = small_bus()
    threads: set[int] = set()

    @bus.handles(Outer)
    def outer(command: Outer) -> str:
        threads.add(threading.get_ident())
        return bus.portal().call(Middle())

    @bus.handles(Middle)
    async def middle(command: Middle) -> str:
        answers: list[str] = []

        async def ask(number: int) -> None:
            answers.append(await bus.call(Inner(number=number)))

        async with anyio.create_task_group() as group:
            for number in range(5):
                group.start_soon(ask, number)
        return " ".join(sorted(answers))

    @bus.handles(Inner)
    def inner(command: Inner) -> str:
        threads.add(threading.get_ident())
        return str(command.number)

    async with bus:
        with anyio.fail_after(10):
            assert await bus.call(Outer()) == "0 1 2 3 4"

    assert len(threads) == 1


async def test_a_nested_call_takes_a_thread_of_its_own_while_there_is_one() -> None:
    """Point 11: so that its caller hears of a time-out when it is time."""
    bus = small_bus(2)
    threads: list[int] = []
    release = threading.Event()

    @bus.handles(Outer)
    def outer(command: Outer) -> str:
        threads.append(threading.get_ident())
        try:
            return bus.portal().call(Inner(), timeout=0.05)
        except HandlerTimeoutError:
            return "too late"
        finally:
            release.set()

    @bus.handles(Inner)
    def inner(command: Inner) -> str:
        threads.append(threading.get_ident())
        release.wait(10)
        return "inner"

    async with bus:
        with anyio.fail_after(10):
            assert await bus.call(Outer()) == "too late"

    assert len(set(threads)) == 2


async def test_errors_of_nested_handlers_reach_their_callers() -> None:
    """Point 11: as of any other call."""
    bus = small_bus()

    @bus.handles(Outer)
    def outer(command: Outer) -> str:
        with pytest.raises(LookupError, match="no such thing"):
            bus.portal().call(Inner())
        return "survived"

    @bus.handles(Inner)
    def inner(command: Inner) -> str:
        raise LookupError("no such thing")

    async with bus:
        with anyio.fail_after(10):
            assert await bus.call(Outer()) == "survived"


async def test_a_nested_call_whose_time_is_over_before_it_begins_is_not_made() -> None:
    """Point 11: the one thread is busy with another call until then."""
    bus = small_bus()
    began: list[int] = []
    timed_out = threading.Event()
    results: list[CommandResult[str]] = []

    @bus.handles(Outer)
    def outer(command: Outer) -> str:
        return bus.portal().call(Middle())

    @bus.handles(Middle)
    async def middle(command: Middle) -> str:
        async def late() -> None:
            results.append(await bus.execute(Inner(number=2), timeout=0.05))
            timed_out.set()

        async with anyio.create_task_group() as group:
            group.start_soon(bus.call, Inner(number=1))
            await let_others_run()
            group.start_soon(late)
        return "done"

    @bus.handles(Inner)
    def inner(command: Inner) -> str:
        began.append(command.number)
        if command.number == 1:
            timed_out.wait(10)
        return "inner"

    async with bus:
        with anyio.fail_after(20):
            assert await bus.call(Outer()) == "done"

    assert began == [1]
    assert isinstance(results[0].exception, HandlerTimeoutError)


async def test_sync_handlers_that_call_each_other_without_end_get_a_clear_error() -> None:
    """Points 10 and 11: they neither hang nor take more and more threads."""
    bus = small_bus(3)
    threads: set[int] = set()

    @bus.handles(Outer)
    def outer(command: Outer) -> str:
        threads.add(threading.get_ident())
        return bus.portal().call(Inner())

    @bus.handles(Inner)
    def inner(command: Inner) -> str:
        threads.add(threading.get_ident())
        return bus.portal().call(Outer())

    async with bus:
        with anyio.fail_after(60):
            result = await bus.execute(Outer())

    assert isinstance(result.exception, MessageDepthError)
    assert len(threads) <= 3


async def test_what_outlives_the_call_that_began_it_goes_to_the_pool() -> None:
    """Point 11: the thread that waited for it waits no more."""
    bus = small_bus()
    go_on, done = anyio.Event(), anyio.Event()

    async def later() -> None:
        await go_on.wait()
        assert await bus.call(Inner()) == "inner"
        done.set()

    @bus.handles(Outer)
    def outer(command: Outer) -> str:
        return bus.portal().call(Middle())

    @bus.handles(Middle)
    async def middle(command: Middle) -> str:
        group.start_soon(later)
        return "middle"

    @bus.handles(Inner)
    def inner(command: Inner) -> str:
        return "inner"

    async with bus, anyio.create_task_group() as group:
        with anyio.fail_after(10):
            assert await bus.call(Outer()) == "middle"
            go_on.set()
            await done.wait()


async def test_a_thread_from_outside_is_given_no_work() -> None:
    """Point 11: only threads of sync handlers hold places in the pool."""
    bus = small_bus()
    release = threading.Event()
    threads: list[int] = []

    @bus.handles(Inner)
    def inner(command: Inner) -> str:
        threads.append(threading.get_ident())
        release.wait(10)
        return "inner"

    outside: list[int] = []

    def call() -> str:
        outside.append(threading.get_ident())
        return bus.portal().call(Inner())

    async def hold() -> None:
        await bus.call(Inner())

    async with bus:
        with anyio.fail_after(10):
            async with anyio.create_task_group() as group:
                group.start_soon(hold)
                await let_others_run()

                async def from_outside() -> None:
                    await anyio.to_thread.run_sync(call)

                group.start_soon(from_outside)
                await let_others_run()
                release.set()

    assert len(threads) == 2
    assert outside[0] not in threads
