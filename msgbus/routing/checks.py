"""What is wrong with a set of routes: everything, found before the first message."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from msgbus.errors import Fault
from msgbus.messages.topics.pattern import PatternKind, TopicPattern
from msgbus.routing.categories import MessageCategory
from msgbus.routing.dispatch.dispatchers import DispatcherEntry
from msgbus.routing.dispatch.results import DispatchRoute
from msgbus.routing.segments import SegmentKind, fold


def route_faults(
    routes: Sequence[DispatchRoute], dispatchers: Mapping[str, DispatcherEntry]
) -> list[Fault]:
    """Every fault of `routes`, which come in the order in which they are tried.

    A disabled route is no fault: somebody has turned it off. It is checked like the
    others, so that turning it on is safe, but it hides nothing.
    """
    found: list[Fault] = []
    for place, route in enumerate(routes):
        found += _faults_of(route, dispatchers)
        hider = next((one for one in routes[:place] if _hides(one, route)), None)
        if hider is not None:
            found.append(
                Fault(
                    f"route {route.route_id!r}",
                    f"can never be taken: {hider.route_id!r} comes first and leads all its "
                    f"messages to the same dispatcher {route.dispatcher_id!r}.",
                    "remove one of them, or raise this one's priority.",
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
            f"leads to dispatcher {route.dispatcher_id!r}, which does not exist.",
            f"register it, or name one of those that do: {known}.",
        )
    else:
        yield from _mismatches(subject, route, dispatcher)
    named = _category_of(route.pattern)
    if named not in (None, route.message_category):
        yield Fault(
            subject,
            f"can never be taken: topics of {route.topic_pattern!r} carry {named.segment}, "
            f"and the route takes {route.message_category.segment}.",
            "change its pattern or its message_category.",
        )


def _mismatches(subject: str, route: DispatchRoute, dispatcher: DispatcherEntry) -> Iterator[Fault]:
    name = dispatcher.dispatcher_id
    if dispatcher.category is not route.message_category:
        yield Fault(
            subject,
            f"can never be taken: it takes {route.message_category.segment}, and its dispatcher "
            f"{name!r} takes {dispatcher.category.segment}.",
            "give both the same category.",
        )
    types = dispatcher.message_types
    # Where classes are taken, the name may be that of a subclass: only its payload will tell.
    if types is None or types.classes or route.message_type is None:
        return
    if route.message_type not in types.names:
        taken = ", ".join(sorted(types.names))
        yield Fault(
            subject,
            f"can never be taken: it takes {route.message_type}, and its dispatcher {name!r} "
            f"takes only {taken}.",
            "change the route's message_type or the dispatcher's message_types.",
        )


def _category_of(pattern: TopicPattern) -> MessageCategory | None:
    """The category that every topic of this pattern has, as far as its beginning says."""
    for segment in pattern.segments:
        if segment.kind is not SegmentKind.TEXT:
            break
        category = MessageCategory.from_topic(segment.text)
        if category is not None:
            return category
    return None


def _hides(first: DispatchRoute, second: DispatchRoute) -> bool:
    """Whether everything that `second` would take has already gone the way of `first`."""
    return (
        first.enabled
        and first.dispatcher_id == second.dispatcher_id
        and first.takes(second.message_category, second.message_type)
        and _covers(first.pattern, second.pattern)
    )


def _covers(wide: TopicPattern, narrow: TopicPattern) -> bool:
    """Whether `wide` certainly matches all that `narrow` does.

    Certain in the cases that people write: the same pattern, one topic among a pattern's,
    and everything. Other overlaps are left alone.
    """
    if wide == narrow or wide.pattern == "**" or _written_alike(wide, narrow):
        return True
    return narrow.is_exact and wide.matches(narrow.exact_topic)


def _written_alike(one: TopicPattern, other: TopicPattern) -> bool:
    if PatternKind.REGEX in (one.kind, other.kind):
        return False
    return fold(one.pattern) == fold(other.pattern)
