"""Registrations: a handler with its message types and options, checked when registered."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from inspect import isclass, isroutine
from types import UnionType
from typing import Any, Union, cast, final, get_args, get_origin

from msgbus.errors import ConfigurationError, Fault, HandlerSignatureError
from msgbus.handlers.config import QueueConfig
from msgbus.handlers.filters import FilterLike, TypeFilter
from msgbus.handlers.injection import per_message
from msgbus.handlers.signatures import (
    HandlerClass,
    Signature,
    annotated_subclass,
    handler_name,
    read_handler,
)
from msgbus.messages.message import Command, Event, Message, SystemEvent
from msgbus.messages.topics.pattern import TopicPattern


@final
@dataclass(frozen=True, slots=True, eq=False, kw_only=True, weakref_slot=True)
class Registration:
    """One handler with its message types and options."""

    message_type: type[Message]
    """The class it handles; of several, their nearest common base. For a topic pattern, the
    annotation of its parameter."""
    handler: Callable[..., Any]
    """The function, object or class that was registered."""
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
    """Whether the name was given with `name=`."""
    pattern: TopicPattern | None = None
    """The topic pattern it is registered for, if not for a class."""
    several: tuple[type[Message], ...] = ()
    """The classes it is registered for, if more than one."""
    durable: bool | str | None = None
    """Whether it continues at its cursor after a restart; a string is the subscription's name."""
    subscription: Mapping[str, Any] | None = None
    """Options of its durable subscription."""
    source: HandlerClass | None = None
    """How to instantiate it, if it is a class."""
    target_key: str = field(init=False)
    """The key of dead letters: the wire names, or `topic:` and the pattern."""

    def __post_init__(self) -> None:
        key = " | ".join(cls.__wire__.name for cls in self.classes)
        if self.pattern is not None:
            key = f"topic:{self.pattern.pattern}"
        object.__setattr__(self, "target_key", key)

    @property
    def is_command(self) -> bool:
        """Whether it handles a command rather than an event."""
        return issubclass(self.message_type, Command)

    @property
    def classes(self) -> tuple[type[Message], ...]:
        """The classes it is registered for."""
        return self.several or (self.message_type,)

    @property
    def targets(self) -> tuple[type[Message] | TopicPattern, ...]:
        """The classes or the pattern it is registered for."""
        return self.classes if self.pattern is None else (self.pattern,)

    @property
    def target_name(self) -> str:
        """The class names or the pattern, as text."""
        if self.pattern is not None:
            return self.pattern.pattern
        return " | ".join(cls.__name__ for cls in self.classes)

    def stats_key(self, *, in_session: bool) -> tuple[str, str]:
        """Return the handler name and message type under which it is counted.

        Handlers of sessions are counted by function and class: names and topics of each
        session would be unbounded.
        """
        if in_session:
            classes = " | ".join(cls.__name__ for cls in self.classes)
            return handler_name(self.handler), classes
        return self.name, self.target_name


def make_registration(
    message_type: type[Message] | tuple[type[Message], ...],
    handler: Any,
    *,
    name: str | None = None,
    batch: bool = False,
    pattern: TopicPattern | None = None,
    **options: Any,
) -> Registration:
    """Check a handler against its message types, and make its registration.

    Raises:
        HandlerSignatureError: It could never be called.
    """
    classes = message_type if isinstance(message_type, tuple) else (message_type,)
    is_per_message = isinstance(handler, per_message)
    if is_per_message:
        handler = _class_per_message(cast("per_message[Any]", handler), classes[0])
    if pattern is not None:
        classes = (annotated_subclass(handler, classes[0], batch=batch),)
    try:
        signature = read_handler(handler, classes[0], batch=batch)
        for cls in classes[1:]:
            read_handler(handler, cls, batch=batch)
    except HandlerSignatureError as error:
        if pattern is not None:
            error.add_note(
                f"A handler of topics ({pattern}) is annotated with Event, or with one class of "
                f"events that can be found from where it is defined; it then gets only those."
            )
        raise
    return Registration(
        message_type=_common_base(classes),
        several=classes if len(classes) > 1 else (),
        handler=handler,
        name=name or handler_name(handler),
        named=name is not None,
        signature=signature,
        source=HandlerClass(handler, per_message=is_per_message) if isclass(handler) else None,
        batch=batch,
        pattern=pattern,
        **options,
    )


