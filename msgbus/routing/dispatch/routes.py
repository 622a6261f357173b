"""Routes of a dispatch engine: validation, and the cached plan of each kind of message."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeAlias, cast, final

from msgbus.errors import Fault
from msgbus.messages.topics.pattern import PatternKind, SegmentKind, TopicPattern, fold, is_topic
from msgbus.messages.topics.router import PatternRouter
from msgbus.routing.dispatch.dispatchers import DispatcherEntry, Step
from msgbus.routing.dispatch.metrics import DispatcherCounts
from msgbus.routing.dispatch.results import DispatchStatus
from msgbus.routing.envelope import (
    EventEnvelope,
    Id,
    MessageCategory,
    not_a_category,
    require_category,
)
from msgbus.runtime.arguments import require_id, require_priority

Key: TypeAlias = tuple[str, MessageCategory | None, str, type]


@final
@dataclass(frozen=True)
class DispatchRoute:
    """A route from a topic pattern, a category and a type to a dispatcher.

    Raises:
        InvalidTopicError: `topic_pattern` is not valid.
        ConfigurationError: An id or `message_type` is blank, `message_category` is not a
            `MessageCategory`, or `priority` is not a whole number.
    """

    route_id: str
    topic_pattern: str
    message_category: MessageCategory
    dispatcher_id: str
    message_type: str | None = None
    """Only messages of this type name; `None` for all."""

    priority: int = 0
    """Higher comes first, then the order of registration."""

    enabled: bool = True
    description: str = ""
    correlation_id: Id | None = None
    metadata: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    pattern: TopicPattern = field(init=False, repr=False, compare=False)
    """`topic_pattern`, compiled."""

    def __post_init__(self) -> None:
        """Validate the fields and compile the pattern."""
        require_id("A route's id", self.route_id)
        what = f"route {self.route_id!r}"
        require_category(what, self.message_category)
        require_id(f"The dispatcher_id of {what}", self.dispatcher_id)
        if self.message_type is not None:
            require_id(f"The message_type of {what}", self.message_type)
        require_priority(what, self.priority)
        object.__setattr__(self, "pattern", TopicPattern(self.topic_pattern))
        object.__setattr__(self, "metadata", MappingProxyType(dict(self.metadata)))

    def matches_topic(self, topic: str) -> bool:
        """Return whether the pattern matches `topic`, whether or not the route is enabled."""
        return self.pattern.matches(topic)

    def matches(
        self, topic: str, category: MessageCategory, message_type: str | None = None
    ) -> bool:
        """Return whether the route is enabled and matches such a message."""
        return self.enabled and self.takes(category, message_type) and self.matches_topic(topic)

    def takes(self, category: MessageCategory, message_type: str | None) -> bool:
        """Return whether category and type match, whatever the topic."""
        return self.message_category is category and self.message_type in (None, message_type)


def route_faults(
    routes: Sequence[DispatchRoute], dispatchers: Mapping[str, DispatcherEntry]
) -> list[Fault]:
    """Return every fault of `routes`, which are sorted by priority.

    A disabled route is not a fault. It is checked like the others, so that enabling it is safe,
    but it hides no other route.
    """
    found: list[Fault] = []
    for index, route in enumerate(routes):
        found += _faults_of(route, dispatchers)
        hider = next((one for one in routes[:index] if _hides(one, route)), None)
        if hider is not None:
            found.append(
                Fault(
                    f"route {route.route_id!r}",
                    f"can never match: {hider.route_id!r} comes first and sends all its "
                    f"messages to the same dispatcher {route.dispatcher_id!r}.",
                    "remove one of them, or raise the priority of this one.",
                )
            )
    return found


def _faults_of(route: DispatchRoute, dispatchers: Mapping[str, DispatcherEntry]) -> Iterator[Fault]:
    subject = f"route {route.route_id!r}"
    dispatcher = dispatchers.get(route.dispatcher_id)
    if dispatcher is None:
        known = ", ".join(map(repr, dispatchers)) or "none"
        yield Fault(
            subject,
            f"names dispatcher {route.dispatcher_id!r}, which does not exist.",
            f"register it, or name one of these: {known}.",
        )
    else:
        yield from _mismatches(subject, route, dispatcher)
    named = _category_of(route.pattern)
    if named not in (None, route.message_category):
        yield Fault(
            subject,
            f"can never match: topics of {route.topic_pattern!r} carry {named.segment}, "
            f"and the route takes {route.message_category.segment}.",
            "change its pattern or its message_category.",
        )


def _mismatches(subject: str, route: DispatchRoute, dispatcher: DispatcherEntry) -> Iterator[Fault]:
    name = dispatcher.dispatcher_id
    if dispatcher.category is not route.message_category:
        yield Fault(
            subject,
            f"can never match: it takes {route.message_category.segment}, and its dispatcher "
            f"{name!r} takes {dispatcher.category.segment}.",
            "give both the same category.",
        )
    types = dispatcher.message_types
    # With classes the name may be that of a subclass, which only the payload shows.
    if types is None or types.classes or route.message_type is None:
        return
    if route.message_type not in types.names:
        taken = ", ".join(sorted(types.names))
        yield Fault(
            subject,
            f"can never match: it takes {route.message_type}, and its dispatcher {name!r} "
            f"takes only {taken}.",
            "change the route's message_type or the dispatcher's message_types.",
        )


def _category_of(pattern: TopicPattern) -> MessageCategory | None:
    """Return the category that the plain segments at the start of a pattern name."""
    for segment in pattern.segments:
        if segment.kind is not SegmentKind.TEXT:
            break
        category = MessageCategory.from_topic(segment.text)
        if category is not None:
            return category
    return None


def _hides(first: DispatchRoute, second: DispatchRoute) -> bool:
    """Return whether `first` takes every message that `second` would take."""
    return (
        first.enabled
        and first.dispatcher_id == second.dispatcher_id
        and first.takes(second.message_category, second.message_type)
        and _covers(first.pattern, second.pattern)
    )


def _covers(wide: TopicPattern, narrow: TopicPattern) -> bool:
    """Return whether `wide` matches everything that `narrow` does.

    Detected for equal patterns, for an exact topic, and for `**`; other overlaps are not.
    """
    if wide == narrow or wide.pattern == "**" or _is_same_text(wide, narrow):
        return True
    return narrow.is_exact and wide.matches(narrow.exact_topic)


def _is_same_text(one: TopicPattern, other: TopicPattern) -> bool:
    if PatternKind.REGEX in (one.kind, other.kind):
        return False
    return fold(one.pattern) == fold(other.pattern)


@final
class DispatchPlan:
    """The dispatchers of messages of one topic, category, type and payload class."""

    __slots__ = (
        "category",
        "counts",
        "dispatcher_ids",
        "error_code",
        "error_message",
        "route_ids",
        "status",
        "steps",
    )

    def __init__(
        self,
        category: MessageCategory | None,
        steps: Sequence[Step] = (),
        *,
        status: DispatchStatus = DispatchStatus.ROUTED,
        error_message: str | None = None,
        error_code: str | None = None,
    ) -> None:
        self.category = category
        """`None` if the message is not valid and its topic names no category."""
        self.steps = tuple(steps)
        self.counts: tuple[DispatcherCounts, ...] = tuple(step.entry.counts for step in steps)
        self.dispatcher_ids = tuple(step.entry.dispatcher_id for step in steps)
        self.route_ids = tuple(step.route_id for step in steps)
        self.status = status
        """The status of the dispatch if there are no steps."""
        self.error_message = error_message
        self.error_code = error_code

    @property
    def is_valid(self) -> bool:
        """Whether the message is valid, with or without dispatchers."""
        return self.status is not DispatchStatus.INVALID_MESSAGE


@final
class FrozenRoutes:
    """The routes and dispatchers of a frozen engine, and the plans cached by kind of message.

    Safe to read from any thread: the router and the table never change, and each access to the
    cache is a single operation on a dict.
    """

    def __init__(
        self,
        routes: Sequence[DispatchRoute],
        dispatchers: Mapping[str, DispatcherEntry],
        cache_size: int,
    ) -> None:
        self._dispatchers = dict(dispatchers)
        self._routes = {route.route_id: route for route in routes}
        self._router = PatternRouter(cache_size=2)  # plans are cached here instead
        for route in routes:
            self._router.register_route(route.pattern, route.route_id, route.priority)
        self._cache_size = cache_size
        self.cache: dict[Key, DispatchPlan] = {}

    def resolve(self, topic: str, envelope: EventEnvelope[Any]) -> DispatchPlan:
        """Return the plan of such a message, and cache it."""
        fault = _fault(topic, envelope)
        if fault is not None:
            return fault
        payload: object = envelope.payload
        kind = type(payload)
        key = (topic, envelope.category, envelope.message_type, kind)
        plan = self._make(topic, *_categories(topic, envelope), envelope.message_type, kind)
        if len(self.cache) >= self._cache_size:
            # Topics that contain ids would fill it without end. Cleared as a whole: it refills in
            # microseconds, and an order of age would cost every hit.
            self.cache.clear()
        self.cache[key] = plan
        return plan

    def _make(
        self,
        topic: str,
        category: MessageCategory,
        conflict: MessageCategory | None,
        message_type: str,
        payload_type: type,
    ) -> DispatchPlan:
        if conflict is not None:
            return _invalid(
                f"The topic {topic!r} carries {category.segment}, but the envelope of "
                f"{message_type} has the category {conflict.value}.",
                "CATEGORY_MISMATCH",
                category,
            )
        steps: dict[str, Step] = {}
        is_disabled = False
        for found in self._router.find_all_routes(topic):
            route = self._routes[found.endpoint_id]
            entry = self._dispatchers[route.dispatcher_id]
            if not (
                route.takes(category, message_type) and entry.takes(message_type, payload_type)
            ):
                continue
            if route.enabled:
                # A dispatcher gets a message once, by its first matching route.
                steps.setdefault(entry.dispatcher_id, Step(entry, route.route_id))
            else:
                is_disabled = True
        if steps:
            return DispatchPlan(category, tuple(steps.values()))
        if is_disabled:
            return DispatchPlan(category, status=DispatchStatus.SKIPPED)
        return DispatchPlan(
            category,
            status=DispatchStatus.NO_DISPATCHER,
            error_message=(
                f"No dispatcher takes {message_type} ({category.value}) from {topic!r}. "
                f"Register a route whose pattern, category and type match."
            ),
            error_code="NO_DISPATCHER",
        )


def _categories(
    topic: str, envelope: EventEnvelope[Any]
) -> tuple[MessageCategory, MessageCategory | None]:
    """Return the category of a message, and the envelope's own if that contradicts it."""
    named = MessageCategory.from_topic(topic)
    if named is None:
        return envelope.category or MessageCategory.EVENT, None
    return named, envelope.category if envelope.category not in (None, named) else None


def _fault(topic: object, envelope: EventEnvelope[Any] | object) -> DispatchPlan | None:
    if not isinstance(topic, str) or not is_topic(topic):
        text = f"{topic!r:.80} is not a topic: segments joined by dots, none of them empty."
        return _invalid(text, "INVALID_TOPIC")
    if not isinstance(envelope, EventEnvelope):
        text = (
            f"{type(envelope).__name__} is not an EventEnvelope: wrap it, EventEnvelope(payload)."
        )
        return _invalid(text, "INVALID_ENVELOPE")
    name, category = cast("object", envelope.message_type), cast("object", envelope.category)
    if not isinstance(name, str):
        return _invalid(f"message_type={name!r:.80} must be text.", "INVALID_ENVELOPE")
    if category is not None and not isinstance(category, MessageCategory):
        return _invalid(not_a_category(f"a {name}", category), "INVALID_ENVELOPE")
    return None


def _invalid(text: str, code: str, category: MessageCategory | None = None) -> DispatchPlan:
    return DispatchPlan(
        category, status=DispatchStatus.INVALID_MESSAGE, error_message=text, error_code=code
    )
