"""A bounded cache by topic that many threads may use at once without a lock."""

from __future__ import annotations

from typing import Generic, TypeVar, final

from msgbus.errors import ConfigurationError

T = TypeVar("T")


@final
class TopicCache(Generic[T]):
    """Keeps what was asked for lately, and at most `size` answers.

    It has two halves. Answers go into the young one; when that is full it becomes the old
    one, and what is asked for again comes back. So a flood of topics that are each seen
    once does not push out those that are in use, and nothing is ever reordered. `None` is
    no answer.
    """

    __slots__ = ("_half", "_old", "young")

    def __init__(self, size: int) -> None:
        if size < 2:
            message = f"cache_size must be at least 2, not {size}."
            raise ConfigurationError(message)
        self._half = size // 2
        self.young: dict[str, T] = {}
        """For callers in a hurry: `young.get(topic)` is the common case of `get`."""
        self._old: dict[str, T] = {}

    def get(self, topic: str) -> T | None:
        """The answer for `topic`, if it is kept."""
        found = self.young.get(topic)
        if found is None:
            found = self._old.get(topic)
            if found is not None:
                self.put(topic, found)
        return found

    def put(self, topic: str, answer: T) -> None:
        """Keep `answer` for `topic`."""
        if len(self.young) >= self._half:
            self._old, self.young = self.young, {}
        self.young[topic] = answer

    def __len__(self) -> int:
        return len(self.young) + len(self._old)
