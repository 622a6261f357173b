"""What is found at the end in the journal, on the shelf and at the mail server."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Final, final

from msgbus.demo.durable.folder import Folder
from msgbus.demo.durable.warehouse import HANDLERS, STOCK
from msgbus.demo.messages import OrderPlaced

if TYPE_CHECKING:
    from msgbus.bus.bus import MessageBus
    from msgbus.journal.port import Journal

PAGE: Final = 1_000


@final
@dataclass(frozen=True, slots=True)
class Sale:
    """One sale as the journal has it."""

    offset: int
    number: int
    sku: str


@final
@dataclass(frozen=True, slots=True)
class HandlerFindings:
    """What one durable handler did with the sales, both workers together."""

    name: str
    effects: int
    """How often it did its work."""
    distinct: int
    """Sales for which it did so."""
    unknown: int
    """Those of them that are not in the journal, or are dead letters."""
    dead_letters: int
    passed: int
    """Sales that are behind its cursor."""
    by_first: int
    by_second: int
    in_order: int
    """Sales whose first time came in the order of the journal; of one article each for
    `take_stock`, of all for `send_receipt`."""

    @property
    def again(self) -> int:
        """How often it did what had been done."""
        return self.effects - self.distinct


@final
@dataclass(frozen=True, slots=True)
class Findings:
    """All of it."""

    sales: Sequence[Sale] = field(repr=False)
    handlers: Sequence[HandlerFindings]
    units: int
    """Units that are off the shelf."""

    def of(self, name: str) -> HandlerFindings:
        """Those about one handler."""
        return next(one for one in self.handlers if one.name == name)


async def find_out(bus: MessageBus, folder: Folder) -> Findings:
    """Look at everything that the workers have left."""
    journal = bus.journal
    assert journal is not None  # noqa: S101 (the shop's bus has one)
    sales = await _read_sales(journal)
    shelf = await bus.transact(
        lambda connection: connection.execute(
            "SELECT number, units, worker FROM shelf ORDER BY rowid"
        ).fetchall()
    )
    effects = {
        name: [
            [number for number, _, by in shelf if by == worker]
            if name == STOCK
            else [int(line) for line in folder.diary(worker).read_text("utf-8").split()]
            for worker in (1, 2)
        ]
        for name in HANDLERS
    }
    handlers = [await _look_at(journal, name, sales, *effects[name]) for name in HANDLERS]
    return Findings(sales, handlers, sum(units for _, units, _ in shelf))


async def _read_sales(journal: Journal) -> list[Sale]:
    sales: list[Sale] = []
    start, head = 1, await journal.head()
    while start <= head:
        page = await journal.read(start, PAGE, names={OrderPlaced.__wire__.name})
        sales += [Sale(one.offset, one.json()["number"], one.key or "") for one in page]
        start = page.next
    return sales


async def _look_at(
    journal: Journal, name: str, sales: Sequence[Sale], first: list[int], second: list[int]
) -> HandlerFindings:
    cursor = await journal.cursor(name)
    letters = await journal.dead_letters(name, limit=len(sales) + 1)
    dead = {letter.record.json()["number"] for letter in letters}
    by_number = {sale.number: sale for sale in sales}
    done = list(dict.fromkeys([*first, *second]))
    known = [by_number[one] for one in done if one in by_number and one not in dead]
    groups = [known]
    if name == STOCK:
        groups = [[sale for sale in known if sale.sku == sku] for sku in {one.sku for one in known}]
    return HandlerFindings(
        name=name,
        effects=len(first) + len(second),
        distinct=len(done),
        unknown=len(done) - len(known),
        dead_letters=len(letters),
        passed=0 if cursor is None else sum(sale.offset <= cursor.offset for sale in sales),
        by_first=len(first),
        by_second=len(second),
        in_order=sum(_in_order(sale.offset for sale in group) for group in groups),
    )


def _in_order(offsets: Iterable[int]) -> int:
    """How many come behind the one before them; the first always does."""
    line = [0, *offsets]
    return sum(before < after for before, after in pairwise(line))
