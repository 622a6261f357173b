"""What is said in the shop."""

from __future__ import annotations

from enum import Enum

from msgbus.errors import Refusal
from msgbus.messages.message import Command, DomainEvent


class Card(Enum):
    """What will become of the payment; the order book decides it in advance."""

    GOOD = "good"
    DECLINED = "declined"
    OFFLINE = "offline"


class PlaceOrder(Command[int]):
    """Sell something; the reply is the price in cents."""

    number: int
    sku: str
    quantity: int
    cents: int
    email: str
    card: Card
    is_test: bool


class ShopEvent(DomainEvent):
    """Base of all that happens here: the audit listens to this one class."""

    number: int
    """Of the order."""


class OrderPlaced(ShopEvent, key="sku"):
    """An order was paid for. Orders of one article keep their order where that is promised."""

    sku: str
    quantity: int
    cents: int
    email: str
    is_test: bool


class CallbackRequested(ShopEvent):
    """A customer whose payment was declined wants to be called."""


class ReviewRequested(ShopEvent):
    """Time has passed, and the customer may have an opinion."""


class PaymentDeclined(Refusal):
    """The bank said no: an answer, not a breakdown."""
