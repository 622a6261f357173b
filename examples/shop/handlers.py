"""The shop's handlers, and the bus of the first act.

Each handler counts what it did. At the end these counts are compared with the bus's own.
"""

from collections import Counter
from dataclasses import dataclass, field

import anyio

from examples.shop.messages import (
    WRONG,
    CallbackRequested,
    Card,
    OrderPlaced,
    PaymentDeclined,
    PlaceOrder,
)
from msgbus import (
    BackpressureStrategy,
    BusConfig,
    CircuitClosedEvent,
    CircuitHalfOpenedEvent,
    CircuitOpenedEvent,
    Context,
    DeadLetteredEvent,
    Event,
    EventHandlerFailedEvent,
    HandlerRegistry,
    PublishSummary,
    QueueConfig,
    RetryScheduledEvent,
    SessionEndEvent,
    SystemEvent,
)
from msgbus.resilience import CircuitBreakerConfig, ResilientMessageBus, RetryConfig

OUTAGE = 6  # calls that fail while the ledger is down: five open its circuit, one probes too early


@dataclass
class Ledger:
    """A service that books sales. One order in a hundred fails once; one outage comes half-way."""

    outage_after: int
    entries: int = 0
    cents: int = 0
    hiccups: int = 0
    calls_while_down: int = 0

    def book(self, number: int, cents: int, attempt: int) -> None:
        """Enter one sale, or raise."""
        if number % 100 == 50:
            if attempt == 1:
                self.hiccups += 1
                raise ConnectionResetError("the ledger closed the connection")
        elif self.entries >= self.outage_after and self.calls_while_down < OUTAGE:
            self.calls_while_down += 1
            raise ConnectionRefusedError("the ledger does not answer")
        self.entries += 1
        self.cents += cents


@dataclass
class Shop:
    """State that the handlers share; those that ask for it by annotation get it."""

    ledger: Ledger
    done: Counter[str] = field(default_factory=Counter[str])
    sales: PublishSummary = field(default_factory=PublishSummary)  # the receipts of `publish`
    bounced: set[int] = field(default_factory=set[int])
    heard: list[SystemEvent] = field(default_factory=list[SystemEvent])


orders = HandlerRegistry()  # the command: one handler, and one result for its caller
sales = HandlerRegistry()  # the events: any number of handlers, each with a queue of its own


@orders.handles(PlaceOrder)
async def place_order(command: PlaceOrder, context: Context, shop: Shop) -> int:
    if command.card is Card.DECLINED:
        raise PaymentDeclined("insufficient funds")
    if command.card is Card.OFFLINE:
        raise ConnectionError("the payment gateway closed the connection")
    receipt = await context.publish(OrderPlaced(**command.model_dump(exclude={"card"})))
    shop.sales.add(receipt)
    if command.session_id is not None:
        shop.done["sales in sessions"] += 1
    return command.cents


# A failure of one handler does not touch the others. Not retried, it becomes a dead letter.
@sales.on(OrderPlaced)
async def send_receipt(event: OrderPlaced, shop: Shop) -> None:
    if event.email.endswith(WRONG):
        shop.done["receipts bounced"] += 1
        shop.bounced.add(event.number)
        raise ValueError(f"no such mailbox for order {event.number}")
    shop.done["receipts sent again" if event.number in shop.bounced else "receipts sent"] += 1


# `open_shop` gives it retries and a circuit breaker. While the circuit is open, its queue waits.
@sales.on(OrderPlaced)
async def book_ledger(event: OrderPlaced, context: Context, shop: Shop) -> None:
    shop.ledger.book(event.number, event.cents, context.attempt)


@sales.on(OrderPlaced, batch=True)
async def analyse(events: list[OrderPlaced], shop: Shop) -> None:
    shop.done["sales analysed"] += len(events)
    shop.done["units analysed"] += sum(event.quantity for event in events)
    shop.done["cents analysed"] += sum(event.cents for event in events)


def is_big(event: Event) -> bool:
    return isinstance(event, OrderPlaced) and event.cents >= 10_000


@sales.on(OrderPlaced, filter=is_big)
async def wrap_gift(event: OrderPlaced, shop: Shop) -> None:
    shop.done["gifts wrapped"] += 1


# Slow. When its queue is full, whoever publishes waits: the default, BackpressureStrategy.WAIT.
@sales.on(OrderPlaced, concurrency=10, queue=QueueConfig(max_size=200, batch_size=20))
async def print_label(event: OrderPlaced, shop: Shop) -> None:
    await anyio.sleep(0.002)
    shop.done["labels printed"] += 1


# Slower still. When its queue is full, the oldest event is dropped, and nobody waits.
@sales.on(OrderPlaced, queue=QueueConfig(max_size=50, strategy=BackpressureStrategy.DROP_OLDEST))
async def show_live(event: OrderPlaced, shop: Shop) -> None:
    await anyio.sleep(0.002)
    shop.done["lines shown"] += 1


# Registered by rush.py, which pauses it for a while. When its queue is full, events are rejected.
CALL_CENTRE = QueueConfig(max_size=25, strategy=BackpressureStrategy.REJECT_NEW)


async def call_back(event: CallbackRequested, shop: Shop) -> None:
    shop.done["calls made"] += 1


# Registered by rush.py for the session of each import job: it gets the sales of that job only.
async def count_import(event: OrderPlaced, shop: Shop) -> None:
    shop.done["sales of imports seen"] += 1


# What the bus says about itself.
@sales.on(EventHandlerFailedEvent, RetryScheduledEvent, DeadLetteredEvent, SessionEndEvent,
          CircuitOpenedEvent, CircuitHalfOpenedEvent, CircuitClosedEvent)  # fmt: skip
async def listen(event: SystemEvent, shop: Shop) -> None:
    shop.heard.append(event)


def open_shop(shop: Shop) -> ResilientMessageBus:
    """Make the bus of the first act. That of the second is in durable.py."""
    bus = ResilientMessageBus(
        BusConfig(name="shop"),
        registries=[orders, sales],
        provide={Shop: shop},
        retry=None,  # for the bus as a whole; book_ledger has a policy of its own
        breaker=None,
    )
    bus.policy(
        "book_ledger",
        retry=RetryConfig(max_retries=OUTAGE, initial_delay=0.005, max_delay=0.05),
        breaker=CircuitBreakerConfig(failure_threshold=OUTAGE - 1, recovery_time=0.2),
    )
    return bus
