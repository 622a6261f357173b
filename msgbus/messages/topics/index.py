"""Where routes are looked up: exact ones by hash, patterns in a trie, expressions in a list.

An index only grows. Each entry knows from which version of the router to which one it
holds, so a reader that began at one version never sees a later change, and a writer never
copies anything. The router makes a new index once half of an old one is no longer valid.

Readers need no lock: writers only append to lists, add keys to dicts and set attributes
that were `None`; and a reader takes one key or walks one list, never a dict.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Final, final

from msgbus.messages.topics.pattern import PatternKind, TopicPattern, is_topic
from msgbus.routing.routes import Route
from msgbus.routing.segments import Segment, SegmentKind, fold

NEVER: Final = sys.maxsize


@final
class Entry:
    """A route, and the versions of the router for which it holds."""

    __slots__ = ("added", "removed", "route")

    def __init__(self, route: Route, added: int) -> None:
        self.route = route
        self.added = added
        self.removed = NEVER

    def holds_at(self, version: int) -> bool:
        """Whether the route was there at this version."""
        return self.added <= version < self.removed


@final
class _Globs:
    """What goes on with wildcards inside the segment."""

    __slots__ = ("_beginnings", "_known", "_longest")

    def __init__(self) -> None:
        self._beginnings: dict[str, list[tuple[Segment, _Node]]] = {}
        """By the plain text they begin with: found by the beginnings of a segment."""
        self._longest = 0
        """Length of the longest such text."""
        self._known: dict[str, _Node] = {}

    def step(self, segment: Segment) -> _Node:
        node = self._known.get(segment.source)
        if node is None:
            node = self._known[segment.source] = _Node()
            self._longest = max(self._longest, len(segment.text))
            self._beginnings.setdefault(segment.text, []).append((segment, node))
        return node

    def after(self, segment: str) -> Iterator[_Node]:
        for length in range(min(len(segment), self._longest) + 1):
            for glob, node in self._beginnings.get(segment[:length], ()):
                if glob.takes(segment):
                    yield node


@final
class _Node:
    """A place in the trie: what patterns that agree up to here go on with."""

    __slots__ = ("entries", "globs", "is_many", "many", "one", "texts")

    def __init__(self, *, is_many: bool = False) -> None:
        self.is_many = is_many
        """Whether it was reached by `**`, and so stays where it is for any segment."""
        self.entries: list[Entry] = []
        """Routes whose pattern ends here."""
        self.texts: dict[str, _Node] = {}
        self.one: _Node | None = None
        self.many: _Node | None = None
        self.globs: _Globs | None = None

    def step(self, segment: Segment) -> _Node:
        """The node behind `segment`, made if it is new."""
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
        """Note that patterns may go on from here, and behind each `**` that takes nothing."""
        node: _Node | None = self
        while node is not None:
            found[node] = None
            node = node.many

    def advance(self, segment: str, found: dict[_Node, None]) -> None:
        """Note the nodes that one segment of a topic leads to."""
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
    """All routes of a router, those that no longer hold included."""

    __slots__ = ("_case_sensitive", "_exact", "_expressions", "_root")

    def __init__(self, *, case_sensitive: bool, entries: Iterable[Entry] = ()) -> None:
        self._case_sensitive = case_sensitive
        self._exact: dict[str, list[Entry]] = {}
        self._root = _Node()
        self._expressions: list[tuple[TopicPattern, Entry]] = []
        for entry in entries:
            self.add(entry)

    def add(self, entry: Entry) -> None:
        """Take a route in. Only one thread at a time may add."""
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
        """The routes that match `topic` at this version of the router, in no order."""
        if not is_topic(topic):
            return []
        folded = topic if self._case_sensitive else fold(topic)
        found = list(self._exact.get(folded, ()))
        for node in self._walk(folded.split(".")):
            found += node.entries
        found += [entry for pattern, entry in self._expressions if pattern.matches(topic)]
        return [entry.route for entry in found if entry.holds_at(version)]

    def _walk(self, segments: list[str]) -> Iterable[_Node]:
        """The nodes where patterns end that match these segments.

        All places that are still possible are kept together, each once, so that many `**`
        in many patterns do not multiply.
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
