"""Does it add up? Each check is an equation between what two different parties counted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, final

from msgbus.demo.ledger import CIRCUIT
from msgbus.demo.messages import CallbackRequested, Card, OrderPlaced, ReviewRequested, ShopEvent
from msgbus.demo.rush import JOBS, Outcome
from msgbus.messages.message import Event
from msgbus.messages.system_events import (
    DeadLetteredEvent,
    EventHandlerFailedEvent,
    RetryScheduledEvent,
    SessionEndEvent,
)
from msgbus.telemetry.stats import EventHandlerStats

BY_THE_BUS: Final = "as the bus counted it"


@final
@dataclass(frozen=True, slots=True)
class Equation:
    """`total` must be the sum of the parts."""

    subject: str
    total_name: str
    total: int
    parts: tuple[tuple[str, int], ...]

    @property
    def holds(self) -> bool:
        """Whether it is true; a count below zero is none."""
        values = [value for _, value in self.parts]
        return self.total == sum(values) and min(values, default=0) >= 0


@final
@dataclass(frozen=True, slots=True)
class Books:
    """All equations of one run, by table."""

    orders: Sequence[Equation]
    events: Sequence[Equation]
    handlers: Sequence[Equation]
    others: Sequence[Equation]
    trouble: Sequence[Equation]

    @property
    def all(self) -> list[Equation]:
        """Every one of them."""
        return [*self.orders, *self.events, *self.handlers, *self.others, *self.trouble]

    @property
    def add_up(self) -> bool:
        """Whether all hold."""
        return all(equation.holds for equation in self.all)


def close_books(outcome: Outcome) -> Books:
    """Write down all equations."""
    return Books(
        orders=list(_orders(outcome)),
        events=list(_events(outcome)),
        handlers=list(_handlers(outcome)),
        others=list(_others(outcome)),
        trouble=list(_trouble(outcome)),
    )


def _orders(outcome: Outcome) -> Iterator[Equation]:
    till, plan = outcome.till, outcome.plan
    command = outcome.stats.commands["place_order"]
    names = ("accepted", "declined", "broken")

    def equation(subject: str, total: int, *parts: int) -> Equation:
        return Equation(subject, "placed", total, tuple(zip(names, parts, strict=True)))

    yield equation("as the tills saw it", till.placed, till.accepted, till.declined, till.broken)
    yield equation(
        "as the order book had it", len(plan.orders), *(plan.count(card) for card in Card)
    )
    yield equation(
        BY_THE_BUS, command.sent, command.handled, till.declined,
        command.failed - till.declined,
    )  # fmt: skip


def _events(outcome: Outcome) -> Iterator[Equation]:
    till, shop, stats = outcome.till, outcome.shop, outcome.stats
    own = {one.__name__ for one in (OrderPlaced, CallbackRequested, ReviewRequested, ShopEvent)}
    failed = sum(one.failed for one in stats.handlers.values() if one.message_type in own)
    ledger = shop.ledger
    published: dict[type[Event], int] = {
        # As the publishers counted it: their receipts, what is due, what the bus must tell.
        OrderPlaced: shop.orders_published.published,
        CallbackRequested: till.callbacks.published,
        ReviewRequested: till.reviews_soon,
        EventHandlerFailedEvent: failed,
        SessionEndEvent: JOBS,
        RetryScheduledEvent: ledger.hiccups + ledger.calls_while_down,
        DeadLetteredEvent: shop.receipts_bounced + till.broken,
    }
    for event_type, number in published.items():
        counted = stats.events.get(event_type.__name__)
        parts = (0, 0, 0) if counted is None else (
            counted.admitted, counted.filtered, counted.rejected,
        )  # fmt: skip
        yield Equation(
            event_type.__name__,
            "published",
            number,
            tuple(zip(("admitted", "filtered", "rejected"), parts, strict=True)),
        )


def _handlers(outcome: Outcome) -> Iterator[Equation]:
    stats = outcome.stats

    def admitted(*types: type[Event]) -> int:
        found = (stats.events.get(one.__name__) for one in types)
        return sum(one.admitted for one in found if one is not None)

    orders = admitted(OrderPlaced)
    expected = {
        "send_receipt": orders + outcome.aftermath.replay.succeeded,
        "book_ledger": orders,
        "take_stock": orders,
        "analyse": orders,
        "wrap_gift": orders,
        "print_label": orders,
        "show_live": orders,
        "audit": admitted(OrderPlaced, CallbackRequested, ReviewRequested),
        "call_back": admitted(CallbackRequested),
        "ask_for_review": admitted(ReviewRequested),
        "Shop.count_import": outcome.shop.published_in_jobs,
        "note_failure": admitted(EventHandlerFailedEvent),
        "note_end": admitted(SessionEndEvent),
        "note_retry": admitted(RetryScheduledEvent),
        "note_letter": admitted(DeadLetteredEvent),
    }
    for name, number in expected.items():
        if name in stats.handlers:
            yield Equation(name, "admitted", number, _fates([stats.handlers[name]]))
    pairs = sum(one.pairs for one in stats.events.values())
    yield Equation("all of them", "admitted", pairs, _fates(list(stats.handlers.values())))


def _fates(handlers: Sequence[EventHandlerStats]) -> tuple[tuple[str, int], ...]:
    names = ("handled", "failed", "filtered", "dropped", "abandoned", "pending")
    return tuple((name, sum(int(getattr(one, name)) for one in handlers)) for name in names)


def same(subject: str, total_name: str, total: int, name: str, value: int) -> Equation:
    """Two parties must have counted the same."""
    return Equation(subject, total_name, total, ((name, value),))


def _others(outcome: Outcome) -> Iterator[Equation]:
    till, shop, stats, drain = outcome.till, outcome.shop, outcome.stats, outcome.drain
    handlers = stats.handlers

    command = stats.commands["place_order"]
    good = outcome.plan.count(Card.GOOD)
    yield same("orders that went well", "in the order book", good, "by the bus", command.handled)
    yield Equation(
        "orders that did not",
        "failed on the bus",
        command.failed,
        (("declined", till.declined), ("broken", till.broken)),
    )
    yield same("money in cents", "taken", till.real_cents, "analysed", shop.cents_analysed)
    yield same("goods in units", "sold", till.real_units, "off the shelf", shop.units_taken)
    yield same("labels", "real orders", till.real_orders, "printed", shop.labels_printed)
    yield same("middleware", "orders timed", shop.stopwatch.calls, "sent", command.sent)
    yield same(
        "failures", "told by the bus", shop.failures_heard, "receipts that bounced",
        handlers["send_receipt"].failed if "send_receipt" in handlers else 0,
    )  # fmt: skip
    yield same(
        "the live screen", "drops in receipts", shop.orders_published.dropped, "by the bus",
        stats.total("dropped"),
    )  # fmt: skip
    yield Equation(
        "reviews",
        "asked for",
        till.reviews_soon + till.reviews_later,
        (("delivered", shop.reviews_asked), ("handed back by stop", len(drain.scheduled))),
    )
    own = {
        "send_receipt": shop.receipts_sent + shop.receipts_sent_again,
        "book_ledger": shop.ledger.entries,
        "analyse": shop.orders_analysed,
        "audit": shop.audited,
        "wrap_gift": shop.gifts_wrapped,
        "show_live": shop.lines_shown,
        "call_back": shop.calls_made,
        "Shop.count_import": shop.imported,
        "note_end": shop.jobs_ended,
    }
    handled = sum(handlers[name].handled for name in own if name in handlers)
    yield Equation(
        "handlers' own counts", "handled", handled, tuple((name, own[name]) for name in own)
    )


def _trouble(outcome: Outcome) -> Iterator[Equation]:
    till, shop, aftermath = outcome.till, outcome.shop, outcome.aftermath
    ledger, heard = shop.ledger, shop.trouble
    opened, closed = heard.count("open"), heard.count("closed")
    yield Equation(
        "retries",
        "told by the bus",
        heard.retries,
        (("hiccups of the ledger", ledger.hiccups), ("while it was down", ledger.calls_while_down)),
    )
    yield Equation(
        "the outage",
        "calls failed",
        ledger.calls_while_down,
        (("opened the circuit", CIRCUIT.failure_threshold * closed),
         ("came too early", opened - closed)),
    )  # fmt: skip
    yield same("the ledger", "real orders", till.real_orders, "entries", ledger.entries)
    yield same("cents in the ledger", "taken", till.real_cents, "booked", ledger.cents)
    yield Equation(
        "dead letters",
        "told by the bus",
        heard.letters,
        (("receipts bounced", shop.receipts_bounced), ("broken", till.broken)),
    )
    yield same(
        "letters mended", "replayed well", aftermath.replay.succeeded,
        "receipts sent again", shop.receipts_sent_again,
    )  # fmt: skip
    receipts = outcome.stats.handlers.get("send_receipt")
    orders = outcome.stats.events.get(OrderPlaced.__name__)
    yield Equation(
        "given to send_receipt",
        "events",
        0 if receipts is None else sum(value for _, value in _fates([receipts])),
        (
            ("orders", 0 if orders is None else orders.admitted),
            ("letters replayed", shop.receipts_sent_again),
        ),
    )
    yield same("letters left", "still dead", aftermath.left, "broken orders", till.broken)
    yield Equation(
        "receipts",
        "real orders",
        till.real_orders,
        (("sent at once", shop.receipts_sent), ("sent again", shop.receipts_sent_again)),
    )
