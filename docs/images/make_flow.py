"""Draws flow.svg: the way of commands and events through the bus.

Run it after a change: python docs/images/make_flow.py
The picture brings its own background, so it reads the same on light and dark pages.
"""

from __future__ import annotations

from pathlib import Path

WIDTH, HEIGHT = 1000, 470

INK, QUIET, PAPER, EDGE = "#1f2937", "#57606a", "#ffffff", "#d0d7de"
COMMAND, COMMAND_FILL = "#4338ca", "#e0e7ff"
EVENT, EVENT_FILL = "#0f766e", "#ccfbf1"
SESSION, SESSION_FILL = "#b45309", "#fffbeb"
PLAIN_FILL = "#f3f4f6"

SANS = "system-ui, 'Segoe UI', Helvetica, Arial, 'DejaVu Sans', sans-serif"
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"

# Columns: left edge and width.
CALLER, FILTERS, QUEUE, CHAIN, HANDLER = (24, 206), (290, 100), (452, 150), (642, 120), (802, 164)
BOX = 54
COMMAND_ROW, LANE_ROWS = 84, (236, 310, 384)


def text(
    x: float, y: float, content: str, *, size: int = 13, fill: str = INK, code: bool = False,
    bold: bool = False, anchor: str = "middle",
) -> str:  # fmt: skip
    family, weight = ("m" if code else "s"), (' font-weight="600"' if bold else "")
    return (
        f'<text x="{x:g}" y="{y:g}" class="{family}" font-size="{size}" fill="{fill}"'
        f'{weight} text-anchor="{anchor}">{content}</text>'
    )


def box(column: tuple[int, int], y: int, lines: list[str], *, line: str, fill: str) -> str:
    """A box of one column; its first line is code, the second says what it is."""
    x, width = column
    middle = x + width / 2
    parts = [
        f'<rect x="{x}" y="{y}" width="{width}" height="{BOX}" rx="8" fill="{fill}"'
        f' stroke="{line}" stroke-width="1.5"/>'
    ]
    if len(lines) == 1:
        parts.append(text(middle, y + BOX / 2 + 4.5, lines[0]))
    else:
        parts.append(text(middle, y + 23, lines[0], code=True, bold=True))
        parts.append(text(middle, y + 42, lines[1], size=12, fill=QUIET))
    return "".join(parts)


def arrow(path: str, color: str, *, dashed: bool = False) -> str:
    dashes = ' stroke-dasharray="5 4"' if dashed else ""
    return (
        f'<path d="{path}" fill="none" stroke="{color}" stroke-width="2"{dashes}'
        f' marker-end="url(#{"c" if color == COMMAND else "e"})"/>'
    )


def right_of(column: tuple[int, int]) -> int:
    return column[0] + column[1]


def queue(y: int, filled: int) -> str:
    """A bounded queue: cells, of which those next to the handler are filled."""
    x, width = QUEUE
    cells, size = 6, 20
    left = x + (width - cells * size) / 2
    top = y + (BOX - size) / 2
    return "".join(
        f'<rect x="{left + number * size:g}" y="{top:g}" width="{size}" height="{size}"'
        f' rx="2" fill="{EVENT if number >= cells - filled else PAPER}"'
        f' stroke="{"#5eead4" if number >= cells - filled else EVENT}"/>'
        for number in range(cells)
    )


def lane(y: int, filled: int, lines: list[str], *, session: bool = False) -> str:
    """One event handler with its own queue and worker."""
    middle = y + BOX / 2
    fork = FILTERS[0] + FILTERS[1] + 34
    start = LANE_ROWS[1] + BOX / 2
    line, fill = (SESSION, SESSION_FILL) if session else (EDGE, "#f9fafb")
    dashes = ' stroke-dasharray="6 4"' if session else ""
    frame = QUEUE[0] - 12
    return "".join(
        [
            f'<rect x="{frame}" y="{y - 7}" width="{WIDTH - 22 - frame}" height="{BOX + 14}"'
            f' rx="10" fill="{fill}" stroke="{line}"{dashes}/>',
            arrow(
                f"M{right_of(FILTERS)} {start:g} H{fork} V{middle:g} H{QUEUE[0] + 8}",
                EVENT,
            ),
            queue(y, filled),
            arrow(f"M{right_of(QUEUE) - 14} {middle:g} H{CHAIN[0] - 5}", EVENT),
            box(CHAIN, y, ["middleware"], line=EDGE, fill=PLAIN_FILL),
            arrow(f"M{right_of(CHAIN)} {middle:g} H{HANDLER[0] - 5}", EVENT),
            box(HANDLER, y, lines, line=SESSION if session else EVENT,
                fill="#fef3c7" if session else EVENT_FILL),
        ]
    )  # fmt: skip


