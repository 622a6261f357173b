"""Filters: on the bus, on one handler, joined, and by rate."""

from __future__ import annotations

from typing import Any

import anyio
import anyio.lowlevel
import pytest

from msgbus import (
    BusClosedError,
    Event,
    Filter,
    MessageBus,
    PublishReceipt,
    PublishStatus,
    RateLimitFilter,
    SessionFilter,
    TypeFilter,
)
from msgbus.runtime.clock import VirtualClock
from tests.fakes import OrderEvent, OrderPlaced, OrderShipped, Recorder, conserves


def number_of(event: Event) -> int:
    return event.number if isinstance(event, OrderEvent) else -1


def is_even(event: Event) -> bool:
    return number_of(event) % 2 == 0


async def is_small(event: Event) -> bool:
    await anyio.lowlevel.checkpoint()
    return number_of(event) < 3


def raise_on_two(event: Event) -> bool:
    if number_of(event) == 2:
        raise LookupError("no such order")
    return True


async def raise_later_on_two(event: Event) -> bool:
    await anyio.lowlevel.checkpoint()
    return raise_on_two(event)


async def published_and_handled(bus: MessageBus, count: int = 6) -> list[int]:
    handler = Recorder()
    bus.subscribe(OrderPlaced, handler)
    async with bus:
        for number in range(count):
            await bus.publish(OrderPlaced(number=number))
        await bus.settled()
    conserves(bus)
    return handler.numbers


# -- on the bus --------------------------------------------------------------------------------


async def test_a_bus_filter_turns_events_away_and_the_receipt_names_it() -> None:
    bus = MessageBus(filters=[is_even])
    handler = Recorder()
    bus.subscribe(OrderPlaced, handler)

    async with bus:
        kept = await bus.publish(OrderPlaced(number=2))
        turned_away = await bus.publish(OrderPlaced(number=3))
        await bus.settled()

    assert kept.status is PublishStatus.ACCEPTED
    assert turned_away.status is PublishStatus.FILTERED
    assert not turned_away.accepted
    assert turned_away.reason == "is_even"
    assert handler.numbers == [2]
    assert bus.stats().events["OrderPlaced"].filtered == 1
    conserves(bus)


async def test_an_async_bus_filter_is_awaited() -> None:
    assert await published_and_handled(MessageBus(filters=[is_small])) == [0, 1, 2]


async def test_an_event_must_pass_all_bus_filters() -> None:
    bus = MessageBus(filters=[is_even])
    bus.add_filter(is_small)

    assert await published_and_handled(bus) == [0, 2]
    assert bus.stats().events["OrderPlaced"].filtered == 4


@pytest.mark.parametrize("predicate", [raise_on_two, raise_later_on_two])
async def test_a_bus_filter_that_raises_tells_the_publisher_and_nothing_is_admitted(
    predicate: Filter,
) -> None:
    bus = MessageBus(filters=[predicate])
    handler = Recorder()
    bus.subscribe(OrderPlaced, handler)

    async with bus:
        await bus.publish(OrderPlaced(number=1))
        with pytest.raises(LookupError, match="no such order"):
            await bus.publish(OrderPlaced(number=2))
        await bus.publish(OrderPlaced(number=3))
        await bus.settled()

    assert handler.numbers == [1, 3]
    assert bus.stats().events["OrderPlaced"].rejected == 1
    conserves(bus)


async def test_a_publish_cancelled_in_a_filter_has_published_nothing() -> None:
    asked = anyio.Event()

    async def never_answer(event: Event) -> bool:
        asked.set()
        await anyio.sleep_forever()
        return True

    bus = MessageBus(filters=[never_answer])
    handler = Recorder()
    bus.subscribe(OrderPlaced, handler)

    async with bus:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(bus.publish, OrderPlaced())
            await asked.wait()
            tasks.cancel_scope.cancel()
        await bus.settled()

    assert handler.numbers == []
    assert bus.stats().events["OrderPlaced"].rejected == 1
    conserves(bus)


class PublishInAFilter:
    """A publish that is held up in an async bus filter until `answer` is set."""

    def __init__(self) -> None:
        self.asked = anyio.Event()
        self.answer = anyio.Event()
        self.handler = Recorder()
        self.bus = MessageBus(filters=[self._filter])
        self.subscription = self.bus.subscribe(OrderPlaced, self.handler)
        self.outcome: PublishReceipt | BusClosedError | None = None

    async def _filter(self, event: Event) -> bool:
        self.asked.set()
        await self.answer.wait()
        return True

    async def publish(self) -> None:
        try:
            self.outcome = await self.bus.publish(OrderPlaced())
        except BusClosedError as error:
            self.outcome = error


async def test_a_publish_that_leaves_its_filter_after_stop_is_refused() -> None:
    held_up = PublishInAFilter()

    async with anyio.create_task_group() as tasks:
        await held_up.bus.start()
        tasks.start_soon(held_up.publish)
        await held_up.asked.wait()
        await held_up.bus.stop()
        held_up.answer.set()

    assert isinstance(held_up.outcome, BusClosedError)
    assert held_up.bus.stats().total("queued") == 0
    conserves(held_up.bus)


