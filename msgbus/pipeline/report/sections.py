"""The sections of a report, one function each, and their tables and tiles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from msgbus.pipeline.report.charts import (
    COLOURS,
    Axis,
    PercentileRange,
    Series,
    colour_of,
    legend,
    lines,
    ranges,
    session_bars,
    stacked,
    tree_bars,
)
from msgbus.pipeline.report.data import Failure, HandlerLatency, Period, ReportData
from msgbus.pipeline.report.markup import (
    NOTHING,
    Child,
    Markup,
    count,
    duration,
    el,
    join,
    moment,
    plural,
    share,
)

UNKNOWN: Final = "(unknown type)"
_QUANTILES: Final = (("p99", "c4"), ("p95", "c1"), ("p50", "c0"))


def section(anchor: str, title: str, note: str, *children: Child) -> Markup:
    """A section with a heading and a note."""
    return el(
        "section",
        el("h2", title, id=f"{anchor}-title"),
        el("p", note, class_="note") if note else None,
        *children,
        id=anchor,
        aria_labelledby=f"{anchor}-title",
    )


def nothing(what: str) -> Markup:
    """A sentence instead of a chart or table."""
    return el("p", what, class_="soft")


def tiles(data: ReportData) -> Markup:
    """The most important numbers."""
    totals, latency = data.totals, data.latency
    rate = totals.failed / totals.attempts if totals.attempts else None
    stuck = sum(one.messages for one in data.stuck if one.reason != "unhandled")
    return el(
        "div",
        tile(count(totals.messages), f"messages of {plural(totals.types, 'type')}"),
        tile(count(totals.attempts), "attempts to handle them"),
        tile(share(rate), "of attempts failed", is_bad=bool(rate and rate >= 0.05)),
        tile(count(totals.dead_letters), "dead letters", is_bad=totals.dead_letters > 0),
        tile(duration(latency.p50 if latency else None), "median, publish to done"),
        tile(duration(latency.p99 if latency else None), "99th percentile"),
        tile(count(stuck), "stuck", is_bad=stuck > 0),
        class_="tiles",
    )


def throughput(data: ReportData) -> Markup:
    """Messages and failures over time."""
    axis = Axis([one.start for one in data.periods], data.step)
    step = duration(data.step.total_seconds()).replace(" 0 s", "").replace(" 0 min", "")
    by_type = _by_type(data.periods)
    failed = [
        # A dead letter may fall into the period after its last attempt.
        Series("failed", "warn", [max(0, one.failed - one.dead_letters) for one in data.periods]),
        Series("dead-lettered", "bad", [one.dead_letters for one in data.periods]),
    ]
    has_failed = any(value for one in failed for value in one.values)
    return section(
        "throughput",
        "Throughput",
        f"Each column is {step}, in UTC. A message counts when it was published, an attempt when "
        "it ended.",
        el("h3", "Messages published, by type"),
        legend(by_type),
        stacked("Messages published over time, by type", axis, by_type),
        el("h3", "Attempts that failed"),
        (legend(failed), stacked("Attempts that failed, over time", axis, failed, height=170))
        if has_failed
        else nothing("No attempt failed."),
        folded(
            "The numbers",
            table(
                "Throughput over time",
                [
                    *words("From (UTC)"),
                    *numbers("Published", "Attempts", "Failed", "Retries", "Dead letters"),
                ],
                [
                    [
                        moment(one.start),
                        count(sum(one.published.values())),
                        *map(count, (one.attempts, one.failed, one.retries, one.dead_letters)),
                    ]
                    for one in data.periods
                ],
            ),
        ),
    )


def latency(data: ReportData) -> Markup:
    """Latency over time and by handler."""
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
        "From publish to the end of an attempt, waiting included. Percentiles come from histograms "
        "and are at most 4.5 % off; the longest are exact.",
        el("h3", "Over time"),
        legend(series),
        lines("Latency over time: 50th, 95th and 99th percentile", axis, series),
        el("h3", "In the handler, by handler"),
        legend(series[::-1]),
        _handler_chart(data.handlers),
        folded(f"All of {plural(len(data.handlers), 'handler')}, with numbers", _handlers(data)),
    )


def failures(data: ReportData) -> Markup:
    """Failures by cause, the most frequent first."""
    if not data.failures:
        return section("failures", "Failures by cause", "", nothing("Nothing has failed."))
    most = max(one.attempts for one in data.failures)
    rest = data.failures_left_out
    return section(
        "failures",
        "Failures by cause",
        "Errors without numbers, ids and quoted text. Recovered: a later attempt was answered. "
        "Dead: dead-lettered or dropped. Refused is an answer, not a failure.",
        table(
            "Failures by cause",
            [
                *words("Cause", "Handler", "Outcomes"),
                *numbers("Attempts", "Messages", "Recovered", "Dead"),
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
        "From publish to the end of the last attempt of a handler; and the time in the handler.",
        table(
            "Slowest messages",
            [
                *words("Message", "Type", "Handler", "Outcome"),
                *numbers("Attempts", "Took", "In handler"),
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
    """Messages that are not handled yet."""
    age = duration(data.stuck_after).replace(" 0 s", "")
    return section(
        "stuck",
        "Stuck messages",
        f"Older than {age}. Unfinished: attempted, but neither answered nor dead-lettered. "
        "Undelivered: not attempted by a handler that has handled an earlier message of the type. "
        "Unhandled: no handler for the type.",
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


def _handler_chart(handlers: Sequence[HandlerLatency]) -> Markup:
    rows = [
        PercentileRange(
            f"{one.handler} ({one.name or UNKNOWN})",
            (one.run.p50, one.run.p95, one.run.p99),
            f"{one.run.attempts:,}",
        )
        for one in handlers[:15]
    ]
    return ranges("Time in the handler, by handler", rows, ("p50", "p95", "p99"))


def _handlers(data: ReportData) -> Markup:
    return table(
        "Latency by handler",
        [
            *words("Handler", "Type"),
            *numbers("Attempts", "Run p50", "p95", "p99", "Longest", "Wait p50", "p95", "p99"),
        ],
        [
            [
                one.handler,
                one.name or UNKNOWN,
                count(one.run.attempts),
                *map(duration, (one.run.p50, one.run.p95, one.run.p99, one.run.longest)),
                *map(duration, (one.wait.p50, one.wait.p95, one.wait.p99)),
            ]
            for one in data.handlers
        ],
    )


def _failure(one: Failure, most: int) -> list[Child]:
    width = max(1.0, 100 * one.attempts / most)
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
        *map(count, (one.attempts, one.messages, one.recovered, one.dead)),
        moment(one.last),
    ]


def cut_end(text: str, length: int) -> str:
    """Shorten a text from the right."""
    return text if len(text) <= length else text[: length - 1] + "…"


_ENDS: Final = (("ok", "good"), ("recovered", "warn"), ("failed", "bad"))


def sessions(data: ReportData) -> Markup:
    """Sessions by outcome, and the longest of them."""
    shown = data.sessions
    if not shown.longest:
        return section("sessions", "Sessions", "", nothing("No message belonged to a session."))
    total = sum(shown.outcomes.values())
    ends = ", ".join(f"{shown.outcomes.get(name, 0):,} {name}" for name, _ in _ENDS)
    return section(
        "sessions",
        "Sessions",
        f"{plural(total, 'session')}: {ends}. The median took {duration(shown.median)}. Recovered: "
        "something failed, and a later attempt was answered. Failed: a message was not answered.",
        el("h3", f"The {plural(len(shown.longest), 'session')} that took longest"),
        legend([Series(name, colour, ()) for name, colour in _ENDS]),
        session_bars("The longest sessions, and how they ended", shown.longest),
        folded(
            "The numbers",
            table(
                "Longest sessions",
                [
                    *words("Session", "Outcome", "Started (UTC)"),
                    *numbers("Took", "Messages", "Attempts", "Failed", "Dead letters"),
                ],
                [
                    [
                        identifier(one.session_id),
                        badge(one.outcome),
                        moment(one.started),
                        duration(one.duration),
                        *map(count, (one.messages, one.attempts, one.failed, one.dead_letters)),
                    ]
                    for one in shown.longest
                ],
            ),
        ),
    )


def causation(data: ReportData) -> Markup:
    """One chain of causes as a tree, and causes by type."""
    tree = data.tree
    if tree is None:
        return section("causation", "Causation", "", nothing("No message has caused another."))
    hidden = tree.messages - len(tree.nodes)
    return section(
        "causation",
        "Causation",
        f"The chain that took longest: {plural(tree.messages, 'message')}, {tree.depth} deep, at "
        f"most {plural(tree.widest, 'direct effect')} of one, {duration(tree.duration)}. A bar "
        "begins when a message is published and ends with its last attempt. Bold: the critical "
        "path, which leads to the last message.",
        legend(
            [
                Series("done", "good", ()),
                Series("refused or cancelled", "warn", ()),
                Series("failed", "bad", ()),
                Series("not attempted", "rest", ()),
            ]
        ),
        tree_bars(f"The chain of causes that begins with message {tree.root_id}", tree),
        nothing(f"{plural(hidden, 'more message')} of this chain left out.")
        if hidden > 0
        else None,
        folded(
            "Which types cause which",
            table(
                "Causes and effects by type",
                [*words("Cause", "Effect"), *numbers("Times", "Most of one", "Mean time")],
                [
                    [
                        one.cause,
                        one.effect,
                        count(one.times),
                        count(one.most),
                        duration(one.seconds),
                    ]
                    for one in data.effects
                ],
            ),
        ),
    )


class Head(NamedTuple):
    """The head of a column."""

    label: str
    is_number: bool = False


def words(*labels: str) -> list[Head]:
    """Columns of text."""
    return [Head(label) for label in labels]


def numbers(*labels: str) -> list[Head]:
    """Columns of numbers, on the right."""
    return [Head(label, is_number=True) for label in labels]


def table(caption: str, heads: Sequence[Head], rows: Iterable[Sequence[Child]]) -> Markup:
    """A table with an accessible caption."""
    head = el("tr", *(el("th", one.label, scope="col", class_=_class(one)) for one in heads))
    body = [
        el(
            "tr",
            *(el("td", cell, class_=_class(one)) for one, cell in zip(heads, row, strict=True)),
        )
        for row in rows
    ]
    inner = el("table", el("thead", head), el("tbody", *body), aria_label=caption)
    return el("div", inner, class_="wide")


def folded(summary: str, *children: Child) -> Markup:
    """Content that is folded until it is opened."""
    return el("details", el("summary", summary), *children)


def badge(outcome: str | None) -> Markup:
    """An outcome in its colour."""
    label = "not attempted" if outcome is None else outcome.replace("_", " ")
    return el("span", label, class_=f"badge {colour_of(outcome)}")


def identifier(text: str | None) -> Markup:
    """An id in a monospaced font."""
    return el("span", text or NOTHING, class_="id")


def tile(value: str, label: str, *, is_bad: bool = False) -> Markup:
    """A number with its name."""
    return el("div", el("b", value), el("span", label), class_="tile bad" if is_bad else "tile")


def _class(head: Head) -> str | None:
    return "n" if head.is_number else None
