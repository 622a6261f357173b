"""What the tests of a durable bus share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias, cast

import pytest

from msgbus import MessageBus
from msgbus.journal.operations import Append, Operation
from msgbus.journal.ports import Journal
from msgbus.journal.records import Appended, Member, Order, Record, Selection
from tests.fakes import OrderEvent

Place: TypeAlias = Callable[[], str | Journal]
"""Gives what `MessageBus(journal=...)` takes; the same messages are in it each time."""


# With names of their own: what is found by its wire name must not be another test's.


class OrderPlaced(OrderEvent, name="places.OrderPlaced"):
    pass


class OrderShipped(OrderEvent, name="places.OrderShipped"):
    pass


def orders(count: int) -> Iterator[OrderPlaced]:
    return (OrderPlaced(number=number) for number in range(count))


def journal_of(bus: MessageBus) -> Journal:
    return cast("Journal", bus.journal)


async def stored(bus: MessageBus) -> list[int]:
    """The numbers of all events in the journal, in its order."""
    scan = await journal_of(bus).read(0, 10_000, Selection(order=Order.NONE))
    return [one.json()["number"] for one in scan.records if not isinstance(one, int)]


def watch_appends(
    bus: MessageBus,
    monkeypatch: pytest.MonkeyPatch,
    look: Callable[[Sequence[Record]], object],
) -> None:
    """Have `look` see what each call of the bus's journal is about to append; it may raise."""
    journal = journal_of(bus)
    commit = journal.commit

    async def watched(
        operations: Sequence[Operation], member: Member | None = None
    ) -> list[Appended]:
        look([one.record for one in operations if isinstance(one, Append)])
        return await commit(operations, member)

    monkeypatch.setattr(journal, "commit", watched)


def count_appends(bus: MessageBus, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many messages each commit of the bus's journal appends, as they come."""
    sizes: list[int] = []

    def count(records: Sequence[Record]) -> None:
        if records:
            sizes.append(len(records))

    watch_appends(bus, monkeypatch, count)
    return sizes