async def test_a_publish_that_leaves_its_filter_after_its_handler_went_is_not_lost() -> None:
    held_up = PublishInAFilter()

    async with held_up.bus, anyio.create_task_group() as tasks:
        tasks.start_soon(held_up.publish)
        await held_up.asked.wait()
        await held_up.subscription.close()
        held_up.answer.set()

    assert isinstance(held_up.outcome, PublishReceipt)
    assert held_up.outcome.handlers == 0
    conserves(held_up.bus)


# -- on one handler ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("predicate", "wanted"), [(is_even, [0, 2, 4]), (is_small, [0, 1, 2])], ids=["sync", "async"]
)
async def test_a_handlers_filter_is_its_own(predicate: Filter, wanted: list[int]) -> None:
    bus = MessageBus()
    choosy, neighbour = Recorder(), Recorder()
    bus.subscribe(OrderPlaced, choosy, name="choosy", filter=predicate)
    bus.subscribe(OrderPlaced, neighbour, name="neighbour")

    async with bus:
        for number in range(6):
            receipt = await bus.publish(OrderPlaced(number=number))
            assert receipt.accepted
        await bus.settled()

    assert choosy.numbers == wanted
    assert neighbour.numbers == [0, 1, 2, 3, 4, 5]
    stats = bus.stats().handlers["choosy"]
    assert (stats.handled, stats.filtered) == (3, 3)
    conserves(bus)


@pytest.mark.parametrize("predicate", [raise_on_two, raise_later_on_two])
async def test_a_handlers_filter_that_raises_fails_that_event_for_that_handler(
    predicate: Filter,
) -> None:
    bus = MessageBus()
    choosy, neighbour = Recorder(), Recorder()
    bus.subscribe(OrderPlaced, choosy, name="choosy", filter=predicate)
    bus.subscribe(OrderPlaced, neighbour, name="neighbour")

    async with bus:
        for number in range(4):
            await bus.publish(OrderPlaced(number=number))
        await bus.settled()

    assert choosy.numbers == [0, 1, 3]
    assert neighbour.numbers == [0, 1, 2, 3]
    stats = bus.stats().handlers["choosy"]
    assert (stats.handled, stats.failed, stats.filtered) == (3, 1, 0)
    conserves(bus)


async def test_a_handlers_filter_that_survives_its_cancellation_is_counted_once() -> None:
    bus = MessageBus()
    asked = anyio.Event()

    async def stubborn(event: Event) -> bool:
        asked.set()
        try:
            await anyio.sleep_forever()
        except anyio.get_cancelled_exc_class():
            return False
        return True

    bus.subscribe(OrderPlaced, Recorder(), filter=stubborn)
    await bus.start()
    await bus.publish(OrderPlaced())
    await asked.wait()

    report = await bus.stop(timeout=0)

    assert report.abandoned == 1
    conserves(bus)


# -- joined --------------------------------------------------------------------------------------

EVEN = Filter(is_even)
SMALL = Filter(is_small)


@pytest.mark.parametrize(
    ("joined", "wanted"),
    [
        (EVEN & SMALL, [0, 2]),
        (SMALL & EVEN, [0, 2]),
        (EVEN | SMALL, [0, 1, 2, 4]),
        (SMALL | EVEN, [0, 1, 2, 4]),
        (~EVEN, [1, 3, 5]),
        (~SMALL, [3, 4, 5]),
        (EVEN & is_small, [0, 2]),
        (is_small & EVEN, [0, 2]),
        (is_small | EVEN, [0, 1, 2, 4]),
        (~(EVEN & SMALL) & ~TypeFilter(OrderShipped), [1, 3, 4, 5]),
    ],
    ids=repr,
)
@pytest.mark.parametrize("where", ["bus", "handler"])
async def test_filters_are_joined_with_and_or_and_not(
    joined: Filter, wanted: list[int], where: str
) -> None:
    bus = MessageBus(filters=[joined] if where == "bus" else [])
    handler = Recorder()
    bus.subscribe(OrderPlaced, handler, filter=joined if where == "handler" else None)

    async with bus:
        for number in range(6):
            await bus.publish(OrderPlaced(number=number))
        await bus.settled()

    assert handler.numbers == wanted
    conserves(bus)


async def test_the_right_side_is_asked_only_if_the_left_does_not_settle_it() -> None:
    asked: list[int] = []

    async def ask(event: Event) -> bool:
        asked.append(number_of(event))
        return True

    both = await published_and_handled(MessageBus(filters=[EVEN & ask]))
    assert both == asked == [0, 2, 4]

    asked.clear()
    either = await published_and_handled(MessageBus(filters=[SMALL | ask]))
    assert either == [0, 1, 2, 3, 4, 5]
    assert asked == [3, 4, 5]


