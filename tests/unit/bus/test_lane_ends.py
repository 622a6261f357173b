"""Lanes that are ended at work: counted once, and nobody is left waiting behind them."""

from __future__ import annotations

import gc
import weakref

import anyio

from msgbus import BusConfig, MessageBus, QueueConfig
from tests.fakes import OrderPlaced, Recorder, conserves, let_others_run


async def test_an_event_that_a_stop_and_the_end_of_its_session_give_up_is_counted_once() -> None:
    bus = MessageBus(BusConfig(session_timeout=0))
    release = anyio.Event()

    async def clean_up_slowly(event: OrderPlaced) -> None:
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await release.wait()

    await bus.start()
    async with anyio.create_task_group() as group:
        async with bus.session() as session:
            session.subscribe(OrderPlaced, clean_up_slowly, name="handler")
            await session.publish(OrderPlaced())
            await let_others_run()
            group.start_soon(bus.stop, 0)
            await let_others_run()
        release.set()

    assert bus.stats().handlers["clean_up_slowly"].abandoned == 1
    conserves(bus)


async def test_events_in_a_lingering_list_that_is_ended_open_the_gate_for_lower_handlers() -> None:
    bus = MessageBus()
    lower = Recorder()

    async def collect(events: list[OrderPlaced]) -> None:
        raise AssertionError("its list never fills")

    higher = bus.subscribe(
        OrderPlaced, collect, batch=True, priority=1, queue=QueueConfig(linger=3600)
    )
    bus.subscribe(OrderPlaced, lower)
    async with bus:
        await bus.publish(OrderPlaced(number=1))
        await let_others_run()
        assert await higher.close(timeout=0) == 1

        await bus.settled(timeout=5)
        assert lower.numbers == [1]
        conserves(bus)


async def test_a_list_handler_that_waits_behind_a_higher_one_ends_with_its_session() -> None:
    bus = MessageBus(BusConfig(session_timeout=0))
    release = anyio.Event()

    async def hold_up(event: OrderPlaced) -> None:
        await release.wait()

    class Handler:
        async def __call__(self, events: list[OrderPlaced]) -> None:
            raise AssertionError("the gate never opens")

    handler = Handler()
    alive = weakref.ref(handler)
    bus.subscribe(OrderPlaced, hold_up, priority=1)
    async with bus:
        async with bus.session() as session:
            session.subscribe(OrderPlaced, handler, batch=True, name="handler")
            await session.publish(OrderPlaced())
            await let_others_run()
        await let_others_run()

        del handler
        gc.collect()
        assert alive() is None
        release.set()
        await bus.settled()
        assert bus.stats().handlers["Handler"].abandoned == 1
        conserves(bus)


async def test_a_worker_that_has_not_begun_when_its_lane_is_ended_goes_home() -> None:
    bus = MessageBus()

    @bus.on(OrderPlaced, concurrency=2)
    async def hang(event: OrderPlaced) -> None:
        await anyio.sleep_forever()

    await bus.start()
    await bus.publish(OrderPlaced())
    await let_others_run()
    await bus.publish(OrderPlaced())
    report = await bus.stop(timeout=0)

    assert report.abandoned == 2
    await bus.settled(timeout=5)
    conserves(bus)
