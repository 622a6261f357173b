"""Numbers and times as people read them."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Final

NOTHING: Final = "\N{EN DASH}"
_UNITS: Final = ((1e-3, 1e6, "µs"), (1.0, 1e3, "ms"), (60.0, 1.0, "s"))


def count(number: int | None) -> str:
    """A whole number, with commas between thousands."""
    return NOTHING if number is None else f"{number:,}"


def short(number: float) -> str:
    """A number for an axis: 1200 is `1.2k`."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= limit:
            return f"{number / limit:.3g}{unit}"
    return f"{number:.3g}"


def share(fraction: float | None) -> str:
    """A fraction as per cent, with more digits the smaller it is."""
    if fraction is None:
        return NOTHING
    percent = fraction * 100
    if percent in {0.0, 100.0}:
        return f"{percent:.0f} %"
    if percent < 0.01:
        return "< 0.01 %"
    return f"{percent:.2f} %" if percent < 1 else f"{percent:.1f} %"


def duration(seconds: float | None) -> str:
    """A duration in the unit that fits it, with three digits."""
    if seconds is None:
        return NOTHING
    if seconds < 0:
        return f"-{duration(-seconds)}"
    if seconds == 0:
        return "0 s"
    for limit, factor, unit in _UNITS:
        if seconds < limit * 0.9995:
            return f"{_three_digits(seconds * factor)} {unit}"
    return _long(round(seconds))


def duration_tick(seconds: float) -> str:
    """A duration for an axis: `10 ms`, not `10.0 ms`."""
    if seconds == 0:
        return "0"
    for limit, factor, unit in _UNITS:
        if seconds < limit * 0.9995:
            return f"{seconds * factor:.3g} {unit}"
    return _long(round(seconds)).removesuffix(" 0 s").removesuffix(" 0 min")


def moment(time: datetime | None) -> str:
    """A time to the second."""
    return NOTHING if time is None else f"{time:%Y-%m-%d %H:%M:%S}"


def tick(time: datetime, span: timedelta) -> str:
    """A time for an axis, as precise as its span allows."""
    if span <= timedelta(minutes=10):
        return f"{time:%H:%M:%S}"
    if span <= timedelta(days=1):
        return f"{time:%H:%M}"
    return f"{time:%b %d, %H:%M}" if span <= timedelta(days=8) else f"{time:%b %d}"


def plural(number: int, noun: str, nouns: str | None = None) -> str:
    """A number with its noun: `1 message`, `2 messages`."""
    word = noun if number == 1 else nouns or f"{noun}s"
    return f"{number:,} {word}"


def _three_digits(number: float) -> str:
    if number >= 99.95:
        return f"{number:.0f}"
    return f"{number:.1f}" if number >= 9.995 else f"{number:.2f}"


def _long(seconds: int) -> str:
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {seconds} s"
