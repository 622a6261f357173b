"""Charts as SVG: stacked bars, lines, ranges, timelines and trees, with their scales.

Colours are classes of the style sheet, which has them for light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Final, NamedTuple, TypeAlias

from msgbus.pipeline.report.data import SessionLine, Tree, TreeNode
from msgbus.pipeline.report.markup import (
    Child,
    Markup,
    count,
    duration,
    duration_tick,
    el,
    join,
    moment,
    plural,
    short,
    tick,
)

WIDTH: Final = 960
COLOURS: Final = 6
"""Series with a colour of their own; the others are grey."""

_LEFT: Final = 64
_RIGHT: Final = 12
_TOP: Final = 10
_BOTTOM: Final = 26


class Series(NamedTuple):
    """One series of a chart."""

    label: str
    colour: str
    """A class of the style sheet: `c0` to `c5`, `rest`, `bad`, `warn`, `good`."""
    values: Sequence[float | None]


class Axis(NamedTuple):
    """A time axis: the start of each period, and their length."""

    starts: Sequence[datetime]
    step: timedelta

    @property
    def end(self) -> datetime:
        """The end of the last period."""
        return self.starts[-1] + self.step


def svg(title: str, height: float, *children: Child) -> Markup:
    """An SVG image with an accessible title."""
    return el(
        "svg",
        el("title", title),
        *children,
        viewBox=f"0 0 {WIDTH} {height:g}",
        role="img",
        aria_label=title,
    )


def legend(series: Sequence[Series]) -> Markup:
    """A legend of the colours."""
    return el(
        "ul",
        *(el("li", el("i", class_=f"key {one.colour}"), one.label) for one in series),
        class_="legend",
    )


def stacked(title: str, axis: Axis, series: Sequence[Series], height: int = 240) -> Markup:
    """Stacked bars, one column per period."""
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
    """Durations as lines over time, on a logarithmic axis, with gaps."""
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


class PercentileRange(NamedTuple):
    """A row of a range chart: a label, three marks and a note."""

    label: str
    marks: tuple[float, float, float]
    note: str


def ranges(title: str, rows: Sequence[PercentileRange], names: tuple[str, str, str]) -> Markup:
    """Rows of durations from the first mark to the last, on a logarithmic axis."""
    left, row, top = 300, 24, 24
    height = top + row * len(rows) + 8
    marks = [mark for one in rows for mark in one.marks if mark > 0]
    ticks = decades(min(marks, default=0.001), max(marks, default=1.0))
    x = logarithmic(ticks[0], ticks[-1], left, WIDTH - 70)
    drawn: list[Child] = []
    for number, one in enumerate(rows):
        y = top + row * number + row / 2
        low, middle, high = one.marks
        tooltip = ", ".join(
            f"{name} {duration(at)}" for name, at in zip(names, one.marks, strict=True)
        )
        drawn.append(
            el(
                "g",
                el("title", f"{one.label}: {tooltip}"),
                el("text", cut(one.label, 42), x=left - 12, y=y + 4, text_anchor="end"),
                el("line", x1=x(low), x2=x(high), y1=y, y2=y, class_="span"),
                el("circle", cx=x(low), cy=y, r=5, class_="c0"),
                el("circle", cx=x(middle), cy=y, r=5, class_="c1"),
                el("circle", cx=x(high), cy=y, r=5, class_="c4"),
                _tick(one.note, WIDTH - 4, y + 4, "end"),
            )
        )
    return svg(title, height, _verticals(ticks, x, height), drawn)


def cut(label: str, length: int) -> str:
    """Shorten a label from the left."""
    return label if len(label) <= length else "…" + label[1 - length :]


# -- parts -------------------------------------------------------------------------------------


def count_text(value: float) -> str:
    """Format a value of a chart of counts."""
    return count(round(value))


def _described(
    start: datetime, series: Sequence[Series], at: int, form: Callable[[float], str]
) -> str:
    parts: Mapping[str, float | None] = {one.label: one.values[at] for one in series}
    tooltip = [f"{label}: {form(value)}" for label, value in parts.items() if value]
    return "\n".join([f"{start:%Y-%m-%d %H:%M} UTC", *(tooltip or ["nothing"])])


def _hover(left: float, right: float, height: float, tooltip: str) -> Markup:
    return el(
        "rect",
        el("title", tooltip),
        x=left,
        y=float(_TOP),
        width=max(right - left, 1.0),
        height=float(height - _TOP - _BOTTOM),
        class_="hover",
    )


def _bar(colour: str, left: float, right: float, top: float, bottom: float) -> Markup:
    width, height = max(right - left, 0.5), max(bottom - top, 0.3)
    return el("rect", x=left, y=top, width=width, height=height, class_=colour)


def _runs(points: Sequence[tuple[float, float] | None], colour: str) -> list[Markup]:
    """Lines between neighbouring points; a point without any is a dot."""
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


def _tick(label: str, x: float, y: float, anchor: str | None = None) -> Markup:
    return el("text", label, x=x, y=y, text_anchor=anchor, class_="tick")


def _x_of(axis: Axis) -> Scale:
    return linear(0.0, _seconds(axis, axis.end), _LEFT, WIDTH - _RIGHT)


def _seconds(axis: Axis, time: datetime) -> float:
    return (time - axis.starts[0]).total_seconds()


def _grid(ticks: Sequence[float], y: Scale, form: Callable[[float], str]) -> Markup:
    return join(
        (
            el("line", x1=_LEFT, x2=WIDTH - _RIGHT, y1=y(at), y2=y(at), class_="grid"),
            _tick(form(at), _LEFT - 8, y(at) + 4, "end"),
        )
        for at in ticks
    )


def _time_axis(axis: Axis, x: Scale, height: float) -> Markup:
    span = axis.end - axis.starts[0]
    return join(
        _tick(tick(at, span), x(_seconds(axis, at)), height - 8, "middle")
        for at in time_ticks(axis.starts[0], axis.end)
        if x(_seconds(axis, at)) < WIDTH - _RIGHT - 16
    )


OUTCOME_COLOURS: Final = {
    "ok": "good",
    "recovered": "warn",
    "failed": "bad",
    "timed_out": "bad",
    "dead_lettered": "bad",
    "dropped": "bad",
    "refused": "warn",
    "cancelled": "warn",
}
_ROW: Final = 22
_HEAD: Final = 24


def colour_of(outcome: str | None) -> str:
    """The colour class of an outcome."""
    return "rest" if outcome is None else OUTCOME_COLOURS.get(outcome, "rest")


def session_bars(title: str, sessions: Sequence[SessionLine]) -> Markup:
    """The duration of sessions, coloured by outcome."""
    left = 200
    height = _HEAD + _ROW * len(sessions) + 8
    longest = max([1e-6, *(one.duration for one in sessions)])
    x = linear(0.0, longest, left, WIDTH - 210)
    drawn: list[Child] = []
    for number, one in enumerate(sessions):
        began = moment(one.started)
        tooltip = (
            f"Session {one.session_id}: {one.outcome}, {duration(one.duration)} "
            f"from {began}, {plural(one.messages, 'message')}"
        )
        y = _HEAD + _ROW * number
        end = x(one.duration)
        drawn.append(
            el(
                "g",
                el("title", tooltip),
                el("text", cut(one.session_id, 26), x=left - 12, y=y + 15, text_anchor="end"),
                _span_bar(x(0.0), end, y, colour_of(one.outcome)),
                _tick(f"{duration(one.duration)}, {began}", end + 6, y + 15),
            )
        )
    return svg(title, height, _verticals(round_seconds(longest), x, height), drawn)


def tree_bars(title: str, tree: Tree) -> Markup:
    """A chain as an indented tree, with bars from publish to the end of the last attempt."""
    left = 360
    rows = ordered(tree.nodes)
    height = _HEAD + _ROW * len(rows) + 8
    end = max([one.end for one in rows] + [one.start for one in rows] + [1e-6])
    x = linear(0.0, end, left, WIDTH - 80)
    positions = {node.message_id: number for number, node in enumerate(rows)}
    # A chain without its root starts deeper.
    shallowest = min(one.depth for one in rows)
    drawn: list[Child] = []
    for number, node in enumerate(rows):
        y = _HEAD + _ROW * number
        indent = 8 + 16 * min(node.depth - shallowest, 14)
        tooltip = (
            f"{node.name} {node.message_id}: published after {duration(node.start)}, "
            f"{node.outcome or 'not attempted'}, done after {duration(node.end)}"
        )
        drawn.append(
            el(
                "g",
                el("title", tooltip),
                _elbow(node, number, indent, positions),
                el("circle", cx=indent, cy=y + 11, r=3.5, class_=colour_of(node.outcome)),
                el(
                    "text",
                    cut(node.name, max(12, 44 - 2 * (node.depth - shallowest))),
                    x=indent + 10,
                    y=y + 15,
                    class_="strong" if node.is_critical else None,
                ),
                _span_bar(x(node.start), x(node.end), y, colour_of(node.outcome)),
                _tick(duration(node.end - node.start), x(node.end) + 6, y + 15),
            )
        )
    return svg(title, height, _verticals(round_seconds(end), x, height), drawn)


def ordered(nodes: Sequence[TreeNode]) -> list[TreeNode]:
    """Messages below their causes, effects in the order of publish."""
    known = {node.message_id for node in nodes}
    children: dict[str | None, list[TreeNode]] = {}
    for node in nodes:
        cause = node.causation_id if node.causation_id in known else None
        children.setdefault(cause, []).append(node)
    found: list[TreeNode] = []
    waiting = list(reversed(children.get(None, [])))
    while waiting:
        node = waiting.pop()
        found.append(node)
        waiting.extend(reversed(children.get(node.message_id, [])))
    return found


def round_seconds(end: float) -> list[float]:
    """Round durations up to `end`, as ticks."""
    scale = 10.0**-12
    ticks = round_ticks(end / scale, 5)
    return [at * scale for at in ticks if at * scale <= end * 1.0001]


def _elbow(node: TreeNode, number: int, indent: int, positions: dict[str, int]) -> Markup | None:
    """The line from a message to its cause."""
    above = positions.get(node.causation_id or "")
    if above is None:
        return None
    top = _HEAD + _ROW * above + 15
    y = _HEAD + _ROW * number + 11
    path = f"M{indent - 16} {top} V{y} H{indent - 4}"
    return el("path", d=path, class_="elbow")


def _span_bar(start: float, end: float, y: float, colour: str) -> Markup:
    width = max(end - start, 2.0)
    return el("rect", x=start, y=y + 5, width=width, height=12, rx=2, class_=colour)


def _verticals(ticks: Sequence[float], x: Scale, height: float) -> list[Child]:
    return [
        (
            el("line", x1=x(at), x2=x(at), y1=float(_HEAD), y2=float(height - 8), class_="grid"),
            _tick(duration_tick(at), x(at), 14, "middle"),
        )
        for at in ticks
    ]


Scale: TypeAlias = Callable[[float], float]

STEPS: Final = tuple(
    timedelta(seconds=seconds)
    for seconds in (60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)
)
"""Lengths of a period of a chart; longer ones are whole days."""


def step_for(span: timedelta, most: int = 72) -> timedelta:
    """The shortest period of which at most `most` cover a span."""
    for step in STEPS:
        if span / step <= most:
            return step
    return timedelta(days=math.ceil(span / timedelta(days=1) / most))


def linear(low: float, high: float, start: float, end: float) -> Scale:
    """A linear scale; an empty span is in the middle."""
    if high == low:
        return lambda _: (start + end) / 2
    return lambda value: start + (value - low) / (high - low) * (end - start)


def logarithmic(low: float, high: float, start: float, end: float) -> Scale:
    """A logarithmic scale; values below `low` are at `low`."""
    inner = linear(math.log10(low), math.log10(high), start, end)
    return lambda value: inner(math.log10(max(value, low)))


def round_ticks(high: float, wanted: int = 4) -> list[float]:
    """Round values from 0 to `high` or just above."""
    if high <= 0:
        return [0.0, 1.0]
    raw = high / wanted
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    if high <= wanted:
        step = max(1.0, step)  # counts are whole numbers
    return [step * number for number in range(math.ceil(high / step - 1e-9) + 1)]


def decades(low: float, high: float) -> list[float]:
    """Powers of ten that enclose a range."""
    first = math.floor(math.log10(max(low, 1e-6)) + 1e-9)
    last = max(first + 1, math.ceil(math.log10(max(high, 1e-6)) - 1e-9))
    return [10.0**power for power in range(first, last + 1)]


def time_ticks(first: datetime, last: datetime, most: int = 8) -> list[datetime]:
    """Round times between two others."""
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
