"""Equations as tables and lines of the terminal, for both acts. Needs rich."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgbus.demo.books import Equation
from msgbus.errors import MissingExtraError
from msgbus.telemetry.stats import DurationStats

try:
    from rich.table import Table
    from rich.text import Text
except ImportError as missing:
    package = "rich"
    raise MissingExtraError(package, extra="cli") from missing


def verdict(equations: Sequence[Equation], good: str) -> str:
    """Whether they hold, and if not, which do not."""
    wrong = [equation for equation in equations if not equation.holds]
    if not wrong:
        return f"[b green]{good}:[/] all {len(equations)} equations hold."
    return f"[b red]{len(wrong)} of {len(equations)} equations DO NOT HOLD:[/] " + "; ".join(
        equation.subject for equation in wrong
    )


def times_table(subject: str, durations: Mapping[str, DurationStats]) -> Table:
    """How long it took, as a table of its own."""
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    table.title, table.title_style, table.title_justify = "\nhow long it took", "bold", "left"
    table.add_column(subject, no_wrap=True)
    for name in ("p50", "p95", "p99"):
        table.add_column(name, justify="right", style="cyan", no_wrap=True)
    for name, stats in durations.items():
        table.add_row(name, *_percentiles(stats))
    return table


def equation_table(
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


def equation_line(equation: Equation) -> Text:
    """An equation in words."""
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
