"""The figures as tables, with ratios, and the bars that they are held against."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, Final, final

BARS: Final = (
    ("journal / Parquet, full rows", "read.source", "read.parquet", 0.4),
    ("lake and tail / Parquet", "lake.union", "lake.parquet", 0.8),
    ("last 1 % / full read", "read.tail", "read.source", 4.0),
    ("replay / plain loop", "replay.spark", "replay.loop", 1.0),
)
"""What must be how many times as fast as what."""


@final
class Figures:
    """Everything that was measured, by rows and cores."""

    def __init__(self) -> None:
        self.data: dict[str, dict[str, Any]] = {}

    def add(self, rows: int, cores: int, found: dict[str, Any]) -> None:
        """More of them. The peak of memory is that of the longest session."""
        known = self.data.setdefault(f"{rows}/{cores}", {})
        for name, one in found.items():
            if name.startswith("memory.") and name in known:
                one = max(known[name], one, key=lambda each: each["seconds"][0])  # noqa: PLW2901
            known[name] = one

    def seconds(self, rows: int, cores: int, name: str) -> float | None:
        """The median; `None` if it was not measured."""
        found = self.data.get(f"{rows}/{cores}", {}).get(name)
        return None if found is None else float(statistics.median(found["seconds"]))

    def rate(self, rows: int, cores: int, name: str) -> float | None:
        """Millions of rows in a second."""
        seconds = self.seconds(rows, cores, name)
        if not seconds:
            return None
        return float(self.data[f"{rows}/{cores}"][name]["rows"]) / seconds / 1e6

    def ratio(self, rows: int, fast: str, slow: str) -> float | None:
        """How many times as fast one is as the other, in rows or, for a part, in time."""
        if fast == "read.tail":
            one, other = self.seconds(rows, 2, slow), self.seconds(rows, 2, fast)
        else:
            one, other = self.rate(rows, 2, fast), self.rate(rows, 2, slow)
        return one / other if one and other else None

    def missed(self, rows: int) -> list[str]:
        """The bars that are not met."""
        found: list[str] = []
        for title, fast, slow, bar in BARS:
            ratio = self.ratio(rows, fast, slow)
            if ratio is None or ratio < bar:
                shown = "not measured" if ratio is None else f"{ratio:.2f}"
                found.append(f"{title}: {shown}, at least {bar:g}")
        return found


@final
@dataclass
class Table:
    """A title, headings and rows of text."""

    title: str
    headings: Sequence[str]
    rows: list[list[str]] = field(default_factory=list[list[str]])

    def __str__(self) -> str:
        lines = [list(self.headings), *self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        shown = [
            "  ".join(
                text.ljust(width) if place == 0 else text.rjust(width)
                for place, (text, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        ]
        return "\n".join([self.title, *shown])


def markdown(found: Sequence[Table]) -> str:
    """The tables for a page."""
    parts: list[str] = []
    for table in found:
        lines = [f"| {' | '.join(table.headings)} |"]
        lines.append("|---|" + "---:|" * (len(table.headings) - 1))
        lines += [f"| {' | '.join(row)} |" for row in table.rows]
        parts.append(f"**{table.title}**\n\n" + "\n".join(lines))
    return "\n\n".join(parts)


def tables(figures: Figures, rows: int, sizes: Sequence[int]) -> list[Table]:
    """Everything, in the order in which it is read."""
    return [
        _bars(figures, rows),
        _reading(figures, rows),
        _jobs(figures, rows),
        _growth(figures, [*sizes, rows]),
        _cores(figures, rows),
        _memory(figures, rows),
    ]


def _bars(figures: Figures, rows: int) -> Table:
    table = Table(f"Bars, {rows:,} messages, 2 cores", ("", "ratio", "at least", ""))
    for title, fast, slow, bar in BARS:
        ratio = figures.ratio(rows, fast, slow)
        is_met = ratio is not None and ratio >= bar
        table.rows.append([title, _x(ratio), _x(bar), "met" if is_met else "MISSED"])
    return table


READING: Final = (
    ("Parquet in Spark", "read.parquet"),
    ("journal, ADBC", "read.source"),
    ("journal, sqlite3 of Python", "read.sqlite3"),
    ("JSON lines in Spark", "read.json"),
    ("lake and tail", "lake.union"),
    ("limit: Parquet, one process, no Spark", "read.limit.parquet"),
    ("limit: ADBC, one process, no Spark", "read.limit.adbc"),
    ("limit: sqlite3, one process, no Spark", "read.limit.sqlite3"),
    ("export to a new lake", "export"),
    ("replay in Spark", "replay.spark"),
    ("replay in Spark, by a field", "replay.field"),
    ("replay, plain loop in one process", "replay.loop"),
    ("replay, `msgbus.pipeline.fold`", "replay.fold"),
)


def _reading(figures: Figures, rows: int) -> Table:
    table = Table(f"Rates, {rows:,} messages, 2 cores", ("", "M rows/s", "of Parquet", "seconds"))
    base = figures.rate(rows, 2, "read.parquet")
    for title, name in READING:
        rate, seconds = figures.rate(rows, 2, name), figures.seconds(rows, 2, name)
        share = rate / base if rate and base and name.startswith(("read", "lake")) else None
        table.rows.append([title, _number(rate, 3), _x(share), _number(seconds, 1)])
    written = figures.rate(rows, 0, "write")
    if written is not None:
        table.rows.append(["written by the journal", _number(written, 3), "", ""])
    return table


def _jobs(figures: Figures, rows: int) -> Table:
    table = Table(f"Jobs, {rows:,} messages, 2 cores", ("", "seconds", "M messages/s"))
    names = figures.data.get(f"{rows}/2", {})
    for name in sorted(one for one in names if one.startswith("job.")):
        shown = name.removeprefix("job.").replace("_", " ")
        seconds, rate = figures.seconds(rows, 2, name), figures.rate(rows, 2, name)
        table.rows.append([shown, _number(seconds, 1), _number(rate, 3)])
    return table


def _growth(figures: Figures, sizes: Sequence[int]) -> Table:
    table = Table("Growth, 2 cores, seconds", ("", *(f"{size:,}" for size in sizes)))
    for title, name in (
        ("Parquet", "read.parquet"),
        ("journal", "read.source"),
        ("last 1 %", "read.tail"),
        ("replay", "replay.spark"),
    ):
        seconds = [figures.seconds(size, 2, name) for size in sizes]
        table.rows.append([title, *(_number(one, 2) for one in seconds)])
    return table


def _cores(figures: Figures, rows: int) -> Table:
    table = Table(f"Cores, {rows:,} messages, seconds", ("", "1 core", "2 cores", "gain"))
    for title, name in (
        ("Parquet", "read.parquet"),
        ("journal", "read.source"),
        ("replay", "replay.spark"),
    ):
        one, two = figures.seconds(rows, 1, name), figures.seconds(rows, 2, name)
        gain = one / two if one and two else None
        table.rows.append([title, _number(one, 2), _number(two, 2), _x(gain)])
    return table


def _memory(figures: Figures, rows: int) -> Table:
    table = Table(f"Peak memory, {rows:,} messages, heap of 1 GB", ("", "MB"))
    for title, name in (("JVM", "memory.java"), ("Python's workers", "memory.python")):
        table.rows.append([title, _number(figures.seconds(rows, 2, name), 0)])
    table.rows.append(["session start, seconds", _number(figures.seconds(rows, 2, "start"), 1)])
    return table


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _x(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"


def conditions(rounds: int) -> str:
    """What the figures depend on. Nothing that names the machine."""
    packages = ("msgbus", "pyspark", "pyarrow", "adbc-driver-sqlite")
    shown = ", ".join(f"{name} {version(name)}" for name in packages)
    return (
        f"Python {platform.python_version()} on {platform.system()} {platform.machine()}, "
        f"{os.cpu_count()} cores; medians of {rounds} rounds for what is compared by turns, one "
        f"round for the rest; {shown}."
    )
