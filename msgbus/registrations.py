"""One handler and everything said about it, checked when it is registered."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast, final

from msgbus.config import QueueConfig
from msgbus.errors import ConfigurationError, Fault, HandlerSignatureError
from msgbus.filters import FilterLike, TypeFilter
from msgbus.messages import Command, Event, Message, SystemEvent
from msgbus.routing.topics import TopicPattern
from msgbus.signatures import Signature, handler_name, narrowed, read_handler


@final
@dataclass(frozen=True, slots=True, eq=False, kw_only=True, weakref_slot=True)
class Registration:
    """One handler and everything said about it when it was registered."""

    message_type: type[Message]
    """The class it takes. For a handler of topics, what its parameter is annotated with."""
    handler: Callable[..., Any]
    name: str
    signature: Signature
    inline: bool = False
    priority: int = 0
    concurrency: int = 1
    batch: bool = False
    timeout: float | None = None
    filter: FilterLike | None = None
    queue: QueueConfig | None = None
    named: bool = False
    """Whether the user gave the name, rather than the function."""
    pattern: TopicPattern | None = None
    """The topics it is registered for, if it is not for a class."""
    durable: bool | str | None = None
    """Whether it goes on where it was after a restart, and under which name, if said."""
    subscription: Mapping[str, Any] | None = None
    """What was said of its place in the journal."""

    @property
    def is_command(self) -> bool:
        """Whether it handles a command rather than an event."""
        return issubclass(self.message_type, Command)

    @property
    def target(self) -> type[Message] | TopicPattern:
        """What it is registered for."""
        return self.pattern or self.message_type

    @property
    def target_name(self) -> str:
        """The same as text: the name of the class, or the pattern."""
        return self.message_type.__name__ if self.pattern is None else self.pattern.pattern

    def row(self, *, in_session: bool) -> tuple[str, str]:
        """Under which handler and message type it is counted.

        Handlers of sessions are counted by function and class: names and topics may be made
        for each session, and would pile up.
        """
        if in_session:
            return handler_name(self.handler), self.message_type.__name__
        return self.name, self.target_name


def make_registration(
    message_type: type[Message],
    handler: Callable[..., Any],
    *,
    name: str | None = None,
    batch: bool = False,
    pattern: TopicPattern | None = None,
    **options: Any,
) -> Registration:
    """Check a handler against what it is registered for.

    Raises:
        HandlerSignatureError: It could never be called.
    """
    if pattern is not None:
        message_type = narrowed(handler, message_type, batch=batch)
    try:
        signature = read_handler(handler, message_type, batch=batch)
    except HandlerSignatureError as error:
        if pattern is not None:
            error.add_note(
                f"A handler of topics ({pattern}) is annotated with Event, or with one class of "
                f"events that can be found from where it is defined; it then gets only those."
            )
        raise
    return Registration(
        message_type=message_type,
        handler=handler,
        name=name or handler_name(handler),
        named=name is not None,
        signature=signature,
        batch=batch,
        pattern=pattern,
        **options,
    )


def require_command_type(message_type: object) -> None:
    """Raise unless this is a command class."""
    if not _is_class(message_type, Command):
        shown = _shown(message_type)
        message = f"{shown} is not a Command class; events are registered with bus.on(...)."
        raise ConfigurationError(message)


def read_event_target(target: object) -> tuple[type[Event], TopicPattern | None]:
    """The event class that a handler takes, and its topics if `target` is a pattern.

    Raises:
        ConfigurationError: It is neither an event class nor text.
        InvalidTopicError: It is text, but no pattern of topics.
    """
    if isinstance(target, str):
        return Event, TopicPattern(target)
    if not _is_class(target, Event):
        shown = _shown(target)
        message = (
            f"{shown} is not an Event class, nor a topic pattern such as 'shop.**'; commands "
            f"are registered with bus.handles(...)."
        )
        raise ConfigurationError(message)
    return cast("type[Event]", target), None


def registration_faults(
    registrations: Iterable[Registration], *, names_are_written: bool
) -> list[Fault]:
    """Handlers that can never be called, and message classes that share a wire name.

    Two classes of one name are no fault where the name is written nowhere.
    """
    faults: list[Fault] = []
    types_by_name: dict[str, set[type[Message]]] = {}
    for registration in registrations:
        cls = registration.message_type
        if registration.pattern is None:
            types_by_name.setdefault(cls.__wire__.name, set()).add(cls)
        if cls is SystemEvent or (registration.pattern and issubclass(cls, SystemEvent)):
            faults.append(
                Fault(
                    registration.name,
                    f"is registered for {registration.target_name} and takes {cls.__name__}, and "
                    "a system event reaches only handlers that name its exact class, so it is "
                    "never called.",
                    "Register it for the classes it wants, such as SessionEndEvent.",
                )
            )
        predicate = registration.filter
        if isinstance(predicate, TypeFilter) and not any(
            issubclass(cls, wanted) or issubclass(wanted, cls) for wanted in predicate.types
        ):
            faults.append(
                Fault(
                    registration.name,
                    f"handles {cls.__name__}, but its own filter {predicate!r} lets none through.",
                    "Change the filter or the event class.",
                )
            )
    for name, types in types_by_name.items():
        if names_are_written and len(types) > 1:
            where = ", ".join(sorted(f"{cls.__module__}.{cls.__qualname__}" for cls in types))
            faults.append(
                Fault(
                    name,
                    f"is the wire name of {len(types)} classes: {where}.",
                    'Give one of them another: class X(Event, name="shop.X").',
                )
            )
    return faults


def _is_class(message_type: object, base: type) -> bool:
    return isinstance(message_type, type) and issubclass(message_type, base)


def _shown(message_type: object) -> str:
    return str(getattr(message_type, "__name__", repr(message_type)))
