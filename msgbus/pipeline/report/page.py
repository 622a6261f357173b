"""The whole page: one file that needs nothing else."""

from __future__ import annotations

from typing import Final

from msgbus.pipeline.report import flows, sections
from msgbus.pipeline.report.data import ReportData
from msgbus.pipeline.report.formats import duration, moment
from msgbus.pipeline.report.markup import Markup, el
from msgbus.pipeline.report.style import CSS

_SECTIONS: Final = (
    ("throughput", "Throughput", sections.throughput),
    ("latency", "Latency", sections.latency),
    ("failures", "Failures", sections.failures),
    ("sessions", "Sessions", flows.sessions),
    ("causation", "Causation", flows.causation),
    ("slowest", "Slowest", sections.slowest),
    ("stuck", "Stuck", sections.stuck),
)


def render(data: ReportData) -> str:
    """The report as HTML: no scripts, no fonts, no pictures from elsewhere."""
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        # Nothing is to be loaded, whatever a message may have in its texts.
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
        told = "The journal has no messages and no deliveries in the time that was asked for."
        return [el("section", el("h2", "Nothing to show"), el("p", told))]
    links = [el("a", label, href=f"#{anchor}") for anchor, label, _ in _SECTIONS]
    return [
        el("nav", *links, aria_label="Sections"),
        sections.tiles(data),
        *(make(data) for _, _, make in _SECTIONS),
    ]


def _footer(data: ReportData) -> Markup:
    return el("footer", f"Made by msgbus at {moment(data.made)} UTC.")
