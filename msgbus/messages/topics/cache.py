"""A bounded cache that many threads may use at once without a lock."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar, final

from msgbus.errors import ConfigurationError

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@final
class RecentCache(Generic[K, V]):
    """At most `size` recently used values by key; `None` is not a value.

    New values go into the young half. When that is full it becomes the old half, and a value
    that is read again returns to the young one. So keys that are seen once do not evict those
    in use, and nothing is reordered.
    """

    __slots__ = ("_half", "_old", "young")

    def __init__(self, size: int) -> None:
        if size < 2:
            message = f"cache_size must be at least 2, not {size}."
            raise ConfigurationError(message)
        self._half = size // 2
        self.young: dict[K, V] = {}
        """For hot paths: `young.get(key)` is the common case of `get`."""
        self._old: dict[K, V] = {}

    def get(self, key: K) -> V | None:
        """Return the value of `key`, or `None`."""
        found = self.young.get(key)
        if found is None:
            found = self._old.get(key)
            if found is not None:
                self.put(key, found)
        return found

    def put(self, key: K, value: V) -> None:
        """Store the value of `key`."""
        if len(self.young) >= self._half:
            self._old, self.young = self.young, {}
        self.young[key] = value

    def __len__(self) -> int:
        return len(self.young) + len(self._old)
