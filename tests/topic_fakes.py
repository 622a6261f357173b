"""Events with topics, and a handler of any of them, that several tests share."""

from __future__ import annotations

from msgbus import Event, SystemEvent


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
