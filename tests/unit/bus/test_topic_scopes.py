"""Handlers of topics that come and go, in sessions and streams; counters and wrong use."""

from __future__ import annotations

import pytest

from msgbus import (
    DuplicateHandlerError,
    Event,
    HandlerRegistry,
    HandlerSignatureError,
    MessageBus,
)
from msgbus.bus.plans import TOPICS_KEPT
from msgbus.errors import InvalidTopicError, MessageDefinitionError
from msgbus.handlers.registration import Registration
from msgbus.telemetry.prometheus import BusCollector
from msgbus.testing import record
from tests.fakes import Recorder, conserves, logged
from tests.topic_fakes import Noticed, Numbers, Paid, Placed, Unnamed

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

        assert len(bus._state.topics) <= 2 * TOPICS_KEPT  # pyright: ignore[reportPrivateUsage]
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
    with pytest.raises(DuplicateHandlerError, match="again already handles"):
        bus.subscribe("shop.**", numbers, name="again")
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
