"""What handlers ask for by annotation: found once, bound once, opened when it must be.

`provide={Database: db, Mailer: open_mailer, Transaction: per_message(begin)}` maps types
to values, to factories of things that live as long as the bus, and to factories of things
that live for one message or one session. A factory may be a function, a generator, a class
or return a context manager, and may itself ask for dependencies and for the `Context`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, AsyncExitStack
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeAlias, TypeVar, cast, final
from weakref import WeakKeyDictionary

from msgbus.bus.context import Context, Frame, context_of, current_frame
from msgbus.errors import (
    BusNotStartedError,
    ConfigurationError,
    Fault,
    MissingProviderError,
    SessionClosedError,
)
from msgbus.handlers.signatures import (
    Dependency,
    Signature,
    function_of,
    handler_name,
    read_dependencies,
)
from msgbus.runtime.resources import enter_any
from msgbus.runtime.threads import ThreadPool

if TYPE_CHECKING:
    from msgbus.handler_classes import HandlerClass
    from msgbus.runtime.event_loop import Runtime
    from msgbus.runtime.resources import Keeper

T_co = TypeVar("T_co", covariant=True)

Call: TypeAlias = Callable[[Any], Awaitable[Any]]
"""A handler with everything bound: message in, awaitable out."""


class Resolver(Protocol):
    """The port for a dependency-injection container such as dishka or svcs."""

    def provides(self, wanted: type) -> bool:
        """Whether the container can make this type."""
        ...

    def open(
        self, context: Context
    ) -> AbstractAsyncContextManager[Callable[[type], Awaitable[Any]]]:
        """A scope for one handling of one message; it gives a function from type to value."""
        ...


@final
class per_message(Generic[T_co]):  # noqa: N801 (reads as a word in provide={...})
    """A provider, or a handler class, made anew for each handling of a message."""

    def __init__(self, factory: Callable[..., T_co]) -> None:
        self.factory = factory


@final
class per_session:  # noqa: N801
    """A provider made once for a session, at its first use, and left when it ends."""

    def __init__(self, factory: Callable[..., Any]) -> None:
        self.factory = factory


@final
class Provider:
    """One entry of `provide`."""

    __slots__ = (
        "context_parameter",
        "dependencies",
        "factory",
        "is_open",
        "is_used_up",
        "scope",
        "value",
    )

    def __init__(self, wanted: type, given: object) -> None:
        self.value: Any = None
        self.is_open = False
        self.is_used_up = False
        """Whether it was opened, and cannot be opened again."""
        self.factory: Callable[..., Any] | None = None
        self.scope = "bus"
        self.context_parameter: str | None = None
        self.dependencies: tuple[Dependency, ...] = ()
        if isinstance(given, per_message | per_session):
            self.scope = "message" if isinstance(given, per_message) else "session"
            self._set_factory(given.factory)
        elif _is_factory(wanted, given):
            self._set_factory(cast("Callable[..., Any]", given))
        elif _is_unopened(wanted, given):
            self.factory = functools.partial(_open_once, self, given)
        else:
            self.value = given
            self.is_open = True

    def _set_factory(self, factory: Callable[..., Any]) -> None:
        name = handler_name(factory)
        try:
            parameters = list(inspect.signature(factory).parameters.values())
        except (TypeError, ValueError):
            parameters = []
        asked = [parameter for parameter in parameters if parameter.default is parameter.empty]
        self.context_parameter, self.dependencies = read_dependencies(factory, asked, name)
        if inspect.isasyncgenfunction(factory):
            factory = contextlib.asynccontextmanager(factory)
        elif inspect.isgeneratorfunction(factory):
            factory = contextlib.contextmanager(factory)
        self.factory = factory


def _open_once(provider: Provider, given: object) -> object:
    """A context manager that was given itself; one of a generator works only once."""
    if provider.is_used_up:
        name = cast("Any", given).gen.__name__
        message = (
            f"{name}() was given to provide= already called, and can be opened only once: the bus "
            f"cannot be started again. Give the function, {name}."
        )
        raise ConfigurationError(message)
    generator = getattr(given, "gen", None)  # of contextlib's own
    provider.is_used_up = inspect.isasyncgen(generator) or inspect.isgenerator(generator)
    return given


def _is_factory(wanted: type, given: object) -> bool:
    if _is_instance(given, wanted):
        return False
    return (
        inspect.isroutine(given) or inspect.isclass(given) or isinstance(given, functools.partial)
    )


def _is_unopened(wanted: type, given: object) -> bool:
    if _is_instance(given, wanted):
        return False
    return isinstance(given, AbstractAsyncContextManager | AbstractContextManager)


def _is_instance(given: object, wanted: type) -> bool:
    try:
        return isinstance(given, wanted)
    except TypeError:  # a protocol that is not runtime-checkable: take the value as it is
        return not (inspect.isroutine(given) or inspect.isclass(given))


@final
class Providers:
    """All that a bus, or a session over its bus, can give to handlers."""

    def __init__(
        self,
        provide: Mapping[Any, object] | None,
        *,
        resolver: Resolver | None = None,
        parent: Providers | None = None,
    ) -> None:
        self._own = {wanted: Provider(wanted, given) for wanted, given in (provide or {}).items()}
        self._made: WeakKeyDictionary[HandlerClass, Any] = WeakKeyDictionary()
        """The objects of handler classes that are made once."""
        self._parent = parent
        self.resolver: Resolver | None = parent.resolver if parent is not None else resolver

    def find(self, dependency: Dependency) -> Provider | None:
        """The provider of what is asked for: by type, or by name where only that is known."""
        wanted = dependency.wanted
        if isinstance(wanted, str):
            short = wanted.rsplit(".", 1)[-1]
            wanted = next((cls for cls in self._own if cls.__name__ == short), wanted)
        provider = self._own.get(wanted)
        if provider is None and self._parent is not None:
            return self._parent.find(dependency)
        return provider

    def resolves(self, dependency: Dependency) -> bool:
        """Whether the user's container can make it."""
        return (
            self.resolver is not None
            and isinstance(dependency.wanted, type)
            and self.resolver.provides(dependency.wanted)
        )

    def faults(self, handler: str, dependencies: Sequence[Dependency]) -> list[Fault]:
        """What a handler asks for and nobody gives, seen through factories of factories."""
        return self._faults(handler, dependencies, ())

    def _faults(
        self, handler: str, dependencies: Sequence[Dependency], path: tuple[Provider, ...]
    ) -> list[Fault]:
        found: list[Fault] = []
        for dependency in dependencies:
            provider = self.find(dependency)
            wanted = dependency.wanted_name
            if provider is None:
                if not dependency.optional and not self.resolves(dependency):
                    problem = f"asks for {dependency.parameter}: {wanted}, which nobody provides."
                    found.append(Fault(handler, problem, f"Pass provide={{{wanted}: ...}}."))
            elif provider in path:
                problem = f"asks for {wanted}, whose factory asks for itself in the end."
                found.append(Fault(handler, problem, "Break the circle of factories."))
            else:
                found += self._faults(handler, provider.dependencies, (*path, provider))
        return found

    async def open(self, runtime: Runtime, keeper: Keeper) -> None:
        """Open everything that lives as long as the bus."""
        for provider in self._own.values():
            if provider.scope == "bus":
                await self._open(provider, runtime, keeper)

    def forget(self) -> None:
        """What was opened is closed again: the next `open` makes it anew, and so handlers."""
        self._made.clear()
        for provider in self._own.values():
            if provider.factory is not None:
                provider.is_open = False
                provider.value = None

    async def _open(self, provider: Provider, runtime: Runtime, keeper: Keeper) -> None:
        if provider.is_open or provider.factory is None:
            return
        arguments: dict[str, Any] = {}
        for dependency in provider.dependencies:
            inner = self.find(dependency)
            if inner is None:
                continue
            await self._open(inner, runtime, keeper)
            arguments[dependency.parameter] = inner.value
        provider.value = await keeper.enter(
            runtime, functools.partial(provider.factory, **arguments)
        )
        provider.is_open = True

    def makes_once(self, source: HandlerClass) -> bool:
        """Whether one object of a handler class is for all messages.

        If not, it is made for each: it was registered `per_message`, or its constructor asks
        for something that lives no longer than a message or session, such as the `Context`.
        """
        constructor = source.constructor
        if source.per_message or constructor.context_parameter is not None:
            return False
        for dependency in constructor.dependencies:
            provider = self.find(dependency)
            if provider.scope != "bus" if provider is not None else self.resolves(dependency):
                return False
        return True

    def made(self, source: HandlerClass, name: str) -> Any:
        """The one object of a handler class, for all types it handles; made if there is none.

        Raises:
            MissingProviderError: Its constructor asks for something nobody provides.
            BusNotStartedError: Its constructor asks for something that is not open yet.
        """
        if source not in self._made:
            same = [made for one, made in self._made.items() if one.cls is source.cls]
            needs = Needs(source.constructor, self, name)
            self._made[source] = same[0] if same else source.cls(**needs.fixed)
        return self._made[source]


