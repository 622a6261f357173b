"""Types of the decorators that register handlers, for type checkers."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Concatenate, Protocol, TypeAlias, TypeVar, overload

from typing_extensions import ParamSpec

from msgbus.handlers.injection import per_message
from msgbus.messages.message import Command, CommandTypes, Event

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
E = TypeVar("E", bound=Event)


class CommandClass(Protocol[C_co, Reply]):
    """A command class and the type of its reply, for type checkers."""

    def __command_types__(self) -> CommandTypes[C_co, Reply]:
        """Never called."""
        ...


class _Made(Protocol[Made_co]):
    """An instance of a class, for type checkers, so that a class decorator can return the class."""

    if TYPE_CHECKING:

        @property  # type: ignore[misc]
        def __class__(self) -> type[Made_co]: ...  # type: ignore[override]


class HasHandle(_Made[Made_co], Protocol[M_contra, T_co, Made_co]):
    """An object with a method `handle` for these messages, for type checkers."""

    def handle(self, message: M_contra, /, *args: Any, **options: Any) -> T_co:
        """Handle one message, or a list of them."""
        ...


class HasCall(_Made[Made_co], Protocol[M_contra, T_co, Made_co]):
    """An object that is callable with these messages, for type checkers."""

    def __call__(self, message: M_contra, /, *args: Any, **options: Any) -> T_co:
        """Handle one message, or a list of them."""
        ...


ClassOf: TypeAlias = type[HasHandle[M, T, Made]] | type[HasCall[M, T, Made]]
"""A handler class."""

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
    """Decorator of a command handler, sync or async; returns it unchanged."""

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
    """Decorator of an event handler; returns it unchanged."""

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
    """Decorator of a batch handler; returns it unchanged."""

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
    """Decorator of a handler of any event class; returns it unchanged."""

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
    """Decorator of a batch handler of any event class; returns it unchanged."""

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
