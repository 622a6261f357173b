"""A bus's life: start, drain, stop, and being waited for."""

from __future__ import annotations

import functools
import threading

import anyio
import anyio.to_thread
import pytest

from msgbus import (
    BusClosedError,
    BusNotStartedError,
    BusStateError,
    Command,
    Context,
    DrainReport,
    Event,
    InsideHandlerError,
    MessageBus,
    QueueConfig,
    SettleTimeoutError,
)
from msgbus.clock import VirtualClock


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
    with pytest.raises(BusClosedError):
        await bus.start()


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