def value_of(provider: Provider, handler: str) -> Any:
    """The value of a provider that lives as long as the bus."""
    if not provider.is_open:
        message = f"{handler} asks for something that is opened at start; start the bus first."
        raise BusNotStartedError(message)
    return provider.value


def _missing(handler: str, dependency: Dependency) -> MissingProviderError:
    wanted = dependency.wanted_name
    return MissingProviderError(
        f"{handler} asks for {dependency.parameter}: {wanted}, which nobody provides. "
        f"Pass provide={{{wanted}: ...}} to the bus or the session."
    )


@final
class Needs:
    """Where the arguments of a function come from: what is known now, and what is not yet.

    Raises:
        MissingProviderError: It asks for something nobody provides.
        BusNotStartedError: It asks for something that is not open yet.
    """

    __slots__ = ("context_parameter", "fixed", "resolved", "scoped")

    def __init__(self, signature: Signature, providers: Providers, name: str) -> None:
        self.context_parameter = signature.context_parameter
        self.fixed: dict[str, Any] = {}
        self.scoped: list[tuple[str, Provider]] = []
        self.resolved: list[Dependency] = []
        for dependency in signature.dependencies:
            provider = providers.find(dependency)
            if provider is not None:
                if provider.scope == "bus":
                    self.fixed[dependency.parameter] = value_of(provider, name)
                else:
                    self.scoped.append((dependency.parameter, provider))
            elif providers.resolves(dependency):
                self.resolved.append(dependency)
            elif not dependency.optional:
                raise _missing(name, dependency)
            elif not dependency.has_default:
                self.fixed[dependency.parameter] = None


