"""The command line of the demo."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import anyio

from msgbus.demo.books import Books, Equation, close_books
from msgbus.demo.durable import act
from msgbus.demo.durable.accounts import Accounts, close_accounts
from msgbus.demo.durable.folder import DEFAULT, Folder
from msgbus.demo.plan import Plan, write_plan
from msgbus.demo.report import write_report
from msgbus.demo.rush import JOBS, Outcome, Till, run
from msgbus.demo.shop import Shop
from msgbus.resilience.stores import LetterGroup

if TYPE_CHECKING:
    from msgbus.demo.screen import Screen

ORDERS: Final = 20_000
QUICK: Final = 2_000

SHARE: Final = 10
"""One order in so many is placed again, in the second act."""
LATE_JOBS: Final = 5

DESCRIPTION: Final = """\
A small shop at load. Orders are commands: one handler, one result each, and a result may be
a refusal (declined) or a failure (broken gateway). Sales are events: each of their handlers
has a queue of its own, so one that is slow or fails does not touch the others.

One of them calls a service that fails: it is tried again, and while the service is down its
circuit is open and the queue waits. What fails for good becomes a dead letter, which is
corrected and replayed after the rush.

Then the same shop writes its sales to a journal, for a worker in another process with two
durable handlers. In the middle the worker is killed with kill -9; another one takes up where
it was, and says in its log what it found.

At the end everything is counted twice, by the bus and by those who use it, and the two must
agree: nothing is lost, dropped or refused without a number that says so. If PySpark is
installed, the data pipeline makes a report from the journal."""

EPILOG: Final = """\
The same seed gives the same orders, results and failures. What the live screen had to drop
depends on how fast the machine is; so do all times, and how many receipts are sent twice
after the kill. Ends with 1 if anything does not add up.

Journal, receipts and report stay in the folder until the next run, which begins anew.

