"""Draws take_over.svg: what happens when a worker is killed, and when it freezes.

Run it after a change: python docs/images/make_take_over.py
The picture brings its own background, so it reads the same on light and dark pages.
"""

from __future__ import annotations

from pathlib import Path

WIDTH, HEIGHT = 1000, 594
LEFT, RIGHT = 116, 976

INK, QUIET, PAPER, EDGE = "#1f2937", "#57606a", "#ffffff", "#d0d7de"
DONE, DONE_FILL = "#0f766e", "#ccfbf1"
CUT, CUT_FILL = "#b91c1c", "#fee2e2"
ALONE, ALONE_FILL = "#b45309", "#fffbeb"
PLAIN, PLAIN_FILL = "#4338ca", "#e0e7ff"
FROZEN_FILL = "#e5e7eb"
SANS = "system-ui, 'Segoe UI', Helvetica, Arial, 'DejaVu Sans', sans-serif"

LANES = {"worker A": 66, "journal": 136, "worker B": 206}
"""Middle of each lane, from the top of its half of the picture."""

BOX = 34
"""Height of a delivery."""


def text(
    x: float, y: float, content: str, *, size: int = 12, fill: str = INK, bold: bool = False,
    anchor: str = "middle", is_over: bool = False,
) -> str:  # fmt: skip
    weight = ' font-weight="600"' if bold else ""
    halo = f' paint-order="stroke" stroke="{PAPER}" stroke-width="4"' if is_over else ""
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{fill}"{weight}{halo}'
        f' text-anchor="{anchor}">{content}</text>'
    )


def lines(x: float, y: float, *content: str, fill: str = QUIET, anchor: str = "middle") -> str:
    return "".join(
        text(x, y + 15 * number, line, fill=fill, anchor=anchor, is_over=True)
        for number, line in enumerate(content)
    )


def box(x: int, y: int, width: int, name: str, colors: tuple[str, str]) -> str:
    """One delivery: a handler that runs, from the left edge to the right."""
    line, fill = colors
    return (
        f'<rect x="{x}" y="{y - BOX // 2}" width="{width}" height="{BOX}" rx="6" fill="{fill}"'
        f' stroke="{line}" stroke-width="1.5"/>'
        + text(x + width / 2, y + 4.5, name, size=13, fill=line, bold=True)
    )


def cross(x: int, y: int) -> str:
    return (
        f'<path d="M{x - 8} {y - 8}L{x + 8} {y + 8}M{x - 8} {y + 8}L{x + 8} {y - 8}"'
        f' stroke="{CUT}" stroke-width="3.5" stroke-linecap="round"/>'
    )


def arrow(x: int, start: int, end: int, *, color: str = QUIET) -> str:
    """A commit: from a worker down or up to the journal."""
    name = {CUT: "b", ALONE: "c"}.get(color, "a")
    return (
        f'<path d="M{x} {start}V{end}" fill="none" stroke="{color}" stroke-width="2"'
        f' marker-end="url(#{name})"/>'
    )


def lane(name: str, y: int, end: int = RIGHT) -> str:
    """The line of one worker, or of the journal; dashed from `end` on."""
    rest = ""
    if end < RIGHT:
        rest = (
            f'<path d="M{end} {y}H{RIGHT}" stroke="{EDGE}" stroke-width="2"'
            ' stroke-dasharray="3 5"/>'
        )
    width = 6 if name == "journal" else 2
    return (
        text(24, y + 4.5, name, size=13, bold=True, anchor="start")
        + f'<path d="M{LEFT} {y}H{end}" stroke="{EDGE}" stroke-width="{width}"/>'
        + rest
    )


def moment(x: int, top: int, label: str, *, color: str = QUIET) -> str:
    """A point in time, over all lanes."""
    return (
        f'<path d="M{x} {top + 44}V{top + 238}" stroke="{color}" stroke-width="1"'
        ' stroke-dasharray="2 4"/>' + text(x, top + 256, label, fill=color, bold=True)
    )


