"""The handler registry: registrations of the bus and of each session."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol, final

from msgbus.errors import DuplicateHandlerError
from msgbus.handlers.registration import Registration
from msgbus.handlers.registration_methods import RegistrationMethods
from msgbus.handlers.signatures import code_identity, handler_name, is_lambda, location_text
from msgbus.messages.message import Message, SystemEvent, class_topic
from msgbus.messages.topics.pattern import TopicPattern

if TYPE_CHECKING:
    from msgbus.messages.topics.index import Route


class IRegistry(Protocol):
    """Protocol of handler registries. Pass your own with `MessageBus(registry=...)`.

    The bus caches lookups, so a registry must report every change to its watchers.
    """

    def watch(self, changed: Callable[[], None]) -> None:
        """Call `changed` after every change."""
        ...

    def add(
        self, registration: Registration, session_id: str | None = None, *, replace: bool = False
    ) -> Registration:
        """Add a registration to one session or (`None`) to the bus.

        Return it as stored: it may have got another name, as lambdas do.
        """
        ...

    def remove(self, registration: Registration, session_id: str | None = None) -> bool:
        """Remove one registration; return false if it was not there."""
        ...

    def drop_session(self, session_id: str) -> None:
        """Remove all registrations of one session."""
        ...

    def command_handler(
        self, command_type: type[Message], session_id: str | None
    ) -> Registration | None:
        """Return the command's handler: that of the session, else that of the bus."""
        ...

    def event_handlers(
        self, event_type: type[Message], session_id: str | None, topic: str | None = None
    ) -> Sequence[Registration]:
        """Return the handlers of the session and of the bus, highest priority first.

        Those of the class, and those whose pattern matches `topic`, by default the topic of
        the class. Patterns never match a `SystemEvent`.
        """
        ...

    def registrations(self) -> Iterable[tuple[str | None, Registration]]:
        """Iterate over all registrations, each with its session (`None` for the bus)."""
        ...


@final
class _TopicHandlers:
    """The handlers of one scope that are registered for topic patterns."""

    __slots__ = ("_registrations", "_router", "_routes")

    def __init__(self) -> None:
        # Not at the top: a bus without topics does not import the router.
        from msgbus.messages.topics.router import PatternRouter

        self._router = PatternRouter()
        self._registrations: dict[Route, Registration] = {}
        self._routes: dict[Registration, Route] = {}

    def add(self, registration: Registration, pattern: TopicPattern) -> None:
        route = self._router.register_route(pattern, registration.name, registration.priority)
        self._registrations[route] = registration
        self._routes[registration] = route

    def remove(self, registration: Registration) -> None:
        route = self._routes.pop(registration, None)
        if route is not None:
            self._router.unregister(route)
            del self._registrations[route]

    def find(self, event_type: type[Message], topic: str) -> list[Registration]:
        found = [self._registrations[route] for route in self._router.find_all_routes(topic)]
        return [one for one in found if issubclass(event_type, one.message_type)]


