"""The page of a report: one HTML file without scripts, fonts or images from elsewhere."""

from __future__ import annotations

from typing import Final

from msgbus.pipeline.report import sections
from msgbus.pipeline.report.data import ReportData
from msgbus.pipeline.report.markup import Markup, duration, el, moment

_SECTIONS: Final = (
    ("throughput", "Throughput", sections.throughput),
    ("latency", "Latency", sections.latency),
    ("failures", "Failures", sections.failures),
    ("sessions", "Sessions", sections.sessions),
    ("causation", "Causation", sections.causation),
    ("slowest", "Slowest", sections.slowest),
    ("stuck", "Stuck", sections.stuck),
)


def render(data: ReportData) -> str:
    """Render a report as HTML."""
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        # Nothing is loaded, whatever the texts of messages contain.
        el(
            "meta",
            http_equiv="Content-Security-Policy",
            content="default-src 'none'; style-src 'unsafe-inline'",
        ),
        el("title", f"msgbus report: {data.source}"),
        el("style", Markup(CSS)),
    )
    body = el("body", el("main", _header(data), *_content(data), _footer(data)))
    return f"<!DOCTYPE html>\n{el('html', head, body, lang='en')}\n"


def _header(data: ReportData) -> Markup:
    if data.first is None or data.last is None:
        period = "Nothing was published in this time."
    else:
        span = duration((data.last - data.first).total_seconds())
        period = f"{moment(data.first)} to {moment(data.last)} UTC ({span})"
    return el(
        "header",
        el("h1", "What the bus did"),
        el("div", data.source),
        el("div", period, class_="soft"),
    )


def _content(data: ReportData) -> list[Markup]:
    if data.is_empty:
        text = "The journal has no messages and no deliveries in the time that was asked for."
        return [el("section", el("h2", "Nothing to show"), el("p", text))]
    links = [el("a", label, href=f"#{anchor}") for anchor, label, _ in _SECTIONS]
    return [
        el("nav", *links, aria_label="Sections"),
        sections.tiles(data),
        *(make(data) for _, _, make in _SECTIONS),
    ]


def _footer(data: ReportData) -> Markup:
    return el("footer", f"Made by msgbus at {moment(data.made)} UTC.")


CSS: Final = """
:root {
  color-scheme: light dark;
  --page: #f6f7f9; --card: #ffffff; --text: #1b1f27; --soft: #5b6472; --line: #dfe3e9;
  --c0: #2563c9; --c1: #d97a06; --c2: #0d8a6a; --c3: #7c4fd0; --c4: #c43a76; --c5: #58707f;
  --rest: #a9b1bd; --good: #2b8a5a; --warn: #c98208; --bad: #cc3b36;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #12151b; --card: #1a1f27; --text: #e6e9ee; --soft: #9aa5b4; --line: #313945;
    --c0: #6ea4ff; --c1: #f0a845; --c2: #45c8a2; --c3: #b295f7; --c4: #f183b1; --c5: #9db4c4;
    --rest: #66707f; --good: #57c08b; --warn: #e8b04a; --bad: #f2706a;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 26px; margin: 0 0 4px; letter-spacing: -0.01em; }
h2 { font-size: 18px; margin: 0 0 4px; }
h3 { font-size: 14px; margin: 22px 0 6px; color: var(--soft); font-weight: 600; }
p { margin: 4px 0 12px; }
.soft, .note { color: var(--soft); }
.note { font-size: 13px; max-width: 100ch; }
nav { margin: 14px 0 4px; font-size: 14px; }
nav a { color: var(--c0); margin-right: 16px; text-decoration: none; }
nav a:hover { text-decoration: underline; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 20px 22px; margin-top: 18px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(126px, 1fr)); gap: 12px;
  margin-top: 18px; }
.tile { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 12px 14px; }
.tile b { display: block; font-size: 22px; font-weight: 650; letter-spacing: -0.02em;
  font-variant-numeric: tabular-nums; white-space: nowrap; }
.tile span { color: var(--soft); font-size: 13px; }
.tile.bad b { color: var(--bad); }
svg { display: block; width: 100%; height: auto; margin: 6px 0 4px; overflow: visible; }
svg text { fill: var(--text); font-size: 12px; }
svg .tick { fill: var(--soft); font-size: 11.5px; }
svg .strong { font-weight: 650; }
svg .grid { stroke: var(--line); stroke-width: 1; }
svg .span { stroke: var(--rest); stroke-width: 3; stroke-linecap: round; }
svg .elbow { stroke: var(--rest); stroke-width: 1; fill: none; }
svg .hover { fill: transparent; }
svg .hover:hover { fill: var(--text); fill-opacity: 0.07; }
.c0 { fill: var(--c0); } .c1 { fill: var(--c1); } .c2 { fill: var(--c2); }
.c3 { fill: var(--c3); } .c4 { fill: var(--c4); } .c5 { fill: var(--c5); }
.rest { fill: var(--rest); } .good { fill: var(--good); } .warn { fill: var(--warn); }
.bad { fill: var(--bad); }
svg .line { fill: none; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
svg .line.c0 { stroke: var(--c0); } svg .line.c1 { stroke: var(--c1); }
svg .line.c4 { stroke: var(--c4); }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 2px 18px; padding: 0;
  margin: 8px 0 0; font-size: 13px; color: var(--soft); }
.key { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 6px; }
.key.c0 { background: var(--c0); } .key.c1 { background: var(--c1); }
.key.c2 { background: var(--c2); } .key.c3 { background: var(--c3); }
.key.c4 { background: var(--c4); } .key.c5 { background: var(--c5); }
.key.rest { background: var(--rest); } .key.good { background: var(--good); }
.key.warn { background: var(--warn); } .key.bad { background: var(--bad); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; margin: 6px 0; }
th { text-align: left; color: var(--soft); font-weight: 600; font-size: 12.5px;
  white-space: nowrap; vertical-align: bottom; }
th, td { padding: 5px 12px 5px 0; border-bottom: 1px solid var(--line); }
td { vertical-align: top; }
tr:last-child td { border-bottom: 0; }
th:last-child, td:last-child { padding-right: 0; }
.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.id { font: 12px ui-monospace, "SFMono-Regular", "DejaVu Sans Mono", monospace;
  overflow-wrap: anywhere; }
.cause { overflow-wrap: anywhere; min-width: 24ch; }
.cause small { display: block; color: var(--soft); overflow-wrap: anywhere; }
.share { height: 5px; border-radius: 3px; background: var(--bad); margin-top: 4px; }
.outcome { white-space: nowrap; margin-bottom: 2px; }
.badge { display: inline-block; border-radius: 999px; padding: 0 9px; font-size: 12px;
  border: 1px solid currentColor; white-space: nowrap; }
.badge.good { color: var(--good); } .badge.warn { color: var(--warn); }
.badge.bad { color: var(--bad); } .badge.rest { color: var(--soft); }
details { margin-top: 8px; font-size: 13.5px; }
summary { cursor: pointer; color: var(--soft); }
footer { color: var(--soft); font-size: 13px; margin-top: 22px; }
@media print { body { background: none; } section, .tile { break-inside: avoid; } }
"""
