"""A small shop and questions to a recorder, for the tests of `record`."""

from __future__ import annotations

from collections.abc import Sequence

from msgbus import (
    Command,
    Context,
    HandlerRegistry,
    Message,
)
from msgbus.testing import Recorder
from tests.fakes import OrderEvent, OrderPlaced


class PlaceOrder(Command[int]):
    number: int = 1


class ChargeCard(Command):
    number: int = 1


class CardCharged(OrderEvent):
    pass


class ReceiptSent(OrderEvent):
    pass


handlers = HandlerRegistry()


@handlers.handles(PlaceOrder)
async def place_order(command: PlaceOrder, context: Context) -> int:
    await context.call(ChargeCard(number=command.number))
    context.emit(OrderPlaced(number=command.number))
    return command.number


@handlers.handles(ChargeCard)
async def charge_card(command: ChargeCard, context: Context) -> None:
    await context.publish(CardCharged(number=command.number))


@handlers.on(OrderPlaced)
async def send_receipt(event: OrderPlaced, context: Context) -> None:
    await context.bus.publish(ReceiptSent(number=event.number))


async def fail(message: object) -> None:
    raise ValueError("boom")


async def ignore(message: object) -> None:
    pass


def handled(recorder: Recorder) -> list[tuple[str, str]]:
    """The names of what was handled, and by whom."""
    return [(type(one.message).__name__, one.handler) for one in recorder.handled()]


def kinds(messages: Sequence[Message]) -> list[str]:
    return [type(message).__name__ for message in messages]