@final
class _Scope:
    """The handlers of the bus, or of one session."""

    __slots__ = ("commands", "events", "names", "topics")

    def __init__(self) -> None:
        self.commands: dict[type[Message], Registration] = {}
        self.events: dict[type[Message] | TopicPattern, list[Registration]] = {}
        self.topics: _TopicHandlers | None = None
        self.names: dict[str, list[Registration]] = {}
        """The registrations of each name."""

    def command(self, command_type: type[Message]) -> Registration | None:
        for cls in command_type.__mro__:
            found = self.commands.get(cls)
            if found is not None:
                return found
        return None

    def event(self, event_type: type[Message], topic: str) -> list[Registration]:
        if issubclass(event_type, SystemEvent):
            # Only handlers of the exact class: a handler of all events would otherwise
            # cause system events about itself without end.
            return self.events.get(event_type, [])
        # Deduplicated: a handler of several classes may match more than once.
        found = list(
            dict.fromkeys(one for cls in event_type.__mro__ for one in self.events.get(cls, ()))
        )
        return found if self.topics is None else found + self.topics.find(event_type, topic)

    def add_event(self, registration: Registration) -> None:
        for target in registration.targets:
            self.events.setdefault(target, []).append(registration)
        if registration.pattern is not None:
            self.topics = self.topics or _TopicHandlers()
            self.topics.add(registration, registration.pattern)

    def remove_event(self, registration: Registration) -> bool:
        for target in registration.targets:
            registered = self.events.get(target, [])
            if registration not in registered:
                return False
            registered.remove(registration)
            if not registered:
                del self.events[target]
        if self.topics is not None:
            self.topics.remove(registration)
        return True

    def unique_name(self, registration: Registration, replaced: Registration | None) -> str:
        """Return a name that no other registration has, except `replaced`.

        Raises:
            DuplicateHandlerError: Another handler has its name.
        """
        name = registration.name if registration.named else handler_name(registration.handler)
        number = 1
        while True:
            candidate = name if number == 1 else f"{name}#{number}"
            others = [one for one in self.names.get(candidate, ()) if one is not replaced]
            same = next((one for one in others if _share_a_target(one, registration)), None)
            # All registrations of one name are alike: checking one is enough.
            other = same or next(iter(others), None)
            if other is None:
                return candidate
            if not _may_share_name(registration, other):
                raise DuplicateHandlerError(_name_conflict(registration, other))
            if same is None:
                return candidate
            if registration.named:
                raise DuplicateHandlerError(_name_conflict(registration, same))
            number += 1

    def add_name(self, registration: Registration) -> None:
        self.names.setdefault(registration.name, []).append(registration)

    def release_name(self, registration: Registration) -> None:
        """Release its name."""
        others = self.names[registration.name]
        others.remove(registration)
        if not others:
            del self.names[registration.name]

    def all(self) -> Iterator[Registration]:
        yield from self.commands.values()
        yield from dict.fromkeys(one for found in self.events.values() for one in found)


def _may_share_name(one: Registration, other: Registration) -> bool:
    """Return whether two may share a name: the same code, or lambdas."""
    if one.handler == other.handler or code_identity(one.handler) == code_identity(other.handler):
        return True
    return not (one.named or other.named) and is_lambda(one.handler) and is_lambda(other.handler)


def _share_a_target(one: Registration, other: Registration) -> bool:
    return not set(one.targets).isdisjoint(other.targets)


def _name_conflict(registration: Registration, other: Registration) -> str:
    return (
        f"Two handlers are named {other.name!r}: one for {other.target_name} "
        f"({location_text(other.handler)}) and one for {registration.target_name} "
        f"({location_text(registration.handler)}). Give one of them another name with name=. "
        f"Dead letters, circuits, policies and metrics identify a handler by its name."
    )


