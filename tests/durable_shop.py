"""A small shop on a bus with a journal: what the tests of durability share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgbus import Command, Event, MessageBus, Query


class Placed(Event, name="durable.Placed", key="sku"):
    sku: str = "tea"
    number: int = 0


class PlacedOnline(Placed, name="durable.PlacedOnline"):
    channel: str = "web"


class Shipped(Event, name="durable.Shipped", topic="shop.orders.shipped"):
    sku: str = "tea"
    number: int = 0


class Place(Command[str], name="durable.Place"):
    sku: str = "tea"


class CountOrders(Query[int], name="durable.CountOrders"):
    pass


class DownError(Exception):
    pass


class Seen:
    """A handler that notes the numbers it saw, and fails where it is told to."""

    def __init__(self, *, fail: dict[int, int] | None = None) -> None:
        self.numbers: list[int] = []
        self.failing = dict(fail or {})
        """How often it fails, by number."""

    async def __call__(self, event: Placed) -> None:
        if self.failing.get(event.number, 0) > 0:
            self.failing[event.number] -= 1
            raise DownError(f"no {event.number}")
        self.numbers.append(event.number)


def url_of(path: Path) -> str:
    return f"sqlite:///{path / 'shop.db'}"


async def recorded(bus: MessageBus) -> list[tuple[str, str]]:
    """What the journal holds: wire name and kind, in order."""
    assert bus.journal is not None
    return [(one.name, one.kind.value) for one in await bus.journal.read(0, 10_000)]


async def outcomes(bus: MessageBus, message_id: str) -> list[tuple[Any, ...]]:
    assert bus.journal is not None
    found = await bus.journal.deliveries(message_id)
    return [(one.handler, one.attempt, one.outcome.value) for one in found]
