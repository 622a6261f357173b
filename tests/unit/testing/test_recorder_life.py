"""A recording begins and ends cleanly, whatever the bus is doing."""

from __future__ import annotations

import gc
import weakref

import anyio
import pytest

from msgbus import Event, MessageBus
from msgbus.errors import InsideHandlerError
from msgbus.testing import record
from msgbus.testing.recording.observer import RecordingObserver
from tests.fakes import OrderPlaced, SlowHandler, let_others_run
from tests.unit.testing.shop import (
    ChargeCard,
    PlaceOrder,
    handled,
    handlers,
    ignore,
    kinds,
)


async def test_a_new_bus_is_started_and_stopped() -> None:
    bus = MessageBus()

    async with record(bus):
        running = bus.is_running

    assert running
    assert bus.stats().state == "stopped"


async def test_the_end_of_the_block_waits_for_what_is_queued() -> None:
    bus = MessageBus()
    bus.register_event_handler(OrderPlaced, ignore, concurrency=1)

    async with record(bus) as recorder:
        await recorder.publish_many(OrderPlaced() for _ in range(500))

    assert len(recorder.published()) == 500
    assert len(recorder.handled()) == 500


async def test_a_running_bus_goes_on_running_and_is_itself_again() -> None:
    async with MessageBus(registries=[handlers]) as bus:
        await bus.call(PlaceOrder())
        await bus.settled()
        async with record(bus) as recorder:
            await bus.publish(OrderPlaced(number=2))
            await bus.call(ChargeCard(number=2))
            await bus.settled()
        await bus.publish(OrderPlaced(number=3))
        await bus.call(PlaceOrder(number=3))
        await bus.settled()

        assert bus.is_running
        assert bus.stats().handlers["send_receipt"].handled == 4
    assert recorder.executed() == [ChargeCard(number=2)]
    assert kinds(recorder.published()) == ["OrderPlaced", "CardCharged", "ReceiptSent"]
    assert handled(recorder) == [("ChargeCard", "charge_card"), ("OrderPlaced", "send_receipt")]


async def test_a_stopped_bus_is_started_again_to_be_recorded() -> None:
    async with MessageBus() as bus:
        pass

    async with record(bus) as recorder:
        assert bus.is_running
        await recorder.publish(OrderPlaced(number=7))

    assert not bus.is_running
    recorder.assert_published(OrderPlaced, number=7)


async def test_a_handler_cannot_record_its_own_running_bus() -> None:
    bus = MessageBus()

    @bus.handles(ChargeCard)
    async def charge(command: ChargeCard) -> None:
        async with record(bus):
            pytest.fail("entered")

    async with bus:
        result = await bus.execute(ChargeCard())

    assert isinstance(result.exception, InsideHandlerError)


async def test_recording_a_busy_bus_begins_once_its_handlers_have_finished_their_turn() -> None:
    slow = SlowHandler()
    entered = anyio.Event()

    async def use(bus: MessageBus) -> None:
        async with record(bus) as recorder:
            entered.set()
            await recorder.publish(OrderPlaced(number=3))
            await recorder.settled()
        assert [one.message.number for one in recorder.handled(OrderPlaced)] == [3]

    async with MessageBus() as bus, anyio.create_task_group() as tasks:
        bus.register_event_handler(OrderPlaced, slow)
        await bus.publish_many([OrderPlaced(number=1), OrderPlaced(number=2)])
        await slow.started.wait()
        tasks.start_soon(use, bus)
        await let_others_run()
        assert not entered.is_set()
        slow.release.set()

    assert slow.ended == [1, 2, 3]


async def test_a_paused_handler_does_not_hold_the_recording_up() -> None:
    async with MessageBus() as bus:
        paused = bus.register_event_handler(OrderPlaced, ignore)
        await bus.publish(OrderPlaced(number=1))
        await bus.settled()
        paused.pause()
        await bus.publish(OrderPlaced(number=2))
        await let_others_run()
        async with record(bus) as recorder:
            await recorder.publish(OrderPlaced(number=3))
            paused.resume()
            await recorder.settled()

    assert [event.number for event in recorder.published(OrderPlaced)] == [3]
    assert [one.message.number for one in recorder.handled(OrderPlaced)] == [2, 3]


async def test_a_block_that_raises_does_not_wait_for_handlers_at_work() -> None:
    bus = MessageBus()
    slow = SlowHandler()
    bus.register_event_handler(OrderPlaced, slow, name="slow")

    recording = record(bus)
    recorder = await recording.__aenter__()
    await recorder.publish_many([OrderPlaced(number=1), OrderPlaced(number=2)])
    await slow.started.wait()
    problem = ZeroDivisionError()
    swallowed = await recording.__aexit__(ZeroDivisionError, problem, None)

    assert not swallowed
    assert recorder.causation_tree().splitlines() == [
        "OrderPlaced: cancelled in slow",
        "OrderPlaced: abandoned for slow",
    ]


async def test_two_recordings_of_one_bus_may_overlap_in_any_order() -> None:
    async with MessageBus(registries=[handlers]) as bus:
        one, two = record(bus), record(bus)
        first = await one.__aenter__()
        await bus.publish(OrderPlaced(number=1))
        second = await two.__aenter__()
        await bus.publish(OrderPlaced(number=2))
        await bus.settled()
        await one.__aexit__(None, None, None)
        await bus.publish(OrderPlaced(number=3))
        await bus.settled()
        await two.__aexit__(None, None, None)
        await bus.publish(OrderPlaced(number=4))
        await bus.settled()

    assert [event.number for event in first.published(OrderPlaced)] == [1, 2]
    assert [event.number for event in second.published(OrderPlaced)] == [2, 3]
    assert [one.message.number for one in second.handled(OrderPlaced)] == [2, 3]


async def test_a_method_that_the_test_has_replaced_is_put_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bus = MessageBus()
    original = bus.publish
    sent: list[Event] = []

    async def spy(event: Event, **options: object) -> object:
        sent.append(event)
        return await original(event)

    monkeypatch.setattr(bus, "publish", spy)
    async with bus:
        async with record(bus) as recorder:
            await recorder.publish(OrderPlaced())

        assert bus.publish is spy
    assert recorder.published() == sent == [OrderPlaced()]


async def test_after_the_block_only_the_recorder_holds_what_was_recorded() -> None:
    async with MessageBus(registries=[handlers]) as bus:
        async with record(bus) as recorder:
            await recorder.publish(OrderPlaced())
            await recorder.settled()
        of_recorder = weakref.ref(recorder)
        of_message = weakref.ref(recorder.handled()[0].message)
        del recorder
        # A worker keeps the frame of its last event until the next one.
        await bus.publish(OrderPlaced())
        await bus.settled()
        gc.collect()

        assert of_recorder() is None
        assert of_message() is None
        assert [one for one in gc.get_objects() if isinstance(one, RecordingObserver)] == []
