"""Handlers of topics: the same lanes, found by the topic of an event instead of its class."""

from __future__ import annotations

import pickle

import anyio

from msgbus import (
    Command,
    Context,
    Event,
    EventHandlerFailedEvent,
    MessageBus,
    QueueConfig,
    TypeFilter,
    topic_of,
)
from msgbus.runtime.clock import VirtualClock
from tests.fakes import OrderPlaced, SlowHandler, conserves
from tests.topic_fakes import Noticed, Numbers, Paid, Placed, Shipped, Unnamed

# -- which topic -----------------------------------------------------------------------------


async def test_a_pattern_gets_events_by_the_topic_of_their_class() -> None:
    bus = MessageBus()
    orders, everything = Numbers(), Numbers()
    bus.subscribe("shop.orders.*", orders)
    bus.subscribe("shop.**", everything)

    async with bus:
        receipts = [
            await bus.publish(event)
            for event in (Placed(number=1), Shipped(number=2), Paid(number=3), Unnamed(number=4))
        ]
        await bus.settled()

    assert [receipt.handlers for receipt in receipts] == [2, 2, 1, 0]
    assert orders.seen == [1, 2]
    assert everything.seen == [1, 2, 3]
    conserves(bus)


async def test_without_a_topic_the_wire_name_is_the_topic() -> None:
    bus = MessageBus()
    by_name, by_wire_name = Numbers(), Numbers()
    bus.subscribe("unnamed", by_name)
    bus.subscribe("shop.orders.shipped", by_wire_name)

    async with bus:
        await bus.publish(Unnamed(number=1))
        await bus.publish(Shipped(number=2))
        await bus.settled()

    assert by_name.seen == [1]
    assert by_wire_name.seen == [2]


async def test_an_explicit_topic_replaces_that_of_the_class() -> None:
    bus = MessageBus()
    orders, returns, by_class = Numbers(), Numbers(), Numbers()
    bus.subscribe("shop.orders.*", orders)
    bus.subscribe("shop.returns.*", returns)
    bus.subscribe(Placed, by_class)

    async with bus:
        await bus.publish(Placed(number=1), topic="shop.returns.eu")
        await bus.publish(Placed(number=2))
        await bus.settled()

    assert returns.seen == [1]
    assert orders.seen == [2]
    assert by_class.seen == [1, 2]
    conserves(bus)


async def test_the_topic_is_not_inherited_by_what_an_event_causes() -> None:
    bus = MessageBus()
    topics: list[str] = []

    @bus.on(Placed)
    async def ship(event: Placed, context: Context) -> None:
        topics.append(context.topic)
        context.emit(Shipped())

    @bus.on("shop.orders.shipped")
    async def note(event: Event, context: Context) -> None:
        topics.append(context.topic)

    async with bus:
        await bus.publish(Placed(), topic="elsewhere")
        await bus.settled()

    assert topics == ["elsewhere", "shop.orders.shipped"]


def test_the_topic_of_a_message_is_its_own_or_its_classes() -> None:
    class Ship(Command):
        pass

    assert topic_of(Placed()) == "shop.orders.placed"
    assert topic_of(Shipped()) == "shop.orders.shipped"
    assert topic_of(Unnamed()) == "Unnamed"
    assert topic_of(Ship()) == "Ship"


async def test_an_event_keeps_the_topic_it_was_published_under() -> None:
    bus = MessageBus()
    async with bus:
        event = Placed()
        await bus.publish(event, topic="shop.returns.eu")

        assert topic_of(event) == "shop.returns.eu"
        assert topic_of(pickle.loads(pickle.dumps(event))) == "shop.returns.eu"
        assert topic_of(event.model_copy()) == "shop.orders.placed"


async def test_a_delayed_event_goes_to_its_topic_when_it_is_due() -> None:
    clock = VirtualClock()
    bus = MessageBus(clock=clock)
    returns = Numbers()
    bus.subscribe("shop.returns.*", returns)

    async with bus:
        await bus.publish(Placed(number=1), topic="shop.returns.eu", delay=5)
        await clock.advance(5)
        await bus.settled()

    assert returns.seen == [1]


async def test_context_and_portal_publish_under_a_topic() -> None:
    bus = MessageBus()
    returns = Numbers()
    bus.subscribe("shop.returns.*", returns)

    @bus.on(Placed)
    async def send_back(event: Placed, context: Context) -> None:
        await context.publish(Paid(number=2), topic="shop.returns.eu")

    async with bus:
        await bus.publish(Placed(number=1))
        await bus.settled()
        portal = bus.portal()
        await anyio.to_thread.run_sync(
            lambda: portal.publish(Paid(number=3), topic="shop.returns.us")
        )
        await bus.settled()

    assert returns.seen == [2, 3]


# -- system events ---------------------------------------------------------------------------


async def test_patterns_never_match_system_events() -> None:
    bus = MessageBus()
    everything, expressions, named = Numbers(), Numbers(), Numbers()
    bus.subscribe("**", everything)
    bus.subscribe("re:.*", expressions)
    bus.subscribe(Noticed, named)

    @bus.on(OrderPlaced)
    async def fail(event: OrderPlaced) -> None:
        raise ValueError

    async with bus:
        await bus.publish(Noticed())
        await bus.publish(Noticed(), topic="shop.explicit")
        await bus.publish(OrderPlaced(number=1))
        await bus.settled()

    assert everything.seen == expressions.seen == [1]
    assert named.seen == [-1, -1]