def killed(top: int) -> list[str]:
    """The upper half: the process is gone, and others on its host see that."""
    a, journal, b = (top + y for y in LANES.values())
    kill, seen = 372, 500
    return [
        text(24, top + 24, "A is killed: kill -9, a crash, out of memory", size=15, bold=True,
             anchor="start"),
        lane("worker A", a, kill), lane("journal", journal), lane("worker B", b),
        moment(kill, top, "killed", color=CUT), moment(seen, top, "within 0.25 s"),
        box(136, a, 70, "41", (DONE, DONE_FILL)),
        arrow(206, a + 17, journal - 5), lines(206, journal + 22, "41 acknowledged"),
        box(226, a, 146, "42", (CUT, CUT_FILL)), cross(kill, a),
        lines(kill + 16, a - 8, "42 was running, 43 was next", anchor="start"),
        lines(136, b + 22, "has other messages,", "or is on standby", anchor="start"),
        arrow(seen, b, journal + 5),
        lines(seen + 10, journal - 26, "B ends A in the journal:", "42 and 43 wait, to run alone",
              anchor="start"),
        arrow(540, b - 17, journal + 5, color=ALONE),
        box(536, b, 96, "42 alone", (ALONE, ALONE_FILL)), arrow(628, b - 17, journal + 5),
        arrow(656, b - 17, journal + 5, color=ALONE),
        box(652, b, 96, "43 alone", (ALONE, ALONE_FILL)), arrow(744, b - 17, journal + 5),
        lines(748, b + 34, "each counted before it begins", fill=ALONE, anchor="end"),
        box(790, b, 60, "44", (PLAIN, PLAIN_FILL)), box(856, b, 60, "45", (PLAIN, PLAIN_FILL)),
        lines(853, b + 34, "as usual"),
    ]  # fmt: skip


def frozen(top: int) -> list[str]:
    """The lower half: the process is still there, so only time can tell."""
    a, journal, b = (top + y for y in LANES.values())
    stop, ended, wakes = 290, 500, 770
    freeze = (
        f'<rect x="{stop}" y="{a - 17}" width="{wakes - stop}" height="{BOX}" rx="6"'
        f' fill="{FROZEN_FILL}" stroke="{QUIET}" stroke-dasharray="4 4"/>'
    )
    renewals = "".join(arrow(x, a + 17, journal - 5) for x in (206, 262)) + arrow(
        150, a, journal - 5
    )
    return [
        text(24, top + 24, "A freezes: SIGSTOP, a paused container, a machine that swaps", size=15,
             bold=True, anchor="start"),
        lane("worker A", a), lane("journal", journal), lane("worker B", b),
        moment(stop, top, "frozen", color=CUT),
        moment(ended, top, "member_ttl later: 5 s"),
        moment(wakes, top, "awake", color=CUT),
        renewals, lines(206, journal + 22, "renewals"),
        freeze, box(176, a, 114, "42", (CUT, CUT_FILL)),
        text((stop + wakes) / 2, a + 4.5, "no renewal", fill=QUIET),
        arrow(ended, b, journal + 5),
        lines(ended + 10, journal - 26, "B ends A in the journal:", "42 waits, to run alone",
              anchor="start"),
        lines(136, b + 22, "has other messages,", "or is on standby", anchor="start"),
        arrow(540, b - 17, journal + 5, color=ALONE),
        box(536, b, 96, "42 alone", (ALONE, ALONE_FILL)), arrow(628, b - 17, journal + 5),
        box(652, b, 48, "43", (PLAIN, PLAIN_FILL)), box(706, b, 48, "44", (PLAIN, PLAIN_FILL)),
        lines(703, b + 34, "as usual"),
        arrow(wakes, a + 17, journal - 14, color=CUT), cross(wakes, journal),
        lines(wakes + 16, journal - 30, "its first commit is refused,",
              "its handlers are cancelled", fill=CUT, anchor="start"),
        lines(wakes + 16, journal + 26, "then it joins again,", "as a new member", anchor="start"),
    ]  # fmt: skip


def marker(name: str, color: str) -> str:
    return (
        f'<marker id="{name}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7"'
        ' markerHeight="7" orient="auto-start-reverse">'
        f'<path d="M0 0L10 5L0 10z" fill="{color}"/></marker>'
    )


def take_over() -> str:
    """Both halves, one below the other."""
    parts = [*killed(14), *frozen(310)]
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"'
        f' font-family="{SANS}">\n<title>A worker dies, and another takes over</title>\n'
        f"<defs>{marker('a', QUIET)}{marker('b', CUT)}{marker('c', ALONE)}</defs>\n"
        f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="12"'
        f' fill="{PAPER}" stroke="{EDGE}"/>\n'
        f'<path d="M24 298H{RIGHT}" stroke="{EDGE}"/>\n{body}\n</svg>\n'
    )


if __name__ == "__main__":
    Path(__file__).with_name("take_over.svg").write_text(take_over(), encoding="utf-8")
