"""A bus's life: start, being waited for, and other threads."""

from __future__ import annotations

import functools

import anyio
import anyio.to_thread
import pytest

from msgbus import Command, Context, Event, MessageBus, SettleTimeoutError
from msgbus.errors import BusNotStartedError, BusStateError
from msgbus.runtime.clock import VirtualClock


class Ask(Command[str]):
    pass


class Happened(Event):
    number: int = 0


async def let_tasks_run() -> None:
    await VirtualClock().advance(0)


async def test_events_published_before_start_are_delivered() -> None:
    bus = MessageBus()
    seen: list[int] = []
    bus.subscribe(Happened, lambda event: seen.append(event.number), inline=True)

    for number in range(3):
        await bus.publish(Happened(number=number))
    async with bus:
        await bus.settled()
        assert seen == [0, 1, 2]


async def test_settled_names_what_still_runs() -> None:
    clock = VirtualClock()
    bus = MessageBus(clock=clock)
    gate = anyio.Event()

    @bus.on(Happened)
    async def stuck(event: Happened) -> None:
        await gate.wait()

    async with bus:
        await bus.publish(Happened())
        await bus.publish(Happened())
        async with anyio.create_task_group() as group:

            async def wait() -> None:
                with pytest.raises(SettleTimeoutError, match=r"stuck \(1 queued, 1 running\)"):
                    await bus.settled(timeout=3)

            group.start_soon(wait)
            await clock.advance(4)
        gate.set()


async def test_settled_waits_for_running_commands_and_what_they_publish() -> None:
    bus = MessageBus()
    gate = anyio.Event()
    started = anyio.Event()
    seen: list[str] = []

    @bus.handles(Ask)
    async def ask(command: Ask, context: Context) -> str:
        started.set()
        await gate.wait()
        context.emit(Happened())
        return ""

    @bus.on(Happened)
    async def happened(event: Happened) -> None:
        seen.append("happened")

    async with bus, anyio.create_task_group() as group:
        group.start_soon(functools.partial(bus.execute, Ask()))
        await started.wait()

        async def settle() -> None:
            await bus.settled()
            seen.append("settled")

        group.start_soon(settle)
        await let_tasks_run()
        gate.set()

    assert seen == ["happened", "settled"]


async def test_settled_before_start_with_queued_events_says_so() -> None:
    bus = MessageBus()
    bus.subscribe(Happened, lambda event: None, inline=True)
    await bus.settled()
    await bus.publish(Happened())

    with pytest.raises(BusNotStartedError):
        await bus.settled()
    await bus.stop()


async def test_starting_twice_does_no_harm() -> None:
    bus = MessageBus()
    await bus.start()
    await bus.start()
    assert bus.is_running
    await bus.stop()
    assert not bus.is_running


async def test_lifespan_runs_the_bus_around_an_application() -> None:
    bus = MessageBus()
    async with bus.lifespan(object()) as state:
        assert state == {"bus": bus}
        assert bus.is_running
    assert not bus.is_running


async def test_the_portal_serves_other_threads() -> None:
    bus = MessageBus()
    seen: list[int] = []
    bus.subscribe(Happened, lambda event: seen.append(event.number), inline=True)

    @bus.handles(Ask)
    async def ask(command: Ask) -> str:
        return "answered"

    def in_thread() -> list[str]:
        portal = bus.portal()
        receipt = portal.publish(Happened(number=5))
        assert receipt.accepted
        return [portal.call(Ask()), portal.execute(Ask()).unwrap()]

    with pytest.raises(BusNotStartedError):
        bus.portal()
    async with bus:
        assert await anyio.to_thread.run_sync(in_thread) == ["answered", "answered"]
        with pytest.raises(BusStateError, match="own thread"):
            bus.portal().publish(Happened())
        await bus.settled()

    assert seen == [5]


async def test_ten_threads_publish_a_hundred_events_each_and_all_arrive() -> None:
    bus = MessageBus()
    seen: list[int] = []
    bus.subscribe(Happened, lambda event: seen.append(event.number), inline=True)

    def publish(portal: object) -> None:
        for number in range(100):
            bus.portal().publish(Happened(number=number))

    async with bus:
        async with anyio.create_task_group() as group:
            for _ in range(10):
                group.start_soon(anyio.to_thread.run_sync, publish, None)
        await bus.settled()

    assert sorted(seen) == sorted(list(range(100)) * 10)
