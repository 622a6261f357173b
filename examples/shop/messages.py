"""The shop's messages, and the orders of one run."""

from enum import Enum
from random import Random

from msgbus import Command, DomainEvent, Refusal


class Card(Enum):
    """Answer of the payment gateway, decided in advance so that it can be counted."""

    GOOD = "good"
    DECLINED = "declined"
    OFFLINE = "offline"


class PlaceOrder(Command[int], name="shop.PlaceOrder"):
    """Sell something; the reply is the price in cents."""

    number: int
    sku: str
    quantity: int
    cents: int
    email: str
    card: Card


class PaymentDeclined(Refusal):
    """The bank said no. A `Refusal` is an answer: it is not retried and not a dead letter."""


class OrderPlaced(DomainEvent, name="shop.OrderPlaced", key="sku"):
    """An order was paid for. Events of one key, here one article, can be kept in order."""

    number: int
    sku: str
    quantity: int
    cents: int
    email: str


class CallbackRequested(DomainEvent):
    """A customer whose card was declined wants to be called."""

    number: int


PRICES = {"tea": 450, "coffee": 790, "cup": 1_250, "pot": 3_900, "samovar": 24_900}
CARDS = {Card.GOOD: 93, Card.DECLINED: 4, Card.OFFLINE: 3}  # in percent
WRONG = "@no-such-mailbox.example"


def make_orders(count: int, seed: int) -> list[PlaceOrder]:
    """Make up `count` orders; the same seed gives the same orders."""
    random = Random(seed)
    orders: list[PlaceOrder] = []
    for number in range(count):
        sku, quantity = random.choice(list(PRICES)), random.randint(1, 5)
        [card] = random.choices(list(CARDS), weights=list(CARDS.values()))
        email = f"order-{number}{WRONG if random.random() < 0.01 else '@example.org'}"
        cents = PRICES[sku] * quantity
        orders.append(
            PlaceOrder(
                number=number, sku=sku, quantity=quantity, cents=cents, email=email, card=card
            )
        )
    return orders
