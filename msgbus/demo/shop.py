"""The shop: its handlers, and the books that each of them keeps for itself.

Nothing here asks the bus for numbers. At the end the bus's counters are held against these
books, so a message that was lost, doubled or miscounted would show.
"""

from __future__ import annotations

import time
from typing import Any, Final, final

import anyio
import anyio.lowlevel

from msgbus.bus.context import Context
from msgbus.bus.subscription import Subscription
from msgbus.demo.aftermath import WRONG, TroubleBook
from msgbus.demo.ledger import CIRCUIT, RETRY, Ledger
from msgbus.demo.messages import (
    CallbackRequested,
    Card,
    OrderPlaced,
    PaymentDeclined,
    PlaceOrder,
    ReviewRequested,
    ShopEvent,
)
from msgbus.handlers.config import BackpressureStrategy, BusConfig, QueueConfig
from msgbus.messages.message import Event
from msgbus.messages.receipts import PublishSummary
from msgbus.messages.system_events import EventHandlerFailedEvent, SessionEndEvent
from msgbus.middleware.chain import CallNext
from msgbus.resilience.bus import ResilientMessageBus
from msgbus.resilience.memory_store import MemoryDeadLetterStore

PRINTING: Final = 0.002
"""Seconds per label; ten are printed at a time."""

SHOWING: Final = 0.002
"""Seconds per line on the live screen, one at a time."""

GIFT_FROM: Final = 10_000
"""Cents from which an order is wrapped as a gift."""

PRINTER: Final = QueueConfig(max_size=200, batch_size=20)
SCREEN: Final = QueueConfig(max_size=50, strategy=BackpressureStrategy.DROP_OLDEST)
CALL_CENTRE: Final = QueueConfig(max_size=25, strategy=BackpressureStrategy.REJECT_NEW)


@final
class PaymentGateway:
    """Somebody else's server, with its moods. Given to the handler that asks for it."""

    async def charge(self, card: Card) -> None:
        """Take the money, or raise."""
        await anyio.lowlevel.checkpoint()
        if card is Card.DECLINED:
            message = "insufficient funds"
            raise PaymentDeclined(message)
        if card is Card.OFFLINE:
            message = "the gateway closed the connection"
            raise ConnectionError(message)


@final
class Stopwatch:
    """Middleware: how long each order took, all that is inside it included."""

    def __init__(self) -> None:
        self.calls = 0
        self.seconds = 0.0

    async def __call__(self, message: Any, call_next: CallNext) -> Any:
        """Time one call."""
        began = time.perf_counter()
        try:
            return await call_next(message)
        finally:
            self.calls += 1
            self.seconds += time.perf_counter() - began


