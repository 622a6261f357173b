"""Draws breaker.svg and attempts.svg: the states of a circuit, and the life of a message.

Run it after a change: python docs/images/make_states.py
The pictures bring their own background, so they read the same on light and dark pages.
"""

from __future__ import annotations

from pathlib import Path

INK, QUIET, PAPER, EDGE = "#1f2937", "#57606a", "#ffffff", "#d0d7de"
GOOD, GOOD_FILL = "#0f766e", "#ccfbf1"
BAD, BAD_FILL = "#b91c1c", "#fee2e2"
WAIT, WAIT_FILL = "#b45309", "#fffbeb"
PLAIN, PLAIN_FILL = "#4338ca", "#e0e7ff"
SANS = "system-ui, 'Segoe UI', Helvetica, Arial, 'DejaVu Sans', sans-serif"


def text(x: float, y: float, content: str, *, size: int = 13, fill: str = INK) -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{fill}"'
        f' text-anchor="middle">{content}</text>'
    )


def state(x: int, y: int, name: str, note: str, colors: tuple[str, str], width: int = 170) -> str:
    """A box with a name and, below it, what it means."""
    line, fill = colors
    return (
        f'<rect x="{x}" y="{y}" width="{width}" height="58" rx="8" fill="{fill}"'
        f' stroke="{line}" stroke-width="1.5"/>'
        f'<text x="{x + width / 2:g}" y="{y + 25}" font-size="14" font-weight="600"'
        f' fill="{line}" text-anchor="middle">{name}</text>'
        + text(x + width / 2, y + 45, note, size=12, fill=QUIET)
    )


def arrow(path: str, label: str, x: float, y: float) -> str:
    return (
        f'<path d="{path}" fill="none" stroke="{QUIET}" stroke-width="2" marker-end="url(#a)"/>'
        + text(x, y, label, size=12)
    )


def picture(width: int, height: int, title: str, parts: list[str]) -> str:
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img"'
        f' font-family="{SANS}">\n<title>{title}</title>\n'
        '<defs><marker id="a" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7"'
        ' markerHeight="7" orient="auto-start-reverse">'
        f'<path d="M0 0L10 5L0 10z" fill="{QUIET}"/></marker></defs>\n'
        f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="12"'
        f' fill="{PAPER}" stroke="{EDGE}"/>\n{body}\n</svg>\n'
    )


def breaker() -> str:
    """The three states of a circuit."""
    return picture(
        820,
        290,
        "A circuit is closed, open or half open",
        [
            state(40, 50, "CLOSED", "calls go through", (GOOD, GOOD_FILL)),
            state(610, 50, "OPEN", "calls are refused", (BAD, BAD_FILL)),
            state(325, 200, "HALF OPEN", "a few probes", (WAIT, WAIT_FILL)),
            arrow("M210 79H606", "failures reach the threshold", 408, 68),
            arrow("M730 108C730 190 640 229 499 229", "recovery time is over", 735, 232),
            arrow("M470 200C490 140 540 110 606 96", "a probe fails: a longer wait", 408, 142),
            arrow("M325 229C190 229 125 190 125 112", "enough probes succeed", 130, 240),
        ],
    )


def attempts() -> str:
    """The life of one message in one handler."""
    return picture(
        980,
        300,
        "A message is attempted, waits, and ends as handled or failed",
        [
            state(30, 50, "TAKEN", "by its handler", (PLAIN, PLAIN_FILL), 150),
            state(290, 50, "ATTEMPTED", "attempt + 1, first", (PLAIN, PLAIN_FILL)),
            state(780, 50, "HANDLED", "emitted events go out", (GOOD, GOOD_FILL)),
            state(290, 210, "WAITING", "pause, or open circuit", (WAIT, WAIT_FILL)),
            state(780, 210, "FAILED", "or the fallback's answer", (BAD, BAD_FILL)),
            arrow("M180 79H286", "circuit lets it", 233, 68),
            arrow("M460 79H776", "the handler returns", 618, 68),
            arrow("M345 108V206", "it raises", 310, 162),
            arrow("M405 210V112", "next attempt", 454, 162),
            arrow("M460 100C600 130 700 170 776 222", "a refusal, or a permanent error", 742, 150),
            arrow("M460 245H776", "no attempt or no time left;", 618, 265),
            text(618, 281, "a command at an open circuit", size=12),
        ],
    )


if __name__ == "__main__":
    for drawing in (breaker, attempts):
        path = Path(__file__).with_name(f"{drawing.__name__}.svg")
        path.write_text(drawing(), encoding="utf-8")
