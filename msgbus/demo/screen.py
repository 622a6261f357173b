"""What one sees: progress bars during the rush, tables afterwards. Needs rich."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

from msgbus.demo.books import BY_THE_BUS, Books, Equation
from msgbus.demo.ledger import CIRCUIT, HICCUP_EVERY
from msgbus.demo.messages import Card, PlaceOrder
from msgbus.demo.plan import Plan
from msgbus.demo.rush import JOBS, TILLS, Outcome, Till
from msgbus.demo.shop import CALL_CENTRE, PRINTER, Shop
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
A shop takes {{orders:,}} orders at {TILLS} tills; a tenth of them come from {JOBS} import jobs, \
each a session. Each order is a command: the bank declines one in 25, the gateway breaks on one in \
33. Each sale is an event with eight handlers. [b]print_label[/] is slow and its queue short \
({PRINTER.max_size}), so the tills wait for it (WAIT). [b]show_live[/] is slower still, but drops \
what is old (DROP_OLDEST). [b]call_back[/] opens after the rush; until then {CALL_CENTRE.max_size} \
may wait, the rest is refused (REJECT_NEW). Test orders are filtered out, and requests for a \
review are delayed.

Some things fail. [b]book_ledger[/] calls a service that refuses one order in {HICCUP_EVERY} at \
the first try, and half-way it is down: each call is tried again, after \
{CIRCUIT.failure_threshold} failures in a row the circuit opens, and the queue waits until it \
closes. Receipts to a wrong address bounce and become dead letters; after the rush the address is \
corrected and they are replayed. Orders that broke are kept as well, but not replayed: their \
callers have seen it.
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
        booked = progress.add_task("ledger entries", total=sales, note="")
        labels = progress.add_task("labels printed", total=sales, note="")
        shown = progress.add_task("shown live", total=sales, note="")

        def update(till: Till, shop: Shop) -> None:
            progress.update(
                orders,
                completed=till.placed,
                note=f"{till.accepted:,} accepted, {till.declined:,} declined, "
                f"{till.broken:,} broken",
            )
            history = shop.trouble.circuit
            waits = bool(history) and history[-1].state != "closed"
            progress.update(
                booked,
                completed=shop.ledger.entries,
                note="circuit open, queue waits" if waits else f"{shop.trouble.retries:,} retries",
            )
            behind = max(shop.orders_published.accepted - shop.labels_printed, 0)
            note = "queue full, the tills wait" if behind >= PRINTER.max_size else ""
            progress.update(labels, completed=shop.labels_printed, note=note)
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
        stats = outcome.stats
        self._print_table("orders", books.orders, {BY_THE_BUS: stats.commands["place_order"]})
        self._print_table("event", books.events, {})
        self._print_table("handler", books.handlers, stats.handlers)
        print_()
        for equation in books.others:
            print_(_line(equation))
        self._print_trouble(outcome, books)
        drain = outcome.drain
        print_(
            f"\n{outcome.seconds:.1f} s, {outcome.till.placed / outcome.seconds:,.0f} orders/s "
            f"(the printer is the limit), "
            f"{stats.total('handled') / outcome.seconds:,.0f} events handled/s. "
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

    def _print_trouble(self, outcome: Outcome, books: Books) -> None:
        """Circuits and dead letters, each with its end."""
        self._console.print("\n[b]what went wrong, and what became of it[/]")
        for table in (_circuit(outcome), _letters(outcome)):
            if table.row_count:
                self._console.print(table, "", sep="\n")
        for equation in books.trouble:
            self._console.print(_line(equation))

    def _print_table(
        self, subject: str, equations: Sequence[Equation], durations: Mapping[str, DurationStats]
    ) -> None:
        """The counts, with the durations beside them if the terminal is wide enough."""
        table = _table(subject, equations, durations)
        unbounded = self._console.options.update(max_width=1000)
        if self._console.measure(table, options=unbounded).maximum <= self._console.width:
            self._console.print(table)
            return
        self._console.print(_table(subject, equations, {}))
        if durations:
            shown = [one.subject for one in equations if one.subject in durations]
            self._console.print(_times(subject, {name: durations[name] for name in shown}))


def _circuit(outcome: Outcome) -> Table:
    """What the circuit did, and when."""
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("circuit", no_wrap=True)
    table.add_column("at", justify="right", no_wrap=True)
    table.add_column("is", no_wrap=True)
    table.add_column("because")
    for note in outcome.shop.trouble.circuit:
        table.add_row(note.circuit, f"{note.seconds:.2f}s", note.state, note.reason)
    return table


def _letters(outcome: Outcome) -> Table:
    """What the dead letters died of."""
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("letters", justify="right", no_wrap=True)
    table.add_column("of", no_wrap=True)
    table.add_column("in", no_wrap=True)
    table.add_column("died of", no_wrap=True)
    table.add_column("and then")
    for group in outcome.aftermath.groups:
        answered = group.message_type == PlaceOrder.__name__
        end = "left to their callers" if answered else "corrected, replayed"
        table.add_row(f"{group.count:,}", group.message_type, group.handler, group.error_type, end)
    return table


def _times(subject: str, durations: Mapping[str, DurationStats]) -> Table:
    """How long it took, as a table of its own."""
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    table.title, table.title_style, table.title_justify = "\nhow long it took", "bold", "left"
    table.add_column(subject, no_wrap=True)
    for name in ("p50", "p95", "p99"):
        table.add_column(name, justify="right", style="cyan", no_wrap=True)
    for name, stats in durations.items():
        table.add_row(name, *_percentiles(stats))
    return table


def _table(
    subject: str, equations: Sequence[Equation], durations: Mapping[str, DurationStats]
) -> Table:
    """One line per equation: the total, its parts, whether they agree, and how long it took."""
    names = [equations[0].total_name, *(name for name, _ in equations[0].parts)]
    table = Table(
        box=None,
        padding=(0, 1, 0, 0),
        header_style="dim",
        title=f"\n{names[0]} = {' + '.join(names[1:])}",
        title_justify="left",
        title_style="bold",
    )
    table.add_column(subject, no_wrap=True)
    lines = [[equation.total, *(value for _, value in equation.parts)] for equation in equations]
    for name, numbers in zip(names, zip(*lines, strict=True), strict=True):
        # On a narrow terminal headings may be folded, but numbers must be read.
        width = max(len(f"{number:,}") for number in numbers)
        table.add_column(name, justify="right", min_width=width, overflow="fold")
    table.add_column("")
    for name in ("p50", "p95", "p99") if durations else ():
        table.add_column(name, justify="right", style="cyan", no_wrap=True)
    for equation, line in zip(equations, lines, strict=True):
        times = _percentiles(durations.get(equation.subject))
        shown = (f"{number:,}" for number in line)
        table.add_row(equation.subject, *shown, _mark(equation), *times)
    return table


def _percentiles(stats: DurationStats | None) -> list[str]:
    return [] if stats is None else [_seconds(one) for one in (stats.p50, stats.p95, stats.p99)]


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
