"""MessageRouter: delivery of the four kinds of messages, and replies."""

from __future__ import annotations

import threading
from typing import Any

import anyio
import pytest

from msgbus import Event, MessageBus
from msgbus.errors import (
    EndpointFailedError,
    InvalidTopicError,
    MessageTooLargeError,
    MissingEndpointError,
    NoRouteError,
    RequestTimeoutError,
    RoutingError,
)
from msgbus.routing import Endpoint, EventEnvelope, MessageKind, MessageRouter, publish_on
from msgbus.runtime.clock import VirtualClock
from tests.fakes import let_others_run


class Shop:
    """A router with three endpoints that note what they get."""

    def __init__(self, **options: Any) -> None:
        self.router = MessageRouter(**options)
        self.got: list[tuple[str, EventEnvelope[Any]]] = []
        for name in ("stock", "billing", "audit"):
            self.router.endpoints.register(Endpoint(name, self.deliver_to(name)))

    def deliver_to(self, name: str) -> Any:
        async def deliver(envelope: EventEnvelope[Any]) -> str:
            self.got.append((name, envelope))
            return f"{name}: {envelope.payload}"

        return deliver

    def route(self, pattern: str, name: str, priority: int = 0) -> None:
        self.router.routes.register_route(pattern, name, priority)

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.got]


def envelope(kind: MessageKind, topic: str | None = "shop.orders", **options: Any) -> Any:
    return EventEnvelope("seven", topic=topic, kind=kind, **options)


# -- requests ------------------------------------------------------------------------------


async def test_a_request_goes_to_the_first_route_and_its_answer_comes_back() -> None:
    shop = Shop()
    shop.route("shop.orders", "stock")
    shop.route("shop.**", "billing", priority=1)

    report = await shop.router.route_message(envelope(MessageKind.REQUEST))

    assert report.reply == "billing: seven"
    assert shop.names == ["billing"]
    assert shop.router.correlations.pending == 0
    assert await shop.router.request("shop.orders", 8) == "billing: 8"


async def test_a_request_carries_the_address_of_the_one_who_asks() -> None:
    shop = Shop()
    shop.route("shop.**", "stock")

    await shop.router.request("shop.orders", 1, reply_to="me")

    sent = shop.got[0][1]
    assert sent.reply_to == "me"
    assert sent.correlation_id is not None
    assert sent.response("answer").topic == "me"


async def test_a_request_raises_what_its_endpoint_raises() -> None:
    router = MessageRouter()

    async def refuse(envelope: EventEnvelope[Any]) -> None:
        raise LookupError(envelope.payload)

    router.endpoints.register(Endpoint("stock", refuse))
    router.routes.register_route("shop.**", "stock")

    with pytest.raises(LookupError, match="seven"):
        await router.route_message(envelope(MessageKind.REQUEST))

    assert router.correlations.pending == 0


async def test_an_answer_may_come_later_as_a_message_of_its_own() -> None:
    router = MessageRouter()
    inbox: list[EventEnvelope[Any]] = []

    async def hand_over(envelope: EventEnvelope[Any]) -> None:
        inbox.append(envelope)

    router.endpoints.register(Endpoint("mailbox", hand_over, answers_later=True))
    router.routes.register_route("shop.**", "mailbox")
    answers: list[Any] = []

    async def ask(number: int) -> None:
        answers.append((number, await router.request("shop.orders", number)))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask, 1)
        tasks.start_soon(ask, 2)
        await let_others_run()
        assert answers == []
        for question in reversed(inbox):
            report = await router.route_message(question.response(question.payload * 10))
            assert report.accepted
            again = await router.route_message(question.response("twice"))
            assert not again.accepted

    assert sorted(answers) == [(1, 10), (2, 20)]
    assert router.correlations.stats().duplicate == 2


async def test_an_answer_may_come_from_another_thread_and_may_be_an_error() -> None:
    router = MessageRouter()

    async def hand_over(envelope: EventEnvelope[Any]) -> None:
        def answer() -> None:
            anyio.run(router.route_message, envelope.response(LookupError("none left")))

        threading.Thread(target=answer).start()

    router.endpoints.register(Endpoint("mailbox", hand_over, answers_later=True))
    router.routes.register_route("shop.**", "mailbox")

    with pytest.raises(LookupError, match="none left"):
        await router.request("shop.orders", 1)


async def test_a_request_that_nobody_answers_ends_in_time() -> None:
    clock = VirtualClock()
    router = MessageRouter(clock=clock)

    async def swallow(envelope: EventEnvelope[Any]) -> None:
        pass

    router.endpoints.register(Endpoint("hole", swallow, answers_later=True))
    router.routes.register_route("shop.**", "hole")
    ended: list[str] = []

    async def ask(seconds: float | None) -> None:
        with pytest.raises(RequestTimeoutError) as caught:
            await router.request("shop.orders", 1, timeout=seconds)
        ended.append(str(caught.value))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask, 2)
        tasks.start_soon(ask, None)
        await clock.advance(30)

    assert ended == [
        "No reply to int to 'shop.orders' within 2 s.",
        "No reply to int to 'shop.orders' within 30 s.",
    ]
    assert router.correlations.pending == 0