async def test_a_type_filter_lets_subclasses_through() -> None:
    bus = MessageBus(filters=[TypeFilter(OrderPlaced)])
    handler = Recorder()
    bus.subscribe(OrderEvent, handler)

    async with bus:
        await bus.publish(OrderPlaced(number=1))
        await bus.publish(OrderShipped(number=2))
        await bus.publish(OrderEvent(number=3))
        await bus.settled()

    assert handler.numbers == [1]


async def test_a_session_filter_lets_through_events_of_its_sessions() -> None:
    bus = MessageBus()
    of_one, of_any = Recorder(), Recorder()
    bus.subscribe(OrderPlaced, of_one, filter=SessionFilter("a"))
    bus.subscribe(OrderPlaced, of_any, filter=SessionFilter())

    async with bus:
        await bus.publish(OrderPlaced(number=0))
        async with bus.session("a") as a, bus.session("b") as b:
            await a.publish(OrderPlaced(number=1))
            await b.publish(OrderPlaced(number=2))
        await bus.settled()

    assert of_one.numbers == [1]
    assert of_any.numbers == [1, 2]


# -- by rate -------------------------------------------------------------------------------------


async def test_a_rate_limit_lets_a_burst_through_and_then_so_many_a_second() -> None:
    clock = VirtualClock()
    bus = MessageBus(filters=[RateLimitFilter(2, burst=3, clock=clock)], clock=clock)
    handler = Recorder()
    bus.subscribe(OrderPlaced, handler)

    async with bus:
        for number in range(5):
            await bus.publish(OrderPlaced(number=number))
        await clock.advance(0.5)
        for number in range(5, 7):
            await bus.publish(OrderPlaced(number=number))
        await clock.advance(60)
        for number in range(7, 12):
            await bus.publish(OrderPlaced(number=number))
        await bus.settled()

    assert handler.numbers == [0, 1, 2, 5, 7, 8, 9]
    assert bus.stats().events["OrderPlaced"].filtered == 5
    conserves(bus)


@pytest.mark.parametrize(("rate", "burst"), [(0, None), (-1, None), (10, 0.5)])
def test_a_rate_limit_that_could_never_let_anything_through_is_refused(
    rate: float, burst: float | None
) -> None:
    with pytest.raises(ValueError, match=r"max_per_second|burst"):
        RateLimitFilter(rate, burst=burst)


def by_shop(event: Event) -> int | None:
    """The shop of an order by its number, in hundreds; what is no order has none."""
    return event.number // 100 if isinstance(event, OrderEvent) else None


def test_a_rate_limit_may_hold_for_each_key_by_itself() -> None:
    """Point g: one noisy key takes nothing from the others."""
    clock = VirtualClock()
    limit = RateLimitFilter(1, burst=2, key=by_shop, clock=clock)

    noisy = [limit(OrderPlaced(number=100 + number)) for number in range(5)]
    quiet = [limit(OrderPlaced(number=200 + number)) for number in range(2)]

    assert noisy == [True, True, False, False, False]
    assert quiet == [True, True]


async def test_the_tokens_of_a_key_come_back_in_time() -> None:
    """Point g."""
    clock = VirtualClock()
    limit = RateLimitFilter(1, burst=2, key=by_shop, clock=clock)
    for number in range(5):
        limit(OrderPlaced(number=number))

    await clock.advance(1)

    assert [limit(OrderPlaced()), limit(OrderPlaced())] == [True, False]


def test_an_event_without_a_key_is_not_limited() -> None:
    """Point g."""
    limit = RateLimitFilter(1, key=by_shop, clock=VirtualClock())

    assert all(limit(Other()) for _ in range(100))


def test_only_so_many_keys_are_remembered_and_those_in_use_longest() -> None:
    """Point g: keys that are seen once do not fill the memory."""
    limit = RateLimitFilter(1, key=number_of, max_keys=3, clock=VirtualClock())

    assert [limit(OrderPlaced(number=number)) for number in (1, 2, 3)] == [True] * 3
    assert not limit(OrderPlaced(number=1))  # known, and so the last to be forgotten
    assert limit(OrderPlaced(number=4))  # in the place of 2
    assert not limit(OrderPlaced(number=1))
    assert limit(OrderPlaced(number=2))
    assert not limit(OrderPlaced(number=4))


async def test_a_bus_limits_the_events_of_each_key() -> None:
    """Point g."""
    bus = MessageBus(filters=[RateLimitFilter(1, burst=1, key=by_shop, clock=VirtualClock())])

    assert await published_and_handled(bus, 301) == [0, 100, 200, 300]
    assert bus.stats().events["OrderPlaced"].filtered == 297


@pytest.mark.parametrize("options", [{"max_keys": 0}, {"key": "number"}])
def test_a_rate_limit_by_key_is_checked_where_it_is_made(options: dict[str, Any]) -> None:
    """Point g."""
    with pytest.raises(ValueError, match=next(iter(options))):
        RateLimitFilter(1, **options)


class Other(Event):
    pass
