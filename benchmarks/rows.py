"""A row of the table: what is measured, against what, and how much it may cost."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final, TypeAlias, final

from benchmarks.timing import Effort, Measurement

Measure: TypeAlias = Callable[[Effort], Awaitable[Measurement | None]]
"""Gives nothing if what it would measure is not installed."""

FAR: Final = 1.5
"""Beyond its budget by more than half, a row fails the whole run."""


class Verdict(Enum):
    """How a row stands against its budget."""

    AIM = "meets aim"
    WITHIN = "in budget"
    OVER = "over budget"
    FAR_OVER = "FAR OVER"
    NO_BUDGET = "-"
    NOT_INSTALLED = "not installed"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table."""

    name: str
    """Area and subject, as `commands.execute`: what to type to run it alone."""

    title: str
    baseline: str
    """What the measured code is held against."""

    measure: Measure
    budget: float | None = None
    aim: float | None = None
    unit: str = "x"
    """Of the value: `x` for ratios."""

    is_speed: bool = False
    """More is better: budget and aim are the least that the value should be."""

    heavy: bool = False
    """Takes seconds to set up: `--quick` leaves it out unless it is named."""

    @property
    def area(self) -> str:
        """The first part of the name."""
        return self.name.partition(".")[0]


@final
@dataclass(frozen=True, slots=True)
class Result:
    """A row and what it found."""

    row: Row
    measurement: Measurement | None

    @property
    def verdict(self) -> Verdict:
        """How it stands."""
        if self.measurement is None:
            return Verdict.NOT_INSTALLED
        row = self.row
        return judge(self.measurement.value, row.budget, row.aim, is_speed=row.is_speed)


def judge(
    value: float, budget: float | None, aim: float | None, *, is_speed: bool = False
) -> Verdict:
    """Hold a value against its budget and its aim, which a speed is to reach."""
    if budget is None:
        return Verdict.NO_BUDGET
    if is_speed:
        return judge(1 / value, 1 / budget, None if aim is None else 1 / aim)
    if value > budget * FAR:
        return Verdict.FAR_OVER
    if value > budget:
        return Verdict.OVER
    if aim is not None and value <= aim:
        return Verdict.AIM
    return Verdict.WITHIN
