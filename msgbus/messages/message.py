"""Message classes: frozen pydantic models with the user's fields only."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, Self, cast, final

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler
from pydantic.errors import PydanticSchemaGenerationError
from pydantic_core import CoreSchema
from typing_extensions import TypeVar
from uuid_utils import uuid7

from msgbus.errors import (
    InvalidTopicError,
    MessageDefinitionError,
    SessionMismatchError,
    WrongMessageTypeError,
)
from msgbus.messages.metadata import ROOT, Metadata, Root, UnvalidatedMetadata
from msgbus.messages.topics.pattern import check_topic

R = TypeVar("R", default=None)
M_co = TypeVar("M_co", covariant=True)

RESERVED: Final = frozenset(
    {
        "message_id",
        "created_at",
        "correlation_id",
        "causation_id",
        "session_id",
        "headers",
        "key",
    }
)


@final
@dataclass(frozen=True, slots=True)
class Wire:
    """Wire name, version, topic and key of a message class; see `Message.__wire__`."""

    name: str
    """Stable name in journals and on the wire; the class name unless given."""

    version: int = 1
    """Schema version of the fields."""

    topic: str | None = None
    """Topic the message is published under; the wire name unless given."""

    key: str | Callable[[Any], str] | None = None
    """Field name or function that gives the ordering key."""


# One entry a class: appending is atomic, adding to a number is not.
_defined: Final[list[None]] = []


def classes_defined() -> int:
    """Return the number of message classes so far, to invalidate caches of them."""
    return len(_defined)


class Message(BaseModel):
    """Base of commands and events.

    Optional class keywords set the wire name, version, topic and ordering key:
    `class OrderPlaced(Event, name="shop.OrderPlaced", version=2, topic="shop.orders.placed",
    key="order_id")`. Subclasses inherit only the key.

    The properties below read metadata, which is not part of the fields. It is filled when the
    message is first executed or published, from the message being handled at that moment.
    A copy (`model_copy`) is a new message; pickling keeps the metadata.
    """

    # JSON has no infinity: as text it comes back from a journal, as null it would not.
    # Errors are logged and stored, and must not contain payloads.
    model_config = ConfigDict(
        frozen=True, extra="forbid", ser_json_inf_nan="strings", hide_input_in_errors=True
    )
    __slots__ = ("__meta__",)

    __wire__: ClassVar[Wire]

    if TYPE_CHECKING:
        # Says "not a field" to type checkers; at run time it is the slot above.
        __meta__: ClassVar[Metadata | Root | None]
    else:

        def __init__(self, /, **data: Any) -> None:
            # The body of BaseModel.__init__ and one slot. An unset slot would raise at the
            # first read, which costs more than the whole dispatch of a command.
            self.__pydantic_validator__.validate_python(data, self_instance=self)
            set_meta(self, None)

        # pydantic's own mark for "this __init__ only validates": keeps its fast paths.
        __init__.__pydantic_base_init__ = True

    def __init_subclass__(
        cls,
        *,
        name: str | None = None,
        version: int = 1,
        topic: str | None = None,
        key: str | Callable[[Any], str] | None = None,
        **kwargs: Any,
    ) -> None:
        """Check the class and set `__wire__`."""
        super().__init_subclass__(**kwargs)
        clashes = sorted(RESERVED & set(inspect.get_annotations(cls)))
        if clashes:
            message = (
                f"{cls.__name__} has fields named {', '.join(clashes)}, which every message "
                f"already has as metadata. Rename them, for example to 'order_{clashes[0]}'."
            )
            raise MessageDefinitionError(message)
        if version < 1:
            message = f"{cls.__name__} has version={version}; versions count from 1."
            raise MessageDefinitionError(message)
        _check_wire_text(cls, name=name, topic=topic)
        if key is None and hasattr(cls, "__wire__"):
            key = cls.__wire__.key
        cls.__wire__ = Wire(name or cls.__name__, version, topic, key)
        _defined.append(None)

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: type[BaseModel], handler: GetCoreSchemaHandler, /
    ) -> CoreSchema:
        """Build the schema; raise for a field that pydantic cannot validate."""
        try:
            return handler(source)
        except PydanticSchemaGenerationError as error:
            what = error.message.partition("schema for ")[2].partition(". ")[0]
            message = (
                f"{cls.__name__} has a field of {what}, which cannot be checked or written as "
                f"JSON. Make that a pydantic model, a dataclass or a TypedDict, or keep its id."
            )
            raise MessageDefinitionError(message) from None

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Check that the ordering key is a field."""
        super().__pydantic_init_subclass__(**kwargs)
        key = cls.__wire__.key
        if isinstance(key, str) and key not in cls.model_fields:
            message = (
                f"{cls.__name__} names key={key!r}, but has no such field. "
                f"Its fields are: {', '.join(cls.model_fields) or 'none'}."
            )
            raise MessageDefinitionError(message)

    @property
    def message_id(self) -> str:
        """The id of this message, a UUIDv7; made at the first read."""
        return metadata_of(self).message_id

    @property
    def created_at(self) -> datetime:
        """The time at which the id was made, in UTC."""
        return metadata_of(self).created_at

    @property
    def correlation_id(self) -> str:
        """The id of the message that started the flow this one belongs to."""
        return metadata_of(self).correlation_id

    @property
    def causation_id(self) -> str | None:
        """The id of the message whose handler sent this one; `None` for a root."""
        return metadata_of(self).causation_id

    @property
    def session_id(self) -> str | None:
        """The session this message belongs to, if any."""
        return metadata_of(self).session_id

    @property
    def headers(self) -> Mapping[str, str]:
        """Read-only text values, inherited by the messages it causes."""
        return metadata_of(self).headers

    @property
    def key(self) -> str | None:
        """The ordering key, from `key=` on the class."""
        key = type(self).__wire__.key
        if key is None:
            return None
        return str(getattr(self, key) if isinstance(key, str) else key(self))

    def __getstate__(self) -> dict[Any, Any]:
        state = super().__getstate__()
        state["__meta__"] = metadata_of(self)
        return state

    def __setstate__(self, state: dict[Any, Any]) -> None:
        meta = state.pop("__meta__")
        super().__setstate__(state)
        set_meta(self, meta)


