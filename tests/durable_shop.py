"""A small shop on a bus with a journal: what the tests of durability share."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

from msgbus import Command, Event, MessageBus, Query
from msgbus.journal.ports import Journal, Questions
from msgbus.journal.records import Letter, Pending, Record, State


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


class DeadMessage(NamedTuple):
    record: Record
    row: Pending
    letter: Letter


def url_of(path: Path) -> str:
    return f"sqlite:///{path / 'shop.db'}"


class LookedInto(Journal, Questions, Protocol):
    """A journal that answers questions, as both engines do."""


def journal_of(bus: MessageBus) -> LookedInto:
    return cast("LookedInto", bus.journal)


async def records(bus: MessageBus) -> list[Record]:
    """What the journal holds, in order."""
    page = await journal_of(bus).find_messages(limit=10_000)
    return [one for one in page.records if isinstance(one, Record)]


async def recorded(bus: MessageBus) -> list[tuple[str, str]]:
    """What the journal holds: wire name and kind, in order."""
    return [(one.name, one.kind.value) for one in await records(bus)]


async def outcomes(bus: MessageBus, message_id: str) -> list[tuple[Any, ...]]:
    found = await journal_of(bus).deliveries(message_id)
    return [(one.handler, one.attempt, one.outcome.value) for one in found]


async def dead_letters(bus: MessageBus, subscription: str | None = None) -> list[DeadMessage]:
    """The dead letters of the journal, or of one subscription."""
    journal, found = journal_of(bus), list[DeadMessage]()
    for row in await journal.find(subscription, [State.DEAD]):
        record, letter = await journal.record(row), await journal.letter(row)
        assert record is not None
        assert letter is not None
        found.append(DeadMessage(record, row, letter))
    return found
