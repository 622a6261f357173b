"""PatternRouter: find the endpoints of a topic.

Routes are ordered by priority, then by registration, whatever their kind: an exact topic does
not come before a pattern of higher priority.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final, final

from msgbus.errors import ConfigurationError
from msgbus.messages.topics.cache import RecentCache
from msgbus.messages.topics.index import Route, RouteEntry, RouteIndex, by_priority
from msgbus.messages.topics.pattern import TopicPattern
from msgbus.runtime.arguments import require_id, require_priority

if TYPE_CHECKING:
    from msgbus.messages.topics.explain import Explanation

_KEPT_INVALID: Final = 64
"""Up to this many removed routes a new index is not worth its cost."""


@final
class _Snapshot:
    """The routes of one version, and the cached results of lookups.

    The caches belong to the snapshot, so a result computed during a change is dropped with the
    old version.
    """

    __slots__ = ("every", "first", "index", "version")

    def __init__(self, index: RouteIndex, version: int, cache_size: int) -> None:
        self.index = index
        self.version = version
        self.first: RecentCache[str, tuple[Route, ...]] = RecentCache(cache_size)
        """The first route, or an empty tuple."""
        self.every: RecentCache[str, tuple[Route, ...]] = RecentCache(cache_size)

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
    """Routes from topic patterns to endpoints, safe for concurrent reads and registrations.

    ```python
    router = PatternRouter()
    router.register_route("shop.orders.*", "orders")
    router.register_route("shop.**", "audit", priority=10)
    router.find_route("shop.orders.placed").endpoint_id  # "audit"
    ```

    A lookup reads one snapshot: it sees all of a change or nothing of it. Registering takes
    constant time, however many routes there are.

    Args:
        case_sensitive: Whether `A` and `a` differ in topics.
        cache_size: How many results are cached, for `find_route` and `find_all_routes` each.
    """

    def __init__(self, *, case_sensitive: bool = False, cache_size: int = 10_000) -> None:
        self._case_sensitive = case_sensitive
        self._cache_size = cache_size
        self._lock = threading.Lock()
        self._routes: dict[Route, RouteEntry] = {}
        self._removed = 0
        self._registered = 0
        index = RouteIndex(case_sensitive=case_sensitive)
        self._snapshot = _Snapshot(index, 0, cache_size)

    @property
    def routes(self) -> tuple[Route, ...]:
        """All routes, in the order of registration."""
        with self._lock:
            return tuple(self._routes)

    def __len__(self) -> int:
        return len(self._routes)

    def register_route(
        self, pattern: str | TopicPattern, endpoint_id: str, priority: int = 0
    ) -> Route:
        """Route topics that match `pattern` to `endpoint_id`.

        Registering the same pattern and endpoint twice makes two routes.

        Raises:
            InvalidTopicError: `pattern` is not valid; the error shows the position.
            ConfigurationError: The pattern and the router differ in `case_sensitive`, the id is
                blank, or the priority is not a whole number.
        """
        checked = self._compile(pattern)
        require_id(f"The endpoint_id of the route {checked.pattern!r}", endpoint_id)
        require_priority(f"the route {checked.pattern!r}", priority)
        with self._lock:
            version = self._snapshot.version + 1
            self._registered += 1
            route = Route(checked, endpoint_id, priority, self._registered)
            entry = self._routes[route] = RouteEntry(route, version)
            self._snapshot.index.add(entry)
            self._swap(version)
        return route

    def unregister(self, route: Route) -> bool:
        """Remove a route; return whether it was registered."""
        with self._lock:
            return self._remove([route]) == 1

    def unregister_endpoint(self, endpoint_id: str) -> int:
        """Remove all routes of an endpoint in one step; return how many there were."""
        with self._lock:
            return self._remove([one for one in self._routes if one.endpoint_id == endpoint_id])

    def _compile(self, pattern: str | TopicPattern) -> TopicPattern:
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
            entry = self._routes.pop(route, None)
            if entry is not None:
                entry.removed = version
                removed += 1
        if removed:
            self._removed += removed
            self._swap(version)
        return removed

    def _swap(self, version: int) -> None:
        index = self._snapshot.index
        if self._removed > len(self._routes) + _KEPT_INVALID:
            index = RouteIndex(case_sensitive=self._case_sensitive, entries=self._routes.values())
            self._removed = 0
        self._snapshot = _Snapshot(index, version, self._cache_size)

    def find_route(self, topic: str) -> Route | None:
        """Return the matching route of the highest priority, the first registered among equals."""
        snapshot = self._snapshot
        found = snapshot.first.young.get(topic)
        if found is None:
            found = snapshot.find_first(topic)
        return found[0] if found else None

    def find_all_routes(self, topic: str) -> list[Route]:
        """Return all matching routes: higher priority first, then order of registration."""
        snapshot = self._snapshot
        found = snapshot.every.young.get(topic)
        return list(snapshot.find_every(topic) if found is None else found)

    def explain(self, topic: str) -> Explanation:
        """Explain which routes match, in which order and why; `str()` gives readable text."""
        from msgbus.messages.topics.explain import explain

        return explain(topic, self.find_all_routes(topic), registered=len(self))

    def __repr__(self) -> str:
        return f"<PatternRouter of {len(self)} routes>"
