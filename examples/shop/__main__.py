"""A small shop on msgbus: `python -m examples.shop`, or `make demo`.

Read on in this order: messages, handlers, rush (act 1), worker, durable (act 2), checks.
"""

import argparse
import logging
import sys
from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import anyio

from examples.shop import durable, rush
from examples.shop.checks import check_durable, check_rush
from examples.shop.messages import make_orders
from examples.shop.worker import url_of
from msgbus import CircuitClosedEvent, CircuitOpenedEvent, MsgBusError, pipeline

ACT_1 = """\
A small shop on msgbus. Everything is counted twice, by the bus and by those who use it, and at
the end the two must agree.

Act 1, in one process: {:,} orders at once, from tills and import jobs. An order is a command:
one handler, one result. A sale is an event: six handlers, each with a queue of its own.
Some cards are declined, the payment gateway fails, mailboxes are wrong, the ledger is down.
"""
RESULT_1 = """\
  orders    {accepted:,} accepted, {declined:,} declined, {failed:,} failed; each till got a result
  ledger    {retries:,} calls retried, a circuit open during the outage; {entries:,} sales booked
  receipts  {receipts bounced:,} dead letters; corrected and replayed, {receipts sent again:,} sent
  labels    slow, and none may be missing: the tills waited; {labels printed:,} printed
  screen    slow, and only the newest count: {dropped:,} lines dropped, {lines shown:,} shown
  calls     closed for now, and 25 may wait: {rejected:,} rejected, {calls made:,} made later
"""
ACT_2 = """\
Act 2, with a journal: {:,} orders more. A sale is on disk before its till gets the result, and
a worker in another process handles it. The worker is killed in the middle.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; 0 if everything adds up, 1 if not."""
    options = parse(arguments)
    durable.clear(options.folder)
    book = make_orders(options.orders, options.seed)
    print(ACT_1.format(len(book)))
    day = anyio.run(rush.run, book)
    show_rush(day)

    book = make_orders(max(options.orders // 10, 1), options.seed + 1)
    print(ACT_2.format(len(book)))
    act = durable.Durable(book, options.folder)
    anyio.run(durable.run, act)
    show_durable(act)

    equations = [*check_rush(day), *check_durable(act)]
    wrong = [equation for equation in equations if not equation.holds]
    if options.details:
        show_details(day)
    for equation in equations if options.details else wrong:
        print(equation)
    if wrong:
        print(f"{len(wrong)} of {len(equations)} equations do not hold.")
    else:
        print(f"Everything adds up: all {len(equations)} equations hold.")
    if options.report is not False:
        write_report(options.folder, is_wanted=bool(options.report))
    return 1 if wrong else 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m examples.shop", description=__doc__)
    add = parser.add_argument
    add("--orders", type=int, default=10_000, metavar="N", help="in act 1; a tenth of it in act 2")
    add("--seed", type=int, default=7, help="the same seed gives the same orders and failures")
    add("--folder", type=Path, default=Path(".demo"), help="for the journal and the report")
    add("--details", action="store_true", help="print every equation, circuit and dead letter")
    add("--report", action=argparse.BooleanOptionalAction, help="by default, if PySpark is there")
    options = parser.parse_args(arguments)
    if not 1 <= options.orders <= 100_000:
        parser.error("--orders must be from 1 to 100000")
    return options


def show_rush(day: rush.Rush) -> None:
    ledger, counts = day.shop.ledger, Counter(day.till)
    counts.update(day.shop.done)
    counts["retries"] = ledger.hiccups + ledger.calls_while_down
    counts["entries"] = ledger.entries
    counts["dropped"] = day.shop.sales.dropped
    counts["rejected"] = day.till["declined"] - day.shop.done["calls made"]
    print(RESULT_1.format_map(counts))


def show_durable(act: durable.Durable) -> None:
    mail, stock = act.handlers["send_receipt"], act.handlers["take_stock"]
    sent, dead = len(mail.rows) - mail.again, len(mail.dead)
    twice = f"{mail.again:,} of them twice due to the kill"
    print(f"  receipts  {sent:,} sent, {twice}; {dead:,} dead letters")
    print(f"  stock     {len(stock.rows):,} sales off the shelf, {stock.again:,} of them twice\n")


def show_details(day: rush.Rush) -> None:
    for event in day.shop.heard:
        if isinstance(event, CircuitOpenedEvent | CircuitClosedEvent):
            print(f"{type(event).__name__}: {event.reason}")
    for group in day.groups:
        print(f"{group.count:,} dead letters: {group.message_type}, {group.error_type}")


def write_report(folder: Path, *, is_wanted: bool) -> None:
    """Let the data pipeline make a report of the journal, if it can or must."""
    if not is_wanted and find_spec("pyspark") is None:
        print('For a report by Spark: pip install "msgbus[spark]", then add --report.')
        return
    print(f"Spark reads {folder / 'shop.db'} and makes a report ...")
    try:
        path = pipeline.open(url_of(folder)).report(folder / "report.html")
        print(f"The report is in {path}; open it in a browser.")
    except Exception as error:
        if is_wanted:
            raise
        print("No report this time:", f"{type(error).__name__}: {error}".splitlines()[0])


if __name__ == "__main__":
    logging.getLogger("msgbus").disabled = True  # what fails here is meant to fail
    try:
        sys.exit(main())
    except MsgBusError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
