"""HTML elements that escape their text, and numbers and times as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from html import escape
from typing import Final, TypeAlias


class Markup(str):
    """Text that is HTML and is not escaped again."""

    __slots__ = ()


Child: TypeAlias = str | int | float | Sequence["Child"] | None

_VOID: Final = frozenset({"br", "circle", "line", "meta", "path", "polyline", "rect"})

# Control characters that HTML does not allow.
_FORBIDDEN: Final = dict.fromkeys((*range(9), 11, 12, *range(14, 32), 127), "�")


def text(value: object) -> Markup:
    """A value as escaped text."""
    if isinstance(value, Markup):
        return value
    clean = str(value).translate(_FORBIDDEN).encode("utf-8", "replace").decode()
    return Markup(escape(clean))


def el(name: str, /, *children: Child, **attributes: object) -> Markup:
    """An element; `class_` is the attribute `class`, `stroke_width` is `stroke-width`."""
    given = "".join(
        f' {key.strip("_").replace("_", "-")}="{text(_number(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _VOID and not children:
        return Markup(f"<{name}{given}/>")
    return Markup(f"<{name}{given}>{join(children)}</{name}>")


def join(children: Iterable[Child]) -> Markup:
    """Concatenate elements and texts; `None` is left out."""
    parts: list[str] = []
    for child in children:
        if child is None:
            continue
        if isinstance(child, (str, int, float)):
            parts.append(text(child))
        else:
            parts.append(join(child))
    return Markup("".join(parts))


def _number(value: object) -> object:
    # Coordinates: a tenth of a pixel is enough, and keeps the file small.
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else value


NOTHING: Final = "\N{EN DASH}"
_UNITS: Final = ((1e-3, 1e6, "µs"), (1.0, 1e3, "ms"), (60.0, 1.0, "s"))


def count(number: int | None) -> str:
    """A whole number with thousands separators."""
    return NOTHING if number is None else f"{number:,}"


def short(number: float) -> str:
    """A number for an axis: 1200 is `1.2k`."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= limit:
            return f"{number / limit:.3g}{unit}"
    return f"{number:.3g}"


def share(fraction: float | None) -> str:
    """A fraction as per cent, with more digits for small ones."""
    if fraction is None:
        return NOTHING
    percent = fraction * 100
    if percent in {0.0, 100.0}:
        return f"{percent:.0f} %"
    if percent < 0.01:
        return "< 0.01 %"
    return f"{percent:.2f} %" if percent < 1 else f"{percent:.1f} %"


def duration(seconds: float | None) -> str:
    """A duration with three digits and a unit."""
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


def plural(number: int, noun: str) -> str:
    """A number with its noun: `1 message`, `2 messages`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


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
