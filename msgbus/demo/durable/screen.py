"""What one sees of the second act: bars and what happens, then tables. Needs rich."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, final

from msgbus.demo.aftermath import WRONG
from msgbus.demo.durable.accounts import Accounts
from msgbus.demo.durable.act import Recovery, Scene, is_sale
from msgbus.demo.durable.folder import Folder
from msgbus.demo.durable.warehouse import LEASE, RECEIPTS
from msgbus.demo.plan import Plan
from msgbus.demo.tables import equation_line, equation_table, verdict
from msgbus.errors import MissingExtraError

try:
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.table import Table
    from rich.text import Text
except ImportError as missing:
    package = "rich"
    raise MissingExtraError(package, extra="cli") from missing

if TYPE_CHECKING:
    from rich.console import Console

INTRODUCTION: Final = f"""
[b]The same shop with a journal, and kill -9[/]

{{orders:,}} orders more. Now a sale is on disk, in {{journal}}, before its till hears of it, and \
it is handled by a worker in a process of its own. The worker has two durable handlers. \
[b]send_receipt[/] is exclusive: one receipt after the other, in the order of the sales; its \
effect is outside the journal, so after a crash some are sent twice. [b]take_stock[/] goes by key: \
articles side by side, each in order; its effect is in a table in the journal's file, in one \
transaction with the word that it is done, so a crash repeats none of it.

In the middle of this the worker is killed. The tills go on, and another worker takes up where it \
was, as soon as the dead one has given no sign of life for {LEASE:g} s.
"""


@final
class RecoveryScreen:
    """The terminal, in the second act."""

    def __init__(self, console: Console) -> None:
        self._console = console

    @contextmanager
    def show(self, plan: Plan, folder: Folder) -> Generator[ShownLive]:
        """Show how far things are; gives the one to tell."""
        journal = escape(str(folder.journal))
        self._console.print(INTRODUCTION.format(orders=len(plan.orders), journal=journal))
        progress = Progress(
            TextColumn("{task.description:14}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("[dim]{task.fields[note]}[/]"),
            console=self._console,
        )
        with progress:
            yield ShownLive(self._console, progress, plan)

    def report(self, recovery: Recovery, accounts: Accounts) -> None:
        """The tables, and the verdict."""
        print_ = self._console.print
        print_(equation_table("durable handler", accounts.handlers, {}))
        print_(equation_table("durable handler", accounts.workers, {}))
        print_()
        for equation in accounts.others:
            print_(equation_line(equation))
        course, receipts = recovery.course, recovery.findings.of(RECEIPTS)
        print_(
            f"\n{recovery.seconds:.1f} s. The worker was killed with "
            f"{receipts.distinct - course.sent_at_kill:,} receipts to go, "
            f"{recovery.published - course.published_at_kill:,} sales were made after that, "
            f"and {receipts.again:,} receipts were sent twice."
        )
        print_(verdict(accounts.all, "Nothing is lost"))


@final
class ShownLive:
    """Bars, and above them what happens."""

    def __init__(self, console: Console, progress: Progress, plan: Plan) -> None:
        sales = [order for order in plan.orders if is_sale(order)]
        mailed = sum(not order.email.startswith(WRONG) for order in sales)
        self._console = console
        self._progress = progress
        self._placed = progress.add_task("orders placed", total=len(plan.orders), note="")
        self._sent = progress.add_task("receipts sent", total=mailed, note="")
        self._taken = progress.add_task("goods taken", total=len(sales), note="")

    def update(self, scene: Scene) -> None:
        """Move the bars."""
        self._progress.update(self._placed, completed=scene.till.placed)
        again = f"{scene.again:,} of them twice" if scene.again else ""
        self._progress.update(self._sent, completed=scene.sent, note=again)
        self._progress.update(self._taken, completed=scene.taken)

    def say(self, seconds: float, text: str, detail: str = "") -> None:
        """A line with its time, and a log line below it."""
        grid = Table.grid(padding=(0, 1, 0, 0))
        grid.add_row(Text(f"{seconds:4.1f}s", "cyan"), Text(text))
        if detail:
            grid.add_row("", Text(detail, "dim"))
        self._console.print(grid)
