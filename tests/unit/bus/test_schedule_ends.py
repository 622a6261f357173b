"""Delayed events that are never published: handed back at stop, or refused and told about."""

from __future__ import annotations

import anyio
import pytest

from msgbus import (
    BackpressureStrategy,
    BusClosedError,
    DrainReport,
    Event,
    EventRefusedEvent,
    MessageBus,
    QueueConfig,
)
from msgbus.runtime.clock import VirtualClock
from tests.fakes import (
    Calendar,
    OrderPlaced,
    OrderShipped,
    Recorder,
    SlowHandler,
    conserves,
    let_others_run,
    logged,
)

REJECT_NEW = BackpressureStrategy.REJECT_NEW


# -- at stop -----------------------------------------------------------------------------------


async def test_stop_hands_back_what_was_not_due_in_order_of_time() -> None:
    calendar = Calendar()
    await calendar.bus.start()
    for number in (3, 1, 2):
        await calendar.bus.publish(OrderPlaced(number=number), delay=number)
    cancelled = await calendar.bus.publish(OrderPlaced(number=4), delay=4)
    assert cancelled.cancel is not None
    cancelled.cancel()
    await calendar.clock.advance(1)

    report = await calendar.bus.stop()

    assert report.scheduled == (OrderPlaced(number=2), OrderPlaced(number=3))
    assert calendar.seen.numbers == [1]
    await calendar.clock.advance(10)
    assert calendar.seen.numbers == [1]
    assert calendar.bus.stats().scheduled == 0


async def test_an_event_that_was_handed_back_cannot_be_taken_back_as_well() -> None:
    calendar = Calendar()
    async with calendar.bus as bus:
        receipt = await bus.publish(OrderPlaced(), delay=5)

    assert receipt.cancel is not None
    assert receipt.cancel() is False
    assert calendar.bus.stats().scheduled == 0


async def test_an_event_that_a_handler_delays_while_the_bus_drains_is_not_lost() -> None:
    calendar = Calendar()
    release = anyio.Event()
    refused: list[BusClosedError] = []
    reports: list[DrainReport] = []

    @calendar.bus.on(OrderShipped)
    async def remind(event: OrderShipped) -> None:
        await release.wait()
        try:
            await calendar.bus.publish(OrderPlaced(number=1), delay=60)
        except BusClosedError as error:
            refused.append(error)

    async def stop() -> None:
        reports.append(await calendar.bus.stop())

    await calendar.bus.start()
    await calendar.bus.publish(OrderShipped())
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(stop)
        await let_others_run()
        release.set()

    handed_back = reports[0].scheduled == (OrderPlaced(number=1),)
    assert handed_back != bool(refused), "it must be either refused or handed back"
    assert calendar.bus.stats().scheduled == 0


async def test_stop_hands_back_an_event_that_is_held_up_in_a_filter() -> None:
    clock = VirtualClock()
    asked = anyio.Event()

    async def never_answer(event: Event) -> bool:
        asked.set()
        await anyio.sleep_forever()
        return True

    bus = MessageBus(clock=clock, filters=[never_answer])
    bus.subscribe(OrderPlaced, Recorder())
    await bus.start()
    await bus.publish(OrderPlaced(number=1), delay=1)
    await clock.advance(1)
    await asked.wait()

    report = await bus.stop()

    assert report.scheduled == (OrderPlaced(number=1),)
    conserves(bus)


# -- refused -----------------------------------------------------------------------------------


class Refusals:
    """A bus on virtual time that notes which delayed events were refused."""

    def __init__(self, bus: MessageBus) -> None:
        self.events: list[EventRefusedEvent] = []
        bus.subscribe(EventRefusedEvent, self._note)

    async def _note(self, event: EventRefusedEvent) -> None:
        self.events.append(event)


@pytest.mark.parametrize(
    "config",
    [QueueConfig(max_size=1, strategy=REJECT_NEW), QueueConfig(max_size=1, max_overflow=0)],
    ids=["refusing", "overflow used up"],
)
async def test_a_due_event_that_does_not_fit_is_told_about(
    config: QueueConfig, caplog: pytest.LogCaptureFixture
) -> None:
    clock = VirtualClock()
    bus = MessageBus(clock=clock)
    slow, refusals = SlowHandler(), Refusals(bus)
    bus.subscribe(OrderPlaced, slow, name="slow", queue=config)
    late = OrderPlaced(number=2)

    async with bus:
        await bus.publish(OrderPlaced(number=0))
        await slow.started.wait()
        await bus.publish(OrderPlaced(number=1))
        await bus.publish(late, delay=5)
        await clock.advance(5)
        slow.release.set()
        await bus.settled()

    (refusal,) = refusals.events
    assert refusal.event_id == late.message_id
    assert refusal.event_type == "OrderPlaced"
    assert "slow" in refusal.reason
    (entry,) = logged(caplog, "delayed_event_refused")
    assert entry["message_id"] == late.message_id
    assert slow.ended == [0, 1]
    assert bus.stats().events["OrderPlaced"].rejected == 1
    conserves(bus)


async def test_a_due_event_whose_filter_raises_is_told_about_and_later_ones_still_come(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def raise_on_one(event: Event) -> bool:
        if event == OrderPlaced(number=1):
            raise LookupError("no such order")
        return event != OrderPlaced(number=2)

    clock = VirtualClock()
    bus = MessageBus(clock=clock, filters=[raise_on_one])
    seen, refusals = Recorder(), Refusals(bus)
    bus.subscribe(OrderPlaced, seen)

    async with bus:
        for number in (1, 2, 3):
            await bus.publish(OrderPlaced(number=number), delay=number)
        await clock.advance(5)
        await bus.settled()

    assert seen.numbers == [3]
    assert [refusal.reason for refusal in refusals.events] == ["LookupError: no such order"]
    assert len(logged(caplog, "delayed_event_refused")) == 1
    events = bus.stats().events["OrderPlaced"]
    assert (events.admitted, events.filtered, events.rejected) == (1, 1, 1)
    conserves(bus)