async def test_a_request_that_cannot_be_delivered_says_why() -> None:
    shop = Shop(max_message_size=10)
    shop.route("gone.**", "nobody")

    with pytest.raises(NoRouteError, match=r"'shop\.orders'"):
        await shop.router.route_message(envelope(MessageKind.REQUEST))
    with pytest.raises(MissingEndpointError, match="'nobody'"):
        await shop.router.request("gone.orders", 1)
    with pytest.raises(MessageTooLargeError):
        await shop.router.request("gone.orders", "x" * 11)
    with pytest.raises(InvalidTopicError):
        await shop.router.request("not..a.topic", 1)
    with pytest.raises(InvalidTopicError):
        await shop.router.route_message(envelope(MessageKind.REQUEST, topic=None))

    assert shop.router.correlations.pending == 0


# -- responses -----------------------------------------------------------------------------


async def test_a_response_needs_an_id() -> None:
    with pytest.raises(RoutingError, match="correlation id"):
        await MessageRouter().route_message(envelope(MessageKind.RESPONSE))


async def test_a_response_to_somebody_elsewhere_is_passed_on_to_them() -> None:
    shop = Shop()
    response = envelope(MessageKind.RESPONSE, topic="billing", correlation_id="asked elsewhere")

    report = await shop.router.route_message(response)

    assert shop.names == ["billing"]
    assert report.delivered == 1


async def test_a_response_that_nobody_waits_for_is_counted() -> None:
    shop = Shop()
    response = envelope(MessageKind.RESPONSE, topic="unheard", correlation_id="unheard of")

    report = await shop.router.route_message(response)

    assert not report.accepted
    assert shop.names == []
    assert shop.router.correlations.stats().unknown == 1


# -- notifications and events ----------------------------------------------------------------


async def test_a_notification_reaches_every_endpoint_once() -> None:
    shop = Shop()
    shop.route("shop.orders", "stock")
    shop.route("shop.**", "audit", priority=5)
    shop.route("**", "stock")
    # A single route was asked for before: that must not shrink the answer to "all".
    assert shop.router.routes.find_route("shop.orders") is not None

    report = await shop.router.route_message(envelope(MessageKind.NOTIFICATION))

    assert shop.names == ["audit", "stock"]
    assert [one.endpoint_id for one in report.deliveries] == ["audit", "stock"]
    assert report.delivered == 2


async def test_a_notification_that_only_some_got_says_who_did_not() -> None:
    shop = Shop()

    async def broken(envelope: EventEnvelope[Any]) -> None:
        message = "amqp://bob:hunter2@host"
        raise ConnectionError(message)

    shop.router.endpoints.register(Endpoint("broken", broken))
    for name in ("stock", "broken", "nobody"):
        shop.route("shop.**", name)

    report = await shop.router.route_message(envelope(MessageKind.NOTIFICATION))

    assert report.is_partial
    assert [one.endpoint_id for one in report.failed] == ["broken", "nobody"]
    assert isinstance(report.failed[0].exception, EndpointFailedError)
    assert "hunter2" not in str(report)
    assert shop.names == ["stock"]


async def test_a_notification_for_nobody_is_an_error_and_an_event_is_not() -> None:
    shop = Shop()

    with pytest.raises(NoRouteError):
        await shop.router.route_message(envelope(MessageKind.NOTIFICATION))
    report = await shop.router.route_message(envelope(MessageKind.EVENT))

    assert report.deliveries == ()


class OrderPlaced(Event):
    number: int = 0


async def test_an_event_goes_to_routes_and_to_the_bus() -> None:
    async with MessageBus() as bus:
        shop = Shop(publish=publish_on(bus))
        shop.route("shop.**", "audit")
        seen: list[int] = []

        @bus.on("shop.orders.*")
        async def note(event: OrderPlaced) -> None:
            seen.append(event.number)

        placed = EventEnvelope(OrderPlaced(number=7), topic="shop.orders.placed")
        report = await shop.router.route_message(placed)
        await bus.settled()

    assert seen == [7]
    assert shop.names == ["audit"]
    assert report.delivered == 2


async def test_an_event_that_the_bus_refuses_is_told() -> None:
    async with MessageBus(filters=[lambda event: False]) as bus:
        shop = Shop(publish=publish_on(bus))

        refused = EventEnvelope(OrderPlaced(), topic="shop.orders")
        filtered = await shop.router.route_message(refused)
        no_event = await shop.router.route_message(envelope(MessageKind.EVENT))

    assert str(filtered.failed[0].error).startswith("filtered: ")
    assert "Only events" in str(no_event.failed[0].error)


async def test_workers_behind_one_name_share_the_requests() -> None:
    router = MessageRouter(balancing="round_robin")

    def worker(name: str) -> Endpoint:
        async def work(envelope: EventEnvelope[Any]) -> str:
            return name

        return Endpoint(name, work, group="crew")

    for name in ("a", "b", "c"):
        router.endpoints.register(worker(name))
    router.routes.register_route("jobs.*", "crew")

    answers = [await router.request("jobs.one", number) for number in range(6)]

    assert answers == ["a", "b", "c", "a", "b", "c"]
    assert router.monitor.is_healthy("a")
