"""The shop of these programs: its events, a read model, and a journal full of orders."""

from __future__ import annotations

import random
from pathlib import Path
from zlib import crc32

from pydantic import BaseModel

from msgbus import Event
from msgbus.journal import MessageCodec, Record
from msgbus.pipeline import Projection
from tests.spark.kit import append

START = 1_767_225_600.0


class Ordered(Event, name="cluster.Ordered", key="customer"):
    customer: str
    cents: int


class Refunded(Event, name="cluster.Refunded", key="customer"):
    customer: str
    cents: int


class Thanked(Event, name="cluster.Thanked", key="customer"):
    customer: str
    cents: int


class Balance(BaseModel):
    customer: str
    cents: int = 0
    trail: str = ""


class Balances(Projection[Balance, Ordered | Refunded]):
    """Depends on the order of events: another order gives another trail."""

    def initial(self, key: str) -> Balance:
        return Balance(customer=key)

    def apply(self, state: Balance, event: Ordered | Refunded) -> Balance:
        cents = event.cents if isinstance(event, Ordered) else -event.cents
        trail = f"{crc32(f'{state.trail}/{cents}'.encode()):x}"
        return Balance(customer=state.customer, cents=state.cents + cents, trail=trail)


def orders(count: int) -> list[Record]:
    dice, codec = random.Random(count), MessageCodec()
    found: list[Record] = []
    for number in range(count):
        kind = Refunded if dice.random() < 0.2 else Ordered
        event = kind(customer=f"c{dice.randrange(97)}", cents=dice.randrange(9999))
        found.append(codec.encode(event, time=START + number / 10))
    return found


def write_orders(path: Path, count: int) -> None:
    append(path, orders(count))
