"""A route: from a pattern of topics to an endpoint."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import final

from msgbus.messages.topics.pattern import PatternKind, TopicPattern


@final
@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """From a pattern of topics to an endpoint. Made by `PatternRouter.register_route`."""

    topic_pattern: TopicPattern
    """What a topic must match."""
    endpoint_id: str
    """Where it leads."""
    priority: int
    """Higher comes first."""
    order: int
    """Counts registrations of its router; among equal priorities the lower comes first."""
    created_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    """When it was registered, in UTC."""

    @property
    def pattern(self) -> str:
        """The text of the pattern."""
        return self.topic_pattern.pattern

    @property
    def kind(self) -> PatternKind:
        """How it is compared: exact, wildcard or regex."""
        return self.topic_pattern.kind

    def matches(self, topic: str) -> bool:
        """Whether `topic` leads here."""
        return self.topic_pattern.matches(topic)


def by_priority(route: Route) -> tuple[int, int]:
    """The order of routes: higher priority first, then in the order of registration."""
    return -route.priority, route.order
