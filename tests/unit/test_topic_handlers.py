"""Handlers of topics: the same lanes, found by the topic of an event instead of its class."""

from __future__ import annotations

import pickle

import anyio
import pytest

from msgbus import (
    Command,
    Context,
    DuplicateHandlerError,
    Event,
    EventHandlerFailedEvent,
    HandlerRegistry,
    HandlerSignatureError,
    InvalidTopicError,
    MessageBus,
    MessageDefinitionError,
    QueueConfig,
    SystemEvent,
    TypeFilter,
    topic_of,
)
from msgbus.clock import VirtualClock
from msgbus.plans import TOPICS_KEPT
from msgbus.registrations import Registration
from msgbus.telemetry.prometheus import BusCollector
from msgbus.testing import record
from tests.fakes import OrderPlaced, Recorder, SlowHandler, conserves, logged


class Placed(Event, topic="shop.orders.placed"):
    number: int = 0


class Shipped(Event, name="shop.orders.shipped"):
    number: int = 0


class Paid(Event, topic="shop.payments.paid"):
    number: int = 0


class Unnamed(Event):
    number: int = 0


class Noticed(SystemEvent, topic="shop.orders.noticed"):
    pass


class Numbers:
    """A handler of any event that notes numbers."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    async def __call__(self, event: Event) -> None:
        self.seen.append(getattr(event, "number", -1))


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


# -- coming and going --------------------------------------------------------------------------


async def test_a_pattern_registered_later_gets_what_is_published_later() -> None:
    bus = MessageBus()
    numbers = Numbers()

    async with bus:
        await bus.publish(Placed(number=1))
        await bus.publish(Placed(number=2), topic="shop.returns.eu")
        subscription = bus.subscribe("shop.**", numbers)
        await bus.publish(Placed(number=3))
        await bus.publish(Placed(number=4), topic="shop.returns.eu")
        await subscription.close()
        await bus.publish(Placed(number=5))
        await bus.publish(Placed(number=6), topic="shop.returns.eu")
        await bus.settled()

    assert numbers.seen == [3, 4]
    assert subscription.pattern == "shop.**"
    assert subscription.message_type is Event
    assert repr(subscription) == "<Subscription Numbers on shop.**>"
    conserves(bus)


async def test_a_subscription_of_topics_pauses_and_resumes() -> None:
    bus = MessageBus()
    numbers = Numbers()
    subscription = bus.subscribe("shop.**", numbers)

    async with bus:
        subscription.pause()
        await bus.publish(Placed(number=1))
        assert subscription.pending == 1
        subscription.resume()
        await bus.settled()

    assert numbers.seen == [1]


async def test_registries_carry_handlers_of_topics() -> None:
    handlers = HandlerRegistry()
    seen: list[str] = []

    @handlers.on("shop.orders.*")
    async def early(event: Event) -> None:
        seen.append("early")

    bus = MessageBus(registries=[handlers])

    @handlers.on("shop.**")
    async def late(event: Event) -> None:
        seen.append("late")

    async with bus:
        await bus.publish(Placed())
        await bus.settled()

    assert sorted(seen) == ["early", "late"]
    assert isinstance(handlers.subscribe("x", Recorder()), Registration)


async def test_many_topics_are_remembered_in_bounds_and_all_counted() -> None:
    bus = MessageBus()
    numbers = Numbers()
    bus.subscribe("shop.*.placed", numbers)
    topics = 2 * TOPICS_KEPT + 500

    async with bus:
        for number in range(topics):
            await bus.publish(Placed(number=number), topic=f"shop.{number}.placed")
        await bus.settled()

        assert len(bus._core.topics) <= 2 * TOPICS_KEPT  # pyright: ignore[reportPrivateUsage]
        assert bus.stats().events["Placed"].admitted == topics
    assert numbers.seen == list(range(topics))
    conserves(bus)


# -- sessions ----------------------------------------------------------------------------------


async def test_a_sessions_patterns_see_its_own_events_only() -> None:
    bus = MessageBus()
    everywhere, in_session = Numbers(), Numbers()
    bus.subscribe("shop.**", everywhere)

    async with bus:
        async with bus.session("job") as session:
            session.subscribe("shop.**", in_session)
            await session.publish(Placed(number=1))
            await session.publish(Placed(number=2), topic="shop.returns.eu")
            await session.publish(Placed(number=3), topic="elsewhere")
            await bus.publish(Placed(number=4))
            await bus.publish(Placed(number=5), topic="shop.returns.eu")
        await bus.publish(Placed(number=6))
        await bus.settled()

    assert in_session.seen == [1, 2]
    assert everywhere.seen == [1, 2, 4, 5, 6]
    assert bus.stats().registered_handlers == 1
    conserves(bus)


async def test_a_session_refuses_a_bad_topic_before_it_marks_the_event() -> None:
    bus = MessageBus()

    async with bus, bus.session("job") as session:
        event = Placed()
        with pytest.raises(InvalidTopicError):
            await session.publish(event, topic="shop..eu")
        await bus.publish(event)

        assert event.session_id is None


# -- streams -----------------------------------------------------------------------------------


async def test_a_stream_of_topics_gives_events_of_all_classes() -> None:
    async with MessageBus() as bus, bus.stream("shop.**") as events:
        await bus.publish(Placed(number=1))
        await bus.publish(Unnamed(number=2))
        await bus.publish(Unnamed(number=3), topic="shop.unnamed")

        assert [await anext(events), await anext(events)] == [Placed(number=1), Unnamed(number=3)]
    assert bus.stats().registered_handlers == 0
    conserves(bus)


async def test_a_stream_of_topics_that_lags_says_which(caplog: pytest.LogCaptureFixture) -> None:
    async with MessageBus() as bus, bus.stream("shop.**", buffer=1) as events:
        await bus.publish(Placed(number=1))
        await bus.publish(Placed(number=2))
        await bus.settled()

        assert events.missed == 1
    (entry,) = logged(caplog, "stream_lagged")
    assert entry["message_type"] == "shop.**"


async def test_a_stream_of_a_bad_pattern_is_refused_when_it_is_entered() -> None:
    async with MessageBus() as bus:
        with pytest.raises(InvalidTopicError):
            async with bus.stream("shop..*"):
                pass


# -- counters ----------------------------------------------------------------------------------


async def test_counters_and_metrics_name_the_pattern() -> None:
    bus = MessageBus()
    numbers = Numbers()
    bus.subscribe("shop.orders.*", numbers)
    bus.subscribe("shop.**", numbers)

    async with bus:
        await bus.publish(Placed())
        await bus.publish(Paid())
        await bus.settled()
        stats = bus.stats()
        samples = {
            (sample.labels["handler"], sample.labels["message_type"]): sample.value
            for family in BusCollector(bus).collect()
            for sample in family.samples
            if sample.name == "msgbus_events_processed_total"
        }

    assert {name: one.handled for name, one in stats.handlers.items()} == {
        "Numbers[shop.orders.*]": 1,
        "Numbers[shop.**]": 2,
    }
    assert stats.handlers["Numbers[shop.**]"].message_type == "shop.**"
    assert samples == {("Numbers", "shop.orders.*"): 1, ("Numbers", "shop.**"): 2}


async def test_a_recorder_sees_what_handlers_of_topics_did() -> None:
    bus = MessageBus()
    bus.subscribe("shop.**", Numbers())

    async with bus, record(bus) as seen:
        await bus.publish(Placed(number=1), topic="shop.returns.eu")
        await bus.settled()

        assert [one.message for one in seen.handled(Placed)] == [Placed(number=1)]


# -- wrong use ---------------------------------------------------------------------------------


@pytest.mark.parametrize("topic", ["", "a..b", ".a", "a.", "a\n", "a\tb"])
async def test_publishing_under_what_is_no_topic_is_refused(topic: str) -> None:
    async with MessageBus() as bus:
        with pytest.raises(InvalidTopicError, match="is not a topic"):
            await bus.publish(Placed(), topic=topic)

    assert "Placed" not in bus.stats().events


@pytest.mark.parametrize("keyword", ["topic", "name"])
def test_a_class_with_a_bad_topic_or_name_is_refused(keyword: str) -> None:
    with pytest.raises(MessageDefinitionError, match=rf"Bad has {keyword}='shop\.\.bad'"):
        type("Bad", (Event,), {}, **{keyword: "shop..bad"})


def test_a_bad_pattern_is_refused_at_registration_with_its_position() -> None:
    with pytest.raises(InvalidTopicError) as caught:
        MessageBus().subscribe("shop.[ab", Numbers())

    assert caught.value.position == 5
    assert MessageBus().stats().registered_handlers == 0


def test_the_same_handler_for_the_same_pattern_is_refused() -> None:
    bus = MessageBus()
    numbers = Numbers()
    bus.subscribe("shop.**", numbers)

    with pytest.raises(DuplicateHandlerError, match=r"already handles shop\.\*\*"):
        bus.subscribe("shop.**", numbers)
    bus.subscribe("shop.**", numbers, name="again")
    with pytest.raises(DuplicateHandlerError, match="'again'"):
        bus.subscribe("other.**", numbers, name="again")


async def test_a_pattern_is_free_again_once_its_handler_has_gone() -> None:
    async with MessageBus() as bus:
        numbers = Numbers()
        await bus.subscribe("shop.**", numbers).close()
        bus.subscribe("shop.**", numbers)
        await bus.publish(Placed(number=1))
        await bus.settled()

    assert numbers.seen == [1]


def test_a_handler_of_topics_must_take_events() -> None:
    async def of_text(text: str) -> None: ...

    with pytest.raises(HandlerSignatureError) as caught:
        MessageBus().subscribe("shop.**", of_text)  # type: ignore[type-var]

    assert "annotated with Event" in caught.value.__notes__[0]


async def test_a_handler_of_topics_that_takes_system_events_is_a_fault() -> None:
    async def never(event: Noticed) -> None: ...

    bus = MessageBus()
    bus.subscribe("shop.**", never)

    (fault,) = bus.check()
    assert fault.subject == "never"
    assert "shop.**" in fault.problem
