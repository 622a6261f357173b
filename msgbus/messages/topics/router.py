"""PatternRouter: which endpoints a topic leads to.

Exact topics, patterns and regular expressions stand side by side. Priority decides across
all of them: higher first, then in the order of registration. An exact route has no
advantage over a pattern of higher priority.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final, final

from msgbus.errors import ConfigurationError
from msgbus.messages.topics.cache import TopicCache
from msgbus.messages.topics.index import Entry, RouteIndex
from msgbus.messages.topics.pattern import TopicPattern
from msgbus.routing.inputs import require_id, require_priority
from msgbus.routing.routes import Route, by_priority

if TYPE_CHECKING:
    from msgbus.messages.topics.explain import Explanation

_FEW: Final = 64
"""So many removed routes are not worth a new index."""


@final
class _Snapshot:
    """The routes as of one version, and what was found in them.

    The caches belong to the snapshot: an answer that was worked out while the routes
    changed goes with the old one, and is never seen again.
    """

    __slots__ = ("every", "first", "index", "version")

    def __init__(self, index: RouteIndex, version: int, cache_size: int) -> None:
        self.index = index
        self.version = version
        self.first: TopicCache[tuple[Route, ...]] = TopicCache(cache_size)
        """The first route alone, or nothing."""
        self.every: TopicCache[tuple[Route, ...]] = TopicCache(cache_size)

    def find_first(self, topic: str) -> tuple[Route, ...]:
        found = self.first.get(topic)
        if found is None:
            routes = self.index.find(topic, self.version)
            found = (min(routes, key=by_priority),) if routes else ()
            self.first.put(topic, found)
        return found

    def find_every(self, topic: str) -> tuple[Route, ...]:
        found = self.every.get(topic)
        if found is None:
            found = tuple(sorted(self.index.find(topic, self.version), key=by_priority))
            self.every.put(topic, found)
        return found


@final
class PatternRouter:
    """Routes by pattern, readable from many threads while another registers.

    ```python
    router = PatternRouter()
    router.register_route("shop.orders.*", "orders")
    router.register_route("shop.**", "audit", priority=10)
    router.find_route("shop.orders.placed").endpoint_id  # "audit"
    ```

    A reader works on one snapshot: it sees all of a change or nothing of it. Registering
    takes the same short time however many routes there are.

    Args:
        case_sensitive: Whether `A` and `a` are different in topics.
        cache_size: How many answers are kept, for each of the two questions.
    """

    def __init__(self, *, case_sensitive: bool = False, cache_size: int = 10_000) -> None:
        self._case_sensitive = case_sensitive
        self._cache_size = cache_size
        self._writing = threading.Lock()
        self._live: dict[Route, Entry] = {}
        self._removed = 0
        self._orders = 0
        index = RouteIndex(case_sensitive=case_sensitive)
        self._snapshot = _Snapshot(index, 0, cache_size)

    @property
    def routes(self) -> tuple[Route, ...]:
        """All routes, in the order of registration."""
        with self._writing:
            return tuple(self._live)

    def __len__(self) -> int:
        return len(self._live)

    def register_route(
        self, pattern: str | TopicPattern, endpoint_id: str, priority: int = 0
    ) -> Route:
        """Lead topics that match `pattern` to `endpoint_id`.

        The same pattern and endpoint may be registered twice; they are two routes.

        Raises:
            InvalidTopicError: It is not a pattern; the error shows the position of the fault.
            ConfigurationError: The pattern treats case otherwise than the router, the id is
                blank, or the priority is no whole number.
        """
        checked = self._checked(pattern)
        require_id(f"The endpoint_id of the route {checked.pattern!r}", endpoint_id)
        require_priority(f"the route {checked.pattern!r}", priority)
        with self._writing:
            version = self._snapshot.version + 1
            self._orders += 1
            route = Route(checked, endpoint_id, priority, self._orders)
            entry = self._live[route] = Entry(route, version)
            self._snapshot.index.add(entry)
            self._swap(version)
        return route

    def unregister(self, route: Route) -> bool:
        """Take a route away; false if it was not there."""
        with self._writing:
            return self._remove([route]) == 1

    def unregister_endpoint(self, endpoint_id: str) -> int:
        """Take all routes to an endpoint away, at once; how many there were."""
        with self._writing:
            return self._remove([one for one in self._live if one.endpoint_id == endpoint_id])

    def _checked(self, pattern: str | TopicPattern) -> TopicPattern:
        if not isinstance(pattern, TopicPattern):
            return TopicPattern(pattern, case_sensitive=self._case_sensitive)
        if pattern.case_sensitive != self._case_sensitive:
            message = (
                f"{pattern!r} has case_sensitive={pattern.case_sensitive}, and the router "
                f"case_sensitive={self._case_sensitive}. Register the text of the pattern."
            )
            raise ConfigurationError(message)
        return pattern

    def _remove(self, routes: list[Route]) -> int:
        version = self._snapshot.version + 1
        removed = 0
        for route in routes:
            entry = self._live.pop(route, None)
            if entry is not None:
                entry.removed = version
                removed += 1
        if removed:
            self._removed += removed
            self._swap(version)
        return removed

    def _swap(self, version: int) -> None:
        index = self._snapshot.index
        if self._removed > len(self._live) + _FEW:
            index = RouteIndex(case_sensitive=self._case_sensitive, entries=self._live.values())
            self._removed = 0
        self._snapshot = _Snapshot(index, version, self._cache_size)

    def find_route(self, topic: str) -> Route | None:
        """The first route that matches: of the highest priority, registered first."""
        snapshot = self._snapshot
        found = snapshot.first.young.get(topic)
        if found is None:
            found = snapshot.find_first(topic)
        return found[0] if found else None

    def find_all_routes(self, topic: str) -> list[Route]:
        """All routes that match: higher priority first, then in order of registration."""
        snapshot = self._snapshot
        found = snapshot.every.young.get(topic)
        return list(snapshot.find_every(topic) if found is None else found)

    def explain(self, topic: str) -> Explanation:
        """Which routes match, in which order, and why; `str()` of it is for people."""
        from msgbus.messages.topics.explain import explain

        return explain(topic, self.find_all_routes(topic), registered=len(self))

    def __repr__(self) -> str:
        return f"<PatternRouter of {len(self)} routes>"
