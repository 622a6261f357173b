"""Bars between two moments: sessions side by side, and one chain of causes as a tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from msgbus.pipeline.report.charts import WIDTH, cut, svg
from msgbus.pipeline.report.data import SessionLine, Tree, TreeNode
from msgbus.pipeline.report.formats import duration, duration_tick, moment, plural
from msgbus.pipeline.report.markup import Child, Markup, el
from msgbus.pipeline.report.scales import Scale, linear, round_ticks

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
_TOP: Final = 24


def colour_of(outcome: str | None) -> str:
    """The class of an outcome's colour."""
    return "rest" if outcome is None else OUTCOME_COLOURS.get(outcome, "rest")


def session_bars(title: str, sessions: Sequence[SessionLine]) -> Markup:
    """How long each session took, and how it ended."""
    left = 200
    height = _TOP + _ROW * len(sessions) + 8
    longest = max([1e-6, *(one.duration for one in sessions)])
    x = linear(0.0, longest, left, WIDTH - 210)
    drawn: list[Child] = []
    for number, one in enumerate(sessions):
        began = moment(one.started)
        told = (
            f"Session {one.session_id}: {one.outcome}, {duration(one.duration)} "
            f"from {began}, {plural(one.messages, 'message')}"
        )
        y = _TOP + _ROW * number
        end = x(one.duration)
        drawn.append(
            el(
                "g",
                el("title", told),
                el("text", cut(one.session_id, 26), x=left - 12, y=y + 15, text_anchor="end"),
                _bar(x(0.0), end, y, colour_of(one.outcome)),
                el(
                    "text", f"{duration(one.duration)}, {began}", x=end + 6, y=y + 15, class_="tick"
                ),
            )
        )
    ticks = [(at, duration_tick(at)) for at in round_seconds(longest)]
    return svg(title, height, _verticals(ticks, x, height), drawn)


def tree_bars(title: str, tree: Tree) -> Markup:
    """A chain as an indented tree, with a bar from publish to the end of the last try."""
    left = 360
    rows = ordered(tree.nodes)
    height = _TOP + _ROW * len(rows) + 8
    end = max([one.end for one in rows] + [one.start for one in rows] + [1e-6])
    x = linear(0.0, end, left, WIDTH - 80)
    places = {node.message_id: number for number, node in enumerate(rows)}
    # A chain that has lost its root starts deeper.
    shallowest = min(one.depth for one in rows)
    drawn: list[Child] = []
    for number, node in enumerate(rows):
        y = _TOP + _ROW * number
        indent = 8 + 16 * min(node.depth - shallowest, 14)
        told = (
            f"{node.name} {node.message_id}: published after {duration(node.start)}, "
            f"{node.outcome or 'nobody tried it'}, done after {duration(node.end)}"
        )
        drawn.append(
            el(
                "g",
                el("title", told),
                _elbow(node, number, indent, places),
                el("circle", cx=indent, cy=y + 11, r=3.5, class_=colour_of(node.outcome)),
                el(
                    "text",
                    cut(node.name, max(12, 44 - 2 * (node.depth - shallowest))),
                    x=indent + 10,
                    y=y + 15,
                    class_="strong" if node.is_critical else None,
                ),
                _bar(x(node.start), x(node.end), y, colour_of(node.outcome)),
                el(
                    "text",
                    duration(node.end - node.start),
                    x=x(node.end) + 6,
                    y=y + 15,
                    class_="tick",
                ),
            )
        )
    ticks = [(at, duration_tick(at)) for at in round_seconds(end)]
    return svg(title, height, _verticals(ticks, x, height), drawn)


def ordered(nodes: Sequence[TreeNode]) -> list[TreeNode]:
    """Every message below its cause, effects in the order they were published."""
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
    """Round durations up to `end`."""
    scale = 10.0**-12
    ticks = round_ticks(end / scale, 5)
    return [at * scale for at in ticks if at * scale <= end * 1.0001]


def _elbow(node: TreeNode, number: int, indent: int, places: dict[str, int]) -> Markup | None:
    """The line from a message to its cause."""
    above = places.get(node.causation_id or "")
    if above is None:
        return None
    top = _TOP + _ROW * above + 15
    y = _TOP + _ROW * number + 11
    path = f"M{indent - 16} {top} V{y} H{indent - 4}"
    return el("path", d=path, class_="elbow")


def _bar(start: float, end: float, y: float, colour: str) -> Markup:
    return el(
        "rect",
        x=start,
        y=y + 5,
        width=max(end - start, 2.0),
        height=12,
        rx=2,
        class_=colour,
    )


def _verticals(ticks: Sequence[tuple[float, str]], x: Scale, height: float) -> list[Child]:
    return [
        (
            el("line", x1=x(at), x2=x(at), y1=float(_TOP), y2=float(height - 8), class_="grid"),
            el("text", label, x=x(at), y=14, text_anchor="middle", class_="tick"),
        )
        for at, label in ticks
    ]
