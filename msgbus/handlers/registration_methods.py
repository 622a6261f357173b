"""Methods that register handlers, shared by registry, bus and session."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping
from types import UnionType
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Final,
    Generic,
    Literal,
    Protocol,
    TypedDict,
    TypeVar,
    cast,
    overload,
)

from typing_extensions import Unpack

from msgbus.errors import ConfigurationError
from msgbus.handlers.decorators import (
    CommandClass,
    HandlesDecorator,
    ObjectOf,
    OnAnyDecorator,
    OnAnyListDecorator,
    OnDecorator,
    OnListDecorator,
)
from msgbus.handlers.registration import (
    Registration,
    make_registration,
    read_event_target,
    refuse_bare_decorator,
    require_command_type,
)
from msgbus.messages.message import Command, Event
from msgbus.runtime.arguments import check_seconds, refuse_unknown

if TYPE_CHECKING:
    from datetime import datetime

    from msgbus.handlers.config import QueueConfig
    from msgbus.handlers.delivery import Delivery, Mode, Poison, StartAt, SubscriptionTuning
    from msgbus.handlers.filters import FilterLike

C = TypeVar("C", bound=Command[Any])
Reply = TypeVar("Reply")
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


class RetryPolicy(Protocol):
    """Retry policy of a durable handler."""

    def delay(self, attempt: int, /) -> float:
        """Return the seconds between the failed attempt number `attempt` and the next."""
        ...

    def allows(self, error: Exception, /) -> bool:
        """Return whether another attempt may follow this error."""
        ...


class EventOptions(TypedDict, total=False):
    """Keywords of `register_event_handler`, except `batch`.

    Those from `mode` on are the fields of `SubscriptionConfig`.
    """

    name: str | None
    priority: int
    concurrency: int | None
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
    retry: RetryPolicy
    on_poison: Poison
    park_key: bool
    park_limit: int
    idempotent: bool
    key: Callable[[Any], str | None] | None
    require: Literal["memory", "os", "fsync", "quorum", "quorum_fsync"] | None
    tuning: SubscriptionTuning


EVENT_OPTIONS: Final = frozenset({*EventOptions.__annotations__, "batch"})


class RegistrationMethods(ABC, Generic[T_co]):
    """Register handlers by call or decorator; subclasses store the registration."""

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
        """Register `handler` as the one handler of `command_type`.

        Args:
            command_type: The command class; includes subclasses without a handler of their own.
            handler: A function, an object with `handle` or `__call__`, or a class of such
                objects. It takes the message, and by annotation a `Context` and dependencies;
                a class is instantiated at start, or for each message.
            name: Its name in logs and metrics; that of the function or class unless given.
            replace: Replace an existing handler instead of raising.
            inline: Call a sync handler on the event loop, without a thread: for short ones only.
            timeout: Seconds that one attempt may take.

        Raises:
            DuplicateHandlerError: The command already has a handler.
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
        concurrency: int | None = None,
        batch: bool = False,
        timeout: float | None = None,
        filter: FilterLike | None = None,
        queue: QueueConfig | None = None,
        inline: bool = False,
        durable: bool | str | None = None,
        **subscription: Any,
    ) -> T_co:
        """Register `handler` for every event of `event_type` and its subclasses.

        `A | B` registers one handler for both: one queue, in publish order, and one name. An
        event that is of both is handled once.

        A topic pattern, such as `"shop.orders.*"`, registers it for every event published
        under a matching topic that is of the class its parameter is annotated with, but never
        for a `SystemEvent`. A handler that is registered twice is called once for each.

        Args:
            event_type: The event class, several as `A | B`, or a topic pattern.
            handler: A function, an object with `handle` or `__call__`, or a class of such
                objects. It takes the event, and by annotation a `Context` and dependencies.
            name: Its name in logs and metrics; that of the function or class unless given.
            priority: Higher runs first: a handler gets an event after all handlers of higher
                priority are done with it.
            concurrency: Events it may handle at once; 1, the default, keeps publish order. For
                a durable handler the same as `max_in_flight`.
            batch: Pass lists of events instead of single ones.
            timeout: Seconds that one attempt may take. For a durable handler the same as
                `ack_timeout`.
            filter: Handle only events that pass this filter.
            queue: Size and strategy of its queue.
            inline: Call a sync handler on the event loop, without a thread: for short ones only.
            durable: On a bus with a journal: false to handle only events that are published
                while the process runs; a string is the name of its subscription. Named
                handlers are durable there unless this is false.
            **subscription: Options of its durable subscription: `mode`, `delivery`, `start`,
                `max_in_flight`, `retry` and the other fields of `SubscriptionConfig`.

        Raises:
            ConfigurationError: An option is unknown, or its value is invalid.
            HandlerSignatureError: The handler could never be called.
            DuplicateHandlerError: It is registered already, or another handler has its name.
            InvalidTopicError: The pattern is not valid.
        """
        classes, pattern = read_event_target(event_type)
        refuse_unknown("A handler", subscription, EVENT_OPTIONS)
        _check_positive("timeout", timeout)
        _check_positive("concurrency", concurrency)
        _refuse_both("concurrency", concurrency, "max_in_flight", subscription)
        _refuse_both("timeout", timeout, "ack_timeout", subscription)
        registration = make_registration(
            classes,
            handler,
            pattern=pattern,
            name=name,
            priority=priority,
            concurrency=1 if concurrency is None else concurrency,
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
        """Return a decorator that calls `register_command_handler`; the handler is unchanged."""
        refuse_bare_decorator("handles", "PlaceOrder", command_type)

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
        """Return a decorator that calls `register_event_handler`; the handler is unchanged.

        `on(A, B)` is the same as `on(A | B)`: one handler of both. Type checkers check up to
        three classes; more, and unions written as `A | B`, are checked at registration.
        """
        refuse_bare_decorator("on", "OrderPlaced", *event_types)

        def decorate(handler: H) -> H:
            self.register_event_handler(cast("Any", event_types), handler, **options)
            return handler

        return decorate


def _check_positive(name: str, value: float | None) -> None:
    check_seconds(name, value)
    if value is not None and value <= 0:
        message = f"{name} must be above 0, not {value}."
        raise ConfigurationError(message)


def _refuse_both(name: str, value: object, durable_name: str, given: Mapping[str, Any]) -> None:
    if value is not None and durable_name in given:
        message = (
            f"{name}={value!r} and {durable_name}={given[durable_name]!r} are the same option of "
            f"a durable handler. Give one of them."
        )
        raise ConfigurationError(message)