class HandlerRegistry(RegistrationMethods[Registration]):
    """A collection of handlers, to be included in a bus.

    ```python
    handlers = HandlerRegistry()

    @handlers.handles(PlaceOrder)
    async def place_order(command: PlaceOrder) -> UUID: ...

    bus = MessageBus(registries=[handlers])
    ```

    Handlers added after `include` are added to the bus too. A bus keeps its own handlers in
    one of these; it implements `IRegistry`.
    """

    def __init__(self) -> None:
        self._bus_scope = _Scope()
        self._sessions: dict[str, _Scope] = {}
        self._watchers: list[weakref.WeakMethod[Callable[[], None]]] = []
        self._followers: list[weakref.WeakMethod[Callable[..., object]]] = []

    def _register(self, registration: Registration, *, replace: bool = False) -> Registration:
        registration = self.add(registration, replace=replace)
        for follower in self._followers:
            callback = follower()
            if callback is not None:
                callback(registration, replace=replace)
        return registration

    def watch(self, changed: Callable[[], None]) -> None:
        """Call a bound method, held weakly, after every change."""
        self._watchers.append(weakref.WeakMethod(changed))

    def _changed(self) -> None:
        for watcher in self._watchers:
            callback = watcher()
            if callback is not None:
                callback()

    def follow(self, callback: Callable[..., object]) -> None:
        """Call a bound method, held weakly, with every later registration."""
        self._followers.append(weakref.WeakMethod(callback))

    def add(
        self, registration: Registration, session_id: str | None = None, *, replace: bool = False
    ) -> Registration:
        """Add a registration to one session or (`None`) to the bus.

        Two handlers of one name are refused, unless they run the same code. Lambdas, and the
        same code with other data (closures, bound methods, objects, partials) for the same
        type, get a number: `note#2`.

        Raises:
            DuplicateHandlerError: The command has a handler, or another handler has its name.
        """
        scope = self._bus_scope if session_id is None else self._sessions.get(session_id)
        if scope is None:
            scope = self._sessions[str(session_id)] = _Scope()
        replaced = self._replaced(scope, registration, replace=replace)
        name = scope.unique_name(registration, replaced)
        if name != registration.name:
            registration = dataclasses.replace(registration, name=name)
        if replaced is not None:
            scope.release_name(replaced)
        if registration.is_command:
            scope.commands[registration.message_type] = registration
        else:
            scope.add_event(registration)
        scope.add_name(registration)
        self._changed()
        return registration

    def _replaced(
        self, scope: _Scope, registration: Registration, *, replace: bool
    ) -> Registration | None:
        """Return the command handler that it replaces.

        Raises:
            DuplicateHandlerError: The command has a handler, or it handles this event already.
        """
        if registration.is_command:
            existing = scope.commands.get(registration.message_type)
            if existing is not None and not replace:
                message = (
                    f"{registration.target_name} is already handled by {existing.name}, and a "
                    f"command has exactly one handler. Pass replace=True to replace it with "
                    f"{registration.name}."
                )
                raise DuplicateHandlerError(message)
            return existing
        others = [one for target in registration.targets for one in scope.events.get(target, ())]
        for other in others:
            is_renamed = registration.named and registration.name != other.name
            if other.handler == registration.handler and not is_renamed:
                message = (
                    f"{other.name} already handles {registration.target_name}. "
                    f"To run it twice for each event, give the second one a name=."
                )
                raise DuplicateHandlerError(message)
        return None

    def remove(self, registration: Registration, session_id: str | None = None) -> bool:
        """Remove one registration; return false if it was not there."""
        scope = self._bus_scope if session_id is None else self._sessions.get(session_id)
        if scope is None:
            return False
        if scope.commands.get(registration.message_type) is registration:
            del scope.commands[registration.message_type]
        elif not scope.remove_event(registration):
            return False
        scope.release_name(registration)
        self._changed()
        return True

    def drop_session(self, session_id: str) -> None:
        """Remove all registrations of one session."""
        if self._sessions.pop(session_id, None) is not None:
            self._changed()

    def command_handler(
        self, command_type: type[Message], session_id: str | None
    ) -> Registration | None:
        """Return the command's handler: that of the session, else that of the bus."""
        own = self._sessions.get(session_id) if session_id is not None else None
        found = own.command(command_type) if own is not None else None
        return found or self._bus_scope.command(command_type)

    def event_handlers(
        self, event_type: type[Message], session_id: str | None, topic: str | None = None
    ) -> Sequence[Registration]:
        """Return the handlers of the session and of the bus, highest priority first."""
        topic = topic or class_topic(event_type)
        own = self._sessions.get(session_id) if session_id is not None else None
        found = own.event(event_type, topic) if own is not None else []
        found = found + self._bus_scope.event(event_type, topic)
        return sorted(found, key=lambda registration: -registration.priority)

    def registrations(self) -> Iterator[tuple[str | None, Registration]]:
        """Iterate over all registrations, each with its session (`None` for the bus)."""
        for registration in self._bus_scope.all():
            yield None, registration
        for session_id, scope in list(self._sessions.items()):
            for registration in scope.all():
                yield session_id, registration
