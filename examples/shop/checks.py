"""Does it add up? Each equation compares what two different parties counted."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from examples.shop.durable import Durable, Handled
from examples.shop.handlers import OUTAGE
from examples.shop.messages import WRONG, Card
from examples.shop.rush import IMPORTS, Rush
from examples.shop.worker import BUFFER


class Equation(NamedTuple):
    """The sums of both sides must be equal, and no count may be below zero."""

    subject: str
    left: dict[str, int]
    right: dict[str, int]

    @property
    def holds(self) -> bool:
        """Compare the two sides."""
        left, right = self.left.values(), self.right.values()
        return sum(left) == sum(right) and min(*left, *right) >= 0

    def __str__(self) -> str:
        left, right = (
            " + ".join(f"{count:,} {name}" for name, count in side.items())
            for side in (self.left, self.right)
        )
        return f"{'ok   ' if self.holds else 'WRONG'} {self.subject}: {left} = {right}"


def check_rush(rush: Rush) -> list[Equation]:
    """All equations of the first act."""
    parts = (check_orders, check_events, check_handlers, check_work, check_failures)
    return [equation for part in parts for equation in part(rush)]


def check_orders(rush: Rush) -> Iterator[Equation]:
    """Tills, order book and bus agree about the orders."""
    till, command = rush.till, rush.stats.commands["place_order"]
    cards = Counter(order.card for order in rush.book)
    results = {name: till[name] for name in ("accepted", "declined", "failed")}
    by_book = {f"{card.value} cards": cards[card] for card in Card}
    good = {"good cards": cards[Card.GOOD]}
    refused = {"declined": till["declined"], "failed": till["failed"]}
    yield Equation("orders, by the tills", {"placed": till["placed"]}, results)
    yield Equation("orders, by the order book", {"placed": len(rush.book)}, by_book)
    yield Equation("orders, by the bus", {"sent": command.sent}, results)
    yield Equation("orders accepted", good, {"handled": command.handled})
    yield Equation("orders refused", {"failed on the bus": command.failed}, refused)


def check_events(rush: Rush) -> Iterator[Equation]:
    """Published events are admitted, filtered or rejected."""
    till, ledger, bounced = rush.till, rush.shop.ledger, rush.shop.done["receipts bounced"]
    published = {
        "OrderPlaced": rush.shop.sales.published,
        "CallbackRequested": till["declined"],
        "EventHandlerFailedEvent": bounced,
        "RetryScheduledEvent": ledger.hiccups + ledger.calls_while_down,
        "DeadLetteredEvent": bounced + till["failed"],
        "SessionEndEvent": IMPORTS,
    }
    for name, count in published.items():
        event = rush.stats.events.get(name)
        fates = {fate: getattr(event, fate, 0) for fate in ("admitted", "filtered", "rejected")}
        yield Equation(name, {"published": count}, fates)


def check_handlers(rush: Rush) -> Iterator[Equation]:
    """Admitted events are handled, failed, filtered, dropped, or left."""
    admitted = Counter({name: event.admitted for name, event in rush.stats.events.items()})
    sales, calls = admitted["OrderPlaced"], admitted["CallbackRequested"]
    special = {
        "send_receipt": sales + rush.replay.succeeded,
        "count_import": rush.shop.done["sales in sessions"],
        "listen": admitted.total() - sales - calls,
    }
    fates = ("handled", "failed", "filtered", "dropped", "abandoned", "pending")
    total = Counter[str]()
    for name, handler in rush.stats.handlers.items():
        counts = {fate: int(getattr(handler, fate)) for fate in fates}
        total.update(counts)
        given = special.get(name, admitted[handler.message_type])
        yield Equation(name, {"admitted": given}, counts)
    pairs = sum(event.pairs for event in rush.stats.events.values())
    yield Equation("all handlers", {"admitted": pairs}, {fate: total[fate] for fate in fates})


def check_work(rush: Rush) -> Iterator[Equation]:
    """The handlers handled exactly the sales."""
    till, shop, done = rush.till, rush.shop, rush.shop.done
    dropped = {"by the bus": rush.stats.total("dropped")}
    yield Equation("goods", {"units sold": till["units"]}, {"analysed": done["units analysed"]})
    yield Equation("money", {"cents taken": till["cents"]}, {"analysed": done["cents analysed"]})
    yield Equation("labels", {"sales": till["accepted"]}, {"printed": done["labels printed"]})
    yield Equation("dropped", {"by receipts of publish": shop.sales.dropped}, dropped)
    work = {
        "send_receipt": done["receipts sent"] + done["receipts sent again"],
        "book_ledger": shop.ledger.entries,
        "analyse": done["sales analysed"],
        "wrap_gift": done["gifts wrapped"],
        "show_live": done["lines shown"],
        "call_back": done["calls made"],
        "count_import": done["sales of imports seen"],
        "listen": len(shop.heard),
    }
    for name, count in work.items():
        handled = getattr(rush.stats.handlers.get(name), "handled", 0)
        yield Equation(f"work of {name}", {"done": count}, {"handled": handled})


def check_failures(rush: Rush) -> Iterator[Equation]:
    """Failures are retried, or become dead letters that are replayed or left."""
    till, done, ledger = rush.till, rush.shop.done, rush.shop.ledger
    heard = Counter(type(event).__name__ for event in rush.shop.heard)
    opened, closed = heard["CircuitOpenedEvent"], heard["CircuitClosedEvent"]
    again, failed = done["receipts sent again"], {"orders failed": till["failed"]}
    bounced = {"receipts bounced": done["receipts bounced"]}
    down = {"calls while down": ledger.calls_while_down}
    calls = {"opened the circuit": (OUTAGE - 1) * closed, "probed too early": opened - closed}
    sent = {"sent": done["receipts sent"], "sent again": again}
    letters = {"announced": heard["DeadLetteredEvent"]}
    hiccups = {"hiccups": ledger.hiccups}
    yield Equation("retries", {"announced": heard["RetryScheduledEvent"]}, {**hiccups, **down})
    yield Equation("outage", down, calls)
    yield Equation("ledger", {"sales": till["accepted"]}, {"entries": ledger.entries})
    yield Equation("ledger in cents", {"taken": till["cents"]}, {"booked": ledger.cents})
    yield Equation("failures", {"announced": heard["EventHandlerFailedEvent"]}, bounced)
    yield Equation("dead letters", letters, {**bounced, **failed})
    yield Equation("dead letters replayed", {"succeeded": rush.replay.succeeded}, {"sent": again})
    yield Equation("dead letters left", {"in the store": rush.letters_left}, failed)
    yield Equation("receipts", {"sales": till["accepted"]}, sent)


def check_durable(act: Durable) -> list[Equation]:
    """All equations of the second act."""
    till, in_journal = act.till, {"in the journal": len(act.journal)}
    results = {name: till[name] for name in ("accepted", "declined", "failed")}
    sales = [order for order in act.book if order.card is Card.GOOD]
    wrong = {"wrong addresses": sum(order.email.endswith(WRONG) for order in sales)}
    dead = {name: len(handled.dead) for name, handled in act.handlers.items()}
    equations = [
        Equation("orders", {"in the order book": len(act.book)}, results),
        Equation("sales", {"by the tills": till["accepted"]}, in_journal),
        Equation("receipts of publish", {"durable": act.shop.sales.accepted}, in_journal),
        Equation("goods", {"units sold": till["units"]}, {"taken": act.units}),
        Equation("dead letters", wrong, dead),
    ]
    for name, handled in act.handlers.items():
        equations += check_durable_handler(act, name, handled)
    return equations


def check_durable_handler(act: Durable, name: str, handled: Handled) -> Iterator[Equation]:
    """No sale is lost, and none is handled more often than promised."""
    records = {record.json()["number"]: record for record in act.journal}
    workers = Counter(worker for _, worker in handled.rows)
    once = list(dict.fromkeys(number for number, _ in handled.rows))
    known = [records[one] for one in once if one in records and one not in handled.dead]
    passed = sum(record.offset <= handled.cursor for record in act.journal)
    # By article, or all together: each must come behind the one before it.
    lines = defaultdict[str | None, list[int]](lambda: [0])
    for record in known:
        lines[record.key if name == "take_stock" else None].append(record.offset)
    ordered = sum(one < other for line in lines.values() for one, other in pairwise(line))
    # A receipt may be sent twice, because of the kill; goods are never taken twice.
    limit = BUFFER if name == "send_receipt" else 0
    count, again = {"handled": len(once)}, {"again": handled.again}
    both = {"by worker 1": workers[1], "by worker 2": workers[2]}
    ends = {**count, "dead letters": len(handled.dead)}
    yield Equation(f"{name}: sales", {"published": act.shop.sales.accepted}, ends)
    yield Equation(f"{name}: workers", both, {**count, **again})
    yield Equation(f"{name}: again", {"limit": limit}, {**again, "to spare": limit - handled.again})
    yield Equation(f"{name}: cursor", {"sales": len(records)}, {"behind the cursor": passed})
    yield Equation(f"{name}: order", count, {"in order": ordered})
    yield Equation(f"{name}: unknown", {"expected": 0}, {"handled": len(once) - len(known)})
