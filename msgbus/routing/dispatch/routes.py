"""The frozen side of an engine: who gets which message, worked out once and kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, cast, final

from msgbus.messages.topics.pattern import is_topic
from msgbus.messages.topics.router import PatternRouter
from msgbus.routing.categories import MessageCategory
from msgbus.routing.dispatch.dispatchers import DispatcherEntry
from msgbus.routing.dispatch.metrics import DispatcherCounts
from msgbus.routing.dispatch.results import DispatchRoute, DispatchStatus
from msgbus.routing.envelope import EventEnvelope
from msgbus.routing.fanout import Step
from msgbus.routing.inputs import not_a_category

Key: TypeAlias = tuple[str, MessageCategory | None, str, type]


@final
class Plan:
    """What to do with messages of one topic, category, type and class of payload."""

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
        """`None` if the message is not valid and its topic names none."""
        self.steps = tuple(steps)
        self.counts: tuple[DispatcherCounts, ...] = tuple(step.entry.counts for step in steps)
        self.dispatcher_ids = tuple(step.entry.dispatcher_id for step in steps)
        self.route_ids = tuple(step.route_id for step in steps)
        self.status = status
        """What a dispatch ends with if there are no steps."""
        self.error_message = error_message
        self.error_code = error_code

    @property
    def is_valid(self) -> bool:
        """Whether the message is in order, even if nobody takes it."""
        return self.status is not DispatchStatus.INVALID_MESSAGE


@final
class FrozenRoutes:
    """Routes and dispatchers that no longer change, and the answers found in them.

    Safe to read from any thread: the router and the table are never written again, and
    each step on the cache is a single operation on a dict.
    """

    def __init__(
        self,
        routes: Sequence[DispatchRoute],
        dispatchers: Mapping[str, DispatcherEntry],
        cache_size: int,
    ) -> None:
        self._dispatchers = dict(dispatchers)
        self._routes = {route.route_id: route for route in routes}
        self._router = PatternRouter(cache_size=2)  # the answers are kept here
        for route in routes:
            self._router.register_route(route.pattern, route.route_id, route.priority)
        self._cache_size = cache_size
        self.cache: dict[Key, Plan] = {}

    def resolve(self, topic: str, envelope: EventEnvelope[Any]) -> Plan:
        """What to do with such a message; kept for the next one."""
        fault = _fault(topic, envelope)
        if fault is not None:
            return fault
        payload: object = envelope.payload
        kind = type(payload)
        key = (topic, envelope.category, envelope.message_type, kind)
        plan = self._make(topic, *_categories(topic, envelope), envelope.message_type, kind)
        if len(self.cache) >= self._cache_size:
            # Topics made up of ids would fill it for ever. All at once, as it is refilled
            # in microseconds and an order of age would cost every hit.
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
    ) -> Plan:
        if conflict is not None:
            return _invalid(
                f"The topic {topic!r} carries {category.segment}, and the envelope says that "
                f"{message_type} is one of the {conflict.segment}.",
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
                # A dispatcher gets a message once, by the first route that leads to it.
                steps.setdefault(entry.dispatcher_id, Step(entry, route.route_id))
            else:
                is_disabled = True
        if steps:
            return Plan(category, tuple(steps.values()))
        if is_disabled:
            return Plan(category, status=DispatchStatus.SKIPPED)
        return Plan(
            category,
            status=DispatchStatus.NO_DISPATCHER,
            error_message=(
                f"No dispatcher takes {message_type} ({category.value}) from {topic!r}. "
                f"Register a route whose pattern, category and type fit."
            ),
            error_code="NO_DISPATCHER",
        )


def _categories(
    topic: str, envelope: EventEnvelope[Any]
) -> tuple[MessageCategory, MessageCategory | None]:
    """The category of a message, and the envelope's own if that contradicts it."""
    named = MessageCategory.from_topic(topic)
    if named is None:
        return envelope.category or MessageCategory.EVENT, None
    return named, envelope.category if envelope.category not in (None, named) else None


def _fault(topic: object, envelope: EventEnvelope[Any] | object) -> Plan | None:
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


def _invalid(text: str, code: str, category: MessageCategory | None = None) -> Plan:
    return Plan(
        category, status=DispatchStatus.INVALID_MESSAGE, error_message=text, error_code=code
    )
