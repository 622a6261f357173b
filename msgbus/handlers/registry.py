"""Who handles what: registrations in two scopes, the bus's and each session's."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol, final

from msgbus.errors import DuplicateHandlerError
from msgbus.handlers.registration import Registration
from msgbus.handlers.registration_methods import Registrar
from msgbus.handlers.signatures import handler_name, is_lambda, place_of, source_of
from msgbus.messages.message import Message, SystemEvent, class_topic
from msgbus.messages.topics.pattern import TopicPattern

if TYPE_CHECKING:
    from msgbus.routing.routes import Route


class IRegistry(Protocol):
    """Where a bus keeps its handlers. Bring your own with `MessageBus(registry=...)`.

    The bus caches what it learns here, so a registry must tell it of every change.
    """

    def watch(self, changed: Callable[[], None]) -> None:
        """Have `changed` called after every change of content."""
        ...

    def add(
        self, registration: Registration, session_id: str | None = None, *, replace: bool = False
    ) -> Registration:
        """Take a registration, for one session or (`None`) for the bus.

        Gives it as it is kept: under another name if it had none of its own (a lambda).
        """
        ...

    def remove(self, registration: Registration, session_id: str | None = None) -> bool:
        """Forget one registration; false if it was not there."""
        ...

    def drop_session(self, session_id: str) -> None:
        """Forget everything of one session."""
        ...

    def command_handler(
        self, command_type: type[Message], session_id: str | None
    ) -> Registration | None:
        """The one handler: the session's own if it has one, else the bus's."""
        ...

    def event_handlers(
        self, event_type: type[Message], session_id: str | None, topic: str | None = None
    ) -> Sequence[Registration]:
        """All handlers of the session and of the bus, highest priority first.

        Those of the class, and those whose pattern matches `topic`, or the class's own if
        it is `None`. Patterns never match a `SystemEvent`.
        """
        ...

    def registrations(self) -> Iterable[tuple[str | None, Registration]]:
        """Everything, each with its session (`None` for the bus)."""
        ...


@final
class _Topics:
    """The handlers of one scope that are registered for topics."""

    __slots__ = ("_registrations", "_router", "_routes")

    def __init__(self) -> None:
        # Not at the top: a bus without topics does without the router.
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
        self.topics: _Topics | None = None
        self.names: dict[str, list[Registration]] = {}
        """Who has which name, by what they are registered for."""

    def command(self, command_type: type[Message]) -> Registration | None:
        for cls in command_type.__mro__:
            found = self.commands.get(cls)
            if found is not None:
                return found
        return None

    def event(self, event_type: type[Message], topic: str) -> list[Registration]:
        if issubclass(event_type, SystemEvent):
            # Only who names a system event gets it: a handler of all events would
            # otherwise hear about itself for ever.
            return self.events.get(event_type, [])
        # Once each: a handler of several classes may be there for more than one.
        found = list(
            dict.fromkeys(one for cls in event_type.__mro__ for one in self.events.get(cls, ()))
        )
        return found if self.topics is None else found + self.topics.find(event_type, topic)

    def add_event(self, registration: Registration) -> None:
        for target in registration.targets:
            self.events.setdefault(target, []).append(registration)
        if registration.pattern is not None:
            self.topics = self.topics or _Topics()
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

    def free_name(self, registration: Registration, replaced: Registration | None) -> str:
        """The name under which it can be told from all others here, `replaced` left aside.

        Raises:
            DuplicateHandlerError: Its name is taken.
        """
        name = registration.name if registration.named else handler_name(registration.handler)
        number = 1
        while True:
            tried = name if number == 1 else f"{name}#{number}"
            others = [one for one in self.names.get(tried, ()) if one is not replaced]
            same = next((one for one in others if _share_a_target(one, registration)), None)
            # All who share a name are alike, so that one of them speaks for all.
            other = same or next(iter(others), None)
            if other is None:
                return tried
            if not _are_alike(registration, other):
                raise DuplicateHandlerError(_clash(registration, other))
            if same is None:
                return tried
            if registration.named:
                raise DuplicateHandlerError(_clash(registration, same))
            number += 1

    def give_name(self, registration: Registration) -> None:
        self.names.setdefault(registration.name, []).append(registration)

    def free(self, registration: Registration) -> None:
        """Let others have its name."""
        others = self.names[registration.name]
        others.remove(registration)
        if not others:
            del self.names[registration.name]

    def all(self) -> Iterator[Registration]:
        yield from self.commands.values()
        yield from dict.fromkeys(one for found in self.events.values() for one in found)


def _are_alike(one: Registration, other: Registration) -> bool:
    """Whether two may have one name: one function, functions of one place, or lambdas."""
    if one.handler == other.handler or source_of(one.handler) == source_of(other.handler):
        return True
    return not (one.named or other.named) and is_lambda(one.handler) and is_lambda(other.handler)


def _share_a_target(one: Registration, other: Registration) -> bool:
    return not set(one.targets).isdisjoint(other.targets)


def _clash(registration: Registration, other: Registration) -> str:
    return (
        f"There is already a handler named {other.name!r} for {other.target_name} "
        f"({place_of(other.handler)}), so this one for {registration.target_name} "
        f"({place_of(registration.handler)}) needs another name: give one of them name=... . "
        f"Dead letters, circuits, policies and metrics know a handler by its name."
    )


class HandlerRegistry(Registrar[Registration]):
    """Handlers, collected by decorator or call, to be included in a bus.

    ```python
    handlers = HandlerRegistry()

    @handlers.handles(PlaceOrder)
    async def place_order(command: PlaceOrder) -> UUID: ...

    bus = MessageBus(registries=[handlers])
    ```

    Handlers added after `include` reach the bus too. The same class is the store that a
    bus uses itself; it satisfies `IRegistry`.
    """

    def __init__(self) -> None:
        self._bus_scope = _Scope()
        self._sessions: dict[str, _Scope] = {}
        self._watchers: list[weakref.WeakMethod[Callable[[], None]]] = []
        self._followers: list[weakref.WeakMethod[Callable[..., object]]] = []

    def _register(self, registration: Registration, *, replace: bool = False) -> Registration:
        registration = self.add(registration, replace=replace)
        for follower in self._followers:
            tell = follower()
            if tell is not None:
                tell(registration, replace=replace)
        return registration

    def watch(self, changed: Callable[[], None]) -> None:
        """Have a bound method called after every change; it is held only weakly."""
        self._watchers.append(weakref.WeakMethod(changed))

    def _changed(self) -> None:
        for watcher in self._watchers:
            tell = watcher()
            if tell is not None:
                tell()

    def follow(self, tell: Callable[..., object]) -> None:
        """Have a bound method told of every later registration."""
        self._followers.append(weakref.WeakMethod(tell))

    def add(
        self, registration: Registration, session_id: str | None = None, *, replace: bool = False
    ) -> Registration:
        """Take a registration, for one session or (`None`) for the bus.

        Two handlers of one name are refused, unless it is one function, for several types.
        Lambdas, and functions of one place in the code with other data (closures, bound
        methods, objects, partials), get a number where they need one: `note#2`.

        Raises:
            DuplicateHandlerError: The command has a handler, or the name is taken.
        """
        scope = self._bus_scope if session_id is None else self._sessions.get(session_id)
        if scope is None:
            scope = self._sessions[str(session_id)] = _Scope()
        replaced = self._replaced(scope, registration, replace=replace)
        name = scope.free_name(registration, replaced)
        if name != registration.name:
            registration = dataclasses.replace(registration, name=name)
        if replaced is not None:
            scope.free(replaced)
        if registration.is_command:
            scope.commands[registration.message_type] = registration
        else:
            scope.add_event(registration)
        scope.give_name(registration)
        self._changed()
        return registration

    def _replaced(
        self, scope: _Scope, registration: Registration, *, replace: bool
    ) -> Registration | None:
        """The command handler whose place it takes.

        Raises:
            DuplicateHandlerError: The command has a handler, or it handles this event already.
        """
        if registration.is_command:
            existing = scope.commands.get(registration.message_type)
            if existing is not None and not replace:
                message = (
                    f"{registration.target_name} is already handled by {existing.name}, and a "
                    f"command has exactly one handler. Pass replace=True to put "
                    f"{registration.name} in its place."
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
        """Forget one registration; false if it was not there."""
        scope = self._bus_scope if session_id is None else self._sessions.get(session_id)
        if scope is None:
            return False
        if scope.commands.get(registration.message_type) is registration:
            del scope.commands[registration.message_type]
        elif not scope.remove_event(registration):
            return False
        scope.free(registration)
        self._changed()
        return True

    def drop_session(self, session_id: str) -> None:
        """Forget everything of one session."""
        if self._sessions.pop(session_id, None) is not None:
            self._changed()

    def command_handler(
        self, command_type: type[Message], session_id: str | None
    ) -> Registration | None:
        """The one handler: the session's own if it has one, else the bus's."""
        own = self._sessions.get(session_id) if session_id is not None else None
        found = own.command(command_type) if own is not None else None
        return found or self._bus_scope.command(command_type)

    def event_handlers(
        self, event_type: type[Message], session_id: str | None, topic: str | None = None
    ) -> Sequence[Registration]:
        """All handlers of the session and of the bus, highest priority first."""
        topic = topic or class_topic(event_type)
        own = self._sessions.get(session_id) if session_id is not None else None
        found = own.event(event_type, topic) if own is not None else []
        found = found + self._bus_scope.event(event_type, topic)
        return sorted(found, key=lambda registration: -registration.priority)

    def registrations(self) -> Iterator[tuple[str | None, Registration]]:
        """Everything, each with its session (`None` for the bus)."""
        for registration in self._bus_scope.all():
            yield None, registration
        for session_id, scope in list(self._sessions.items()):
            for registration in scope.all():
                yield session_id, registration
