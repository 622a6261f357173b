"""Routes and their index: exact topics by hash, patterns in a trie, regular expressions in a list.

An index only grows. Each entry has the first and last version of the router for which it is
valid, so a reader at one version never sees a later change, and a writer copies nothing. The
router builds a new index once half of the entries are no longer valid.

Readers need no lock: writers only append to lists, add keys to dicts and set attributes that
were `None`; a reader looks up one key or walks one list, and never iterates over a dict.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final, final

from msgbus.messages.topics.pattern import (
    PatternKind,
    PatternSegment,
    SegmentKind,
    TopicPattern,
    fold,
    is_topic,
)

NEVER: Final = sys.maxsize


@final
@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """A topic pattern and its endpoint, made by `PatternRouter.register_route`."""

    topic_pattern: TopicPattern
    """The compiled pattern."""
    endpoint_id: str
    """The endpoint of matching topics."""
    priority: int
    """Higher comes first."""
    order: int
    """The number of the registration; among equal priorities the lower comes first."""
    created_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    """The time of registration, in UTC."""

    @property
    def pattern(self) -> str:
        """The text of the pattern."""
        return self.topic_pattern.pattern

    @property
    def kind(self) -> PatternKind:
        """The kind of the pattern: exact, wildcard or regex."""
        return self.topic_pattern.kind

    def matches(self, topic: str) -> bool:
        """Return whether `topic` matches the pattern."""
        return self.topic_pattern.matches(topic)


def by_priority(route: Route) -> tuple[int, int]:
    """Sort key of routes: higher priority first, then order of registration."""
    return -route.priority, route.order


@final
class RouteEntry:
    """A route, and the versions of the router for which it is valid."""

    __slots__ = ("added", "removed", "route")

    def __init__(self, route: Route, added: int) -> None:
        self.route = route
        self.added = added
        self.removed = NEVER

    def is_valid_at(self, version: int) -> bool:
        """Return whether the router had the route at this version."""
        return self.added <= version < self.removed


@final
class _Globs:
    """The next nodes behind segments with wildcards for characters."""

    __slots__ = ("_longest", "_nodes", "_prefixes")

    def __init__(self) -> None:
        self._prefixes: dict[str, list[tuple[PatternSegment, _Node]]] = {}
        """By the plain text before the first wildcard."""
        self._longest = 0
        """The length of the longest such text."""
        self._nodes: dict[str, _Node] = {}

    def step(self, segment: PatternSegment) -> _Node:
        node = self._nodes.get(segment.source)
        if node is None:
            node = self._nodes[segment.source] = _Node()
            self._longest = max(self._longest, len(segment.text))
            self._prefixes.setdefault(segment.text, []).append((segment, node))
        return node

    def after(self, segment: str) -> Iterator[_Node]:
        for length in range(min(len(segment), self._longest) + 1):
            for glob, node in self._prefixes.get(segment[:length], ()):
                if glob.matches(segment):
                    yield node


@final
class _Node:
    """A node of the trie: where patterns with the same segments so far continue."""

    __slots__ = ("entries", "globs", "is_many", "many", "one", "texts")

    def __init__(self, *, is_many: bool = False) -> None:
        self.is_many = is_many
        """Whether it stands behind `**`, and so matches any further segment."""
        self.entries: list[RouteEntry] = []
        """The routes whose pattern ends here."""
        self.texts: dict[str, _Node] = {}
        self.one: _Node | None = None
        self.many: _Node | None = None
        self.globs: _Globs | None = None

    def step(self, segment: PatternSegment) -> _Node:
        """Return the node behind `segment`, made if it is new."""
        if segment.kind is SegmentKind.TEXT:
            return self.texts.get(segment.text) or self.texts.setdefault(segment.text, _Node())
        if segment.kind is SegmentKind.ONE:
            self.one = self.one or _Node()
            return self.one
        if segment.kind is SegmentKind.MANY:
            self.many = self.many or _Node(is_many=True)
            return self.many
        self.globs = self.globs or _Globs()
        return self.globs.step(segment)

    def reach(self, found: dict[_Node, None]) -> None:
        """Add this node, and those behind each `**` that matches no segment."""
        node: _Node | None = self
        while node is not None:
            found[node] = None
            node = node.many

    def advance(self, segment: str, found: dict[_Node, None]) -> None:
        """Add the nodes that one segment of a topic leads to."""
        if self.is_many:
            found[self] = None
        if (node := self.texts.get(segment)) is not None:
            node.reach(found)
        if self.one is not None:
            self.one.reach(found)
        if self.globs is not None:
            for node in self.globs.after(segment):
                node.reach(found)


@final
class RouteIndex:
    """All routes of a router, including those that are no longer valid."""

    __slots__ = ("_case_sensitive", "_exact", "_expressions", "_root")

    def __init__(self, *, case_sensitive: bool, entries: Iterable[RouteEntry] = ()) -> None:
        self._case_sensitive = case_sensitive
        self._exact: dict[str, list[RouteEntry]] = {}
        self._root = _Node()
        self._expressions: list[tuple[TopicPattern, RouteEntry]] = []
        for entry in entries:
            self.add(entry)

    def add(self, entry: RouteEntry) -> None:
        """Add a route. Only one thread at a time may add."""
        pattern = entry.route.topic_pattern
        if pattern.kind is PatternKind.EXACT:
            self._exact.setdefault(pattern.exact_topic, []).append(entry)
        elif pattern.kind is PatternKind.REGEX:
            self._expressions.append((pattern, entry))
        else:
            node = self._root
            for segment in pattern.segments:
                node = node.step(segment)
            node.entries.append(entry)

    def find(self, topic: str, version: int) -> list[Route]:
        """Return the routes that match `topic` at this version of the router, unordered."""
        if not is_topic(topic):
            return []
        folded = topic if self._case_sensitive else fold(topic)
        found = list(self._exact.get(folded, ()))
        for node in self._walk(folded.split(".")):
            found += node.entries
        found += [entry for pattern, entry in self._expressions if pattern.matches(topic)]
        return [entry.route for entry in found if entry.is_valid_at(version)]

    def _walk(self, segments: list[str]) -> Iterable[_Node]:
        """Return the nodes where matching patterns end.

        All possible nodes are kept in one set, so many `**` in many patterns do not multiply.
        """
        here: dict[_Node, None] = {}
        self._root.reach(here)
        for segment in segments:
            found: dict[_Node, None] = {}
            for node in here:
                node.advance(segment, found)
            if not found:
                return ()
            here = found
        return here
