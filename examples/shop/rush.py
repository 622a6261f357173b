"""Act 1: a busy day in one process, with failures; then the dead letters are put right."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import anyio

from examples.shop.handlers import CALL_CENTRE, Ledger, Shop, call_back, count_import, open_shop
from examples.shop.messages import CallbackRequested, OrderPlaced, PaymentDeclined, PlaceOrder
from msgbus import BusSession, BusStats, CommandResult, MessageBus
from msgbus.resilience import LetterGroup, LetterReplayReport

TILLS = 16
IMPORTS = 20

Till = Counter[str]
"""Results that the tills got, as they counted them."""


@dataclass
class Rush:
    """Everything that was counted in the first act."""

    book: Sequence[PlaceOrder]
    till: Till
    shop: Shop
    groups: Sequence[LetterGroup]  # the dead letters, before the replay
    replay: LetterReplayReport
    letters_left: int
    stats: BusStats


async def run(book: Sequence[PlaceOrder]) -> Rush:
    """Place all orders, replay the dead letters, stop the bus, and hand over the counts."""
    till, shop = Till(), Shop(Ledger(outage_after=len(book) // 3))
    async with open_shop(shop) as bus:
        calls = bus.subscribe(CallbackRequested, call_back, queue=CALL_CENTRE)
        calls.pause()
        await place_orders(bus, book, till)
        calls.resume()
        await bus.settled()  # until all handlers are done with what is queued

        letters = bus.dead_letters
        groups = await letters.groups()
        for letter in await letters.find(OrderPlaced, handler="send_receipt"):
            if isinstance(letter.message, OrderPlaced):
                await letters.edit(letter, email=f"order-{letter.message.number}@example.org")
        # Failed orders are skipped: their callers got the error, and may have ordered again.
        replay = await letters.replay_all()
        left = await letters.count()
    return Rush(book, till, shop, groups, replay, left, bus.stats())


async def place_orders(bus: MessageBus, book: Sequence[PlaceOrder], till: Till) -> None:
    """Give a tenth of the orders to the import jobs, the others to the tills."""
    tenth = len(book) // 10
    imported, line = book[:tenth], iter(book[tenth:])
    async with anyio.create_task_group() as everybody:
        for job in range(IMPORTS):
            everybody.start_soon(run_import, bus, f"import-{job}", imported[job::IMPORTS], till)
        for _ in range(TILLS):
            everybody.start_soon(run_till, bus, line, till)


async def run_till(bus: MessageBus, line: Iterator[PlaceOrder], till: Till) -> None:
    for order in line:
        await place(bus, order, till)


async def run_import(bus: MessageBus, name: str, book: Sequence[PlaceOrder], till: Till) -> None:
    async with bus.session(name) as session:
        session.subscribe(OrderPlaced, count_import, durable=False)
        for order in book:
            await place(session, order, till)


async def place(bus: MessageBus | BusSession, order: PlaceOrder, till: Till) -> None:
    result = await bus.execute(order)
    count_result(till, order, result)
    if isinstance(result.exception, PaymentDeclined):
        await bus.publish(CallbackRequested(number=order.number))


def count_result(till: Till, order: PlaceOrder, result: CommandResult[int]) -> None:
    till["placed"] += 1
    if result.success:
        till["accepted"] += 1
        till["cents"] += result.unwrap()
        till["units"] += order.quantity
    elif isinstance(result.exception, PaymentDeclined):
        till["declined"] += 1
    else:
        till["failed"] += 1
