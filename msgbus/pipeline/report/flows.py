"""The sections on what belongs together: sessions, and causes with their effects."""

from __future__ import annotations

from typing import Final

from msgbus.pipeline.report.bars import session_bars, tree_bars
from msgbus.pipeline.report.charts import Series, legend
from msgbus.pipeline.report.data import ReportData
from msgbus.pipeline.report.formats import count, duration, moment, plural
from msgbus.pipeline.report.markup import Markup, el
from msgbus.pipeline.report.sections import nothing, section
from msgbus.pipeline.report.tables import badge, folded, identifier, numbers, table, words

_ENDS: Final = (("ok", "good"), ("recovered", "warn"), ("failed", "bad"))


def sessions(data: ReportData) -> Markup:
    """How sessions ended, and the longest of them."""
    shown = data.sessions
    if not shown.longest:
        return section("sessions", "Sessions", "", nothing("No message belonged to a session."))
    total = sum(shown.outcomes.values())
    ends = ", ".join(f"{shown.outcomes.get(name, 0):,} {name}" for name, _ in _ENDS)
    return section(
        "sessions",
        "Sessions",
        f"{plural(total, 'session')}: {ends}. The median took {duration(shown.median)}. Recovered: "
        "something failed, and a later try made it good. Failed: a message was not answered.",
        el("h3", f"The {plural(len(shown.longest), 'session')} that took longest"),
        legend([Series(name, colour, ()) for name, colour in _ENDS]),
        session_bars("The longest sessions, and how they ended", shown.longest),
        folded(
            "The numbers",
            table(
                "Longest sessions",
                [
                    *words("Session", "Outcome", "Started (UTC)"),
                    *numbers("Took", "Messages", "Tries", "Failed", "Dead letters"),
                ],
                [
                    [
                        identifier(one.session_id),
                        badge(one.outcome),
                        moment(one.started),
                        duration(one.duration),
                        count(one.messages),
                        count(one.tries),
                        count(one.failed),
                        count(one.dead_letters),
                    ]
                    for one in shown.longest
                ],
            ),
        ),
    )


def causation(data: ReportData) -> Markup:
    """One chain as a tree, and which types cause which."""
    tree = data.tree
    if tree is None:
        return section("causation", "Causation", "", nothing("No message has caused another."))
    hidden = tree.messages - len(tree.nodes)
    return section(
        "causation",
        "Causation",
        f"The chain that took longest: {plural(tree.messages, 'message')}, {tree.depth} deep, at "
        f"most {plural(tree.widest, 'direct effect')} of one, {duration(tree.duration)}. A bar "
        "begins when a message is published and ends with its last try. Bold: the critical path, "
        "which leads to the last message.",
        legend(
            [
                Series("done", "good", ()),
                Series("refused or cancelled", "warn", ()),
                Series("failed", "bad", ()),
                Series("nobody tried it", "rest", ()),
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
