"""`ReplayTarget`: the handler that history is replayed to, and which part of it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, final

from msgbus.bus.subscription import Subscription
from msgbus.errors import ConfigurationError, HandlerSignatureError
from msgbus.handlers.registration import make_registration
from msgbus.handlers.signatures import annotated_classes
from msgbus.journal.codec import WireNames
from msgbus.messages.message import Event
from msgbus.messages.topics.pattern import TopicPattern

if TYPE_CHECKING:
    from msgbus.bus.durable.hub import DurableBus
    from msgbus.handlers.injection import Call
    from msgbus.handlers.registration import Registration
    from msgbus.journal.records import Record
    from msgbus.messages.message import Message


@final
class ReplayTarget:
    """One handler, ready to be called, and the messages that it gets.

    Raises:
        ConfigurationError: There is no such handler.
        HandlerSignatureError: The function could never be called.
    """

    def __init__(
        self,
        hub: DurableBus,
        to: str | Subscription | Callable[..., Any],
        *,
        names: Collection[str] | None,
        topic: str | None,
    ) -> None:
        self.registration: Registration
        self.call: Call
        classes: tuple[type[Message], ...]
        if isinstance(to, str | Subscription):
            self.registration = _registered(hub, to)
            self.call = hub.state.chain(self.registration, None)
            classes = self.registration.classes
        else:
            self.registration, classes = _of_function(to)
            self.call = hub.state.bound(self.registration)
        self.names = _names(hub, classes, names)
        """Wire names of its messages; `None` for all."""
        self._topic = None if topic is None else TopicPattern(topic)
        queue = self.registration.queue or hub.state.config.queue
        self.size = queue.batch_size if self.registration.batch else 1
        """Events that it gets at a time."""

    def wants(self, record: Record) -> bool:
        """Tell whether a record is for it, by its topic."""
        patterns = (self.registration.pattern, self._topic)
        return all(one is None or one.matches(record.topic) for one in patterns)


def _registered(hub: DurableBus, to: str | Subscription) -> Registration:
    """Return the registration of a handler, by its own name or that of its subscription."""
    known = [
        one
        for session_id, one in hub.state.registry.registrations()
        if session_id is None and not one.is_command
    ]
    if isinstance(to, Subscription):
        found = [one for one in known if to.registration is one]
    else:
        found = [one for one in known if to in _names_of(hub, one)]
    if len(found) == 1:
        return found[0]
    if found:
        choice = ", ".join(sorted(name for one in found for name in _names_of(hub, one)[:1]))
        message = f"{len(found)} event handlers are called {to!r}. Name one of them: {choice}."
    else:
        names = sorted({name for one in known for name in _names_of(hub, one)})
        shown = f"It has: {', '.join(names)}" if names else "It has none"
        message = f"This bus has no event handler {to!r}. {shown}."
    raise ConfigurationError(message)


def _names_of(hub: DurableBus, registration: Registration) -> list[str]:
    handler = hub.handlers.of(registration)
    full = f"{registration.name}[{registration.target_name}]"
    return [full if handler is None else handler.name, registration.name, full]


def _of_function(
    function: Callable[..., Any],
) -> tuple[Registration, tuple[type[Message], ...]]:
    try:
        classes, is_list = annotated_classes(function, Event)
        return make_registration(classes[0], function, batch=is_list), classes
    except HandlerSignatureError as error:
        error.add_note(
            "The annotation of its first parameter says which events a function is shown: an "
            "event class that can be found from where it is defined, a union of them, or Event."
        )
        raise


def _names(
    hub: DurableBus, classes: tuple[type[Message], ...], names: Collection[str] | None
) -> Collection[str] | None:
    if isinstance(names, str):
        names = (names,)
    if Event in classes:
        # For the classes to be known by the time their records are read.
        len(WireNames(Event, hub.codec))
        return None if names is None else frozenset(names)
    known = frozenset[str]().union(*(WireNames(one, hub.codec) for one in classes))
    return known if names is None else known & frozenset(names)
