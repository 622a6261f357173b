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
from typing import Any, Final

import anyio

from msgbus.demo.books import Books, close_books
from msgbus.demo.plan import write_plan
from msgbus.demo.rush import JOBS, Outcome, Till, run
from msgbus.demo.shop import Shop
from msgbus.resilience.stores import LetterGroup

ORDERS: Final = 20_000
QUICK: Final = 2_000

DESCRIPTION: Final = """\
A small shop at load. Orders are commands: one handler, one result each, and a result may be
a refusal (declined) or a failure (broken gateway). Sales are events: each of their handlers
has a queue of its own, so one that is slow or fails does not touch the others.

One of them calls a service that fails: it is tried again, and while the service is down its
circuit is open and the queue waits. What fails for good becomes a dead letter, which is
corrected and replayed after the rush.

At the end everything is counted twice, by the bus and by those who use it, and the two must
agree: nothing is lost, dropped or refused without a number that says so."""

EPILOG: Final = """\
The same seed gives the same orders, results and failures. What the live screen had to drop
depends on how fast the machine is; so do all times. Ends with 1 if anything does not add up.

The code is in msgbus/demo: shop.py has the handlers, rush.py uses the bus,
aftermath.py looks after the dead letters."""


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
    return parser.parse_args(arguments)


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
    """
    options = parse(arguments)
    orders = options.orders or (QUICK if options.quick else ORDERS)
    plan = write_plan(orders, options.seed, JOBS)
    if options.json:
        with silent_log():
            outcome = anyio.run(partial(run, plan, _see_nothing))
        books = close_books(outcome)
        sys.stdout.write(json.dumps(as_data(outcome, books), indent=2) + "\n")
        return 0 if books.add_up else 1
    from msgbus.demo.screen import Screen

    screen = Screen()
    with silent_log(), screen.rush(plan) as update:
        outcome = anyio.run(partial(run, plan, update))
    books = close_books(outcome)
    screen.report(outcome, books)
    return 0 if books.add_up else 1


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
        "equations": [
            {**dataclasses.asdict(equation), "holds": equation.holds} for equation in books.all
        ],
        "adds_up": books.add_up,
    }
