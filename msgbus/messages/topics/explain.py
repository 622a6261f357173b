"""Explain which routes match a topic, in which order and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

from msgbus.messages.topics.index import Route
from msgbus.messages.topics.pattern import (
    PatternKind,
    SegmentKind,
    TopicPattern,
    fold,
    match_segments,
)


@final
@dataclass(frozen=True, slots=True)
class RouteMatch:
    """One matching route, how it matches and why it has its rank."""

    rank: int
    """1 for the route that `find_route` returns."""
    route: Route
    how: str
    """How the pattern matches the topic."""
    why_here: str
    """Why it has this rank."""

    def as_dict(self) -> dict[str, Any]:
        """Return JSON-ready data."""
        return {
            "rank": self.rank,
            "pattern": self.route.pattern,
            "kind": self.route.kind.value,
            "endpoint_id": self.route.endpoint_id,
            "priority": self.route.priority,
            "order": self.route.order,
            "how": self.how,
            "why_here": self.why_here,
        }


@final
@dataclass(frozen=True, slots=True)
class Explanation:
    """Which routes match a topic, in which order and why."""

    topic: str
    matches: tuple[RouteMatch, ...]
    """The matching routes, in the order of `find_all_routes`."""
    registered: int
    """The number of routes of the router."""

    @property
    def chosen(self) -> Route | None:
        """The route that `find_route` returns."""
        return self.matches[0].route if self.matches else None

    def as_dict(self) -> dict[str, Any]:
        """Return JSON-ready data."""
        return {
            "topic": self.topic,
            "registered": self.registered,
            "matches": [match.as_dict() for match in self.matches],
        }

    def __str__(self) -> str:
        lines = [f"{self.topic!r} matches {len(self.matches)} of {self.registered} routes."]
        for match in self.matches:
            route = match.route
            lines += [
                f"{match.rank}. {route.pattern} -> {route.endpoint_id}",
                f"     how:   {match.how}",
                f"     rank:  {match.why_here}",
            ]
        return "\n".join(lines)


def explain(topic: str, routes: Sequence[Route], *, registered: int) -> Explanation:
    """Explain why these routes, in this order, match `topic`."""
    matches: list[RouteMatch] = []
    before: Route | None = None
    for rank, route in enumerate(routes, 1):
        how = _how(route.topic_pattern, topic)
        matches.append(RouteMatch(rank, route, how, _why_here(route, before)))
        before = route
    return Explanation(topic, tuple(matches), registered)


def _why_here(route: Route, before: Route | None) -> str:
    if before is None:
        return f"first, with the highest priority ({route.priority})."
    if before.priority > route.priority:
        return f"its priority {route.priority} is below {before.priority}."
    return (
        f"the same priority {route.priority}, and registered later "
        f"(number {route.order}, after {before.order})."
    )


def _how(pattern: TopicPattern, topic: str) -> str:
    if pattern.kind is PatternKind.REGEX:
        return "the regular expression matches the whole topic."
    if pattern.kind is PatternKind.EXACT:
        return "the pattern is the topic itself."
    parts = [f"{source} = {text or 'nothing'}" for source, text in align(pattern, topic)]
    return ", ".join(parts) + "."


def align(pattern: TopicPattern, topic: str) -> list[tuple[str, str]]:
    """Pair each segment of a wildcard pattern with the part of a topic that it matches.

    Each `**` matches as little as possible.
    """
    segments = topic.split(".")
    folded = segments if pattern.case_sensitive else [fold(one) for one in segments]
    taken: list[tuple[str, str]] = []
    at = 0
    for number, segment in enumerate(pattern.segments):
        end = at + 1
        if segment.kind is SegmentKind.MANY:
            rest = pattern.segments[number + 1 :]
            possible = range(at, len(segments) + 1)
            end = next(one for one in possible if match_segments(rest, folded[one:]))
        taken.append((segment.source, ".".join(segments[at:end])))
        at = end
    return taken
