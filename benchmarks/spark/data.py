"""A journal like that of a busy shop, written by the journal itself, and the read model of it."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from pydantic import BaseModel

from msgbus import Event
from msgbus.journal import DeliveryRecord, MessageCodec, Outcome, Record, SqliteJournal
from msgbus.journal.operations import Append, Note, Operation
from msgbus.messages.message import set_meta
from msgbus.messages.metadata import Metadata
from msgbus.pipeline import Projection
from msgbus.pipeline.source.writer import v7

START: Final = 1_767_225_600.0
"""The first message: 2026-01-01, midnight in UTC."""

PER_SECOND: Final = 100
GROUP: Final = 5_000
CUSTOMERS: Final = 50_000
TYPES: Final = 40
HANDLERS: Final = ("billing", "stock", "mail")
ERRORS: Final = ("TimeoutError: no answer", "ConnectionError: refused", "KeyError: 'sku'")


class OrderPlaced(Event, name="shop.OrderPlaced", key="customer"):
    order_id: str
    customer: str
    cents: int
    country: str = "DE"
    lines: tuple[str, ...] = ()


class Seen(Event, name="shop.Seen", key="customer"):
    customer: str
    page: str
    kind: int


class Customer(BaseModel):
    customer: str
    orders: int = 0
    cents: int = 0
    seen: int = 0


class Customers(Projection[dict[str, int], OrderPlaced | Seen]):
    """What the replay folds: all messages, by the key that they are kept under."""

    row = Customer

    def initial(self, key: str) -> dict[str, int]:
        del key
        return {"orders": 0, "cents": 0, "seen": 0}

    def apply(self, state: dict[str, int], event: OrderPlaced | Seen) -> dict[str, int]:
        if isinstance(event, OrderPlaced):
            state["orders"] += 1
            state["cents"] += event.cents
        else:
            state["seen"] += 1
        return state

    def result(self, key: str, state: dict[str, int]) -> Customer:
        return Customer(customer=key, **state)


def write_journal(path: Path, first: int, last: int) -> float:
    """Write messages with these numbers, each with a delivery; gives the seconds it took."""
    began = time.perf_counter()

    async def write() -> None:
        async with SqliteJournal(path, reserve=0) as journal:
            for group in groups(first, last):
                await journal.commit(group)

    asyncio.run(write())
    return time.perf_counter() - began


def groups(first: int, last: int) -> Iterator[list[Operation]]:
    """The operations, a transaction at a time; the same for the same numbers."""
    codec = MessageCodec()
    for start in range(first, last, GROUP):
        dice, parent = random.Random(start), None
        operations: list[Operation] = []
        for number in range(start, min(start + GROUP, last)):
            record = make_record(dice, codec, number, parent)
            # A root has no parent, and most messages have a root not far above.
            parent = record if record.depth < 6 and dice.random() < 0.7 else None
            operations += [Append(record), *map(Note, deliveries(dice, record))]
        yield operations


def make_record(
    dice: random.Random, codec: MessageCodec, number: int, parent: Record | None
) -> Record:
    moment = START + number / PER_SECOND
    customer = f"customer-{dice.randrange(CUSTOMERS)}"
    event: Event
    if dice.random() < 0.5:
        lines = tuple(f"sku-{dice.randrange(999)}" for _ in range(dice.randrange(4)))
        event = OrderPlaced(
            order_id=f"order-{number}", customer=customer, cents=dice.randrange(99_999), lines=lines
        )
    else:
        event = Seen(customer=customer, page=f"/shop/{dice.randrange(999)}", kind=number % TYPES)
    own = v7(int(moment * 1000), dice.getrandbits(74))
    meta = Metadata(
        own,
        correlation_id=own if parent is None else parent.correlation_id,
        causation_id=None if parent is None else parent.message_id,
        session_id=f"session-{number // 50}" if number % 3 else None,
        fixed=True,
        root_id=own if parent is None else parent.root_id,
        depth=0 if parent is None else parent.depth + 1,
    )
    set_meta(event, meta)
    return codec.encode(event, time=moment)


def deliveries(dice: random.Random, record: Record) -> Iterator[DeliveryRecord]:
    """One try, or a failed one and a second."""
    handler, attempt = dice.choice(HANDLERS), 1
    wait, run = dice.expovariate(200), dice.lognormvariate(-6, 1)
    moment = record.time + wait + run
    while dice.random() < 0.02 and attempt < 3:
        error = dice.choice(ERRORS)
        yield DeliveryRecord(
            record.message_id, handler, attempt, Outcome.FAILED, wait, run, moment, error
        )
        attempt, moment = attempt + 1, moment + 1
    is_lost = attempt == 3
    yield DeliveryRecord(
        record.message_id,
        handler,
        attempt,
        Outcome.DEAD_LETTERED if is_lost else Outcome.OK,
        wait,
        run,
        moment,
        ERRORS[0] if is_lost else None,
    )
