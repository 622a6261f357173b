"""The sections of a report, one function each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from msgbus.pipeline.report.charts import (
    COLOURS,
    Axis,
    Range,
    Series,
    legend,
    lines,
    ranges,
    stacked,
)
from msgbus.pipeline.report.data import Failure, HandlerLatency, Period, ReportData
from msgbus.pipeline.report.formats import NOTHING, count, duration, moment, plural, share
from msgbus.pipeline.report.markup import Child, Markup, el, join
from msgbus.pipeline.report.tables import (
    badge,
    folded,
    identifier,
    numbers,
    table,
    tile,
    words,
)

UNKNOWN: Final = "(unknown type)"
_QUANTILES: Final = (("p99", "c4"), ("p95", "c1"), ("p50", "c0"))


def section(anchor: str, title: str, note: str, *children: Child) -> Markup:
    """A section with a heading and a sentence on how to read it."""
    return el(
        "section",
        el("h2", title, id=f"{anchor}-title"),
        el("p", note, class_="note") if note else None,
        *children,
        id=anchor,
        aria_labelledby=f"{anchor}-title",
    )


def nothing(what: str) -> Markup:
    """A sentence where there is nothing to show."""
    return el("p", what, class_="soft")


def tiles(data: ReportData) -> Markup:
    """The numbers to look at first."""
    totals, latency = data.totals, data.latency
    rate = totals.failed / totals.tries if totals.tries else None
    stuck = sum(one.messages for one in data.stuck if one.reason != "unhandled")
    return el(
        "div",
        tile(count(totals.messages), f"messages of {plural(totals.types, 'type')}"),
        tile(count(totals.tries), "tries to handle them"),
        tile(share(rate), "of tries failed", is_bad=bool(rate and rate >= 0.05)),
        tile(count(totals.dead_letters), "dead letters", is_bad=totals.dead_letters > 0),
        tile(duration(latency.p50 if latency else None), "median, publish to done"),
        tile(duration(latency.p99 if latency else None), "99th percentile"),
        tile(count(stuck), "stuck", is_bad=stuck > 0),
        class_="tiles",
    )


def throughput(data: ReportData) -> Markup:
    """Messages and troubles over time."""
    axis = Axis([one.start for one in data.periods], data.step)
    step = duration(data.step.total_seconds()).replace(" 0 s", "").replace(" 0 min", "")
    by_type = _by_type(data.periods)
    trouble = [
        # What was decided may fall into the period after its try.
        Series("failed", "warn", [max(0, one.failed - one.dead_letters) for one in data.periods]),
        Series("given up as dead letters", "bad", [one.dead_letters for one in data.periods]),
    ]
    has_trouble = any(value for one in trouble for value in one.values)
    return section(
        "throughput",
        "Throughput",
        f"Each column is {step}, in UTC. A message counts when it was published, a try when it "
        "ended.",
        el("h3", "Messages published, by type"),
        legend(by_type),
        stacked("Messages published over time, by type", axis, by_type),
        el("h3", "Tries that failed"),
        (legend(trouble), _trouble_chart(axis, trouble))
        if has_trouble
        else nothing("No try failed."),
        folded(
            "The numbers",
            table(
                "Throughput over time",
                [
                    *words("From (UTC)"),
                    *numbers("Published", "Tries", "Failed", "Retries", "Dead letters"),
                ],
                [
                    [
                        moment(one.start),
                        count(sum(one.published.values())),
                        count(one.tries),
                        count(one.failed),
                        count(one.retries),
                        count(one.dead_letters),
                    ]
                    for one in data.periods
                ],
            ),
        ),
    )


def latency(data: ReportData) -> Markup:
    """How long things take, over time and by handler."""
    if data.latency is None:
        return section("latency", "Latency", "", nothing("No handler has run."))
    axis = Axis([one.start for one in data.periods], data.step)
    series = [
        Series(name, colour, [getattr(one.latency, name, None) for one in data.periods])
        for name, colour in _QUANTILES
    ]
    return section(
        "latency",
        "Latency",
        "From publish to the end of a try, waiting included. Percentiles come from histograms and "
        "are at most 4.5 % off; the longest are exact.",
        el("h3", "Over time"),
        legend(series),
        lines("Latency over time: 50th, 95th and 99th percentile", axis, series),
        el("h3", "In the handler, by handler"),
        legend(series[::-1]),
        _handler_chart(data.handlers),
        folded(f"All of {plural(len(data.handlers), 'handler')}, with numbers", _handlers(data)),
    )


def failures(data: ReportData) -> Markup:
    """Causes, the most frequent first."""
    if not data.failures:
        return section("failures", "Failures by cause", "", nothing("Nothing has failed."))
    most = max(one.tries for one in data.failures)
    rest = data.failures_left_out
    return section(
        "failures",
        "Failures by cause",
        "Errors with numbers, ids and quoted text taken out. Recovered: a later try went well. "
        "Given up: a dead letter, or dropped. Refused is an answer: nothing broke.",
        table(
            "Failures by cause",
            [
                *words("Cause", "Handler", "Outcomes"),
                *numbers("Tries", "Messages", "Recovered", "Given up"),
                *words("Last (UTC)"),
            ],
            [_failure(one, most) for one in data.failures],
        ),
        nothing(f"{plural(rest, 'less frequent cause')} left out.") if rest else None,
    )


def slowest(data: ReportData) -> Markup:
    """The messages that took longest."""
    return section(
        "slowest",
        "Slowest messages",
        "From publish to the end of the last try of a handler; of that, seconds in the handler.",
        table(
            "Slowest messages",
            [
                *words("Message", "Type", "Handler", "Outcome"),
                *numbers("Tries", "Took", "In handler"),
            ],
            [
                [
                    identifier(one.message_id),
                    one.name or UNKNOWN,
                    one.handler,
                    badge(one.outcome),
                    count(one.attempts),
                    duration(one.seconds),
                    duration(one.run),
                ]
                for one in data.slowest
            ],
        )
        if data.slowest
        else nothing("No handler has run."),
    )


def stuck(data: ReportData) -> Markup:
    """What waits for somebody."""
    age = duration(data.stuck_after).replace(" 0 s", "")
    return section(
        "stuck",
        "Stuck messages",
        f"Older than {age}. Unfinished: tried, but neither answered nor given up. Undelivered: not "
        "tried by a handler that has handled an earlier one of the type. Unhandled: nobody "
        "handles the type.",
        table(
            "Stuck messages",
            [
                *words("Reason", "Type", "Handler"),
                *numbers("Messages", "Oldest"),
                *words("Oldest message"),
            ],
            [
                [
                    one.reason,
                    one.name,
                    one.handler or NOTHING,
                    count(one.messages),
                    duration(one.age),
                    identifier(one.oldest_id),
                ]
                for one in data.stuck
            ],
        )
        if data.stuck
        else nothing("Nothing is stuck."),
    )


# -- parts -------------------------------------------------------------------------------------


def _by_type(periods: Sequence[Period]) -> list[Series]:
    totals: Counter[str] = Counter()
    for one in periods:
        totals.update(one.published)
    ranked = sorted(totals, key=lambda name: (-totals[name], name))
    top = ranked[:COLOURS]
    found = [
        Series(name, f"c{number}", [one.published.get(name, 0) for one in periods])
        for number, name in enumerate(top)
    ]
    if len(ranked) > len(top):
        others = [
            sum(number for name, number in one.published.items() if name not in top)
            for one in periods
        ]
        found.append(Series(plural(len(ranked) - len(top), "other"), "rest", others))
    return found


def _trouble_chart(axis: Axis, trouble: list[Series]) -> Markup:
    return stacked("Tries that failed, over time", axis, trouble, height=170)


def _handler_chart(handlers: Sequence[HandlerLatency]) -> Markup:
    rows = [
        Range(
            f"{one.handler} ({one.name or UNKNOWN})",
            (one.run.p50, one.run.p95, one.run.p99),
            f"{one.run.tries:,}",
        )
        for one in handlers[:15]
    ]
    return ranges("Time in the handler, by handler", rows, ("p50", "p95", "p99"))


def _handlers(data: ReportData) -> Markup:
    return table(
        "Latency by handler",
        [
            *words("Handler", "Type"),
            *numbers("Tries", "Run p50", "p95", "p99", "Longest", "Wait p50", "p95", "p99"),
        ],
        [
            [
                one.handler,
                one.name or UNKNOWN,
                count(one.run.tries),
                *map(duration, (one.run.p50, one.run.p95, one.run.p99, one.run.longest)),
                *map(duration, (one.wait.p50, one.wait.p95, one.wait.p99)),
            ]
            for one in data.handlers
        ],
    )


def _failure(one: Failure, most: int) -> list[Child]:
    width = max(1.0, 100 * one.tries / most)
    return [
        el(
            "div",
            one.cause,
            el("div", class_="share", style=f"width:{width:.0f}%"),
            folded(
                "the last of them",
                el("small", cut_end(one.example or NOTHING, 500)),
                el("small", "message ", identifier(one.example_id)),
            ),
            class_="cause",
        ),
        join([one.handler, el("br"), el("span", one.name or UNKNOWN, class_="soft")]),
        join(
            el("div", badge(outcome), f" {number:,}", class_="outcome")
            for outcome, number in sorted(one.outcomes.items())
        ),
        count(one.tries),
        count(one.messages),
        count(one.recovered),
        count(one.given_up),
        moment(one.last),
    ]


def cut_end(text: str, length: int) -> str:
    """The beginning of a long text."""
    return text if len(text) <= length else text[: length - 1] + "…"
