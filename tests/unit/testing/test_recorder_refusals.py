"""A recorder tells events that were turned away or are not due from published ones."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import anyio
import pytest

from msgbus import (
    BackpressureStrategy,
    BusConfig,
    Context,
    MessageBus,
    PublishStatus,
    QueueConfig,
    TypeFilter,
)
from msgbus.errors import WrongMessageTypeError
from msgbus.testing import VirtualClock, record
from tests.fakes import OrderEvent, OrderPlaced, SlowHandler, let_others_run
from tests.unit.testing.shop import (
    CardCharged,
    PlaceOrder,
    ReceiptSent,
    handlers,
    ignore,
)


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


async def test_the_status_tells_which_events_were_turned_away() -> None:
    bus = MessageBus(filters=[~TypeFilter(CardCharged)])
    slow = SlowHandler()
    bus.register_event_handler(
        OrderPlaced,
        slow,
        queue=QueueConfig(max_size=1, strategy=BackpressureStrategy.REJECT_NEW),
    )

    async with record(bus) as recorder:
        await recorder.publish(OrderPlaced(number=1))
        await slow.started.wait()
        await recorder.publish(OrderPlaced(number=2))
        await recorder.publish(OrderPlaced(number=3))
        await recorder.publish(CardCharged())
        slow.release.set()
        await recorder.settled()

    assert len(recorder.published()) == 4
    assert recorder.published(status=PublishStatus.REJECTED) == [OrderPlaced(number=3)]
    assert recorder.published(CardCharged, status=PublishStatus.FILTERED) == [CardCharged()]
    assert len(recorder.published(OrderPlaced, status=PublishStatus.ACCEPTED)) == 2


async def test_an_event_whose_publish_raised_was_not_published() -> None:
    bus = MessageBus(
        BusConfig(queue=QueueConfig(max_size=1, max_overflow=0)), filters=[TypeFilter(OrderEvent)]
    )

    @bus.on(OrderPlaced)
    async def publish_two(event: OrderPlaced, context: Context) -> None:
        await context.publish(ReceiptSent(number=1))
        await context.publish(ReceiptSent(number=2))

    bus.register_event_handler(ReceiptSent, ignore)

    async with record(bus) as recorder:
        await recorder.publish(OrderPlaced())
        await recorder.settled()

    assert recorder.published(ReceiptSent) == [ReceiptSent(number=1)]
    assert "ReceiptSent: not published: QueueFullError" in recorder.causation_tree()


async def test_a_publish_that_was_cancelled_while_it_waited_is_not_recorded() -> None:
    bus = MessageBus(BusConfig(queue=QueueConfig(max_size=1)))
    slow = SlowHandler()
    bus.register_event_handler(OrderPlaced, slow, name="slow")

    async with record(bus) as recorder:
        await recorder.publish(OrderPlaced(number=1))
        await slow.started.wait()
        await recorder.publish(OrderPlaced(number=2))
        with anyio.move_on_after(0):
            await recorder.publish(OrderPlaced(number=3))
        slow.release.set()
        await recorder.settled()

    assert [event.number for event in recorder.published(OrderPlaced)] == [1, 2]
    assert recorder.causation_tree().splitlines() == ["OrderPlaced: handled by slow"] * 2


async def test_an_event_that_waits_for_room_is_published_once_it_has_it() -> None:
    bus = MessageBus(BusConfig(queue=QueueConfig(max_size=1)))
    slow = SlowHandler()
    bus.register_event_handler(OrderPlaced, slow, name="slow")
    before: list[object] = []

    async with record(bus) as recorder:
        async with anyio.create_task_group() as tasks:
            await recorder.publish(OrderPlaced(number=1))
            await slow.started.wait()
            await recorder.publish(OrderPlaced(number=2))
            tasks.start_soon(recorder.publish, OrderPlaced(number=3))
            await let_others_run()
            before += [len(recorder.published()), recorder.causation_tree().splitlines()[-1]]
            slow.release.set()
        await recorder.settled()

    assert before == [2, "OrderPlaced: being published"]
    assert [event.number for event in recorder.published(OrderPlaced)] == [1, 2, 3]


async def test_what_is_no_event_is_not_recorded() -> None:
    async with record(MessageBus(registries=[handlers])) as recorder:
        with pytest.raises(WrongMessageTypeError):
            await recorder.publish(PlaceOrder())  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]

    assert recorder.published() == []
    assert recorder.causation_tree() == ""


async def test_a_delayed_event_is_published_when_its_time_has_come(clock: VirtualClock) -> None:
    async with record(MessageBus(clock=clock)) as recorder:
        await recorder.publish(OrderPlaced(number=1), delay=10)
        at = datetime.fromtimestamp(clock.time(), UTC) + timedelta(seconds=20)
        await recorder.publish(OrderPlaced(number=2), at=at)
        before = recorder.published()
        await clock.advance(10)
        after = recorder.published(OrderPlaced)
        await clock.advance(5)

    await clock.advance(100)
    assert before == []
    assert after == recorder.published() == [OrderPlaced(number=1)]


async def test_a_delayed_event_that_was_taken_back_is_never_published(clock: VirtualClock) -> None:
    async with record(MessageBus(clock=clock)) as recorder:
        receipt = await recorder.publish(OrderPlaced(), delay=10)
        assert receipt.cancel is not None
        taken_back = (receipt.cancel(), receipt.cancel())
        await clock.advance(20)

    assert taken_back == (True, False)
    assert recorder.published() == []
    assert recorder.causation_tree() == "OrderPlaced: cancelled before it was due"


async def test_a_delayed_event_that_the_bus_was_told_to_forget_is_never_published(
    clock: VirtualClock,
) -> None:
    event = OrderPlaced()

    async with record(MessageBus(clock=clock)) as recorder:
        await recorder.publish(event, delay=10)
        assert await recorder.bus.unschedule(event)
        await clock.advance(20)

    assert recorder.published() == []
    assert recorder.causation_tree() == "OrderPlaced: cancelled before it was due"
