"""Does it add up after kill -9? Tills, journal, shelf and mail server must agree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

from msgbus.demo.aftermath import WRONG
from msgbus.demo.books import Equation, same
from msgbus.demo.durable.act import Recovery
from msgbus.demo.durable.warehouse import FLUSH, RECEIPTS, STOCK, WINDOW
from msgbus.demo.messages import Card


@final
@dataclass(frozen=True, slots=True)
class Accounts:
    """All equations of the second act, by table."""

    handlers: Sequence[Equation]
    """What each durable handler did with what was published."""
    workers: Sequence[Equation]
    """What it did twice, as the first worker was killed before it could say so."""
    others: Sequence[Equation]

    @property
    def all(self) -> list[Equation]:
        """Every one of them."""
        return [*self.handlers, *self.workers, *self.others]

    @property
    def add_up(self) -> bool:
        """Whether all hold."""
        return all(equation.holds for equation in self.all)


def close_accounts(recovery: Recovery) -> Accounts:
    """Write down all equations."""
    return Accounts(
        handlers=list(_handlers(recovery)),
        workers=list(_workers(recovery)),
        others=list(_others(recovery)),
    )


def _handlers(recovery: Recovery) -> Iterator[Equation]:
    for one in recovery.findings.handlers:
        yield Equation(
            one.name,
            "published",
            recovery.published,
            (("handled", one.distinct), ("dead letters", one.dead_letters)),
        )


def _workers(recovery: Recovery) -> Iterator[Equation]:
    for one in recovery.findings.handlers:
        yield Equation(
            one.name,
            "by both workers",
            one.by_first + one.by_second,
            (("handled", one.distinct), ("handled again", one.again)),
        )


def _others(recovery: Recovery) -> Iterator[Equation]:
    till, findings, plan = recovery.till, recovery.findings, recovery.plan
    sales = len(findings.sales)
    yield Equation(
        "orders",
        "in the order book",
        len(plan.orders),
        (("accepted", till.accepted), ("declined", till.declined), ("broken", till.broken)),
    )
    yield same("sales", "real orders", till.real_orders, "in the journal", sales)
    yield same("receipts of the bus", "durable", recovery.published, "in the journal", sales)
    for one in findings.handlers:
        yield same(f"the cursor of {one.name}", "sales", sales, "behind it", one.passed)
        order = "in the order of the journal" + (" by article" if one.name == STOCK else "")
        yield same(f"the order of {one.name}", "handled", one.distinct, order, one.in_order)
        yield same(f"unknown orders at {one.name}", "expected", 0, "handled", one.unknown)
    again, stock = findings.of(RECEIPTS).again, findings.of(STOCK)
    yield Equation(
        "receipts, at least once",
        "at most again",
        WINDOW + FLUSH,
        (("again", again), ("to spare", WINDOW + FLUSH - again)),
    )
    yield same("goods, none twice", "orders", sales, "entries", stock.effects)
    yield same("goods in units", "sold", till.real_units, "off the shelf", findings.units)
    bounced = sum(
        order.email.startswith(WRONG) and order.card is Card.GOOD and not order.is_test
        for order in plan.orders
    )
    letters = sum(one.dead_letters for one in findings.handlers)
    yield same("dead letters", "wrong addresses", bounced, "in the journal", letters)
