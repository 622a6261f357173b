"""Charts, drawn as SVG. Colours are classes; the style sheet has them for light and dark."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Final, NamedTuple

from msgbus.pipeline.report.formats import count, duration, duration_tick, short, tick
from msgbus.pipeline.report.markup import Child, Markup, el, join
from msgbus.pipeline.report.scales import (
    Scale,
    decades,
    linear,
    logarithmic,
    round_ticks,
    time_ticks,
)

WIDTH: Final = 960
COLOURS: Final = 6
"""Series that have a colour of their own; the rest is grey."""

_LEFT: Final = 64
_RIGHT: Final = 12
_TOP: Final = 10
_BOTTOM: Final = 26


class Series(NamedTuple):
    """One colour of a chart."""

    label: str
    colour: str
    """A class of the style sheet: `c0` to `c5`, `rest`, `bad`, `warn`, `good`."""
    values: Sequence[float | None]


class Axis(NamedTuple):
    """Time from left to right: where each period begins, and where the last one ends."""

    starts: Sequence[datetime]
    step: timedelta

    @property
    def end(self) -> datetime:
        """The end of the last period."""
        return self.starts[-1] + self.step


def svg(title: str, height: float, *children: Child, width: int = WIDTH) -> Markup:
    """A picture with a name for those who cannot see it."""
    return el(
        "svg",
        el("title", title),
        *children,
        viewBox=f"0 0 {width} {height:g}",
        role="img",
        aria_label=title,
    )


def legend(series: Sequence[Series]) -> Markup:
    """What the colours mean."""
    return el(
        "ul",
        *(el("li", el("i", class_=f"key {one.colour}"), one.label) for one in series),
        class_="legend",
    )


def stacked(title: str, axis: Axis, series: Sequence[Series], height: int = 240) -> Markup:
    """Bars on top of each other, one column for each period."""
    sums = [sum(one.values[at] or 0 for one in series) for at in range(len(axis.starts))]
    ticks = round_ticks(max(sums, default=0))
    y = linear(0, ticks[-1], height - _BOTTOM, _TOP)
    x = _x_of(axis)
    bars: list[Markup] = []
    for at, start in enumerate(axis.starts):
        left, right = x(_seconds(axis, start)), x(_seconds(axis, start + axis.step))
        gap = min(2.0, (right - left) * 0.2)
        below = 0.0
        for one in series:
            value = one.values[at] or 0
            if value:
                bars.append(_bar(one.colour, left, right - gap, y(below + value), y(below)))
            below += value
        bars.append(_hover(left, right, height, _described(start, series, at, count_text)))
    return svg(title, height, _grid(ticks, y, short), _time_axis(axis, x, height), bars)


def lines(title: str, axis: Axis, series: Sequence[Series], height: int = 240) -> Markup:
    """Durations as lines over time, on a logarithmic axis; gaps where there is nothing."""
    known = [value for one in series for value in one.values if value]
    ticks = decades(min(known, default=0.001), max(known, default=1.0))
    y = logarithmic(ticks[0], ticks[-1], height - _BOTTOM, _TOP)
    x = _x_of(axis)
    drawn: list[Markup] = []
    for one in series:
        points = [
            (x(_seconds(axis, start + axis.step / 2)), y(value)) if value else None
            for start, value in zip(axis.starts, one.values, strict=True)
        ]
        drawn.extend(_runs(points, one.colour))
    hovers = [
        _hover(
            x(_seconds(axis, start)),
            x(_seconds(axis, start + axis.step)),
            height,
            _described(start, series, at, duration),
        )
        for at, start in enumerate(axis.starts)
    ]
    return svg(
        title, height, _grid(ticks, y, duration_tick), _time_axis(axis, x, height), drawn, hovers
    )


class Range(NamedTuple):
    """A line of a range chart: three marks between a label and a note."""

    label: str
    marks: tuple[float, float, float]
    note: str


def ranges(title: str, rows: Sequence[Range], names: tuple[str, str, str]) -> Markup:
    """Durations side by side: from the first mark to the last, logarithmic."""
    left, row, top = 300, 24, 24
    height = top + row * len(rows) + 8
    marks = [mark for one in rows for mark in one.marks if mark > 0]
    ticks = decades(min(marks, default=0.001), max(marks, default=1.0))
    x = logarithmic(ticks[0], ticks[-1], left, WIDTH - 70)
    grid = [
        (
            el("line", x1=x(at), x2=x(at), y1=float(top), y2=float(height - 8), class_="grid"),
            el("text", duration_tick(at), x=x(at), y=14, text_anchor="middle", class_="tick"),
        )
        for at in ticks
    ]
    drawn: list[Child] = []
    for number, one in enumerate(rows):
        y = top + row * number + row / 2
        low, middle, high = one.marks
        told = ", ".join(
            f"{name} {duration(at)}" for name, at in zip(names, one.marks, strict=True)
        )
        drawn.append(
            el(
                "g",
                el("title", f"{one.label}: {told}"),
                el("text", cut(one.label, 42), x=left - 12, y=y + 4, text_anchor="end"),
                el("line", x1=x(low), x2=x(high), y1=y, y2=y, class_="span"),
                el("circle", cx=x(low), cy=y, r=5, class_="c0"),
                el("circle", cx=x(middle), cy=y, r=5, class_="c1"),
                el("circle", cx=x(high), cy=y, r=5, class_="c4"),
                el("text", one.note, x=WIDTH - 4, y=y + 4, text_anchor="end", class_="tick"),
            )
        )
    return svg(title, height, grid, drawn)


def cut(label: str, length: int) -> str:
    """A label that fits; the end, which tells the most, stays."""
    return label if len(label) <= length else "…" + label[1 - length :]


# -- parts -------------------------------------------------------------------------------------


def count_text(value: float) -> str:
    """A value of a chart of counts."""
    return count(round(value))


def _described(
    start: datetime, series: Sequence[Series], at: int, form: Callable[[float], str]
) -> str:
    parts: Mapping[str, float | None] = {one.label: one.values[at] for one in series}
    told = [f"{label}: {form(value)}" for label, value in parts.items() if value]
    return "\n".join([f"{start:%Y-%m-%d %H:%M} UTC", *(told or ["nothing"])])


def _hover(left: float, right: float, height: float, told: str) -> Markup:
    return el(
        "rect",
        el("title", told),
        x=left,
        y=float(_TOP),
        width=max(right - left, 1.0),
        height=float(height - _TOP - _BOTTOM),
        class_="hover",
    )


def _bar(colour: str, left: float, right: float, top: float, bottom: float) -> Markup:
    return el(
        "rect",
        x=left,
        y=top,
        width=max(right - left, 0.5),
        height=max(bottom - top, 0.3),
        class_=colour,
    )


def _runs(points: Sequence[tuple[float, float] | None], colour: str) -> list[Markup]:
    """Lines between neighbours; a point without any is a dot."""
    found: list[Markup] = []
    run: list[tuple[float, float]] = []
    for point in (*points, None):
        if point is not None:
            run.append(point)
            continue
        if len(run) == 1:
            found.append(el("circle", cx=run[0][0], cy=run[0][1], r=3, class_=colour))
        elif run:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in run)
            found.append(el("polyline", points=path, class_=f"line {colour}"))
        run = []
    return found


def _x_of(axis: Axis) -> Scale:
    return linear(0.0, _seconds(axis, axis.end), _LEFT, WIDTH - _RIGHT)


def _seconds(axis: Axis, time: datetime) -> float:
    return (time - axis.starts[0]).total_seconds()


def _grid(ticks: Sequence[float], y: Scale, form: Callable[[float], str]) -> Markup:
    return join(
        (
            el("line", x1=_LEFT, x2=WIDTH - _RIGHT, y1=y(at), y2=y(at), class_="grid"),
            el("text", form(at), x=_LEFT - 8, y=y(at) + 4, text_anchor="end", class_="tick"),
        )
        for at in ticks
    )


def _time_axis(axis: Axis, x: Scale, height: float) -> Markup:
    span = axis.end - axis.starts[0]
    return join(
        el(
            "text",
            tick(at, span),
            x=x(_seconds(axis, at)),
            y=height - 8,
            text_anchor="middle",
            class_="tick",
        )
        for at in time_ticks(axis.starts[0], axis.end)
        if x(_seconds(axis, at)) < WIDTH - _RIGHT - 16
    )