@final
class _Handling:
    """One handling of one message: what is made for it is made once, and left after it."""

    __slots__ = ("_context", "_get", "_made", "_name", "_providers", "_stack")

    def __init__(
        self, providers: Providers, stack: AsyncExitStack, context: Context, name: str
    ) -> None:
        self._providers = providers
        self._stack = stack
        self._context = context
        self._name = name
        self._made: dict[Provider, Any] = {}
        self._get: Callable[[type], Awaitable[Any]] | None = None

    async def arguments(self, needs: Needs) -> dict[str, Any]:
        """The arguments of one function."""
        arguments = dict(needs.fixed)
        if needs.context_parameter is not None:
            arguments[needs.context_parameter] = self._context
        for parameter, provider in needs.scoped:
            arguments[parameter] = await self._value(provider)
        for dependency in needs.resolved:
            arguments[dependency.parameter] = await self._resolve(dependency.wanted)
        return arguments

    async def _resolve(self, wanted: type) -> Any:
        if self._get is None:
            resolver = cast("Resolver", self._providers.resolver)
            self._get = await self._stack.enter_async_context(resolver.open(self._context))
        return await self._get(wanted)

    async def _value(self, provider: Provider) -> Any:
        if provider.scope == "bus":
            return value_of(provider, self._name)
        if provider not in self._made:
            self._made[provider] = await self._make(provider)
        return self._made[provider]

    async def _make(self, provider: Provider) -> Any:
        arguments: dict[str, Any] = {}
        for dependency in provider.dependencies:
            inner = self._providers.find(dependency)
            if inner is None:
                raise _missing(self._name, dependency)
            arguments[dependency.parameter] = await self._value(inner)
        if provider.context_parameter is not None:
            arguments[provider.context_parameter] = self._context
        make = functools.partial(cast("Callable[..., Any]", provider.factory), **arguments)
        if provider.scope == "message":
            return await enter_any(self._stack, make())
        session = self._context.session
        if session is None:
            message = (
                f"{self._name} asks for something that lives per session, but "
                f"{type(self._context.message).__name__} belongs to no live session. "
                f"Send it through `async with bus.session() as s:`."
            )
            raise SessionClosedError(message)
        return await session.keep(provider, make)


