"""MessageRouter: metrics, and the warning of slow route lookups."""

from __future__ import annotations

from typing import Any

import pytest

from msgbus import BusConfig, ConfigurationError, Event, MessageBus
from msgbus.errors import NoRouteError
from msgbus.routing import Endpoint, EventEnvelope, MessageKind, MessageRouter
from msgbus.runtime.clock import SystemClock, VirtualClock
from tests.fakes import logged


class Ticking:
    """Each look at it takes a second."""

    def __init__(self) -> None:
        self._real = SystemClock()
        self._now = 0.0
        self.time = self._real.time
        self.sleep = self._real.sleep
        self.cancel_after = self._real.cancel_after

    def now(self) -> float:
        self._now += 1
        return self._now


class OrderPlaced(Event):
    number: int = 0


async def echo(envelope: EventEnvelope[Any]) -> Any:
    return envelope.payload


def shop(**options: Any) -> MessageRouter:
    router = MessageRouter(**options)
    router.endpoints.register(Endpoint("a", echo))
    router.endpoints.register(Endpoint("b", echo))
    router.routes.register_route("shop.**", "a")
    router.routes.register_route("shop.orders", "b")
    return router


def message(kind: MessageKind, topic: str = "shop.orders") -> EventEnvelope[Any]:
    return EventEnvelope(1, topic=topic, kind=kind)


async def test_a_router_counts_what_it_routed_and_what_it_could_not() -> None:
    """Point 12."""
    router = shop()
    for kind in (MessageKind.REQUEST, MessageKind.NOTIFICATION, MessageKind.EVENT):
        await router.route_message(message(kind))
    for kind in (MessageKind.REQUEST, MessageKind.NOTIFICATION):
        with pytest.raises(NoRouteError):
            await router.route_message(message(kind, "nowhere"))
    await router.route_message(message(MessageKind.EVENT, "nowhere"))

    metrics = router.metrics()

    assert (metrics.routed, metrics.unroutable) == (3, 3)
    assert metrics.routes == 5
    assert sum(metrics.buckets) == 6
    assert 0 < metrics.seconds < 1
    assert 0 < metrics.p50 <= metrics.p99


async def test_an_event_that_goes_to_the_bus_alone_is_routed() -> None:
    """Point 12."""
    got: list[str] = []
    router = MessageRouter(publish=lambda topic, envelope: got.append(topic))

    await router.route_message(message(MessageKind.EVENT))

    assert got == ["shop.orders"]
    assert (router.metrics().routed, router.metrics().unroutable) == (1, 0)


async def test_slow_routes_are_warned_of_if_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    """Point 12: finding the way, not the delivery."""
    await shop(clock=Ticking()).request("shop.orders", 1)
    await shop(clock=Ticking(), slow_route=2.0).request("shop.orders", 1)
    assert logged(caplog, "slow_route") == []

    await shop(clock=Ticking(), slow_route=100e-6).request("shop.orders", 1)

    assert logged(caplog, "slow_route") == [
        {"event": "slow_route", "topic": "shop.orders", "seconds": 1.0, "limit": 100e-6}
    ]


@pytest.mark.parametrize("wrong", [-1.0, 0.0, float("nan")])
def test_a_limit_is_a_number_above_zero(wrong: float) -> None:
    """Point 12."""
    with pytest.raises(ConfigurationError, match="slow_route"):
        MessageRouter(slow_route=wrong)
    with pytest.raises(ValueError, match="slow_publish"):
        BusConfig(slow_publish=wrong)


async def test_slow_publishes_are_warned_of_if_asked_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Point 12: the whole of admission, filters and waits included."""

    async def publish_on(config: BusConfig) -> None:
        clock = VirtualClock()

        async def slow(event: Event) -> bool:
            await clock.advance(0.005)
            return True

        bus = MessageBus(config, clock=clock, filters=[slow])
        async with bus:
            await bus.publish(OrderPlaced())

    await publish_on(BusConfig())
    await publish_on(BusConfig(slow_publish=0.01))
    assert logged(caplog, "slow_publish") == []

    await publish_on(BusConfig(name="shop", slow_publish=1e-3))

    [row] = logged(caplog, "slow_publish")
    assert row["bus"] == "shop"
    assert row["message_type"] == "OrderPlaced"
    assert row["limit"] == 1e-3
    assert row["seconds"] == pytest.approx(0.005)


async def test_a_bus_without_filters_warns_too(caplog: pytest.LogCaptureFixture) -> None:
    """Point 12."""
    handled: list[int] = []
    bus = MessageBus(BusConfig(slow_publish=1e-3), clock=Ticking())

    @bus.on(OrderPlaced)
    async def handle(event: OrderPlaced) -> None:
        handled.append(event.number)

    async with bus:
        await bus.publish(OrderPlaced(number=1))
        await bus.publish_many([OrderPlaced(number=2), OrderPlaced(number=3)])
        await bus.settled()

    assert handled == [1, 2, 3]
    assert len(logged(caplog, "slow_publish")) == 3