async def test_a_failing_handler_of_all_topics_does_not_hear_of_itself() -> None:
    bus = MessageBus()
    failures: list[str] = []

    @bus.on("**")
    async def fail(event: Event) -> None:
        raise ValueError

    @bus.on(EventHandlerFailedEvent)
    async def note(event: EventHandlerFailedEvent) -> None:
        failures.append(event.handler)

    async with bus:
        await bus.publish(Placed())
        await bus.settled()

    assert failures == ["fail"]
    conserves(bus)


# -- as any other handler --------------------------------------------------------------------


async def test_a_handler_registered_twice_gets_an_event_once_per_registration() -> None:
    bus = MessageBus()
    numbers = Numbers()
    bus.subscribe(Placed, numbers)
    bus.subscribe("shop.orders.*", numbers)
    bus.subscribe("shop.**", numbers)

    async with bus:
        receipt = await bus.publish(Placed(number=1))
        await bus.settled()

    assert receipt.handlers == 3
    assert numbers.seen == [1, 1, 1]
    conserves(bus)


async def test_priorities_hold_between_classes_and_patterns() -> None:
    bus = MessageBus()
    order: list[str] = []

    def noting(name: str, priority: int, target: type[Event] | str) -> None:
        async def note(event: Event) -> None:
            order.append(name)

        bus.subscribe(target, note, priority=priority, name=name)

    noting("class", 5, Placed)
    noting("low", -1, "shop.**")
    noting("high", 10, "shop.orders.*")
    noting("base", 0, Event)

    async with bus:
        await bus.publish(Placed())
        await bus.settled()
        await bus.publish(Placed(), topic="shop.orders.again")
        await bus.settled()

    assert order == ["high", "class", "base", "low"] * 2
    conserves(bus)


async def test_a_handler_of_topics_gets_only_the_class_it_is_annotated_with() -> None:
    bus = MessageBus()
    seen: list[int] = []

    @bus.on("shop.**")
    async def single(event: Placed) -> None:
        seen.append(event.number)

    @bus.on("shop.**", batch=True)
    async def lists(events: list[Placed]) -> None:
        seen.extend(event.number for event in events)

    async with bus:
        receipts = [
            await bus.publish(Placed(number=1)),
            await bus.publish(Paid(number=2)),
            await bus.publish(Paid(number=3), topic="shop.orders.placed"),
            await bus.publish(Placed(number=4), topic="elsewhere"),
        ]
        await bus.settled()

    assert [receipt.handlers for receipt in receipts] == [2, 0, 0, 0]
    assert seen == [1, 1]
    conserves(bus)


async def test_a_batch_handler_of_topics_gets_lists() -> None:
    bus = MessageBus()
    lists: list[list[str]] = []

    @bus.on("shop.**", batch=True)
    async def insert(events: list[Event]) -> None:
        lists.append([topic_of(event) for event in events])

    await bus.publish(Placed())
    await bus.publish(Paid(), topic="shop.payments.late")
    await bus.publish(Shipped())
    async with bus:
        await bus.settled()

    assert lists == [["shop.orders.placed", "shop.payments.late", "shop.orders.shipped"]]


async def test_filters_timeouts_and_middleware_hold_for_patterns() -> None:
    clock = VirtualClock()
    around: list[str] = []
    bus = MessageBus(clock=clock)
    filtered = Numbers()

    async def watch(message: Event, call_next: object) -> object:
        around.append(type(message).__name__)
        return await call_next(message)  # type: ignore[operator]

    bus.add_middleware(watch, types=Paid)
    bus.subscribe("shop.**", filtered, filter=TypeFilter(Placed, Paid))

    @bus.on("shop.payments.*", timeout=2.0, name="slow")
    async def slow(event: Event) -> None:
        await clock.sleep(10)

    async with bus:
        for event in (Placed(number=1), Shipped(number=2), Paid(number=3)):
            await bus.publish(event)
        await clock.advance(3)
        await bus.settled()

    assert filtered.seen == [1, 3]
    assert around == ["Paid", "Paid"]
    assert bus.stats().handlers["slow"].failed == 1
    assert bus.check() == []
    conserves(bus)


async def test_a_pattern_has_a_queue_of_its_own_with_back_pressure() -> None:
    bus = MessageBus()
    slow = SlowHandler()

    async def hold(event: Event) -> None:
        assert isinstance(event, OrderPlaced)
        await slow(event)

    bus.subscribe("OrderPlaced", hold, queue=QueueConfig(max_size=1))
    published: list[int] = []

    async with bus, anyio.create_task_group() as tasks:
        await bus.publish(OrderPlaced(number=0))
        await slow.started.wait()
        await bus.publish(OrderPlaced(number=1), topic="orderplaced")

        async def publish_more() -> None:
            await bus.publish(OrderPlaced(number=2), topic="ORDERPLACED")
            published.append(2)

        tasks.start_soon(publish_more)
        await anyio.wait_all_tasks_blocked()
        assert published == []
        slow.release.set()

    assert slow.ended == [0, 1, 2]
    conserves(bus)


async def test_events_published_before_the_start_reach_patterns() -> None:
    bus = MessageBus()
    numbers = Numbers()
    bus.subscribe("shop.returns.*", numbers)
    await bus.publish(Placed(number=1), topic="shop.returns.eu")

    async with bus:
        await bus.settled()

    assert numbers.seen == [1]
