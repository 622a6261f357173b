"""The ways to register a handler, shared by registry, bus and session."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from types import UnionType
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Final,
    Generic,
    Literal,
    Protocol,
    TypeAlias,
    TypedDict,
    TypeVar,
    cast,
    overload,
)

from typing_extensions import ParamSpec, Unpack

from msgbus.errors import ConfigurationError
from msgbus.handlers.injection import per_message
from msgbus.handlers.registration import (
    Registration,
    make_registration,
    read_event_target,
    refuse_function,
    require_command_type,
)
from msgbus.messages.message import Command, CommandTypes, Event
from msgbus.runtime.arguments import check_seconds, refuse_unknown

if TYPE_CHECKING:
    from datetime import datetime

    from msgbus.handlers.config import QueueConfig
    from msgbus.handlers.delivery import Delivery, Mode, Poison, StartAt
    from msgbus.handlers.filters import FilterLike
    from msgbus.journal.records import AckLevel, Record
    from msgbus.subscriptions.config import RetryTiers

P = ParamSpec("P")
C = TypeVar("C", bound=Command[Any])
C_co = TypeVar("C_co", covariant=True)
Reply = TypeVar("Reply")
M_contra = TypeVar("M_contra", contravariant=True)
M = TypeVar("M")
Made = TypeVar("Made")
Made_co = TypeVar("Made_co", covariant=True)
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
H = TypeVar("H", bound=Callable[..., Any])
E = TypeVar("E", bound=Event)
E2 = TypeVar("E2", bound=Event)
E3 = TypeVar("E3", bound=Event)


class CommandOptions(TypedDict, total=False):
    """Keywords of `register_command_handler`."""

    name: str | None
    replace: bool
    inline: bool
    timeout: float | None


class EventOptions(TypedDict, total=False):
    """Keywords of `register_event_handler`, but for `batch`.

    Those from `mode` on are the fields of `SubscriptionConfig`.
    """

    name: str | None
    priority: int
    concurrency: int
    timeout: float | None
    filter: FilterLike | None
    queue: QueueConfig | None
    inline: bool
    durable: bool | str | None
    mode: Mode
    delivery: Delivery
    start: StartAt | int | datetime
    max_in_flight: int
    ack_timeout: float | None
    rate_limit: float | None
    burst: int
    retry: RetryTiers
    on_poison: Poison
    park_key: bool
    idempotent: bool
    key: Callable[[Record], str | None] | None
    require: AckLevel | None
    lease_ttl: float
    flush_acks: int
    flush_interval: float
    flush_idle: float
    fetch_size: int
    max_buffered: int
    max_ahead: int
    loss_window: int
    watchdog: float


EVENT_OPTIONS: Final = frozenset({*EventOptions.__annotations__, "batch"})


class CommandClass(Protocol[C_co, Reply]):
    """A class of commands, for type checkers: which it is, and what it replies with."""

    def __command_types__(self) -> CommandTypes[C_co, Reply]:
        """Never called."""
        ...


class _Made(Protocol[Made_co]):
    """An object of a class, for type checkers: so a decorator of the class can give it back."""

    if TYPE_CHECKING:

        @property  # type: ignore[misc]
        def __class__(self) -> type[Made_co]: ...  # type: ignore[override]


class HasHandle(_Made[Made_co], Protocol[M_contra, T_co, Made_co]):
    """An object whose method `handle` takes such messages, for type checkers."""

    def handle(self, message: M_contra, /, *args: Any, **options: Any) -> T_co:
        """Handle one message, or a list of them."""
        ...


class HasCall(_Made[Made_co], Protocol[M_contra, T_co, Made_co]):
    """An object that is called with such messages, for type checkers."""

    def __call__(self, message: M_contra, /, *args: Any, **options: Any) -> T_co:
        """Handle one message, or a list of them."""
        ...


ClassOf: TypeAlias = type[HasHandle[M, T, Made]] | type[HasCall[M, T, Made]]
"""A class of handlers, of such messages, with such a reply."""

ObjectOf: TypeAlias = (
    HasHandle[M, T, Any]
    | ClassOf[M, T, Any]
    | per_message[HasHandle[M, T, Any]]
    | per_message[HasCall[M, T, Any]]
)
"""A handler that is not a function: an object with `handle`, or a class."""


# In the decorators below, classes come second: type checkers report against the first or the
# last form, and most handlers are functions.


class HandlesDecorator(Protocol[C, Reply]):
    """Takes a handler of such commands, sync or async, and gives it back unchanged."""

    @overload
    def __call__(
        self, handler: Callable[Concatenate[C, P], Coroutine[Any, Any, Reply]], /
    ) -> Callable[Concatenate[C, P], Coroutine[Any, Any, Reply]]: ...
    @overload
    def __call__(
        self, handler: ClassOf[C, Reply | Coroutine[Any, Any, Reply], Made], /
    ) -> type[Made]: ...
    @overload
    def __call__(
        self, handler: Callable[Concatenate[C, P], Reply], /
    ) -> Callable[Concatenate[C, P], Reply]: ...


class OnDecorator(Protocol[E]):
    """Takes a handler of such events and gives it back unchanged."""

    @overload
    def __call__(
        self, handler: Callable[Concatenate[E, P], Coroutine[Any, Any, T]], /
    ) -> Callable[Concatenate[E, P], Coroutine[Any, Any, T]]: ...
    @overload
    def __call__(self, handler: ClassOf[E, Any, Made], /) -> type[Made]: ...
    @overload
    def __call__(
        self, handler: Callable[Concatenate[E, P], T], /
    ) -> Callable[Concatenate[E, P], T]: ...


class OnListDecorator(Protocol[E]):
    """Takes a handler of lists of such events and gives it back unchanged."""

    @overload
    def __call__(
        self, handler: Callable[Concatenate[list[E], P], Coroutine[Any, Any, T]], /
    ) -> Callable[Concatenate[list[E], P], Coroutine[Any, Any, T]]: ...
    @overload
    def __call__(self, handler: ClassOf[list[E], Any, Made], /) -> type[Made]: ...
    @overload
    def __call__(
        self, handler: Callable[Concatenate[list[E], P], T], /
    ) -> Callable[Concatenate[list[E], P], T]: ...


class OnAnyDecorator(Protocol):
    """Takes a handler of any class of events and gives it back unchanged."""

    @overload
    def __call__(
        self, handler: Callable[Concatenate[E, P], Coroutine[Any, Any, T]], /
    ) -> Callable[Concatenate[E, P], Coroutine[Any, Any, T]]: ...
    @overload
    def __call__(self, handler: ClassOf[E, Any, Made], /) -> type[Made]: ...
    @overload
    def __call__(
        self, handler: Callable[Concatenate[E, P], T], /
    ) -> Callable[Concatenate[E, P], T]: ...


class OnAnyListDecorator(Protocol):
    """Takes a handler of lists of any class of events and gives it back unchanged."""

    @overload
    def __call__(
        self, handler: Callable[Concatenate[list[E], P], Coroutine[Any, Any, T]], /
    ) -> Callable[Concatenate[list[E], P], Coroutine[Any, Any, T]]: ...
    @overload
    def __call__(self, handler: ClassOf[list[E], Any, Made], /) -> type[Made]: ...
    @overload
    def __call__(
        self, handler: Callable[Concatenate[list[E], P], T], /
    ) -> Callable[Concatenate[list[E], P], T]: ...


class Registrar(ABC, Generic[T_co]):
    """Registration by call and by decorator; where it ends up is the subclass's business."""

    @abstractmethod
    def _register(self, registration: Registration, *, replace: bool = False) -> T_co: ...

    def register_command_handler(
        self,
        command_type: CommandClass[C, Reply],
        handler: Callable[Concatenate[C, ...], Coroutine[Any, Any, Reply]]
        | Callable[Concatenate[C, ...], Reply]
        | ObjectOf[C, Reply | Coroutine[Any, Any, Reply]],
        *,
        name: str | None = None,
        replace: bool = False,
        inline: bool = False,
        timeout: float | None = None,
    ) -> None:
        """Make `handler` the one handler of `command_type`.

        Args:
            command_type: The command; subclasses without a handler of their own come too.
            handler: Takes the message, and by annotation a `Context` and dependencies: a function,
                an object with `handle` or `__call__`, or a class of such objects, which is made
                of what its constructor asks for, at start or for each message.
            name: Its name in logs and metrics; that of the function or class unless given.
            replace: Take the place of an existing handler instead of raising.
            inline: Call a sync handler on the event loop: for trivial ones only.
            timeout: Seconds that one attempt may take.

        Raises:
            DuplicateHandlerError: There is one already.
            HandlerSignatureError: The handler could never be called.
        """
        _check_positive("timeout", timeout)
        registration = make_registration(
            require_command_type(command_type), handler, name=name, inline=inline, timeout=timeout
        )
        self._register(registration, replace=replace)

    # The plain forms come first: type checkers can infer a lambda's parameter only there.
    @overload
    def register_event_handler(
        self,
        event_type: type[E] | UnionType | str,
        handler: Callable[[E], Any],
        *,
        batch: Literal[False] = False,
        **options: Unpack[EventOptions],
    ) -> T_co: ...
    @overload
    def register_event_handler(
        self,
        event_type: type[E] | UnionType | str,
        handler: Callable[[list[E]], Any],
        *,
        batch: Literal[True],
        **options: Unpack[EventOptions],
    ) -> T_co: ...
    @overload
    def register_event_handler(
        self,
        event_type: type[E] | UnionType | str,
        handler: Callable[Concatenate[E, ...], Any] | ObjectOf[E, Any],
        *,
        batch: Literal[False] = False,
        **options: Unpack[EventOptions],
    ) -> T_co: ...
    @overload
    def register_event_handler(
        self,
        event_type: type[E] | UnionType | str,
        handler: Callable[Concatenate[list[E], ...], Any] | ObjectOf[list[E], Any],
        *,
        batch: Literal[True],
        **options: Unpack[EventOptions],
    ) -> T_co: ...
    def register_event_handler(
        self,
        event_type: type[Event] | UnionType | str,
        handler: Any,
        *,
        name: str | None = None,
        priority: int = 0,
        concurrency: int = 1,
        batch: bool = False,
        timeout: float | None = None,
        filter: FilterLike | None = None,
        queue: QueueConfig | None = None,
        inline: bool = False,
        durable: bool | str | None = None,
        **subscription: Any,
    ) -> T_co:
        """Have `handler` called for every event of `event_type` and its subclasses.

        `A | B` is one handler of both: one queue, in publish order, one name, one handle. An
        event that is of both is handled once.

        For a topic pattern, such as `"shop.orders.*"`, it is called for every event that is
        published under such a topic and is of the class its parameter is annotated with, but
        never for a `SystemEvent`. A handler that is registered in two ways is called once for
        each of them.

        Args:
            event_type: The event class, several as `A | B`, or a pattern of topics.
            handler: Takes the event, and by annotation a `Context` and dependencies: a function,
                an object with `handle` or `__call__`, or a class of such objects.
            name: Its name in logs and metrics; that of the function or class unless given.
            priority: Higher runs first: lower handlers get an event once all higher ones
                are done with it.
            concurrency: How many events it may handle at once; 1 keeps publish order.
            batch: Hand it lists of events instead of single ones.
            timeout: Seconds that one attempt may take.
            filter: Only events it lets through are handled.
            queue: A queue of its own size and strategy.
            inline: Call a sync handler on the event loop: for trivial ones only.
            durable: On a bus with a journal: false to be called only for what is published
                while the process lives, a name to go on under it whatever the function is
                called. Named handlers are durable there unless this is false.
            **subscription: How it reads the journal: `mode`, `delivery`, `start`,
                `max_in_flight`, `retry` and the other fields of `SubscriptionConfig`.

        Raises:
            ConfigurationError: An option is not known, or its value cannot be.
            HandlerSignatureError: The handler could never be called.
            DuplicateHandlerError: It is registered already, or the name is taken.
            InvalidTopicError: The pattern is not valid.
        """
        classes, pattern = read_event_target(event_type)
        refuse_unknown("A handler", subscription, EVENT_OPTIONS)
        _check_positive("timeout", timeout)
        _check_positive("concurrency", concurrency)
        registration = make_registration(
            classes,
            handler,
            pattern=pattern,
            name=name,
            priority=priority,
            concurrency=concurrency,
            batch=batch,
            timeout=timeout,
            filter=filter,
            queue=queue,
            inline=inline,
            durable=durable,
            subscription=subscription or None,
        )
        return self._register(registration)

    subscribe = register_event_handler

    def handles(
        self, command_type: CommandClass[C, Reply], **options: Unpack[CommandOptions]
    ) -> HandlesDecorator[C, Reply]:
        """Decorator form of `register_command_handler`; function or class stay as they are."""
        refuse_function("handles", "PlaceOrder", command_type)

        def decorate(handler: H) -> H:
            self.register_command_handler(command_type, handler, **options)
            return handler

        return cast("HandlesDecorator[C, Reply]", decorate)

    @overload
    def on(
        self,
        event_type: type[E],
        /,
        *,
        batch: Literal[False] = False,
        **options: Unpack[EventOptions],
    ) -> OnDecorator[E]: ...
    @overload
    def on(
        self,
        event_type: type[E],
        /,
        *,
        batch: Literal[True],
        **options: Unpack[EventOptions],
    ) -> OnListDecorator[E]: ...
    @overload
    def on(
        self,
        first: type[E],
        second: type[E2],
        /,
        *,
        batch: Literal[False] = False,
        **options: Unpack[EventOptions],
    ) -> OnDecorator[E | E2]: ...
    @overload
    def on(
        self,
        first: type[E],
        second: type[E2],
        /,
        *,
        batch: Literal[True],
        **options: Unpack[EventOptions],
    ) -> OnListDecorator[E | E2]: ...
    @overload
    def on(
        self,
        first: type[E],
        second: type[E2],
        third: type[E3],
        /,
        *,
        batch: Literal[False] = False,
        **options: Unpack[EventOptions],
    ) -> OnDecorator[E | E2 | E3]: ...
    @overload
    def on(
        self,
        first: type[E],
        second: type[E2],
        third: type[E3],
        /,
        *,
        batch: Literal[True],
        **options: Unpack[EventOptions],
    ) -> OnListDecorator[E | E2 | E3]: ...
    @overload
    def on(
        self,
        event_type: UnionType | str,
        /,
        *,
        batch: Literal[False] = False,
        **options: Unpack[EventOptions],
    ) -> OnAnyDecorator: ...
    @overload
    def on(
        self,
        event_type: UnionType | str,
        /,
        *,
        batch: Literal[True],
        **options: Unpack[EventOptions],
    ) -> OnAnyListDecorator: ...
    @overload
    def on(
        self,
        first: type[Event],
        second: type[Event],
        third: type[Event],
        fourth: type[Event],
        /,
        *more: type[Event],
        batch: Literal[False] = False,
        **options: Unpack[EventOptions],
    ) -> OnAnyDecorator: ...
    @overload
    def on(
        self,
        first: type[Event],
        second: type[Event],
        third: type[Event],
        fourth: type[Event],
        /,
        *more: type[Event],
        batch: Literal[True],
        **options: Unpack[EventOptions],
    ) -> OnAnyListDecorator: ...
    def on(self, *event_types: Any, **options: Any) -> Any:
        """Decorator form of `register_event_handler`; function or class stay as they are.

        `on(A, B)` is the same as `on(A | B)`: one handler of both. Type checkers hold the
        parameter of a handler against up to three classes; more, and those written as
        `A | B`, are checked when the handler is registered.
        """
        refuse_function("on", "OrderPlaced", *event_types)

        def decorate(handler: H) -> H:
            self.register_event_handler(cast("Any", event_types), handler, **options)
            return handler

        return decorate


def _check_positive(name: str, value: float | None) -> None:
    check_seconds(name, value)
    if value is not None and value <= 0:
        message = f"{name} must be above 0, not {value}."
        raise ConfigurationError(message)
