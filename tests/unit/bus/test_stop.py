"""Stopping a bus: drain, then end what is left, and count all of it."""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio
import anyio.to_thread
import pytest

from msgbus import (
    BusClosedError,
    Command,
    Context,
    DrainReport,
    Event,
    MessageBus,
    QueueConfig,
)
from msgbus.errors import InsideHandlerError
from msgbus.runtime.clock import VirtualClock


class Database:
    pass


class Ask(Command[str]):
    pass


class Happened(Event):
    number: int = 0


async def let_tasks_run() -> None:
    await VirtualClock().advance(0)


async def test_leaving_the_block_drains() -> None:
    bus = MessageBus()
    seen: list[int] = []

    @bus.on(Happened)
    async def slowly(event: Happened) -> None:
        await anyio.lowlevel.checkpoint()
        seen.append(event.number)

    async with bus:
        await bus.publish_many(Happened(number=number) for number in range(100))

    assert seen == list(range(100))


async def test_stop_with_ten_thousand_queued_and_a_deadline_reports_exactly() -> None:
    clock = VirtualClock()
    bus = MessageBus(clock=clock)
    reports: list[DrainReport] = []

    @bus.on(Happened)
    async def slow(event: Happened) -> None:
        await clock.sleep(1)

    await bus.start()
    await bus.publish_many(Happened(number=number) for number in range(10_000))
    async with anyio.create_task_group() as group:

        async def stop() -> None:
            reports.append(await bus.stop(timeout=10.5))

        group.start_soon(stop)
        await clock.advance(11)

    (report,) = reports
    assert report.handled + report.abandoned == 10_000
    assert report.handled == 10
    assert report.persisted == 0
    assert len(report.leftovers) == report.abandoned - 1  # one was being handled
    assert report.leftovers[0].handler == "slow"
    stats = bus.stats()
    assert (stats.total("handled"), stats.total("abandoned"), stats.total("pending")) == (
        10,
        9_990,
        0,
    )


async def test_stop_without_start_hands_back_what_was_published() -> None:
    bus = MessageBus()
    bus.subscribe(Happened, lambda event: None, inline=True)
    await bus.publish(Happened(number=7))

    report = await bus.stop()

    assert report.abandoned == 1
    assert report.leftovers[0].event == Happened(number=7)


async def test_a_second_stop_gives_the_same_report() -> None:
    bus = MessageBus()
    await bus.start()

    first = await bus.stop()

    assert await bus.stop() is first


async def test_two_stops_at_once_both_get_the_report() -> None:
    bus = MessageBus()
    gate = anyio.Event()
    reports: list[DrainReport] = []

    @bus.on(Happened)
    async def wait(event: Happened) -> None:
        await gate.wait()

    await bus.start()
    await bus.publish(Happened())
    async with anyio.create_task_group() as group:

        async def stop() -> None:
            reports.append(await bus.stop())

        group.start_soon(stop)
        group.start_soon(stop)
        await let_tasks_run()
        gate.set()

    assert reports[0] is reports[1]
    assert reports[0].handled == 1


async def test_while_draining_only_handlers_may_send() -> None:
    bus = MessageBus()
    gate = anyio.Event()
    started = anyio.Event()
    seen: list[int] = []

    @bus.handles(Ask)
    async def ask(command: Ask) -> str:
        return "answered"

    @bus.on(Happened)
    async def again(event: Happened, context: Context) -> None:
        seen.append(event.number)
        if event.number == 0:
            started.set()
            await gate.wait()
            assert await context.call(Ask()) == "answered"
            await context.publish(Happened(number=1))

    await bus.start()
    await bus.publish(Happened())
    await started.wait()
    async with anyio.create_task_group() as group:
        group.start_soon(bus.stop)
        await let_tasks_run()
        with pytest.raises(BusClosedError, match="is stopping"):
            await bus.publish(Happened())
        with pytest.raises(BusClosedError, match="is stopping"):
            await bus.execute(Ask())
        gate.set()

    assert seen == [0, 1]
    with pytest.raises(BusClosedError, match="has stopped"):
        await bus.publish(Happened())


