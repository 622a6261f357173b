"""What one sees: progress bars during the rush, tables afterwards. Needs rich."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

from msgbus.demo.books import BY_THE_BUS, Books, Equation
from msgbus.demo.durable.folder import Folder
from msgbus.demo.ledger import CIRCUIT, HICCUP_EVERY
from msgbus.demo.messages import Card, PlaceOrder
from msgbus.demo.plan import Plan
from msgbus.demo.report import HOW_TO, is_possible, write_report
from msgbus.demo.rush import JOBS, TILLS, Outcome, Till
from msgbus.demo.shop import CALL_CENTRE, PRINTER, Shop
from msgbus.demo.tables import equation_line, equation_table, times_table, verdict
from msgbus.errors import MissingExtraError, MsgBusError
from msgbus.telemetry.stats import DurationStats

try:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.table import Table
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
        self.console = Console(highlight=False)

    @contextmanager
    def rush(self, plan: Plan) -> Generator[Callable[[Till, Shop], None]]:
        """Show how far things are; gives the function that updates it."""
        self.console.print(INTRODUCTION.format(orders=len(plan.orders)))
        progress = Progress(
            TextColumn("{task.description:14}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("[dim]{task.fields[note]}[/]"),
            console=self.console,
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
        print_ = self.console.print
        stats = outcome.stats
        self._print_table("orders", books.orders, {BY_THE_BUS: stats.commands["place_order"]})
        self._print_table("event", books.events, {})
        self._print_table("handler", books.handlers, stats.handlers)
        print_()
        for equation in books.others:
            print_(equation_line(equation))
        self._print_trouble(outcome, books)
        drain = outcome.drain
        print_(
            f"\n{outcome.seconds:.1f} s, {outcome.till.placed / outcome.seconds:,.0f} orders/s "
            f"(the printer is the limit), "
            f"{stats.total('handled') / outcome.seconds:,.0f} events handled/s. "
            f"stop() finished {drain.handled:,} queued, abandoned {drain.abandoned:,}, "
            f"handed back {len(drain.scheduled):,} delayed."
        )
        print_(verdict(books.all, "Everything adds up"))

    def end(self, folder: Folder, *, is_wanted: bool) -> None:
        """The report of the pipeline, or how to get one.

        One that nobody has asked for may fail, and the demo has ended well all the same.

        Raises:
            MsgBusError: It is wanted, and cannot be made.
        """
        if not (is_wanted or is_possible()):
            self.console.print(f"\n{HOW_TO}", markup=False)
            return
        self.console.print(f"\nThe pipeline reads {folder.journal} with Spark ...", markup=False)
        try:
            path = write_report(folder)
        except Exception as error:
            if is_wanted:
                raise
            self.console.print(f"No report this time: {_in_short(error)}", markup=False)
        else:
            self.console.print(f"The report is in {path}; open it in a browser.", markup=False)

    def _print_trouble(self, outcome: Outcome, books: Books) -> None:
        """Circuits and dead letters, each with its end."""
        self.console.print("\n[b]what went wrong, and what became of it[/]")
        for table in (_circuit(outcome), _letters(outcome)):
            if table.row_count:
                self.console.print(table, "", sep="\n")
        for equation in books.trouble:
            self.console.print(equation_line(equation))

    def _print_table(
        self, subject: str, equations: Sequence[Equation], durations: Mapping[str, DurationStats]
    ) -> None:
        """The counts, with the durations beside them if the terminal is wide enough."""
        table = equation_table(subject, equations, durations)
        unbounded = self.console.options.update(max_width=1000)
        if self.console.measure(table, options=unbounded).maximum <= self.console.width:
            self.console.print(table)
            return
        self.console.print(equation_table(subject, equations, {}))
        if durations:
            shown = [one.subject for one in equations if one.subject in durations]
            self.console.print(times_table(subject, {name: durations[name] for name in shown}))


def _in_short(error: Exception) -> str:
    """The first line; what a JVM says has many."""
    first = (str(error).splitlines() or [""])[0]
    return first if isinstance(error, MsgBusError) else f"{type(error).__name__}: {first}"


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