def _check_wire_text(cls: type[Message], **given: str | None) -> None:
    """Raise unless name and topic are valid topics."""
    for keyword, text in given.items():
        if text is None:
            continue
        try:
            check_topic(text)
        except InvalidTopicError as error:
            message = f"{cls.__name__} has {keyword}={text!r}. {error}"
            raise MessageDefinitionError(message) from None


set_meta: Final[Callable[[Message, Metadata | Root | None], None]] = Message.__dict__[
    "__meta__"
].__set__
"""Set the metadata slot of a frozen model, through its descriptor."""

_making: Final = threading.RLock()


@final
class CommandTypes(Generic[M_co, R]):
    """A command class and the type of its reply, for type checkers."""

    reply: R


class Command(Message, Generic[R]):
    """An intention with exactly one handler; `R` is the type of its reply.

    `class PlaceOrder(Command[UUID])` replies with a UUID, `class CancelOrder(Command)`
    with nothing.
    """

    if TYPE_CHECKING:
        # Lets type checkers compare a handler's parameter and reply; never called.
        @classmethod
        def __command_types__(cls) -> CommandTypes[Self, R]: ...


class Query(Command[R], Generic[R]):
    """A command that only reads: not journaled and never dead-lettered."""


class CreateCommand(Command[R], Generic[R]):
    """A command that creates something; `R` is often its id."""


class UpdateCommand(Command[R], Generic[R]):
    """A command that changes something."""


class DeleteCommand(Command[R], Generic[R]):
    """A command that deletes something."""


class Event(Message):
    """A fact in the past tense, for any number of handlers."""


class DomainEvent(Event):
    """A business fact for use inside the application."""


class IntegrationEvent(Event):
    """A fact for other applications."""


class SystemEvent(Event):
    """A fact about the bus itself; handled only by handlers that name its exact type."""


def require_command(command: object) -> None:
    """Raise `WrongMessageTypeError` unless this is a command."""
    if not isinstance(command, Command):
        raise _wrong_type("execute takes a Command", "Command", command)


def require_event(event: object) -> None:
    """Raise `WrongMessageTypeError` unless this is an event."""
    if not isinstance(event, Event):
        raise _wrong_type("publish takes an Event", "Event", event)


