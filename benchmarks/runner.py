"""The command line: choose rows, measure them one by one, report."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks.report import (
    as_data,
    complaint,
    conditions_line,
    markdown_table,
    print_table,
)
from benchmarks.rows import Result, Row
from benchmarks.suite import ROWS, UnknownRowError, choose
from benchmarks.timing import FULL, QUICK, Effort, Measurement

BEGIN: Final = "<!-- benchmarks: begin -->"
END: Final = "<!-- benchmarks: end -->"

DESCRIPTION: Final = """\
Measure what msgbus costs. Every figure is a ratio to the plainest code that does the same,
timed by turns in the same run, so it means something on a busy machine too.
Ends with 1 if a row is over its budget by more than half."""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "names",
        nargs="*",
        help="rows to run, by name or by a part of it: commands, events.publish, peer",
    )
    parser.add_argument("--quick", action="store_true", help="few repeats: a smoke test")
    parser.add_argument("--list", action="store_true", help="print the names of all rows")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument(
        "--refresh",
        type=Path,
        metavar="PAGE",
        help="put the Markdown table between the marks of this page",
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None, rows: Sequence[Row] = ROWS) -> int:
    """Run the benchmarks; 0 if all budgets hold well enough, 1 if not, 2 on wrong usage."""
    options = parse(arguments)
    if options.list:
        print(*(f"{row.name:28} {row.title}" for row in rows), sep="\n")
        return 0
    try:
        chosen = choose(rows, options.names, quick=options.quick)
    except UnknownRowError as error:
        print(error, file=sys.stderr)
        return 2
    effort = QUICK if options.quick else FULL
    results = [measure(row, effort, place, len(chosen)) for place, row in enumerate(chosen, 1)]
    if options.json is not None:
        options.json.write_text(json.dumps(as_data(results, effort), indent=2) + "\n")
    if options.refresh is not None:
        refresh(options.refresh, results, effort)
    if options.markdown:
        print(markdown_page(results, effort))
    else:
        print_table(results)
        print(conditions_line(effort))
    trouble = complaint(results)
    if trouble:
        print(f"\n{trouble}", file=sys.stderr)
    return 1 if trouble else 0


def measure(row: Row, effort: Effort, place: int, total: int) -> Result:
    """One row on an event loop of its own."""
    if sys.stderr.isatty():
        print(f"\r\033[K[{place}/{total}] {row.title}", end="", file=sys.stderr, flush=True)

    async def run() -> Measurement | None:
        return await row.measure(effort)

    result = Result(row, asyncio.run(run()))
    if sys.stderr.isatty() and place == total:
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    return result


def markdown_page(results: Sequence[Result], effort: Effort) -> str:
    """The table and what its figures depend on."""
    return f"{markdown_table(results)}\n\n{conditions_line(effort)}"


def refresh(page: Path, results: Sequence[Result], effort: Effort) -> None:
    """Replace what stands between the marks of a page."""
    before, begin, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        message = f"{page} has no {BEGIN} and {END} around its table."
        raise SystemExit(message)
    table = markdown_page(results, effort)
    page.write_text(f"{before}{BEGIN}\n\n{table}\n\n{END}{after}")
