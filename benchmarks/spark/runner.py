"""The command line: write journals, measure them in processes of their own, print the tables."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.spark.data import write_journal
from benchmarks.spark.table import Figures, conditions, markdown, tables

DESCRIPTION: Final = """\
Measure the data pipeline: a journal with as many messages as --rows, written by the journal
itself, is read, exported, reported on and replayed, next to Parquet, JSON and plain Python.
Ratios come from rounds by turns in one session with a heap of 1 GB; rates depend on the machine.
Ends with 1 if a bar is missed. On two quiet cores it takes some 40 minutes, and --rows 500000 takes
five. Files, 6 GB of them, go to the working folder, and are removed."""

BEGIN: Final = "<!-- bench-spark: begin -->"
END: Final = "<!-- bench-spark: end -->"

ALL: Final = ("read", "lake_and_tail", "read_others", "jobs", "replay_and_loop")
SMALL: Final = ("read", "replay")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.spark",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rows", type=int, default=5_000_000, help="messages; default 5,000,000")
    parser.add_argument(
        "--growth",
        type=int,
        nargs="*",
        metavar="ROWS",
        help="smaller journals to show growth with; default a tenth and a fifth",
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds of what is compared")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    parser.add_argument("--markdown", action="store_true", help="print the tables as Markdown")
    parser.add_argument(
        "--refresh",
        type=Path,
        metavar="PAGE",
        help="put the Markdown tables between the marks of this page",
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure everything; 0 if all bars are met, 1 if not."""
    options = parse(arguments)
    sizes = options.growth
    if sizes is None:
        sizes = [options.rows // 10, options.rows // 5]
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=Path.cwd()) as temporary:
        figures = measure(Path(temporary), options.rows, sorted(sizes), options.rounds)
    if options.json is not None:
        options.json.write_text(json.dumps(figures.data, indent=2) + "\n")
    found = tables(figures, options.rows, sorted(sizes))
    if options.refresh is not None:
        refresh(options.refresh, f"{markdown(found)}\n\n{conditions(options.rounds)}")
    print(markdown(found) if options.markdown else "\n\n".join(map(str, found)))
    print(f"\n{conditions(options.rounds)}")
    missed = figures.missed(options.rows)
    if missed:
        print("\nMISSED: " + "; ".join(missed), file=sys.stderr)
    return 1 if missed else 0


def refresh(page: Path, text: str) -> None:
    """Replace what stands between the marks of a page."""
    before, begin, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        message = f"{page} has no {BEGIN} and {END} around its tables."
        raise SystemExit(message)
    page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")


def measure(folder: Path, rows: int, sizes: Sequence[int], rounds: int) -> Figures:
    """All figures, by size and cores."""
    figures = Figures()
    for size in sizes:
        journal = prepare(folder, size, size, figures)
        figures.add(size, 2, child(journal, SMALL, 2, rounds))
    # The lake gets all but the last hundredth, which is the tail.
    sealed = rows - rows // 100
    journal = prepare(folder, rows, sealed, figures)
    figures.add(rows, 2, child(journal, ("export",), 2, rounds))
    note(f"writing the last {rows - sealed:,} messages")
    write_journal(journal, sealed, rows)
    figures.add(rows, 2, child(journal, ALL, 2, rounds))
    figures.add(rows, 1, child(journal, SMALL, 1, 1))
    return figures


def prepare(folder: Path, rows: int, upto: int, figures: Figures) -> Path:
    """A journal of so many rows."""
    journal = folder / f"{rows}" / "journal.db"
    journal.parent.mkdir()
    note(f"writing a journal of {upto:,} messages")
    seconds = write_journal(journal, 0, upto)
    figures.add(rows, 0, {"write": {"rows": upto, "seconds": [seconds]}})
    return journal


def child(journal: Path, works: Sequence[str], cores: int, rounds: int) -> dict[str, Any]:
    """What a session on so many cores has measured."""
    note(f"{journal.parent.name} messages, {cores} core(s): {', '.join(works)}")
    command = [sys.executable, "-m", "benchmarks.spark.works", str(journal), *works]
    command += ["--cores", str(cores), "--rounds", str(rounds)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = {}
    for line in done.stdout.splitlines():
        if line.startswith("@ "):
            data = json.loads(line[2:])
            found[data["name"]] = data
    return found


def note(text: str) -> None:
    """Where it is, for whoever waits."""
    print(f"... {text}", file=sys.stderr, flush=True)
