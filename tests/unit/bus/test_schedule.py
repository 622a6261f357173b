"""Delayed events: published when their time has come, cancellable, handed back at stop."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest

from msgbus import (
    BackpressureStrategy,
    BusConfig,
    Context,
    MessageBus,
    PublishStatus,
)
from msgbus.runtime.clock import VirtualClock
from tests.fakes import (
    Calendar,
    OrderPlaced,
    OrderShipped,
    Recorder,
    SlowHandler,
    conserves,
    queue,
)

REJECT_NEW = BackpressureStrategy.REJECT_NEW


# -- when it is due ----------------------------------------------------------------------------


async def test_a_delayed_event_is_published_when_its_time_has_come() -> None:
    calendar = Calendar()

    async with calendar.bus as bus:
        receipt = await bus.publish(OrderPlaced(number=1), delay=5)
        assert receipt.status is PublishStatus.ACCEPTED
        assert bus.stats().scheduled == 1
        assert bus.stats().events == {}
        await calendar.clock.advance(4.9)
        assert calendar.seen.numbers == []
        await calendar.clock.advance(0.1)

        assert calendar.seen.numbers == [1]
        assert bus.stats().scheduled == 0
        conserves(bus)


async def test_delayed_events_come_in_order_of_their_time_not_of_their_publish() -> None:
    calendar = Calendar()

    async with calendar.bus as bus:
        for number in (3, 1, 2, 0):
            await bus.publish(OrderPlaced(number=number), delay=number + 1)
        await calendar.clock.advance(2)
        assert calendar.seen.numbers == [0, 1]
        await calendar.clock.advance(10)

    assert calendar.seen.numbers == [0, 1, 2, 3]


async def test_events_due_at_the_same_moment_keep_publish_order() -> None:
    calendar = Calendar()

    async with calendar.bus as bus:
        for number in range(20):
            await bus.publish(OrderPlaced(number=number), delay=1)
        await calendar.clock.advance(1)

    assert calendar.seen.numbers == list(range(20))


async def test_an_event_may_be_published_at_a_date() -> None:
    noon = datetime(2030, 1, 1, 12, tzinfo=UTC)
    calendar = Calendar(start=noon.timestamp())
    one_oclock_in_delhi = datetime(2030, 1, 1, 18, 30, tzinfo=timezone(timedelta(hours=5.5)))

    async with calendar.bus as bus:
        await bus.publish(OrderPlaced(number=1), at=one_oclock_in_delhi)
        await calendar.clock.advance(3599)
        assert calendar.seen.numbers == []
        await calendar.clock.advance(1)

    assert calendar.seen.numbers == [1]


@pytest.mark.parametrize("past", [{"delay": -5.0}, {"at": datetime(1969, 7, 20, tzinfo=UTC)}])
async def test_a_time_in_the_past_means_now(past: dict[str, float]) -> None:
    calendar = Calendar()

    async with calendar.bus as bus:
        await bus.publish(OrderPlaced(number=1), **past)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        await calendar.clock.advance(0)

        assert calendar.seen.numbers == [1]


async def test_a_date_without_time_zone_is_refused() -> None:
    async with MessageBus() as bus:
        naive = datetime(2030, 1, 1)  # noqa: DTZ001 (the point of the test)
        with pytest.raises(ValueError, match="timezone-aware"):
            await bus.publish(OrderPlaced(), at=naive)
        assert bus.stats().scheduled == 0


@pytest.mark.parametrize("delay", [float("nan"), float("inf"), float("-inf")])
async def test_a_delay_that_is_no_number_is_refused(delay: float) -> None:
    async with MessageBus() as bus:
        with pytest.raises(ValueError, match="number of seconds"):
            await bus.publish(OrderPlaced(), delay=delay)
        assert bus.stats().scheduled == 0


async def test_delay_and_date_together_are_refused() -> None:
    async with MessageBus() as bus:
        with pytest.raises(ValueError, match="not both"):
            await bus.publish(OrderPlaced(), delay=1, at=datetime.now(UTC))
        assert bus.stats().scheduled == 0


async def test_an_event_delayed_before_start_is_kept() -> None:
    calendar = Calendar()
    await calendar.bus.publish(OrderPlaced(number=1), delay=5)
    await calendar.clock.advance(60)
    assert calendar.seen.numbers == []

    async with calendar.bus as bus:
        await calendar.clock.advance(0)
        await bus.settled()

    assert calendar.seen.numbers == [1]


async def test_a_delayed_event_keeps_its_cause() -> None:
    calendar = Calendar()
    causes: list[str | None] = []

    @calendar.bus.on(OrderShipped)
    async def note(event: OrderShipped) -> None:
        causes.append(event.causation_id)

    @calendar.bus.on(OrderPlaced)
    async def ship_later(event: OrderPlaced, context: Context) -> None:
        await context.publish(OrderShipped(), delay=60)

    order = OrderPlaced()
    async with calendar.bus as bus:
        await bus.publish(order)
        await calendar.clock.advance(60)

    assert causes == [order.message_id]


# -- beside everything else --------------------------------------------------------------------


async def test_delayed_events_hold_up_neither_publishes_nor_settled() -> None:
    calendar = Calendar()

    async with calendar.bus as bus:
        await bus.publish(OrderPlaced(number=99), delay=3600)
        for number in range(100):
            await bus.publish(OrderPlaced(number=number))
        await bus.settled()

        assert calendar.seen.numbers == list(range(100))
        assert bus.stats().scheduled == 1


async def test_a_due_event_is_not_counted_in_any_queue_before() -> None:
    bus = MessageBus(BusConfig(queue=queue(1)), clock=VirtualClock())
    slow = SlowHandler()
    bus.subscribe(OrderPlaced, slow)

    async with bus:
        for number in range(50):
            await bus.publish(OrderPlaced(number=number), delay=10)
        receipt = await bus.publish(OrderPlaced())
        slow.release.set()
        await bus.settled()

    assert receipt.status is PublishStatus.ACCEPTED
    assert slow.ended == [0]


async def test_a_due_event_never_waits_for_room_and_so_delays_no_other() -> None:
    clock = VirtualClock()
    bus = MessageBus(clock=clock)
    slow, quick = SlowHandler(), Recorder()
    bus.subscribe(OrderPlaced, slow, name="slow", queue=queue(1))
    bus.subscribe(OrderShipped, quick)

    async with bus:
        for number in range(4):
            await bus.publish(OrderPlaced(number=number), delay=1)
        await bus.publish(OrderShipped(number=9), delay=2)
        await clock.advance(2)
        seen_at_two = list(quick.numbers)
        slow.release.set()
        await bus.settled()

    assert seen_at_two == [9]
    assert slow.ended == [0, 1, 2, 3]
    assert bus.stats().handlers["slow"].overflowed > 0
    conserves(bus)


# -- taken back --------------------------------------------------------------------------------


async def test_a_receipt_takes_a_delayed_event_back_once() -> None:
    calendar = Calendar()

    async with calendar.bus as bus:
        await bus.publish(OrderPlaced(number=1), delay=5)
        receipt = await bus.publish(OrderPlaced(number=2), delay=5)
        await bus.publish(OrderPlaced(number=3), delay=5)
        assert receipt.cancel is not None
        assert receipt.cancel() is True
        assert receipt.cancel() is False
        assert bus.stats().scheduled == 2
        await calendar.clock.advance(5)

    assert calendar.seen.numbers == [1, 3]


async def test_a_receipt_says_when_it_is_too_late() -> None:
    calendar = Calendar()

    async with calendar.bus as bus:
        receipt = await bus.publish(OrderPlaced(number=1), delay=5)
        await calendar.clock.advance(5)
        assert receipt.cancel is not None

        assert receipt.cancel() is False
        assert bus.stats().scheduled == 0


async def test_a_plain_receipt_has_nothing_to_take_back() -> None:
    async with MessageBus() as bus:
        receipt = await bus.publish(OrderPlaced())

    assert receipt.cancel is None
