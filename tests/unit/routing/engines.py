"""Messages, routes and dispatchers that the tests of the dispatch engine share."""

from __future__ import annotations

from typing import Any

from msgbus import Event
from msgbus.routing import (
    DispatchResult,
    DispatchRoute,
    DispatchStatus,
    EventEnvelope,
    MessageCategory,
    MessageDispatchEngine,
)
from msgbus.runtime.clock import VirtualClock

EVENT = MessageCategory.EVENT
COMMAND = MessageCategory.COMMAND
TOPIC = "shop.events.orders"


class OrderPlaced(Event, name="shop.OrderPlaced"):
    number: int = 0


class OrderShipped(Event):
    pass


PLACED = EventEnvelope(OrderPlaced(number=7))


def route(
    dispatcher_id: str,
    pattern: str = "shop.**",
    category: MessageCategory = EVENT,
    *,
    route_id: str | None = None,
    message_type: str | None = None,
    priority: int = 0,
    enabled: bool = True,
) -> DispatchRoute:
    return DispatchRoute(
        route_id or f"to-{dispatcher_id}",
        pattern,
        category,
        dispatcher_id,
        message_type=message_type,
        priority=priority,
        enabled=enabled,
    )


class Log:
    """Makes dispatchers that note who ran."""

    def __init__(self) -> None:
        self.ran: list[str] = []

    def named(self, name: str, output: Any = None) -> Any:
        async def dispatcher(envelope: EventEnvelope[Any]) -> Any:
            self.ran.append(name)
            return output

        return dispatcher


async def nothing(envelope: EventEnvelope[Any]) -> None:
    pass


async def failing(envelope: EventEnvelope[Any]) -> None:
    message = "no way to https://bob:hunter2@example.org"
    raise ValueError(message)


def engine_of(
    dispatchers: dict[str, Any], *, clock: VirtualClock | None = None, **options: Any
) -> MessageDispatchEngine:
    """A frozen engine in which every dispatcher has a route of its own, in this order."""
    engine = MessageDispatchEngine(clock=clock, **options)
    for name, dispatcher in dispatchers.items():
        engine.register_dispatcher(name, dispatcher, EVENT)
        engine.register_route(route(name))
    engine.freeze()
    return engine


class Reducer:
    dispatcher_id = "reducer"
    category = EVENT
    node_kind = "reducer"

    def __init__(self, status: DispatchStatus = DispatchStatus.SUCCESS) -> None:
        self.message_types = {OrderPlaced}
        self.status = status

    async def handle(self, envelope: EventEnvelope[Any]) -> DispatchResult:
        return DispatchResult(
            status=self.status,
            topic=TOPIC,
            outputs=["shop.events.reduced"],
            error_message="password=hunter2" if self.status.is_error() else None,
        )
