"""From values to places in a chart, and the values worth a label."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Final, TypeAlias

Scale: TypeAlias = Callable[[float], float]

STEPS: Final = tuple(
    timedelta(seconds=seconds)
    for seconds in (60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)
)
"""How long a period of a chart may be; longer ones are whole days."""


def step_for(span: timedelta, most: int = 72) -> timedelta:
    """The shortest period of which no more than `most` cover a span."""
    for step in STEPS:
        if span / step <= most:
            return step
    return timedelta(days=math.ceil(span / timedelta(days=1) / most))


def linear(low: float, high: float, start: float, end: float) -> Scale:
    """Even steps; a span of nothing is in the middle."""
    if high == low:
        return lambda _: (start + end) / 2
    return lambda value: start + (value - low) / (high - low) * (end - start)


def logarithmic(low: float, high: float, start: float, end: float) -> Scale:
    """Even steps for equal factors; values below `low` are at `low`."""
    inner = linear(math.log10(low), math.log10(high), start, end)
    return lambda value: inner(math.log10(max(value, low)))


def round_ticks(high: float, wanted: int = 4) -> list[float]:
    """Round values from 0 up to `high` or just beyond."""
    if high <= 0:
        return [0.0, 1.0]
    raw = high / wanted
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    if high <= wanted:
        step = max(1.0, step)  # what is counted has no halves
    return [step * number for number in range(math.ceil(high / step - 1e-9) + 1)]


def decades(low: float, high: float) -> list[float]:
    """Powers of ten around a range, both ends outside of it."""
    first = math.floor(math.log10(max(low, 1e-6)) + 1e-9)
    last = max(first + 1, math.ceil(math.log10(max(high, 1e-6)) - 1e-9))
    return [10.0**power for power in range(first, last + 1)]


def time_ticks(first: datetime, last: datetime, most: int = 8) -> list[datetime]:
    """Round moments between two others."""
    span = last - first
    choices = [timedelta(seconds=one) for one in (1, 2, 5, 10, 15, 30)]
    choices += [*STEPS, *(timedelta(days=days) for days in (2, 7, 14, 30, 90, 365))]
    step = next((one for one in choices if span / one <= most), choices[-1])
    midnight = first.replace(hour=0, minute=0, second=0, microsecond=0)
    number = math.ceil((first - midnight) / step)
    found: list[datetime] = []
    while midnight + number * step <= last:
        found.append(midnight + number * step)
        number += 1
    return found