@final
class Shop:
    """All handlers, each with a number or two of its own."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.trouble = TroubleBook()
        self.stopwatch = Stopwatch()
        self.orders_published = PublishSummary()
        """What the bus said about each `OrderPlaced`."""
        self.published_in_jobs = 0
        """Those of them that were admitted in an import job."""
        self.receipts_sent = 0
        self.receipts_bounced = 0
        self.receipts_sent_again = 0
        """Those that had bounced, and came back with an address that exists."""
        self.units_taken = 0
        self.cents_analysed = 0
        self.lists_analysed = 0
        self.orders_analysed = 0
        self.audited = 0
        self.gifts_wrapped = 0
        self.labels_printed = 0
        self.lines_shown = 0
        self.calls_made = 0
        self.reviews_asked = 0
        self.imported = 0
        self.failures_heard = 0
        self.jobs_ended = 0
        self._bounced: set[int] = set()
        self._reviews_wanted = -1
        self._reviews_done = anyio.Event()

    async def place_order(
        self, command: PlaceOrder, context: Context, gateway: PaymentGateway
    ) -> int:
        """Charge the card, and tell everybody."""
        await gateway.charge(command.card)
        receipt = await context.publish(
            OrderPlaced(
                number=command.number,
                sku=command.sku,
                quantity=command.quantity,
                cents=command.cents,
                email=command.email,
                is_test=command.is_test,
            )
        )
        self.orders_published.add(receipt)
        if receipt.accepted and command.session_id is not None:
            self.published_in_jobs += 1
        return command.cents

    async def send_receipt(self, event: OrderPlaced) -> None:
        """Some mailboxes do not exist: those events fail, only here, and are kept."""
        if event.email.startswith(WRONG):
            self.receipts_bounced += 1
            self._bounced.add(event.number)
            message = f"no such mailbox for order {event.number}"
            raise ValueError(message)
        if event.number in self._bounced:
            self._bounced.remove(event.number)
            self.receipts_sent_again += 1
        else:
            self.receipts_sent += 1

    async def book_ledger(self, event: OrderPlaced, ledger: Ledger) -> None:
        """Calls a service that fails: is tried again, and waits while its circuit is open."""
        ledger.book(event.number, event.cents)

    async def take_stock(self, event: OrderPlaced) -> None:
        """Take the goods off the shelf."""
        self.units_taken += event.quantity

    async def analyse(self, events: list[OrderPlaced]) -> None:
        """A batch handler: one call for a whole list."""
        self.lists_analysed += 1
        self.orders_analysed += len(events)
        self.cents_analysed += sum(event.cents for event in events)

    async def audit(self, event: ShopEvent) -> None:
        """Registered for the base class: sees all events of the shop."""
        del event
        self.audited += 1

    async def wrap_gift(self, event: OrderPlaced) -> None:
        """Has a filter of its own: big orders only."""
        del event
        self.gifts_wrapped += 1

    async def print_label(self, event: OrderPlaced) -> None:
        """Slow, with a short queue: whoever publishes has to wait."""
        del event
        await anyio.sleep(PRINTING)
        self.labels_printed += 1

    async def show_live(self, event: OrderPlaced) -> None:
        """Slower still, but what is old may be dropped: nobody waits."""
        del event
        await anyio.sleep(SHOWING)
        self.lines_shown += 1

    async def call_back(self, event: CallbackRequested) -> None:
        """Closed during the rush; when its short queue is full, it refuses."""
        del event
        self.calls_made += 1

    async def ask_for_review(self, event: ReviewRequested) -> None:
        """Published with a delay."""
        del event
        self.reviews_asked += 1
        if self.reviews_asked == self._reviews_wanted:
            self._reviews_done.set()

    async def wait_for_reviews(self, number: int) -> None:
        """Return once so many were asked for."""
        if self.reviews_asked < number:
            self._reviews_wanted = number
            await self._reviews_done.wait()

    async def count_import(self, event: OrderPlaced) -> None:
        """Registered on each import job's session: sees that job's orders only."""
        del event
        self.imported += 1

    async def note_failure(self, event: EventHandlerFailedEvent) -> None:
        """The bus tells of every failed handler, to those who ask."""
        del event
        self.failures_heard += 1

    async def note_end(self, event: SessionEndEvent) -> None:
        """The bus tells of every session that ends."""
        del event
        self.jobs_ended += 1


def is_real(event: Event) -> bool:
    """A filter of the bus: test orders go no further."""
    return not getattr(event, "is_test", False)


def is_big(event: Event) -> bool:
    """A filter of one handler."""
    return isinstance(event, OrderPlaced) and event.cents >= GIFT_FROM


def open_shop(shop: Shop) -> tuple[ResilientMessageBus, Subscription]:
    """The bus with all handlers, and the handle of the call centre."""
    bus = ResilientMessageBus(
        BusConfig(name="shop"),
        retry=None,
        breaker=None,
        dead_letters=MemoryDeadLetterStore(max_size=None),
        filters=[is_real],
        provide={PaymentGateway: PaymentGateway(), Ledger: shop.ledger},
    )
    bus.policy("book_ledger", retry=RETRY, breaker=CIRCUIT)
    bus.add_middleware(shop.stopwatch, types=PlaceOrder)
    bus.register_command_handler(PlaceOrder, shop.place_order, name="place_order")
    on = bus.register_event_handler
    on(OrderPlaced, shop.send_receipt, name="send_receipt")
    on(OrderPlaced, shop.book_ledger, name="book_ledger")
    on(OrderPlaced, shop.take_stock, name="take_stock")
    on(OrderPlaced, shop.analyse, name="analyse", batch=True)
    on(OrderPlaced, shop.wrap_gift, name="wrap_gift", filter=is_big)
    on(OrderPlaced, shop.print_label, name="print_label", concurrency=10, queue=PRINTER)
    on(OrderPlaced, shop.show_live, name="show_live", queue=SCREEN)
    on(ShopEvent, shop.audit, name="audit")
    on(ReviewRequested, shop.ask_for_review, name="ask_for_review")
    on(EventHandlerFailedEvent, shop.note_failure, name="note_failure")
    on(SessionEndEvent, shop.note_end, name="note_end")
    calls = on(CallbackRequested, shop.call_back, name="call_back", queue=CALL_CENTRE)
    shop.trouble.listen(bus)
    return bus, calls