The code is in msgbus/demo: shop.py has the handlers, rush.py uses the bus,
aftermath.py looks after the dead letters, durable/ has the worker and its end."""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m msgbus.demo",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--orders", type=_positive, metavar="N", help=f"orders to place (default {ORDERS:,})"
    )
    parser.add_argument("--seed", type=int, default=7, help="of the order book (default 7)")
    parser.add_argument("--quick", action="store_true", help=f"only {QUICK:,} orders")
    parser.add_argument(
        "--json", action="store_true", help="print all counts as JSON instead of tables"
    )
    parser.add_argument(
        "--folder", type=Path, default=DEFAULT, metavar="PATH",
        help=f"where the journal is to be (default {DEFAULT}/); one for each run at a time",
    )  # fmt: skip
    parser.add_argument(
        "--no-journal", action="store_true", help="leave out the worker, the kill and the report"
    )
    parser.add_argument(
        "--report", action=argparse.BooleanOptionalAction, default=None,
        help="make the report with Spark, or not (by default: if PySpark is installed and "
        "there are tables to show)",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    if options.report and options.no_journal:
        parser.error("--report needs the journal; leave out --no-journal")
    return options


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        message = f"{number} orders are too few; give at least 1"
        raise argparse.ArgumentTypeError(message)
    return number


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; 0 if everything adds up, 1 if not.

    Raises:
        MissingExtraError: There are tables to show, and rich is not installed.
        DemoError: The demo cannot go on.
        MsgBusError: A report was asked for, and cannot be made.
    """
    options = parse(arguments)
    orders = options.orders or (QUICK if options.quick else ORDERS)
    plan = write_plan(orders, options.seed, JOBS)
    folder = None
    if not options.no_journal:
        folder = Folder(options.folder)
        folder.begin_anew()
    second = write_plan(max(orders // SHARE, 1), options.seed + 1, LATE_JOBS)
    if options.json:
        return _as_json(plan, second, folder, with_report=options.report)
    return _on_screen(plan, second, folder, with_report=options.report)


def _as_json(plan: Plan, second: Plan, folder: Folder | None, *, with_report: bool | None) -> int:
    with silent_log():
        outcome = anyio.run(partial(run, plan, _see_nothing))
        recovery = folder and anyio.run(act.run, second, folder, _NoWatcher())
    books = close_books(outcome)
    accounts = recovery and close_accounts(recovery)
    data = as_data(outcome, books)
    add_up = books.add_up
    if recovery is not None and accounts is not None:
        data["durable"] = recovery_data(recovery, accounts)
        data["report"] = str(write_report(recovery.folder)) if with_report else None
        add_up = data["adds_up"] = add_up and accounts.add_up
    sys.stdout.write(json.dumps(data, indent=2) + "\n")
    return 0 if add_up else 1


def _on_screen(plan: Plan, second: Plan, folder: Folder | None, *, with_report: bool | None) -> int:
    from msgbus.demo.screen import Screen

    screen = Screen()
    with silent_log(), screen.rush(plan) as update:
        outcome = anyio.run(partial(run, plan, update))
    books = close_books(outcome)
    screen.report(outcome, books)
    add_up = books.add_up
    if folder is not None:
        add_up = _second_act(screen, second, folder) and add_up
        if with_report is not False:
            screen.end(folder, is_wanted=bool(with_report))
    return 0 if add_up else 1


def _second_act(screen: Screen, plan: Plan, folder: Folder) -> bool:
    from msgbus.demo.durable.screen import RecoveryScreen

    show = RecoveryScreen(screen.console)
    with silent_log(), show.show(plan, folder) as watcher:
        recovery = anyio.run(act.run, plan, folder, watcher)
    accounts = close_accounts(recovery)
    show.report(recovery, accounts)
    return accounts.add_up


class _NoWatcher:
    def update(self, scene: act.Scene) -> None:
        """Nobody looks."""

    def say(self, seconds: float, text: str, detail: str = "") -> None:
        """Nobody listens."""


def _see_nothing(till: Till, shop: Shop) -> None:
    del till, shop


@contextmanager
def silent_log() -> Generator[None]:
    """Keep the bus's log off the screen: here failures are meant to happen, and are shown."""
    log = logging.getLogger("msgbus")
    was = log.disabled
    log.disabled = True
    try:
        yield
    finally:
        log.disabled = was


def _group(group: LetterGroup) -> dict[str, Any]:
    data = dataclasses.asdict(group)
    return {**data, "first": group.first.isoformat(), "last": group.last.isoformat()}


def as_data(outcome: Outcome, books: Books) -> dict[str, Any]:
    """Everything that was counted, by whomever, ready for JSON."""
    shop = {
        name: value
        for name, value in vars(outcome.shop).items()
        if isinstance(value, int) and not name.startswith("_")
    }
    aftermath, trouble = outcome.aftermath, outcome.shop.trouble
    return {
        "seed": outcome.plan.seed,
        "orders": len(outcome.plan.orders),
        "seconds": outcome.seconds,
        "till": dataclasses.asdict(outcome.till),
        "shop": {**shop, "orders_published": dataclasses.asdict(outcome.shop.orders_published)},
        "ledger": dataclasses.asdict(outcome.shop.ledger),
        "trouble": {
            "retries": trouble.retries,
            "letters": trouble.letters,
            "circuit": [dataclasses.asdict(note) for note in trouble.circuit],
        },
        "aftermath": {
            "groups": [_group(group) for group in aftermath.groups],
            "mended": aftermath.mended,
            "replay": dataclasses.asdict(aftermath.replay),
            "left": aftermath.left,
        },
        "bus": outcome.stats.as_dict(),
        "drain": {
            "handled": outcome.drain.handled,
            "abandoned": outcome.drain.abandoned,
            "scheduled": len(outcome.drain.scheduled),
        },
        "equations": _equations(books.all),
        "adds_up": books.add_up,
    }


def recovery_data(recovery: act.Recovery, accounts: Accounts) -> dict[str, Any]:
    """What was counted in the second act, ready for JSON."""
    course = recovery.course
    return {
        "orders": len(recovery.plan.orders),
        "seconds": recovery.seconds,
        "journal": str(recovery.folder.journal),
        "till": dataclasses.asdict(recovery.till),
        "published": recovery.published,
        "at_kill": {
            "published": course.published_at_kill,
            "sent": course.sent_at_kill,
            "taken": course.taken_at_kill,
            "exit_code": course.exit_code,
        },
        "recovered": dict(course.recovered),
        "takeover": course.takeover,
        "handlers": {
            one.name: {**dataclasses.asdict(one), "again": one.again}
            for one in recovery.findings.handlers
        },
        "units": recovery.findings.units,
        "equations": _equations(accounts.all),
        "adds_up": accounts.add_up,
    }


def _equations(equations: Sequence[Equation]) -> list[dict[str, Any]]:
    return [{**dataclasses.asdict(one), "holds": one.holds} for one in equations]
