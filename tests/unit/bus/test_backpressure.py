"""Full queues: wait, refuse, drop or slow down, each with exact counts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import anyio
import pytest

from msgbus import (
    BackpressureStrategy,
    BusConfig,
    Event,
    MessageBus,
    PublishStatus,
    PublishSummary,
)
from msgbus.telemetry.prometheus import expose
from tests.fakes import (
    FullLane,
    OrderPlaced,
    Recorder,
    conserves,
    let_others_run,
    queue,
)

WAIT = BackpressureStrategy.WAIT
REJECT_NEW = BackpressureStrategy.REJECT_NEW
DROP_OLDEST = BackpressureStrategy.DROP_OLDEST
ADAPTIVE = BackpressureStrategy.ADAPTIVE_RATE_LIMIT


# -- WAIT ------------------------------------------------------------------------------------


async def test_a_full_queue_makes_the_publisher_wait_for_room() -> None:
    lane = FullLane(2)

    async with lane.bus, anyio.create_task_group() as tasks:
        await lane.fill()
        tasks.start_soon(lane.publish, 3)
        await let_others_run()

        assert lane.admitted == []
        assert lane.handler.queued == 2
        assert lane.handler.backpressure
        conserves(lane.bus)

        lane.slow.release.set()
        await let_others_run()
        assert await lane.finish() == [0, 1, 2, 3]

    assert lane.admitted == [3]
    assert (lane.events.published, lane.events.rejected) == (4, 0)
    assert not lane.handler.backpressure
    conserves(lane.bus)


async def test_waiting_publishers_are_served_in_order_of_arrival() -> None:
    lane = FullLane(1)

    async with lane.bus, anyio.create_task_group() as tasks:
        await lane.fill()
        for number in range(2, 10):
            tasks.start_soon(lane.publish, number)
            await let_others_run()
        lane.slow.release.set()
        while len(lane.admitted) < 8:
            await let_others_run()
        assert await lane.finish() == list(range(10))

    assert lane.admitted == list(range(2, 10))
    conserves(lane.bus)


async def test_a_cancelled_wait_publishes_nothing_and_holds_up_nobody_behind_it() -> None:
    lane = FullLane(1)

    async with lane.bus, anyio.create_task_group() as tasks:
        await lane.fill()
        with anyio.CancelScope() as first_wait:
            async with anyio.create_task_group() as first:
                first.start_soon(lane.publish, 2)
                await let_others_run()
                tasks.start_soon(lane.publish, 3)
                await let_others_run()
                first_wait.cancel()
        lane.slow.release.set()
        await let_others_run()
        assert await lane.finish() == [0, 1, 3]

    assert lane.admitted == [3]
    assert (lane.events.published, lane.events.admitted, lane.events.rejected) == (4, 3, 1)
    conserves(lane.bus)


class PublisherAtItsTurn:
    """Two publishers wait; `at_that_moment` is called when the first has its turn, unrun."""

    def __init__(self) -> None:
        self.bus = MessageBus(BusConfig(queue=queue(1), drain_timeout=0))
        self.bus.subscribe(OrderPlaced, self._handle)
        self.admitted: list[int] = []
        self.handled: list[int] = []
        self.at_that_moment: Callable[[], object] = lambda: None
        self._hanging = anyio.Event()
        self._release = anyio.Event()

    async def _handle(self, event: OrderPlaced) -> None:
        if event.number == 0:
            self._hanging.set()
            await self._release.wait()
        if event.number == 1:
            # Taking this event made room, so publisher 2 has been told; it runs after this.
            self.at_that_moment()
        self.handled.append(event.number)

    async def publish(self, number: int) -> None:
        await self.bus.publish(OrderPlaced(number=number))
        self.admitted.append(number)

    async def run(self, publish_two: Callable[[], Coroutine[Any, Any, None]]) -> None:
        async with self.bus, anyio.create_task_group() as tasks:
            await self.publish(0)
            await self._hanging.wait()
            await self.publish(1)
            tasks.start_soon(publish_two)
            await let_others_run()
            tasks.start_soon(self.publish, 3)
            await let_others_run()
            self._release.set()
            await let_others_run()
            await self.bus.settled()
        conserves(self.bus)


async def test_a_wait_cancelled_in_the_very_step_of_its_turn_is_all_or_nothing() -> None:
    race = PublisherAtItsTurn()
    scope = anyio.CancelScope()
    race.at_that_moment = scope.cancel

    async def publish_two() -> None:
        with scope:
            await race.publish(2)

    await race.run(publish_two)

    # A scope that is cancelled too late lets the wait end: then it must be published.
    assert race.handled == race.admitted
    assert race.admitted[-1] == 3
    assert race.bus.stats().events["OrderPlaced"].published == 4


@pytest.mark.asyncio_only("only asyncio can throw into a task that was already woken")
async def test_a_task_cancelled_in_the_very_step_of_its_turn_publishes_nothing() -> None:
    race = PublisherAtItsTurn()
    tasks: list[asyncio.Task[None]] = []

    async def publish_two() -> None:
        tasks.append(asyncio.create_task(race.publish(2)))
        race.at_that_moment = tasks[0].cancel
        await asyncio.wait(tasks)

    await race.run(publish_two)

    assert tasks[0].cancelled()
    assert race.handled == race.admitted == [0, 1, 3]
    events = race.bus.stats().events["OrderPlaced"]
    assert (events.published, events.admitted, events.rejected) == (4, 3, 1)


async def test_a_publish_never_overtakes_those_who_have_their_turn() -> None:
    race = PublisherAtItsTurn()
    there_is_room = anyio.Event()
    race.at_that_moment = there_is_room.set

    async def publish_two_and_later_four() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(publish_four)
            await race.publish(2)

    async def publish_four() -> None:
        await there_is_room.wait()
        await race.publish(4)

    await race.run(publish_two_and_later_four)

    assert race.handled == race.admitted == [0, 1, 2, 3, 4]


async def test_publish_many_waits_for_room_too() -> None:
    bus = MessageBus(BusConfig(queue=queue(3)))
    handler = Recorder()
    bus.subscribe(OrderPlaced, handler)

    async with bus:
        summary = await bus.publish_many(OrderPlaced(number=number) for number in range(100))
        await bus.settled()

    assert summary == PublishSummary(accepted=100)
    assert handler.numbers == list(range(100))
    conserves(bus)


# -- REJECT_NEW ------------------------------------------------------------------------------


async def test_reject_new_refuses_the_event_for_all_its_handlers() -> None:
    lane = FullLane(2, REJECT_NEW)
    roomy = Recorder()
    lane.bus.subscribe(OrderPlaced, roomy, name="roomy", queue=queue(100))

    async with lane.bus:
        await lane.fill()
        receipts = [await lane.bus.publish(OrderPlaced(number=number)) for number in (3, 4, 5)]
        await let_others_run()
        assert await lane.finish() == [0, 1, 2]

    assert {receipt.status for receipt in receipts} == {PublishStatus.REJECTED}
    assert not any(receipt.accepted for receipt in receipts)
    assert "slow" in receipts[0].reason
    assert "2 events" in receipts[0].reason
    assert roomy.numbers == [0, 1, 2]
    assert (lane.events.published, lane.events.admitted, lane.events.rejected) == (6, 3, 3)
    conserves(lane.bus)


# -- DROP_OLDEST -----------------------------------------------------------------------------


async def test_drop_oldest_names_what_fell_out_and_for_which_handler() -> None:
    lane = FullLane(2, DROP_OLDEST)
    roomy = Recorder()
    lane.bus.subscribe(OrderPlaced, roomy, name="roomy", queue=queue(100))
    dropped: list[tuple[Event, str]] = []

    async with lane.bus:
        await lane.fill()
        for number in (3, 4, 5):
            receipt = await lane.bus.publish(OrderPlaced(number=number))
            assert receipt.status is PublishStatus.DROPPED
            assert receipt.accepted
            assert receipt.handlers == 2
            dropped += [(one.event, one.handler) for one in receipt.dropped]
        await let_others_run()
        conserves(lane.bus)
        assert await lane.finish() == [0, 4, 5]

    assert dropped == [(OrderPlaced(number=number), "slow") for number in (1, 2, 3)]
    assert roomy.numbers == [0, 1, 2, 3, 4, 5]
    assert (lane.events.published, lane.events.admitted) == (6, 6)
    assert (lane.handler.handled, lane.handler.dropped) == (3, 3)
    conserves(lane.bus)


@pytest.mark.parametrize("strategy", [WAIT, REJECT_NEW, DROP_OLDEST])
async def test_receipts_agree_with_the_counters(strategy: BackpressureStrategy) -> None:
    bus = MessageBus(BusConfig(queue=queue(3, strategy)))
    handler = Recorder()
    bus.subscribe(OrderPlaced, handler)

    async with bus:
        summary = await bus.publish_many(
            (OrderPlaced(number=number) for number in range(50)), chunk=7
        )
        await bus.settled()

    events, stats = bus.stats().events["OrderPlaced"], bus.stats().handlers["Recorder"]
    assert summary.published == events.published == 50
    assert summary.accepted == events.admitted
    assert summary.rejected == events.rejected
    assert summary.dropped == stats.dropped
    assert len(handler.numbers) == stats.handled == summary.accepted - summary.dropped
    assert handler.numbers == sorted(handler.numbers)
    conserves(bus)


# -- the gauge ---------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", [REJECT_NEW, DROP_OLDEST])
async def test_a_queue_that_refuses_or_drops_is_under_pressure_while_it_is_full(
    strategy: BackpressureStrategy,
) -> None:
    """Point 13: `backpressure_active` was 0 while events were refused and dropped."""
    lane = FullLane(2, strategy)

    async with lane.bus:
        await lane.bus.publish(OrderPlaced(number=0))
        await lane.slow.started.wait()
        assert not lane.handler.backpressure
        await lane.bus.publish(OrderPlaced(number=1))
        assert not lane.handler.backpressure
        await lane.bus.publish(OrderPlaced(number=2))
        await lane.bus.publish(OrderPlaced(number=3))

        assert lane.handler.backpressure
        assert gauge(lane.bus) == 1.0
        await lane.finish()

    assert not lane.handler.backpressure
    assert gauge(lane.bus) == 0.0


async def test_a_queue_that_handlers_have_filled_beyond_its_bound_is_under_pressure() -> None:
    """Point 13."""
    lane = FullLane(1)
    bus = lane.bus

    @bus.on(Restock)
    async def restock(event: Restock) -> None:
        for number in range(5):
            await bus.publish(OrderPlaced(number=number))

    async with bus:
        await bus.publish(Restock())
        await lane.slow.started.wait()
        assert lane.handler.queued == 4
        assert lane.handler.backpressure
        await lane.finish()

    assert not lane.handler.backpressure


class Restock(Event):
    pass


def gauge(bus: MessageBus) -> float:
    lines = [line for line in expose(bus).splitlines() if line.startswith("msgbus_backpressure")]
    [value] = [float(line.split()[-1]) for line in lines if 'handler="slow"' in line]
    return value
