"""Those who do the work: the protocol, and the registry that collects them."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Awaitable, Callable, Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast, final

from msgbus.errors import ConfigurationError, DuplicateHandlerError, EngineFrozenError
from msgbus.protocols import require_members
from msgbus.routing.categories import MessageCategory
from msgbus.routing.dispatch.results import DispatchResult
from msgbus.routing.envelope import EventEnvelope, message_type_name
from msgbus.routing.inputs import require_category, require_id

if TYPE_CHECKING:
    from msgbus.routing.dispatch.metrics import DispatcherCounts

DispatcherOutput: TypeAlias = str | list[str] | DispatchResult | None
"""What a dispatcher gives: the topics its output goes to, or a whole result."""

DispatchFunction: TypeAlias = Callable[
    [EventEnvelope[Any]], Awaitable[DispatcherOutput] | DispatcherOutput
]
"""A dispatcher as a function; a sync one runs in a thread."""

MessageTypes: TypeAlias = Collection[str | type]


class MessageDispatcher(Protocol):
    """A dispatcher as an object that says by itself what it is for."""

    @property
    def dispatcher_id(self) -> str:
        """Its id, unique in an engine."""
        ...

    @property
    def category(self) -> MessageCategory:
        """The sort of messages it takes."""
        ...

    @property
    def message_types(self) -> MessageTypes | None:
        """The messages it takes, by name or class, subclasses included; `None` or none for all."""
        ...

    @property
    def node_kind(self) -> str:
        """What part it plays, as `"reducer"`: told in descriptions, never acted upon."""
        ...

    def handle(
        self, envelope: EventEnvelope[Any]
    ) -> Awaitable[DispatcherOutput] | DispatcherOutput:
        """Do the work."""
        ...


@final
@dataclass(frozen=True, slots=True)
class AcceptedTypes:
    """The messages that a dispatcher takes: by name, and by class with its subclasses."""

    names: frozenset[str]
    """Given names, and the names of given classes."""

    classes: tuple[type, ...]

    def take(self, name: str, payload_type: type) -> bool:
        """Whether a message of this name, with a payload of this class, is among them."""
        return name in self.names or issubclass(payload_type, self.classes)


@final
@dataclass(frozen=True, slots=True)
class DispatcherEntry:
    """A dispatcher as an engine keeps it."""

    dispatcher_id: str
    function: DispatchFunction
    category: MessageCategory
    message_types: AcceptedTypes | None
    timeout: float | None
    is_async: bool
    counts: DispatcherCounts

    def takes(self, message_type: str, payload_type: type) -> bool:
        """Whether it takes messages of this name and class of payload."""
        return self.message_types is None or self.message_types.take(message_type, payload_type)


def accepted_types(message_types: MessageTypes | None) -> AcceptedTypes | None:
    """Read message types, given by name or class; `None` for all of them.

    Raises:
        ConfigurationError: A single text, which would be read letter by letter, or one that is
            neither a name nor a class that `issubclass` can be asked about.
    """
    if isinstance(message_types, str):
        message = f"message_types={message_types!r} is one text; give a set: {{{message_types!r}}}."
        raise ConfigurationError(message)
    if not message_types:
        return None
    classes = tuple(one for one in message_types if isinstance(one, type))
    for one in classes:
        _require_class(one)
    return AcceptedTypes(frozenset(_type_name(one) for one in message_types), classes)


def _require_class(one: type) -> None:
    try:
        issubclass(object, one)
    except TypeError as error:  # a protocol, for instance
        message = f"{one.__name__} in message_types cannot be used to find subclasses: {error}."
        raise ConfigurationError(message) from None


def _type_name(message_type: str | type) -> str:
    if isinstance(message_type, type):
        return message_type_name(message_type)
    require_id("Each of message_types", message_type)
    return message_type


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling `function` gives something to await."""
    while hasattr(function, "func"):  # functools.partial
        function = cast("Any", function).func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 (the method itself is asked)
    )


@final
class DispatcherRegistry:
    """Dispatcher objects, collected before they go into an engine.

    ```python
    registry = DispatcherRegistry()
    registry.register_dispatcher(OrderDispatcher())
    engine.include(registry)
    ```
    """

    def __init__(self) -> None:
        self._dispatchers: dict[str, MessageDispatcher] = {}
        self._lock = threading.Lock()
        self._is_frozen = False

    def register_dispatcher(self, dispatcher: MessageDispatcher) -> None:
        """Take one in.

        Raises:
            ConfigurationError: It lacks a part of the `MessageDispatcher` protocol, its id is
                blank, or its category is none.
            DuplicateHandlerError: There is one of its id.
            EngineFrozenError: The registry is frozen.
        """
        fix = "See msgbus.routing.MessageDispatcher for what they are."
        require_members(dispatcher, MessageDispatcher, "The dispatcher", fix)
        if not callable(dispatcher.handle):
            message = f"The dispatcher {dispatcher!r:.60} has a handle that is no method."
            raise ConfigurationError(message)
        require_id(f"The dispatcher_id of {type(dispatcher).__name__}", dispatcher.dispatcher_id)
        require_category(f"dispatcher {dispatcher.dispatcher_id!r}", dispatcher.category)
        accepted_types(dispatcher.message_types)
        with self._lock:
            if self._is_frozen:
                raise EngineFrozenError(what=f"dispatcher {dispatcher.dispatcher_id!r}")
            if dispatcher.dispatcher_id in self._dispatchers:
                raise duplicate("dispatcher", dispatcher.dispatcher_id)
            self._dispatchers[dispatcher.dispatcher_id] = dispatcher

    def unregister_dispatcher(self, dispatcher_id: str) -> bool:
        """Take one out; false if there was none.

        Raises:
            EngineFrozenError: The registry is frozen.
        """
        with self._lock:
            if self._is_frozen:
                raise EngineFrozenError(what=f"removal of dispatcher {dispatcher_id!r}")
            return self._dispatchers.pop(dispatcher_id, None) is not None

    def freeze(self) -> None:
        """Take no more from now on."""
        with self._lock:
            self._is_frozen = True

    @property
    def is_frozen(self) -> bool:
        """Whether it takes no more."""
        return self._is_frozen

    def get_dispatcher(self, dispatcher_id: str) -> MessageDispatcher | None:
        """The one of this id."""
        return self._dispatchers.get(dispatcher_id)

    def get_dispatchers(
        self, category: MessageCategory, message_type: str | type | None = None
    ) -> list[MessageDispatcher]:
        """Those that take such messages, in the order they came.

        Only a class, not a name, finds those that take a base class of it.

        Raises:
            ConfigurationError: `category` is none.
        """
        require_category("the dispatchers that are looked for", category)
        found = [one for one in self if one.category is category]
        if message_type is None:
            return found
        kind = message_type if isinstance(message_type, type) else object
        name = _type_name(message_type)
        return [
            one
            for one in found
            if (types := accepted_types(one.message_types)) is None or types.take(name, kind)
        ]

    def __iter__(self) -> Iterator[MessageDispatcher]:
        return iter(list(self._dispatchers.values()))

    def __len__(self) -> int:
        return len(self._dispatchers)


def duplicate(what: str, name: str) -> DuplicateHandlerError:
    """The error for a second thing of one id."""
    message = f"There is already a {what} {name!r}. Give this one another id."
    return DuplicateHandlerError(message)
