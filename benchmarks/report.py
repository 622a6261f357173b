"""The results for people (rich or plain), for pages (Markdown) and for programs (JSON)."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import groupby
from typing import Any, Final

from benchmarks.journal import PACKAGES as STORES
from benchmarks.peers import PACKAGES
from benchmarks.resilience import PACKAGES as BREAKERS
from benchmarks.rows import FAR, Result, Verdict
from benchmarks.timing import Effort

HEADINGS: Final = ("", "ratio", "±", "each", "budget", "aim", "verdict")
"""`±` is half the width of the middle half of the repeats; `each` the time per message."""

STYLES: Final = {
    Verdict.AIM: "green",
    Verdict.WITHIN: "green",
    Verdict.OVER: "yellow",
    Verdict.FAR_OVER: "bold red",
}
ALWAYS: Final = ("msgbus", "pydantic", "anyio")


def figure(value: float, unit: str) -> str:
    """A value with its unit, to about three digits."""
    if unit == "x":
        return f"{value:.2f}x" if value < 10 else f"{value:.1f}x"
    return f"{value:.3g} {unit}".strip()


def seconds(value: float | None) -> str:
    """A duration in the unit that suits it."""
    if value is None:
        return ""
    for limit, factor, unit in ((1e-6, 1e9, "ns"), (1e-3, 1e6, "µs"), (1.0, 1e3, "ms")):
        if value < limit:
            return f"{value * factor:.3g} {unit}"
    return f"{value:.3g} s"


def cells(result: Result) -> tuple[str, ...]:
    """One row as text, under `HEADINGS`."""
    row, found = result.row, result.measurement
    least = "≥ " if row.is_speed else ""
    limits = tuple("" if limit is None else f"{least}{limit:g}" for limit in (row.budget, row.aim))
    if found is None:
        return (row.title, "-", "", "", *limits, result.verdict.value)
    spread = (found.high - found.low) / 2 / found.value if found.repeats > 1 else None
    return (
        row.title,
        figure(found.value, row.unit),
        "" if spread is None else f"{spread:.0%}",
        seconds(found.candidate),
        *limits,
        result.verdict.value,
    )


def groups(results: Sequence[Result]) -> Iterator[tuple[str, list[Result]]]:
    """Neighbours that are held against the same thing, with a heading."""
    for (area, baseline), members in groupby(
        results, key=lambda one: (one.row.area, one.row.baseline)
    ):
        yield f"{area}, against {baseline}" if baseline else area, list(members)


def plain_table(results: Sequence[Result]) -> str:
    """Aligned columns for any terminal or file."""
    rows = [cells(result) for result in results]
    widths = [max(map(len, column)) for column in zip(HEADINGS, *rows, strict=True)]

    def line(texts: Sequence[str]) -> str:
        first = texts[0].ljust(widths[0])
        rest = [text.rjust(width) for text, width in zip(texts[1:-1], widths[1:-1], strict=True)]
        return "  ".join([first, *rest, texts[-1]]).rstrip()

    lines = [line(HEADINGS)]
    for heading, members in groups(results):
        lines += ["", heading, *(line(cells(member)) for member in members)]
    return "\n".join(lines)


def markdown_table(results: Sequence[Result]) -> str:
    """A Markdown table, with a column for what each row is held against."""
    lines = [
        "| | held against | ratio | ± | each | budget | aim | verdict |",
        "|---|---|---:|---:|---:|---:|---:|---|",
    ]
    for result in results:
        title, *rest = cells(result)
        baseline = result.row.baseline
        if "(" in baseline:
            baseline = f"`{baseline}`"  # code, which Markdown would else take for a link
        lines.append(f"| {' | '.join([title, baseline, *rest])} |")
    return "\n".join(lines)


def print_table(results: Sequence[Result]) -> None:
    """The table on standard output: with colours if rich is installed."""
    if find_spec("rich") is None:
        print(plain_table(results))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    rows = [cells(result) for result in results]
    widths = [max(map(len, column)) for column in zip(HEADINGS, *rows, strict=True)]
    for place, (heading, members) in enumerate(groups(results)):
        console.print(f"\n{heading}", style="bold", markup=False)
        table = Table(box=None, show_header=place == 0, padding=(0, 2, 0, 0))
        for title, width in zip(HEADINGS, widths, strict=True):
            left = title in {"", "verdict"}
            table.add_column(title, justify="left" if left else "right", min_width=width)
        for member in members:
            *texts, verdict = cells(member)
            table.add_row(*texts, Text(verdict, style=STYLES.get(member.verdict, "dim")))
        console.print(table)
    console.print()


def installed_version(package: str) -> str | None:
    """The version of a package, if it is there."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def conditions(effort: Effort) -> dict[str, Any]:
    """What the figures depend on. Nothing that names the machine."""
    return {
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "system": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "repeats": effort.repeats,
        "versions": {
            name: installed_version(name) for name in (*ALWAYS, *PACKAGES, *BREAKERS, *STORES)
        },
    }


def conditions_line(effort: Effort) -> str:
    """The same in one sentence."""
    known = conditions(effort)
    versions = ", ".join(f"{name} {found}" for name, found in known["versions"].items() if found)
    return (
        f"{known['python']} on {known['system']}; median of {known['repeats']} ratios; {versions}."
    )


def as_data(results: Sequence[Result], effort: Effort) -> dict[str, Any]:
    """Everything, ready for JSON."""
    return {"conditions": conditions(effort), "rows": [row_data(result) for result in results]}


def row_data(result: Result) -> dict[str, Any]:
    """One row, ready for JSON."""
    row, found = result.row, result.measurement
    return {
        "name": row.name,
        "title": row.title,
        "baseline": row.baseline,
        "unit": row.unit,
        "value": None if found is None else found.value,
        "low": None if found is None else found.low,
        "high": None if found is None else found.high,
        "repeats": None if found is None else found.repeats,
        "baseline_seconds": None if found is None else found.baseline,
        "seconds": None if found is None else found.candidate,
        "budget": row.budget,
        "aim": row.aim,
        "is_speed": row.is_speed,
        "verdict": result.verdict.value,
    }


def complaint(results: Sequence[Result]) -> str:
    """What to shout about: every row far over its budget; empty if there is none."""
    far = [result for result in results if result.verdict is Verdict.FAR_OVER]
    if not far:
        return ""
    lines = [f"FAILED: {len(far)} row(s) more than {FAR:g} times over budget:"]
    for result in far:
        title, value, *_ = cells(result)
        lines.append(f"  {result.row.name} ({title}): {value}, budget {result.row.budget:g}")
    return "\n".join(lines)