def _wrong_type(wanted: str, kind: str, given: object) -> WrongMessageTypeError:
    """Return the error for an argument of the wrong type."""
    if isinstance(given, type):
        return WrongMessageTypeError(f"{wanted}, not the class {given.__name__}: pass an instance.")
    name = type(given).__name__
    hint = f"Define one: class Something({kind}): ..."
    if isinstance(given, Event):
        hint = "Events are published: await bus.publish(event)."
    elif isinstance(given, Command):
        hint = "Commands are executed: await bus.execute(command)."
    return WrongMessageTypeError(f"{wanted}, not {name}. {hint}")


def first_message(handled: object) -> Message:
    """Return the message, or the first of a batch."""
    if isinstance(handled, list):
        return cast("list[Message]", handled)[0]
    return cast("Message", handled)


def message_type_of(handled: object) -> type[Message]:
    """Return the class of a message, or of the first of a batch."""
    return type(first_message(handled))


def class_topic(message_type: type[Message]) -> str:
    """Return the topic of a message class: its `topic=`, else its wire name."""
    wire = message_type.__wire__
    return wire.topic or wire.name


def topic_of(message: Message) -> str:
    """Return the topic of a message: its own, else that of its class."""
    meta = peek(message)
    return (None if meta is None else meta.topic) or class_topic(type(message))


def metadata_of(message: Message) -> Metadata:
    """Return the metadata of a message; made at the first call."""
    try:
        meta = message.__meta__
    except AttributeError:  # see `peek`
        meta = _of_unvalidated(message)
    return _materialise(message) if meta is None or meta is ROOT else cast("Metadata", meta)


def _materialise(message: Message) -> Metadata:
    with _making:
        meta = message.__meta__
        if meta is None or meta is ROOT:
            # With its id: what reads metadata nearly always reads that, under one lock more.
            meta = Metadata(str(uuid7()), fixed=meta is not None)
            set_meta(message, meta)
        return cast("Metadata", meta)


def peek(message: Message) -> Metadata | Root | None:
    """Return the metadata of a message so far, without making any that tells nothing."""
    try:
        return message.__meta__
    except AttributeError:
        # Built by model_validate, model_construct or a copy, which do not call __init__.
        return _of_unvalidated(message)


def _of_unvalidated(message: Message) -> Metadata | Root | None:
    with _making:
        if not hasattr(message, "__meta__"):
            set_meta(message, UnvalidatedMetadata())
        return message.__meta__


def fix(  # noqa: C901 (one decision table)
    message: Message,
    parent: Message | None,
    *,
    session_id: str | None = None,
    headers: Mapping[str, str] | None = None,
    topic: str | None = None,
) -> Metadata | Root:
    """Fix the cause of `message` when it is first sent; later calls do not change it.

    Raises:
        SessionMismatchError: It already belongs to another session than `session_id`.
        InvalidTopicError: `topic` is not a valid topic.
    """
    if topic is not None:
        check_topic(topic)
    meta = peek(message)
    if parent is None and session_id is None and not headers and topic is None:
        if meta is None:
            set_meta(message, ROOT)
            return ROOT
        if meta.fixed:
            return meta
    meta = metadata_of(message)
    if session_id is not None and meta.session_id not in (None, session_id):
        text = (
            f"{type(message).__name__} {meta.message_id} belongs to session "
            f"{meta.session_id!r}, not to {session_id!r}. Send it through its own session, "
            f"or send a copy: message.model_copy()."
        )
        raise SessionMismatchError(text)
    if not meta.fixed:
        if parent is not None:
            meta.inherit(metadata_of(parent), parent_is_system=isinstance(parent, SystemEvent))
        meta.fixed = True
        if session_id is not None:
            meta.session_id = session_id
    elif meta.session_id is None:
        meta.session_id = session_id
    if headers:
        meta.add_headers(headers)
    if topic is not None:
        meta.topic = topic
    return meta


def ids_of(message: Message) -> dict[str, str | None]:
    """Return the log fields of a message: type, id, correlation and session."""
    meta = metadata_of(message)
    message_id, correlation_id, _ = meta.ids()
    return {
        "message_type": type(message).__name__,
        "message_id": message_id,
        "correlation_id": correlation_id,
        "session_id": meta.session_id,
    }
