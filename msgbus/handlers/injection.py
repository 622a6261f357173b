"""Dependency injection: parameters of handlers are filled by annotation.

`provide={Database: db, Mailer: open_mailer, Transaction: per_message(begin)}` maps types
to values, or to factories per bus, per message or per session. A factory may be a function,
a generator, a class or return a context manager, and may itself have dependencies.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, AsyncExitStack
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeAlias, TypeVar, cast, final
from weakref import WeakKeyDictionary

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
from msgbus.messages.frame import BusHost, Frame, context_of, current_frame
from msgbus.messages.message import Message
from msgbus.runtime.resources import enter_any
from msgbus.runtime.threads import ThreadPool

if TYPE_CHECKING:
    from msgbus.handlers.signatures import HandlerClass
    from msgbus.runtime.event_loop import Runtime
    from msgbus.runtime.resources import Resources

T_co = TypeVar("T_co", covariant=True)

Call: TypeAlias = Callable[[Any], Awaitable[Any]]
"""A handler with its dependencies bound: message in, awaitable out."""


class Resolver(Protocol):
    """Protocol for a dependency-injection container such as dishka or svcs."""

    def provides(self, wanted: type) -> bool:
        """Return whether the container can make this type."""
        ...

    def open(self, context: Any) -> AbstractAsyncContextManager[Callable[[type], Awaitable[Any]]]:
        """Open a scope for one handling of one message; it gives a function from type to value.

        Args:
            context: The `Context` of that handling.
        """
        ...


@final
class per_message(Generic[T_co]):  # noqa: N801 (reads as a function in provide={...})
    """A provider or handler class that is instantiated for each handling of a message."""

    def __init__(self, factory: Callable[..., T_co]) -> None:
        self.factory = factory


@final
class per_session:  # noqa: N801
    """A provider that is opened once per session, at its first use, and closed at its end."""

    def __init__(self, factory: Callable[..., Any]) -> None:
        self.factory = factory


@final
class Provider:
    """One entry of `provide`."""

    __slots__ = (
        "context_parameter",
        "dependencies",
        "factory",
        "is_exhausted",
        "is_open",
        "scope",
        "value",
    )

    def __init__(self, wanted: type, given: object) -> None:
        self.value: Any = None
        self.is_open = False
        self.is_exhausted = False
        """Whether it was opened and cannot be opened again."""
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
        required = [parameter for parameter in parameters if parameter.default is parameter.empty]
        self.context_parameter, self.dependencies = read_dependencies(factory, required, name)
        if inspect.isasyncgenfunction(factory):
            factory = contextlib.asynccontextmanager(factory)
        elif inspect.isgeneratorfunction(factory):
            factory = contextlib.contextmanager(factory)
        self.factory = factory


def _open_once(provider: Provider, given: object) -> object:
    """Return a context manager passed as a value; raise if it cannot be opened again."""
    if provider.is_exhausted:
        name = cast("Any", given).gen.__name__
        message = (
            f"provide= has the context manager {name}(), which can be opened only once, so the "
            f"bus cannot be started again. Pass the function itself: {name}."
        )
        raise ConfigurationError(message)
    generator = getattr(given, "gen", None)  # of contextlib
    provider.is_exhausted = inspect.isasyncgen(generator) or inspect.isgenerator(generator)
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
    except TypeError:  # a protocol that is not runtime-checkable
        return not (inspect.isroutine(given) or inspect.isclass(given))


@final
class Providers:
    """The providers of a bus, or of a session and its bus."""

    def __init__(
        self,
        provide: Mapping[Any, object] | None,
        *,
        resolver: Resolver | None = None,
        parent: Providers | None = None,
    ) -> None:
        self._own = {wanted: Provider(wanted, given) for wanted, given in (provide or {}).items()}
        self._objects: WeakKeyDictionary[HandlerClass, Any] = WeakKeyDictionary()
        """The single instances of handler classes."""
        self._parent = parent
        self.resolver: Resolver | None = parent.resolver if parent is not None else resolver

    def find(self, dependency: Dependency) -> Provider | None:
        """Find a provider by type, or by name if the annotation could not be resolved."""
        wanted = dependency.wanted
        if isinstance(wanted, str):
            short = wanted.rsplit(".", 1)[-1]
            wanted = next((cls for cls in self._own if cls.__name__ == short), wanted)
        provider = self._own.get(wanted)
        if provider is None and self._parent is not None:
            return self._parent.find(dependency)
        return provider

    def resolves(self, dependency: Dependency) -> bool:
        """Return whether the container of the user provides it."""
        return (
            self.resolver is not None
            and isinstance(dependency.wanted, type)
            and self.resolver.provides(dependency.wanted)
        )

    def faults(self, handler: str, dependencies: Sequence[Dependency]) -> list[Fault]:
        """List the dependencies without a provider, factories of factories included."""
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
                    problem = f"asks for {dependency.parameter}: {wanted}, which has no provider."
                    found.append(Fault(handler, problem, f"Pass provide={{{wanted}: ...}}."))
            elif provider in path:
                problem = f"asks for {wanted}, whose factory depends on itself."
                found.append(Fault(handler, problem, "Break the cycle of factories."))
            else:
                found += self._faults(handler, provider.dependencies, (*path, provider))
        return found

    async def open(self, runtime: Runtime, resources: Resources) -> None:
        """Open all providers that live as long as the bus."""
        for provider in self._own.values():
            if provider.scope == "bus":
                await self._open(provider, runtime, resources)

    def forget(self) -> None:
        """Forget opened providers and handler instances; the next `open` makes new ones."""
        self._objects.clear()
        for provider in self._own.values():
            if provider.factory is not None:
                provider.is_open = False
                provider.value = None

    async def _open(self, provider: Provider, runtime: Runtime, resources: Resources) -> None:
        if provider.is_open or provider.factory is None:
            return
        arguments: dict[str, Any] = {}
        for dependency in provider.dependencies:
            inner = self.find(dependency)
            if inner is None:
                continue
            await self._open(inner, runtime, resources)
            arguments[dependency.parameter] = inner.value
        provider.value = await resources.enter(
            runtime, functools.partial(provider.factory, **arguments)
        )
        provider.is_open = True

    def is_singleton(self, source: HandlerClass) -> bool:
        """Return whether one instance of a handler class handles all messages.

        Not if it was registered `per_message`, or if its constructor asks for the `Context`
        or for a dependency per message or session.
        """
        constructor = source.constructor
        if source.per_message or constructor.context_parameter is not None:
            return False
        for dependency in constructor.dependencies:
            provider = self.find(dependency)
            if provider.scope != "bus" if provider is not None else self.resolves(dependency):
                return False
        return True

    def singleton(self, source: HandlerClass, name: str) -> Any:
        """Return the one instance of a handler class for all types it handles.

        Raises:
            MissingProviderError: Its constructor asks for a dependency without a provider.
            BusNotStartedError: Its constructor asks for a dependency that is not open yet.
        """
        if source not in self._objects:
            same = [made for one, made in self._objects.items() if one.cls is source.cls]
            plan = ArgumentPlan(source.constructor, self, name)
            self._objects[source] = same[0] if same else source.cls(**plan.fixed)
        return self._objects[source]


def value_of(provider: Provider, handler: str) -> Any:
    """Return the value of a provider that lives as long as the bus."""
    if not provider.is_open:
        message = (
            f"{handler} asks for a dependency that is opened when the bus starts. "
            f"Start the bus first: `async with bus:`."
        )
        raise BusNotStartedError(message)
    return provider.value


def _missing(handler: str, dependency: Dependency) -> MissingProviderError:
    wanted = dependency.wanted_name
    return MissingProviderError(
        f"{handler} asks for {dependency.parameter}: {wanted}, which has no provider. "
        f"Pass provide={{{wanted}: ...}} to the bus or the session."
    )


@final
class ArgumentPlan:
    """The sources of a function's arguments: values known now, and providers per message.

    Raises:
        MissingProviderError: It asks for a dependency without a provider.
        BusNotStartedError: It asks for a dependency that is not open yet.
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
class _MessageScope:
    """The dependencies of one handling of one message; each is opened at most once."""

    __slots__ = ("_context", "_frame", "_get", "_name", "_objects", "_providers", "_stack")

    def __init__(
        self, providers: Providers, stack: AsyncExitStack, frame: Frame, name: str
    ) -> None:
        self._providers = providers
        self._stack = stack
        self._frame = frame
        self._context = context_of(frame)
        self._name = name
        self._objects: dict[Provider, Any] = {}
        self._get: Callable[[type], Awaitable[Any]] | None = None

    async def arguments(self, plan: ArgumentPlan) -> dict[str, Any]:
        """Return the arguments of one function."""
        arguments = dict(plan.fixed)
        if plan.context_parameter is not None:
            arguments[plan.context_parameter] = self._context
        for parameter, provider in plan.scoped:
            arguments[parameter] = await self._value(provider)
        for dependency in plan.resolved:
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
        if provider not in self._objects:
            self._objects[provider] = await self._make(provider)
        return self._objects[provider]

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
        message: Message = self._frame.message
        session_id = message.session_id
        host: BusHost = self._frame.owner.host
        session = None if session_id is None else host.session_host(session_id)
        if session is None:
            text = (
                f"{self._name} asks for a per_session dependency, but "
                f"{type(message).__name__} belongs to no live session. "
                f"Send it through `async with bus.session() as s:`."
            )
            raise SessionClosedError(text)
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
    """Bind the dependencies of a handler: return a function of the message alone.

    Args:
        handler: The handler.
        signature: Its parameters.
        providers: The providers of its dependencies.
        source: Its class, if a handler class was registered.
        name: The handler's name.
        inline: Whether a sync handler is called on the event loop.
        threads: The thread pool that calls it otherwise.
        is_wrapped: Whether middleware is around it, which may catch its error and retry.

    Raises:
        MissingProviderError: It asks for a dependency without a provider.
        BusNotStartedError: It asks for a dependency that is not open yet.
    """

    def awaitable(function: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
        return function if signature.is_async else _from_sync(function, threads, inline=inline)

    plan = ArgumentPlan(signature, providers, name)
    if source is not None and not providers.is_singleton(source):
        return _with_scope(_new(source, providers, name, awaitable), plan, providers, name)
    function = function_of(handler)
    if source is not None:
        function = getattr(providers.singleton(source, name), source.method)
    if plan.scoped or plan.resolved:
        call = awaitable(function)

        async def ready(_: _MessageScope) -> Callable[..., Awaitable[Any]]:
            return call

        return _with_scope(ready, plan, providers, name)
    if plan.fixed:
        function = functools.partial(function, **plan.fixed)
    if plan.context_parameter is not None:
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

    # If it fails, the frame is discarded, with what it emitted.
    def call_by_name(message: Any) -> Awaitable[Any]:
        return call(message, **{parameter: context_of(get_frame())})

    def call_by_position(message: Any) -> Awaitable[Any]:  # the common case, and cheaper
        return call(message, context_of(get_frame()))

    async def call_and_forget(message: Any) -> Any:
        context = context_of(get_frame())
        before = len(context.emitted)
        try:
            return await call(message, **{parameter: context})
        except BaseException:
            # A middleware may retry: discard what this attempt emitted.
            del context.emitted[before:]
            raise

    if is_wrapped:
        return call_and_forget
    return call_by_position if signature.is_async and signature.is_context_second else call_by_name


def _new(
    source: HandlerClass,
    providers: Providers,
    name: str,
    awaitable: Callable[[Callable[..., Any]], Callable[..., Awaitable[Any]]],
) -> Callable[[_MessageScope], Awaitable[Callable[..., Awaitable[Any]]]]:
    """Return a function that instantiates a handler class for one message."""
    plan = ArgumentPlan(source.constructor, providers, name)

    async def make(scope: _MessageScope) -> Callable[..., Awaitable[Any]]:
        made = source.cls(**await scope.arguments(plan))
        return awaitable(getattr(made, source.method))

    return make


def _with_scope(
    get_call: Callable[[_MessageScope], Awaitable[Callable[..., Awaitable[Any]]]],
    plan: ArgumentPlan,
    providers: Providers,
    name: str,
) -> Call:
    async def call_in_scope(message: Any) -> Any:
        frame = cast("Frame", current_frame.get())
        context = context_of(frame)
        before = len(context.emitted)
        try:
            async with AsyncExitStack() as stack:
                scope = _MessageScope(providers, stack, frame, name)

                call = await get_call(scope)
                return await call(message, **await scope.arguments(plan))
        except BaseException:
            del context.emitted[before:]
            raise

    return call_in_scope
