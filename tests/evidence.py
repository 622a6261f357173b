"""The table of `make stress`: what was done how often, and what was lost on the way.

A test marked `stress(area)` asks for the fixture `evidence` and calls it with what it counted.
Tests that say the same `what` are one row, their numbers added up.
"""

from __future__ import annotations

import os
import platform
import re
import sqlite3
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Protocol

AREAS: Final = (
    "core",
    "routing",
    "journal",
    "subscriptions",
    "durability",
    "letters",
    "spark",
    "benchmarks",
)

FAULTS: Final = ("lost", "doubled", "reordered")

HEADER: Final = (
    "| What | How many | Lost | Doubled | Reordered | Seconds |\n|---|---|---:|---:|---:|---:|"
)

INTRODUCTION: Final = """\
# Evidence

What `make stress` did, and what it found. The same tests run with small counts in `make test`.
`make stress AREA=journal` runs one part and replaces its section here, so sections may be of
different days; each says when, at which commit and on what machine it ran.

*Lost* counts what was acknowledged and is not there. *Doubled* counts what was delivered again
after a crash, which at-least-once allows, or what happened twice where that is ruled out; the
tests know which, and fail on the second. *Reordered* counts what came out of the order that was
promised. A dash: does not apply. Rows that begin with *control* break the code on purpose: there,
a loss has to be found.
"""


class Evidence(Protocol):
    """Notes what a test has counted: how many of what, and how many faults it found."""

    def __call__(
        self,
        what: str,
        *,
        lost: int | None = None,
        doubled: int | None = None,
        reordered: int | None = None,
        **amounts: int,
    ) -> None: ...


@dataclass
class Row:
    """One line of the table."""

    area: str
    what: str
    amounts: dict[str, int] = field(default_factory=dict[str, int])
    """How many of what: kills, messages, seeds."""
    faults: dict[str, int] = field(default_factory=dict[str, int])
    """How many were lost, doubled, reordered, where that applies."""
    seconds: float = 0.0

    def add(self, amounts: Mapping[str, int], faults: Mapping[str, int], seconds: float) -> None:
        for total, more in ((self.amounts, amounts), (self.faults, faults)):
            for name, number in more.items():
                total[name] = total.get(name, 0) + number
        self.seconds += seconds

    def __str__(self) -> str:
        amounts = ", ".join(f"{number:,} {name}" for name, number in self.amounts.items())
        faults = [f"{self.faults[name]:,}" if name in self.faults else "-" for name in FAULTS]
        return f"| {' | '.join([self.what, amounts, *faults, f'{self.seconds:.0f}'])} |"


class Table:
    """All rows of one run."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str], Row] = {}

    def take(self, properties: Iterable[tuple[str, Any]], seconds: float) -> None:
        """Add what a test has noted among its properties; they share its duration."""
        notes = [value for name, value in properties if name == "evidence"]
        for note in notes:
            key = note["area"], note["what"]
            row = self._rows.setdefault(key, Row(*key))
            row.add(note["amounts"], note["faults"], seconds / len(notes))

    def sections(self) -> dict[str, str]:
        """The table of each area."""
        found: dict[str, str] = {}
        for area in AREAS:
            lines = sorted(str(row) for row in self._rows.values() if row.area == area)
            if lines:
                found[area] = "\n".join([HEADER, *lines])
        return found

    def write(self, page: Path) -> None:
        """Replace the sections of the areas that were run; the others stay as they are."""
        old = page.read_text() if page.exists() else ""
        sections = dict(
            re.findall(r"^## (\w+)\n\n(.*?)(?=\n## |\Z)", old, re.MULTILINE | re.DOTALL)
        )
        conditions = conditions_of_this_run()
        for area, table in self.sections().items():
            sections[area] = f"{conditions}\n\n{table}\n"
        parts = [f"## {area}\n\n{sections[area]}" for area in AREAS if area in sections]
        page.write_text("\n".join([INTRODUCTION, *parts]))


def conditions_of_this_run() -> str:
    """Date, commit and machine, in one line."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    times = int(os.environ.get("STRESS", "0"))
    return (
        f"{datetime.now(UTC):%Y-%m-%d}, commit {_commit()}, STRESS={times}; "
        f"{os.cpu_count()} cores, {memory:.0f} GiB, {platform.system()} {platform.machine()}, "
        f"Python {platform.python_version()}, SQLite {sqlite3.sqlite_version}"
    )


def _commit() -> str:
    def git(*words: str) -> str:
        command = ["git", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    changed = " with changes" if git("status", "--porcelain", "--", "msgbus", "tests") else ""
    return (git("rev-parse", "--short", "HEAD") or "unknown") + changed