def commands() -> str:
    middle = COMMAND_ROW + BOX / 2
    back = COMMAND_ROW - 26
    caller, handler = CALLER[0] + CALLER[1] / 2, HANDLER[0] + HANDLER[1] / 2
    return "".join(
        [
            text(24, 34, "COMMANDS", size=12, bold=True, fill=COMMAND, anchor="start"),
            text(112, 34, "one handler, and a result", size=12, fill=QUIET, anchor="start"),
            arrow(f"M{right_of(CALLER)} {middle:g} H{CHAIN[0] - 5}", COMMAND),
            arrow(f"M{right_of(CHAIN)} {middle:g} H{HANDLER[0] - 5}", COMMAND),
            arrow(
                f"M{handler:g} {COMMAND_ROW} V{back} H{caller:g} V{COMMAND_ROW - 5}",
                COMMAND,
                dashed=True,
            ),
            text(520, back - 8, "CommandResult: the value, or why there is none", size=13),
            box(CALLER, COMMAND_ROW, ["execute(PlaceOrder)", "your code"],
                line=COMMAND, fill=COMMAND_FILL),
            box(CHAIN, COMMAND_ROW, ["middleware"], line=EDGE, fill=PLAIN_FILL),
            box(HANDLER, COMMAND_ROW, ["place_order", "the one handler"],
                line=COMMAND, fill=COMMAND_FILL),
        ]
    )  # fmt: skip


def events() -> str:
    row = LANE_ROWS[1]
    turn = COMMAND_ROW + BOX + 36
    handler, filters = HANDLER[0] + HANDLER[1] / 2, FILTERS[0] + FILTERS[1] / 2
    caller = CALLER[0] + CALLER[1] / 2
    receipt = row + BOX + 22
    return "".join(
        [
            text(24, 216, "EVENTS", size=12, bold=True, fill=EVENT, anchor="start"),
            text(112, 216, "any number of handlers", size=12, fill=QUIET, anchor="start"),
            arrow(f"M{handler:g} {COMMAND_ROW + BOX} V{turn} H{filters:g} V{row - 5}", EVENT),
            text(610, turn - 8, "emit(OrderPlaced), once the command has succeeded", size=13),
            arrow(f"M{right_of(CALLER)} {row + BOX / 2:g} H{FILTERS[0] - 5}", EVENT),
            box(CALLER, row, ["publish(OrderPlaced)", "your code"], line=EVENT, fill=EVENT_FILL),
            box(FILTERS, row, ["filters"], line=EDGE, fill=PLAIN_FILL),
            arrow(
                f"M{filters:g} {row + BOX} V{receipt} H{caller:g} V{row + BOX + 5}",
                EVENT,
                dashed=True,
            ),
            text(caller, receipt + 20, "PublishReceipt: accepted,"),
            text(caller, receipt + 38, "filtered, rejected or dropped"),
            text(QUEUE[0] - 10, 220, "one bounded queue and worker per handler", size=12,
                 fill=QUIET, anchor="start"),
            lane(LANE_ROWS[0], 4, ["send_receipt", "has four to do"]),
            lane(LANE_ROWS[1], 0, ["pack_parcel", "is up to date"]),
            lane(LANE_ROWS[2], 2, ["show_progress", "session job-42 only"], session=True),
        ]
    )  # fmt: skip


def drawing() -> str:
    heads = "".join(
        f'<marker id="{name}" viewBox="0 0 10 10" refX="6" refY="5" markerWidth="6"'
        f' markerHeight="6" orient="auto-start-reverse">'
        f'<path d="M0 0L10 5L0 10z" fill="{color}"/></marker>'
        for name, color in (("c", COMMAND), ("e", EVENT))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"'
        f' width="{WIDTH}" height="{HEIGHT}" aria-labelledby="title">'
        '<title id="title">A command goes through middleware to its one handler and comes back'
        " as a result; an event goes through filters into the queue of each of its handlers."
        "</title>"
        f"<style>.s{{font-family:{SANS}}}.m{{font-family:{MONO}}}</style>"
        f"<defs>{heads}</defs>"
        f'<rect x="1" y="1" width="{WIDTH - 2}" height="{HEIGHT - 2}" rx="14" fill="{PAPER}"'
        f' stroke="{EDGE}" stroke-width="2"/>'
        f"{commands()}{events()}</svg>\n"
    )


if __name__ == "__main__":
    Path(__file__).with_name("flow.svg").write_text(drawing(), encoding="utf-8")
