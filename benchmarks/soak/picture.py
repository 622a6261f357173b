"""Draws a soak: memory, file, lag and latency over time, with a mark for each kill."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from benchmarks.soak.runner import Sample, Soak

INK: Final = "#1f2937"
QUIET: Final = "#57606a"
PAPER: Final = "#ffffff"
EDGE: Final = "#d0d7de"
KILL: Final = "#b91c1c"
FONT: Final = "system-ui, 'Segoe UI', Helvetica, Arial, 'DejaVu Sans', sans-serif"
WIDTH: Final = 900
LEFT: Final = 70
RIGHT: Final = 20
HEIGHT: Final = 110
"""Of one chart, without its title."""
STEP: Final = 165


class Line(NamedTuple):
    """One line of a chart."""

    name: str
    colour: str
    value: Callable[[Sample], float | None]


class Chart(NamedTuple):
    """One chart: its title, the unit of its axis, and its lines."""

    title: str
    unit: str
    lines: Sequence[Line]


def _memory(sample: Sample) -> float:
    return sample.memory / 1e6


def _file(sample: Sample) -> float:
    return sample.file / 1e6


def _lag(sample: Sample) -> float:
    return float(sample.lag)


def _median(sample: Sample) -> float | None:
    return None if sample.median is None else sample.median * 1000


def _p99(sample: Sample) -> float | None:
    return None if sample.p99 is None else sample.p99 * 1000


CHARTS: Final = (
    Chart("Memory of the largest process", "MB", [Line("", "#4338ca", _memory)]),
    Chart("Journal with its write-ahead log", "MB", [Line("", "#0f766e", _file)]),
    Chart("Messages that the slowest mode has still to handle", "", [Line("", "#b45309", _lag)]),
    Chart(
        "From publish to handler",
        "ms",
        [Line("median", "#4338ca", _median), Line("99th percentile", "#f59e0b", _p99)],
    ),
)


def draw(found: Soak) -> str:
    """Return the picture as SVG."""
    height = 70 + STEP * len(CHARTS)
    title = (
        f"{_span(found.seconds)} at {found.rate:,.0f} messages a second, "
        f"{len(found.kills)} processes killed, {sum(found.lost.values())} messages lost"
    )
    parts = [_text(LEFT, 32, title, size=15, weight=600)]
    for number, chart in enumerate(CHARTS):
        parts += _chart(found, chart, 75 + number * STEP)
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img"'
        f' font-family="{FONT}">\n<title>{title}</title>\n'
        f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="12"'
        f' fill="{PAPER}" stroke="{EDGE}"/>\n{body}\n</svg>\n'
    )


def _span(seconds: float) -> str:
    return f"{seconds / 60:.0f} minutes" if seconds >= 90 else f"{seconds:.0f} seconds"


def _text(
    x: float,
    y: float,
    content: str,
    *,
    size: int = 12,
    fill: str = INK,
    anchor: str = "start",
    weight: int = 400,
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{fill}" font-weight="{weight}"'
        f' text-anchor="{anchor}">{content}</text>'
    )


def _chart(found: Soak, chart: Chart, top: int) -> list[str]:
    values = [
        value
        for line in chart.lines
        for one in found.samples
        if (value := line.value(one)) is not None
    ]
    most = _round_up(max(values, default=1.0))
    bottom = top + HEIGHT
    parts = [_text(LEFT, top - 10, chart.title, size=13, weight=600)]
    for share in (0.0, 0.5, 1.0):
        y = bottom - share * HEIGHT
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="{EDGE}"/>'
        )
        label = f"{most * share:,.4g} {chart.unit}".strip()
        parts.append(_text(LEFT - 8, y + 4, label, size=11, fill=QUIET, anchor="end"))
    for kill in found.kills:
        x = _x(found, kill)
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 5}" stroke="{KILL}"/>'
        )
    parts += [_path(found, line, most, bottom) for line in chart.lines]
    named = [line for line in chart.lines if line.name]
    for place, line in enumerate(reversed(named)):
        x = WIDTH - RIGHT - place * 120
        parts.append(_text(x, top - 10, line.name, fill=line.colour, anchor="end", weight=600))
    end = _span(found.seconds)
    parts.append(_text(WIDTH - RIGHT, bottom + 18, end, size=11, fill=QUIET, anchor="end"))
    parts.append(
        _text(LEFT, bottom + 18, "0; a red mark: a process is killed", size=11, fill=QUIET)
    )
    return parts


def _x(found: Soak, time: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * time / max(found.seconds, 1e-9)


def _path(found: Soak, line: Line, most: float, bottom: int) -> str:
    points = [
        f"{_x(found, one.time):.1f} {bottom - HEIGHT * min(value / most, 1.0):.1f}"
        for one in found.samples
        if (value := line.value(one)) is not None
    ]
    path = f"M{'L'.join(points)}" if points else ""
    return f'<path d="{path}" fill="none" stroke="{line.colour}" stroke-width="1.5"/>'


def _round_up(value: float) -> float:
    """Return the next of 1, 2 or 5 times a power of ten."""
    power = 1.0
    while power * 10 <= value:
        power *= 10
    while power > value:
        power /= 10
    return next(power * one for one in (1, 2, 5, 10) if power * one >= value)