def bind(
    handler: Callable[..., Any],
    signature: Signature,
    providers: Providers,
    *,
    source: HandlerClass | None = None,
    name: str,
    inline: bool,
    threads: ThreadPool,
    is_wrapped: bool,
) -> Call:
    """The handler as a function of the message alone, as direct as its needs allow.

    Args:
        handler: The handler.
        signature: What it asks for.
        providers: Where that comes from.
        source: The class it is made of, if it is a handler class.
        name: The handler's name.
        inline: Whether a sync handler is called on the event loop.
        threads: Where it is called otherwise.
        is_wrapped: Whether middleware is around it, which may catch its error and go on.

    Raises:
        MissingProviderError: It asks for something nobody provides.
        BusNotStartedError: It asks for something that is not open yet.
    """

    def awaitable(function: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
        return function if signature.is_async else _from_sync(function, threads, inline=inline)

    needs = Needs(signature, providers, name)
    if source is not None and not providers.makes_once(source):
        return _with_scope(_new(source, providers, name, awaitable), needs, providers, name)
    function = function_of(handler)
    if source is not None:
        function = getattr(providers.made(source, name), source.method)
    if needs.scoped or needs.resolved:
        call = awaitable(function)

        async def ready(_: _Handling) -> Callable[..., Awaitable[Any]]:
            return call

        return _with_scope(ready, needs, providers, name)
    if needs.fixed:
        function = functools.partial(function, **needs.fixed)
    if needs.context_parameter is not None:
        return _with_context(awaitable(function), signature, is_wrapped=is_wrapped)
    return awaitable(function)


def _from_sync(
    function: Callable[..., Any], threads: ThreadPool, *, inline: bool
) -> Callable[..., Awaitable[Any]]:
    async def call_inline(message: Any, **arguments: Any) -> Any:
        value = function(message, **arguments)
        return await value if inspect.isawaitable(value) else value

    async def call_in_thread(message: Any, **arguments: Any) -> Any:
        value = await threads.run(functools.partial(function, message, **arguments))
        return await value if inspect.isawaitable(value) else value

    return call_inline if inline else call_in_thread


def _with_context(
    call: Callable[..., Awaitable[Any]], signature: Signature, *, is_wrapped: bool
) -> Call:
    # The bus sets the frame before it calls a handler.
    get_frame = cast("Callable[[], Frame]", current_frame.get)
    parameter = cast("str", signature.context_parameter)

    # If it fails, the whole frame is given up, and what it emitted with it.
    def call_by_name(message: Any) -> Awaitable[Any]:
        return call(message, **{parameter: context_of(get_frame())})

    def call_by_place(message: Any) -> Awaitable[Any]:  # the common case, and cheaper
        return call(message, context_of(get_frame()))

    async def call_and_forget(message: Any) -> Any:
        context = context_of(get_frame())
        before = len(context.emitted)
        try:
            return await call(message, **{parameter: context})
        except BaseException:
            # A middleware may try again: what this attempt emitted did not happen.
            del context.emitted[before:]
            raise

    if is_wrapped:
        return call_and_forget
    return call_by_place if signature.is_async and signature.is_context_second else call_by_name


def _new(
    source: HandlerClass,
    providers: Providers,
    name: str,
    awaitable: Callable[[Callable[..., Any]], Callable[..., Awaitable[Any]]],
) -> Callable[[_Handling], Awaitable[Callable[..., Awaitable[Any]]]]:
    """Make a handler of its class for one handling."""
    needs = Needs(source.constructor, providers, name)

    async def make(handling: _Handling) -> Callable[..., Awaitable[Any]]:
        made = source.cls(**await handling.arguments(needs))
        return awaitable(getattr(made, source.method))

    return make


def _with_scope(
    get_call: Callable[[_Handling], Awaitable[Callable[..., Awaitable[Any]]]],
    needs: Needs,
    providers: Providers,
    name: str,
) -> Call:
    async def call_in_scope(message: Any) -> Any:
        context = context_of(cast("Frame", current_frame.get()))
        before = len(context.emitted)
        try:
            async with AsyncExitStack() as stack:
                handling = _Handling(providers, stack, context, name)
                call = await get_call(handling)
                return await call(message, **await handling.arguments(needs))
        except BaseException:
            del context.emitted[before:]
            raise

    return call_in_scope
