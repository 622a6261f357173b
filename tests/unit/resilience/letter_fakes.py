"""Messages, handlers and queues that the tests of dead letters share."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from msgbus import Command, Event, Message
from msgbus.journal import MemoryJournal, SqliteJournal
from msgbus.resilience import (
    DeadLetterEntry,
    DeadLetterQueue,
    DeadLetterStore,
    JournalDeadLetterStore,
    MemoryDeadLetterStore,
    SqliteDeadLetterStore,
)
from msgbus.runtime.clock import VirtualClock

STORES = pytest.mark.parametrize("kind", ["memory", "sqlite", "journal", "memory journal"])


class ChargeCard(Command[str], name="letters.ChargeCard"):
    order: int = 0


class CardCharged(Event, name="letters.CardCharged", version=2, topic="shop.cards.charged"):
    order: int = 0
    note: str = ""


class GoldCardCharged(CardCharged, name="letters.GoldCardCharged"):
    pass


class Service:
    """A handler's outside world: it fails for the orders it is told to fail for."""

    def __init__(self) -> None:
        self.handled: list[int] = []
        self.failing: set[int] = set()
        self.seen: list[tuple[Message, str]] = []

    async def redeliver(self, letter: DeadLetterEntry) -> object:
        message = letter.message
        self.seen.append((message, letter.handler))
        assert isinstance(message, (ChargeCard, CardCharged))
        if message.order in self.failing:
            raise ConnectionError(f"order {message.order} again")
        self.handled.append(message.order)
        return None


@asynccontextmanager
async def made_store(
    kind: str, folder: Path, clock: VirtualClock, **options: Any
) -> AsyncGenerator[DeadLetterStore]:
    if kind == "memory":
        yield MemoryDeadLetterStore(**options)
    elif kind == "sqlite":
        yield SqliteDeadLetterStore(folder / "letters.db", **options)
    elif kind == "memory journal":
        async with MemoryJournal(clock=clock) as memory:
            yield JournalDeadLetterStore(memory, **options)
    else:
        async with SqliteJournal(folder / "journal.db", clock=clock, reserve=0) as journal:
            yield JournalDeadLetterStore(journal, **options)


@asynccontextmanager
async def opened_queue(
    kind: str, folder: Path, **options: Any
) -> AsyncGenerator[tuple[DeadLetterQueue, Service, VirtualClock]]:
    clock = VirtualClock()
    async with made_store(kind, folder, clock, **options) as store:
        queue = DeadLetterQueue(store, clock=clock)
        service = Service()
        queue.connect(service.redeliver)
        async with queue:
            yield queue, service, clock


def bury(
    queue: DeadLetterQueue,
    message: Message,
    *,
    handler: str = "charge",
    error: BaseException | None = None,
    attempts: int = 3,
    answered: bool = False,
) -> DeadLetterEntry:
    """Add a letter that must be taken."""
    letter = queue.add(
        message,
        handler=handler,
        error=ConnectionError("down") if error is None else error,
        attempts=attempts,
        first_attempt=queue._clock.time(),  # pyright: ignore[reportPrivateUsage]
        reason="retries exhausted",
        answered=answered,
    )
    assert letter is not None
    return letter


def bury_orders(queue: DeadLetterQueue, number: int) -> list[DeadLetterEntry]:
    return [bury(queue, CardCharged(order=order)) for order in range(number)]