def _class_per_message(given: per_message[Any], message_type: type[Message]) -> type:
    if not isclass(given.factory):
        name = handler_name(given.factory)
        text = (
            f"per_message({name}) is registered for {message_type.__name__}, and {name} is not a "
            f"class. A function is called for each message anyway: register it without per_message."
        )
        raise HandlerSignatureError(text)
    return given.factory


def refuse_bare_decorator(decorator: str, example: str, *targets: object) -> None:
    """Raise if a decorator was written without parentheses.

    Raises:
        ConfigurationError: A target is a function.
    """
    for target in targets:
        if isroutine(target):
            name = handler_name(target)
            message = (
                f"@bus.{decorator} above {name} names no message class: write "
                f"@bus.{decorator}({example})."
            )
            raise ConfigurationError(message)


def require_command_type(message_type: object) -> type[Message]:
    """Return a command class.

    Raises:
        ConfigurationError: It is not.
    """
    if not _is_class(message_type, Command):
        shown = _type_text(message_type)
        message = f"{shown} is not a Command class; events are registered with bus.on(...)."
        raise ConfigurationError(message)
    return cast("type[Message]", message_type)


def _common_base(classes: tuple[type[Message], ...]) -> type[Message]:
    """Return the nearest common base."""
    first, *others = classes
    return next(base for base in first.__mro__ if all(issubclass(one, base) for one in others))


def read_event_target(target: object) -> tuple[tuple[type[Event], ...], TopicPattern | None]:
    """Return the event classes of a target, and its pattern if it is one.

    Several classes are a union, or a tuple of classes and unions.

    Raises:
        ConfigurationError: There is no class, one is not an event class, or a pattern is
            combined with other targets.
        InvalidTopicError: It is text, but not a topic pattern.
    """
    targets = cast("tuple[object, ...]", target) if isinstance(target, tuple) else (target,)
    if len(targets) == 1 and isinstance(targets[0], str):
        return (Event,), TopicPattern(targets[0])
    classes: dict[type[Event], None] = {}
    for one in targets:
        is_union = get_origin(one) in (Union, UnionType)
        for cls in get_args(one) if is_union else (one,):
            if isinstance(cls, str):
                message = (
                    f"{cls!r} is a topic pattern, and a handler is registered for one pattern, or "
                    f"for one or more event classes. Register it for the others separately."
                )
                raise ConfigurationError(message)
            if not _is_class(cls, Event):
                message = (
                    f"{_type_text(cls)} is not an Event class, nor a topic pattern such as "
                    f"'shop.**'; commands are registered with bus.handles(...)."
                )
                raise ConfigurationError(message)
            classes[cast("type[Event]", cls)] = None
    if not classes:
        message = "No event class is given. Name at least one: bus.on(OrderPlaced)."
        raise ConfigurationError(message)
    return tuple(classes), None


def registration_faults(
    registrations: Iterable[Registration], *, names_are_written: bool
) -> list[Fault]:
    """List handlers that can never be called, and message classes that share a wire name.

    A shared wire name is a fault only where names are written, as in a journal.
    """
    faults: list[Fault] = []
    types_by_name: dict[str, set[type[Message]]] = {}
    for registration in registrations:
        cls = registration.message_type
        if registration.pattern is None:
            for one in registration.classes:
                types_by_name.setdefault(one.__wire__.name, set()).add(one)
        if SystemEvent in registration.classes or (
            registration.pattern and issubclass(cls, SystemEvent)
        ):
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
            issubclass(one, wanted) or issubclass(wanted, one)
            for wanted in predicate.types
            for one in registration.classes
        ):
            faults.append(
                Fault(
                    registration.name,
                    f"handles {registration.target_name}, but its own filter {predicate!r} "
                    f"passes none of them.",
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


def _type_text(message_type: object) -> str:
    return str(getattr(message_type, "__name__", repr(message_type)))