async def test_stop_and_settled_inside_a_handler_raise_instead_of_hanging() -> None:
    bus = MessageBus()
    errors: list[type[BaseException]] = []

    @bus.on(Happened)
    async def stop_it(event: Happened) -> None:
        for wait in (bus.stop, bus.settled):
            with pytest.raises(InsideHandlerError) as caught:
                await wait()
            errors.append(caught.type)

    @bus.handles(Ask)
    async def nested(command: Ask) -> str:
        await bus.stop()
        return ""

    async with bus:
        await bus.publish(Happened())
        await bus.settled()
        with pytest.raises(InsideHandlerError):
            await bus.call(Ask())

    assert errors == [InsideHandlerError, InsideHandlerError]


async def test_buses_stop_in_any_order_and_do_not_share_anything() -> None:
    one, other = MessageBus(), MessageBus()
    seen: list[str] = []
    one.subscribe(Happened, lambda event: seen.append("one"), inline=True)
    other.subscribe(Happened, lambda event: seen.append("other"), inline=True)

    await one.start()
    await other.start()
    await one.publish(Happened())
    await other.publish(Happened())
    await one.stop()
    await other.publish(Happened())
    await other.stop()

    assert sorted(seen) == ["one", "other", "other"]


async def test_a_sync_handler_still_running_at_the_deadline_counts_as_abandoned() -> None:
    clock = VirtualClock()
    bus = MessageBus(clock=clock)
    started, release = threading.Event(), threading.Event()

    @bus.on(Happened)
    def block(event: Happened) -> None:
        started.set()
        release.wait(10)

    await bus.start()
    await bus.publish(Happened())
    await anyio.to_thread.run_sync(started.wait)
    reports: list[DrainReport] = []
    async with anyio.create_task_group() as group:

        async def stop() -> None:
            reports.append(await bus.stop(timeout=1))

        group.start_soon(stop)
        await clock.advance(2)
    release.set()

    assert reports[0].abandoned == 1
    assert bus.stats().total("abandoned") == 1


async def test_a_cancelled_program_still_drains() -> None:
    bus = MessageBus()
    seen: list[int] = []

    @bus.on(Happened)
    async def slowly(event: Happened) -> None:
        await anyio.lowlevel.checkpoint()
        seen.append(event.number)

    with anyio.CancelScope() as scope:
        async with bus:
            await bus.publish_many(Happened(number=number) for number in range(10))
            scope.cancel()
            await anyio.sleep_forever()

    assert seen == list(range(10))


async def test_a_publish_that_waits_when_the_bus_stops_is_told() -> None:
    clock = VirtualClock()
    bus = MessageBus(clock=clock)
    errors: list[str] = []

    @bus.on(Happened, queue=QueueConfig(max_size=1))
    async def stuck(event: Happened) -> None:
        await anyio.sleep_forever()

    await bus.start()
    await bus.publish(Happened())
    await clock.advance(0)
    await bus.publish(Happened())
    async with anyio.create_task_group() as group:

        async def wait_for_room() -> None:
            with pytest.raises(BusClosedError, match="stop"):
                await bus.publish(Happened())
            errors.append("told")

        group.start_soon(wait_for_room)
        await clock.advance(0)
        group.start_soon(bus.stop, 1)
        await clock.advance(2)

    assert errors == ["told"]
    counts = bus.stats().events["Happened"]
    assert (counts.published, counts.admitted, counts.rejected) == (3, 2, 1)


async def test_a_stop_that_is_cancelled_ends_the_bus_and_the_next_one_reports_it() -> None:
    closed: list[str] = []

    @asynccontextmanager
    async def open_database() -> AsyncGenerator[Database]:
        yield Database()
        await anyio.lowlevel.checkpoint()
        closed.append("database")

    bus = MessageBus(provide={Database: open_database})

    @bus.on(Happened)
    async def stuck(event: Happened, database: Database) -> None:
        await anyio.sleep_forever()

    await bus.start()
    await bus.publish_many(Happened(number=number) for number in range(3))
    async with anyio.create_task_group() as group:
        group.start_soon(bus.stop, None)
        await let_tasks_run()
        group.cancel_scope.cancel()

    assert closed == ["database"]
    with anyio.fail_after(5):
        report = await bus.stop()
    assert (report.handled, report.abandoned, len(report.leftovers)) == (0, 3, 2)
