"""The order book of one run, written in advance: the same seed gives the same orders."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Final, final

from msgbus.demo.aftermath import RIGHT, WRONG
from msgbus.demo.messages import Card, PlaceOrder

PRICES: Final = {"tea": 450, "coffee": 790, "cup": 1_250, "pot": 3_900, "samovar": 24_900}
CARDS: Final = {Card.GOOD: 93, Card.DECLINED: 4, Card.OFFLINE: 3}
TEST_SHARE: Final = 0.02
BOUNCE_SHARE: Final = 0.01
IMPORT_SHARE: Final = 10
"""One order in ten comes from an import job."""


@final
@dataclass(frozen=True, slots=True)
class Plan:
    """Who will order what."""

    seed: int
    # Not in the repr: asyncio shows the result of its main task when the loop is closed.
    at_tills: tuple[PlaceOrder, ...] = field(repr=False)
    imports: tuple[tuple[PlaceOrder, ...], ...] = field(repr=False)
    """One list for each import job."""

    @property
    def orders(self) -> tuple[PlaceOrder, ...]:
        """All of them."""
        return self.at_tills + tuple(order for job in self.imports for order in job)

    def count(self, card: Card) -> int:
        """How many orders will be paid with such a card."""
        return sum(order.card is card for order in self.orders)


def write_plan(orders: int, seed: int, jobs: int) -> Plan:
    """Make up `orders` orders, a tenth of them spread over `jobs` import jobs."""
    random = Random(seed)
    book = [_make_up(number, random) for number in range(orders)]
    imported = book[: orders // IMPORT_SHARE]
    return Plan(
        seed=seed,
        at_tills=tuple(book[len(imported) :]),
        imports=tuple(tuple(imported[job::jobs]) for job in range(jobs)),
    )


def _make_up(number: int, random: Random) -> PlaceOrder:
    sku = random.choice(list(PRICES))
    quantity = random.randint(1, 5)
    (card,) = random.choices(list(CARDS), weights=list(CARDS.values()))
    mailbox = WRONG if random.random() < BOUNCE_SHARE else RIGHT
    return PlaceOrder(
        number=number,
        sku=sku,
        quantity=quantity,
        cents=PRICES[sku] * quantity,
        email=f"{mailbox}{number}@example.org",
        card=card,
        is_test=random.random() < TEST_SHARE,
    )
