"""Queues of several strategies behind one event, and publishers that cannot wait."""

from __future__ import annotations

import anyio
import pytest

from msgbus import (
    BackpressureStrategy,
    BusClosedError,
    BusConfig,
    MessageBus,
    PublishReceipt,
    PublishStatus,
    QueueConfig,
    QueueFullError,
)
from tests.fakes import (
    FullLane,
    OrderEvent,
    OrderPlaced,
    OrderShipped,
    Recorder,
    SlowHandler,
    conserves,
    let_others_run,
    queue,
)

WAIT = BackpressureStrategy.WAIT
REJECT_NEW = BackpressureStrategy.REJECT_NEW
DROP_OLDEST = BackpressureStrategy.DROP_OLDEST
ADAPTIVE = BackpressureStrategy.ADAPTIVE_RATE_LIMIT


# -- several lanes ---------------------------------------------------------------------------


async def test_an_event_is_admitted_to_all_its_lanes_or_none() -> None:
    lane = FullLane(1)
    free = Recorder()
    lane.bus.subscribe(OrderPlaced, free, name="free", queue=queue(100))

    async with lane.bus, anyio.create_task_group() as tasks:
        await lane.fill()
        tasks.start_soon(lane.publish, 2)
        await let_others_run()
        assert free.numbers == [0, 1]
        lane.slow.release.set()
        await let_others_run()
        await lane.finish()

    assert free.numbers == [0, 1, 2]
    conserves(lane.bus)


async def test_a_refusing_lane_refuses_even_if_another_would_wait() -> None:
    lane = FullLane(1, WAIT)
    refusing = SlowHandler()
    lane.bus.subscribe(OrderEvent, refusing, name="refusing", queue=queue(1, REJECT_NEW))

    async with lane.bus:
        await lane.fill()
        await let_others_run()
        receipt = await lane.bus.publish(OrderPlaced(number=2))
        refusing.release.set()
        assert await lane.finish() == [0, 1]

    assert receipt.status is PublishStatus.REJECTED
    assert "refusing" in receipt.reason
    assert refusing.ended == [0, 1]
    conserves(lane.bus)


async def test_a_dropping_lane_drops_only_once_the_waiting_lane_has_room() -> None:
    lane = FullLane(1, WAIT)
    dropping = SlowHandler()
    lane.bus.subscribe(OrderPlaced, dropping, name="dropping", queue=queue(1, DROP_OLDEST))
    receipts: list[PublishReceipt] = []

    async def publish(number: int) -> None:
        receipts.append(await lane.bus.publish(OrderPlaced(number=number)))

    async with lane.bus, anyio.create_task_group() as tasks:
        await lane.fill()
        await let_others_run()
        tasks.start_soon(publish, 2)
        await let_others_run()
        assert lane.bus.stats().handlers["dropping"].dropped == 0
        lane.slow.release.set()
        await let_others_run()
        dropping.release.set()
        await lane.bus.settled()

    (receipt,) = receipts
    assert receipt.status is PublishStatus.DROPPED
    assert [one.handler for one in receipt.dropped] == ["dropping"]
    assert lane.slow.ended == [0, 1, 2]
    assert dropping.ended == [0, 2]
    conserves(lane.bus)


@pytest.mark.parametrize("strategy", [REJECT_NEW, DROP_OLDEST])
async def test_a_publish_to_queues_that_never_wait_does_not_wait_for_another_event(
    strategy: BackpressureStrategy,
) -> None:
    lane = FullLane(1, WAIT)
    never_waits = Recorder()
    lane.bus.subscribe(OrderEvent, never_waits, name="never waits", queue=queue(10, strategy))
    shipped: list[PublishReceipt] = []

    async def ship() -> None:
        shipped.append(await lane.bus.publish(OrderShipped(number=3)))

    async with lane.bus, anyio.create_task_group() as tasks:
        await lane.fill()
        tasks.start_soon(lane.publish, 2)
        await let_others_run()
        tasks.start_soon(ship)
        await let_others_run()
        assert len(shipped) == 1
        lane.slow.release.set()
        await let_others_run()
        await lane.finish()

    conserves(lane.bus)


# -- before start, and closed ----------------------------------------------------------------


@pytest.mark.parametrize("strategy", [WAIT, ADAPTIVE])
async def test_before_start_a_full_queue_raises_as_nobody_would_make_room(
    strategy: BackpressureStrategy,
) -> None:
    bus = MessageBus(BusConfig(queue=queue(2, strategy)))
    handler, roomy = Recorder(), Recorder()
    bus.subscribe(OrderPlaced, handler, name="narrow")
    bus.subscribe(OrderPlaced, roomy, name="roomy", queue=queue(100))

    for number in range(2):
        await bus.publish(OrderPlaced(number=number))
    with pytest.raises(QueueFullError, match="not started") as caught:
        await bus.publish(OrderPlaced(number=2))
    assert (caught.value.handler, caught.value.max_size) == ("narrow", 2)
    conserves(bus)
    async with bus:
        await bus.settled()

    assert handler.numbers == roomy.numbers == [0, 1]
    assert bus.stats().events["OrderPlaced"].rejected == 1
    conserves(bus)


@pytest.mark.parametrize("max_overflow", [0, 10])
async def test_before_start_a_dropping_queue_drops_and_a_refusing_one_refuses(
    max_overflow: int,
) -> None:
    bus = MessageBus()
    dropping = Recorder()
    bus.subscribe(
        OrderPlaced,
        dropping,
        queue=QueueConfig(max_size=1, strategy=DROP_OLDEST, max_overflow=max_overflow),
    )
    bus.subscribe(
        OrderShipped,
        Recorder(),
        queue=QueueConfig(max_size=1, strategy=REJECT_NEW, max_overflow=max_overflow),
    )

    for event_type in (OrderPlaced, OrderShipped):
        await bus.publish(event_type(number=0))
    dropped = await bus.publish(OrderPlaced(number=1))
    refused = await bus.publish(OrderShipped(number=1))
    async with bus:
        await bus.settled()

    assert dropped.status is PublishStatus.DROPPED
    assert refused.status is PublishStatus.REJECTED
    assert dropping.numbers == [1]
    conserves(bus)


async def test_a_publish_that_waited_when_the_bus_stopped_is_refused_and_counted() -> None:
    lane = FullLane(1)

    async def publish() -> None:
        with pytest.raises(BusClosedError):
            await lane.publish(2)

    await lane.bus.start()
    await lane.fill()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(publish)
        await let_others_run()
        report = await lane.bus.stop(timeout=0)
        assert report.abandoned == 2

    assert lane.events.rejected == 1
    conserves(lane.bus)
