"""The rush: tills and import jobs at the same time, then the end of the day."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, final

import anyio

from msgbus.bus.bus import MessageBus
from msgbus.bus.session import BusSession
from msgbus.demo.aftermath import Aftermath, clear_up
from msgbus.demo.ledger import Ledger
from msgbus.demo.messages import (
    CallbackRequested,
    Card,
    OrderPlaced,
    PaymentDeclined,
    PlaceOrder,
    ReviewRequested,
)
from msgbus.demo.plan import Plan
from msgbus.demo.shop import Shop, open_shop
from msgbus.messages.receipts import DrainReport, PublishSummary
from msgbus.messages.results import CommandResult
from msgbus.telemetry.stats import BusStats

TILLS: Final = 16
JOBS: Final = 20

REVIEW_EVERY: Final = 500
SOON: Final = 0.05
"""Half of the customers are asked for a review in a moment, the others in an hour."""
LATER: Final = 3_600.0

REFRESH: Final = 0.05


@final
@dataclass(slots=True)
class Till:
    """What those who place orders see of it: results, and receipts for what they publish."""

    placed: int = 0
    accepted: int = 0
    declined: int = 0
    broken: int = 0
    real_orders: int = 0
    real_cents: int = 0
    real_units: int = 0
    callbacks: PublishSummary = field(default_factory=PublishSummary)
    reviews_soon: int = 0
    reviews_later: int = 0

    def note(self, order: PlaceOrder, result: CommandResult[int]) -> None:
        """Count one result."""
        self.placed += 1
        if result.success:
            self.accepted += 1
            if not order.is_test:
                self.real_orders += 1
                self.real_cents += result.unwrap()
                self.real_units += order.quantity
        elif isinstance(result.exception, PaymentDeclined):
            self.declined += 1
        else:
            self.broken += 1


@final
@dataclass(frozen=True, slots=True)
class Outcome:
    """Everything that is known at the end of the day."""

    plan: Plan
    till: Till
    shop: Shop
    stats: BusStats
    aftermath: Aftermath
    drain: DrainReport
    seconds: float


async def run(plan: Plan, watch: Callable[[Till, Shop], None]) -> Outcome:
    """Take all orders, put right what went wrong, close the shop, and hand over the books.

    Args:
        plan: The orders.
        watch: Called several times a second, to show how far things are.
    """
    shop, till = Shop(Ledger(outage_after=plan.count(Card.GOOD) // 2)), Till()
    bus, calls = open_shop(shop)
    await bus.start()
    calls.pause()
    began = time.perf_counter()
    async with anyio.create_task_group() as watching:
        watching.start_soon(_show, watch, till, shop)
        await _rush(bus, plan, till, shop)
        await shop.wait_for_reviews(till.reviews_soon)
        await _all_receipts(bus)
        watching.cancel_scope.cancel()
    aftermath = await clear_up(bus)
    calls.resume()
    drain = await bus.stop()
    seconds = time.perf_counter() - began
    watch(till, shop)
    return Outcome(plan, till, shop, bus.stats(), aftermath, drain, seconds)


async def _rush(bus: MessageBus, plan: Plan, till: Till, shop: Shop) -> None:
    line = iter(plan.at_tills)
    async with anyio.create_task_group() as everybody:
        for job, orders in enumerate(plan.imports, 1):
            everybody.start_soon(_import, bus, f"import-{job}", orders, till, shop)
        for _ in range(TILLS):
            everybody.start_soon(_sell, bus, line, till)


async def _sell(bus: MessageBus, line: Iterator[PlaceOrder], till: Till) -> None:
    for order in line:
        await _place(bus, order, till)


async def _import(
    bus: MessageBus, name: str, orders: tuple[PlaceOrder, ...], till: Till, shop: Shop
) -> None:
    async with bus.session(name) as session:
        session.register_event_handler(OrderPlaced, shop.count_import)
        for order in orders:
            await _place(session, order, till)


async def _place(where: MessageBus | BusSession, order: PlaceOrder, till: Till) -> None:
    result = await where.execute(order)
    till.note(order, result)
    if isinstance(result.exception, PaymentDeclined):
        till.callbacks.add(await where.publish(CallbackRequested(number=order.number)))
    if order.number % REVIEW_EVERY == 0:
        soon = order.number % (2 * REVIEW_EVERY) == 0
        await where.publish(ReviewRequested(number=order.number), delay=SOON if soon else LATER)
        if soon:
            till.reviews_soon += 1
        else:
            till.reviews_later += 1


async def _all_receipts(bus: MessageBus) -> None:
    """Wait until each was sent or has bounced. The rest of the work is left for `stop`."""
    # A bus tells when everything is done; this is about one handler only.
    while _pending(bus, "send_receipt"):  # noqa: ASYNC110
        await anyio.sleep(REFRESH)


def _pending(bus: MessageBus, handler: str) -> int:
    stats = bus.stats().handlers.get(handler)
    return 0 if stats is None else stats.pending


async def _show(watch: Callable[[Till, Shop], None], till: Till, shop: Shop) -> None:
    while True:
        watch(till, shop)
        await anyio.sleep(REFRESH)
