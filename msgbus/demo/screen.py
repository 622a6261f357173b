"""What one sees: progress bars during the rush, tables afterwards. Needs rich."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Final

from msgbus.demo.books import Books, Equation
from msgbus.demo.messages import Card
from msgbus.demo.plan import Plan
from msgbus.demo.rush import JOBS, TILLS, Outcome, Till
from msgbus.demo.shop import CALL_CENTRE, PRINTER, SCREEN, Shop
from msgbus.errors import MissingExtraError
from msgbus.telemetry.stats import DurationStats

try:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.table import Table
    from rich.text import Text
except ImportError as missing:
    package = "rich"
    raise MissingExtraError(package, extra="cli") from missing

INTRODUCTION: Final = f"""\
A shop takes {{orders:,}} orders at {TILLS} tills, and {JOBS} import jobs, a session each, bring a \
tenth of them.
Each order is a command; one in 25 is declined by the bank, one in 33 meets a broken gateway.
Each sale is an event with seven handlers. [b]print_label[/] is slow, with a queue of \
{PRINTER.max_size}: the tills wait for it (WAIT).
[b]show_live[/] is slower, with a queue of {SCREEN.max_size}: what is old falls out \
(DROP_OLDEST). [b]call_back[/] opens after the rush
and takes {CALL_CENTRE.max_size} (REJECT_NEW). A filter of the bus stops test orders; \
some receipts bounce; some reviews are delayed.
"""


class Screen:
    """The terminal."""

    def __init__(self) -> None:
        self._console = Console(highlight=False)

    @contextmanager
    def rush(self, plan: Plan) -> Generator[Callable[[Till, Shop], None]]:
        """Show how far things are; gives the function that updates it."""
        self._console.print(INTRODUCTION.format(orders=len(plan.orders)))
        progress = Progress(
            TextColumn("{task.description:14}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("[dim]{task.fields[note]}[/]"),
            console=self._console,
        )
        orders = progress.add_task("orders placed", total=len(plan.orders), note="")
        sales = plan.count(Card.GOOD) - sum(
            order.is_test and order.card is Card.GOOD for order in plan.orders
        )
        labels = progress.add_task("labels printed", total=sales, note="")
        shown = progress.add_task("shown live", total=sales, note="")

        def update(till: Till, shop: Shop) -> None:
            progress.update(
                orders,
                completed=till.placed,
                note=f"{till.accepted:,} accepted, {till.declined:,} declined, "
                f"{till.broken:,} broken",
            )
            behind = shop.orders_published.accepted - shop.labels_printed
            progress.update(
                labels, completed=shop.labels_printed, note=f"{max(behind, 0):,} behind: tills wait"
            )
            progress.update(
                shown,
                completed=shop.lines_shown,
                note=f"{shop.orders_published.dropped:,} dropped as too old",
            )

        with progress:
            yield update

    def report(self, outcome: Outcome, books: Books) -> None:
        """The tables, and the verdict."""
        print_ = self._console.print
        print_()
        print_(_table("orders", books.orders))
        print_(_table("event", books.events))
        print_(_table("handler", books.handlers, durations=_durations(outcome)))
        for equation in books.others:
            print_(_line(equation))
        drain = outcome.drain
        print_(
            f"\n{outcome.seconds:.1f} s, {outcome.till.placed / outcome.seconds:,.0f} orders/s, "
            f"{outcome.stats.total('handled') / outcome.seconds:,.0f} handler calls/s. "
            f"stop() finished {drain.handled:,} queued, abandoned {drain.abandoned:,}, "
            f"handed back {len(drain.scheduled):,} delayed."
        )
        wrong = [equation for equation in books.all if not equation.holds]
        if wrong:
            print_(
                f"[b red]{len(wrong)} of {len(books.all)} equations DO NOT HOLD:[/] "
                + "; ".join(equation.subject for equation in wrong)
            )
        else:
            print_(f"[b green]Everything adds up:[/] all {len(books.all)} equations hold.")


def _table(
    subject: str,
    equations: Sequence[Equation],
    durations: dict[str, DurationStats] | None = None,
) -> Table:
    """One line per equation: the total, its parts, and whether they agree."""
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column(subject)
    table.add_column(f"{equations[0].total_name} =", justify="right")
    for place, (name, _) in enumerate(equations[0].parts):
        table.add_column(name if place == 0 else f"+ {name}", justify="right")
    table.add_column("")
    if durations is not None:
        for name in ("p50", "p95", "p99"):
            table.add_column(name, justify="right", style="cyan")
    for equation in equations:
        numbers = [equation.total, *(value for _, value in equation.parts)]
        times: list[str] = []
        if durations is not None and equation.subject in durations:
            stats = durations[equation.subject]
            times = [_seconds(one) for one in (stats.p50, stats.p95, stats.p99)]
        table.add_row(
            equation.subject, *(f"{number:,}" for number in numbers), _mark(equation), *times
        )
    return table


def _durations(outcome: Outcome) -> dict[str, DurationStats]:
    return {**outcome.stats.handlers, **outcome.stats.commands}


def _line(equation: Equation) -> Text:
    parts = " + ".join(f"{value:,} {name}" for name, value in equation.parts)
    return Text.assemble(
        _mark(equation),
        f" {equation.subject}: {equation.total:,} {equation.total_name} = ",
        parts,
    )


def _mark(equation: Equation) -> Text:
    return Text("✓", "green") if equation.holds else Text("✗", "bold red")


def _seconds(value: float) -> str:
    if value < 1e-3:
        return f"{value * 1e6:.3g}µs"
    return f"{value * 1e3:.3g}ms" if value < 1 else f"{value:.3g}s"
