"""What the tests of a durable bus share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import pytest

from msgbus import MessageBus
from msgbus.journal import Ack, Journal
from msgbus.journal.operations import Append, Operation
from tests.fakes import OrderPlaced

Place: TypeAlias = Callable[[], str | Journal]
"""Gives what `MessageBus(journal=...)` takes; the same messages are in it each time."""


def orders(count: int) -> Iterator[OrderPlaced]:
    return (OrderPlaced(number=number) for number in range(count))


def journal_of(bus: MessageBus) -> Journal:
    assert bus.journal is not None
    return bus.journal


async def stored(bus: MessageBus) -> list[int]:
    """The numbers of all events in the journal, in its order."""
    return [record.json()["number"] for record in await journal_of(bus).read(1, 10_000)]


def count_appends(bus: MessageBus, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many messages each commit of the bus's journal appends, as they come."""
    commit = journal_of(bus).commit
    sizes: list[int] = []

    async def counted(operations: Sequence[Operation]) -> list[Ack]:
        appends = sum(isinstance(one, Append) for one in operations)
        if appends:
            sizes.append(appends)
        return await commit(operations)

    monkeypatch.setattr(journal_of(bus), "commit", counted)
    return sizes
