"""Signatures of handlers, read once at registration."""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Final, Union, cast, final, get_args, get_origin

from typing_extensions import is_protocol

from msgbus.errors import HandlerSignatureError
from msgbus.messages.frame import HandlingContext
from msgbus.messages.message import Event, Message

_VARIADIC: Final = frozenset({inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD})
_POSITIONAL: Final = frozenset(
    {inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD}
)


@final
@dataclass(frozen=True, slots=True)
class Dependency:
    """One parameter that is injected by annotation."""

    parameter: str
    wanted: Any
    """The annotated type, or its name if it cannot be resolved yet."""
    optional: bool
    """Whether the parameter has a default or may be `None`."""
    has_default: bool

    @property
    def wanted_name(self) -> str:
        """The annotation as text."""
        return self.wanted if isinstance(self.wanted, str) else type_name(self.wanted)


@final
@dataclass(frozen=True, slots=True)
class Signature:
    """How to call a handler, or to instantiate its class."""

    is_async: bool
    context_parameter: str | None
    dependencies: tuple[Dependency, ...]
    is_context_second: bool = False
    """Whether the context can be passed as second positional argument."""


def type_name(wanted: Any) -> str:
    """Return a readable name for a class or typing construct."""
    return wanted.__name__ if isinstance(wanted, type) else str(wanted)


def handler_name(handler: Callable[..., Any]) -> str:
    """Return the name of a handler for logs and errors."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    name = getattr(handler, "__qualname__", None) or type(handler).__qualname__
    return name.rsplit("<locals>.", 1)[-1]


def is_lambda(handler: Callable[..., Any]) -> bool:
    """Return whether it is a lambda."""
    return handler_name(handler) == "<lambda>"


def method_of(handler_class: type) -> str | None:
    """Return the method that is called for a message: `__call__`, else `handle`, else none."""
    names = {name for base in handler_class.__mro__ for name in vars(base)}
    return next((name for name in ("__call__", "handle") if name in names), None)


def function_of(handler: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function of a handler: itself, or the method `handle` of an object."""
    if callable(handler):
        return handler
    method: Callable[..., Any] | None = getattr(handler, "handle", None)
    return method if callable(method) else handler


def code_identity(handler: Callable[..., Any]) -> object:
    """Return a value that is equal for handlers that run the same code, whatever their data."""
    plain = _unwrap(handler)
    code: object = getattr(plain, "__code__", None)
    owner = _class_of(handler)
    if owner is not None:
        return owner.__module__, owner.__qualname__, code
    return code or (getattr(plain, "__module__", None), getattr(plain, "__qualname__", None))


def location_of(handler: Callable[..., Any]) -> tuple[str, int | None]:
    """Return the module and line where a handler is defined."""
    plain = _unwrap(handler)
    code = getattr(plain, "__code__", None)
    module = getattr(plain, "__module__", None) or "builtins"
    return module, None if code is None else code.co_firstlineno


def location_text(handler: Callable[..., Any]) -> str:
    """Return the location of a handler as text."""
    module, line = location_of(handler)
    return module if line is None else f"{module}, line {line}"


def _class_of(handler: Callable[..., Any]) -> type | None:
    """Return the class of a handler that is a class or an instance; `None` for functions."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    if inspect.isroutine(handler):
        return None
    return handler if isinstance(handler, type) else type(handler)


def _unwrap(function: Callable[..., Any]) -> Any:
    """Return the function without partials, wrappers and the object it is bound to."""
    while isinstance(function, functools.partial):
        function = function.func
    function = function_of(function)
    owner = _class_of(function)
    if owner is not None:
        function = getattr(owner, method_of(owner) or "__call__")
    function = inspect.unwrap(function)
    return getattr(function, "__func__", function)


def is_async_callable(function: Callable[..., Any]) -> bool:
    """Return whether calling it gives an awaitable, looking through partials and wrappers."""
    while isinstance(function, functools.partial):
        function = function.func
    if inspect.iscoroutinefunction(inspect.unwrap(function)):
        return True
    if inspect.isroutine(function):
        return False
    call = getattr(type(function), "__call__", None)  # noqa: B004
    return call is not None and inspect.iscoroutinefunction(inspect.unwrap(call))


def read_handler(
    handler: Callable[..., Any], message_type: type[Message], *, batch: bool
) -> Signature:
    """Check that `handler` accepts `message_type`, and read its dependencies.

    Raises:
        HandlerSignatureError: It could never be called.
    """
    function, name = _handler_function(handler, message_type)
    message, *others = _parameters(function, name, message_type)
    _check_message(message, _resolve(message, function), name, message_type, batch=batch)
    context, dependencies = read_dependencies(function, others, name)
    is_second = bool(others) and others[0].name == context and others[0].kind in _POSITIONAL
    return Signature(is_async_callable(function), context, dependencies, is_second)


def read_constructor(handler_class: type) -> Signature:
    """Read the dependencies of the constructor of a handler class.

    Raises:
        HandlerSignatureError: It could never be called.
    """
    name = handler_name(handler_class)
    if inspect.iscoroutinefunction(inspect.getattr_static(handler_class, "__init__")):
        text = (
            f"{name}.__init__ is async, and Python cannot await a constructor. Make it `def "
            f"__init__`, and open what it needs in a provider: provide={{Database: open_database}}."
        )
        raise HandlerSignatureError(text)
    if inspect.isabstract(handler_class) or is_protocol(handler_class):
        text = f"{name} is abstract and cannot be instantiated. Register a concrete subclass."
        raise HandlerSignatureError(text)
    try:
        parameters = list(inspect.signature(handler_class).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    context, dependencies = read_dependencies(handler_class, parameters, f"{name}.__init__")
    return Signature(is_async=False, context_parameter=context, dependencies=dependencies)


def annotated_subclass(
    handler: Callable[..., Any], message_type: type[Message], *, batch: bool
) -> type[Message]:
    """Return the class that the handler's parameter is annotated with, if a subclass.

    Raises:
        HandlerSignatureError: It could never be called.
    """
    function, name = _handler_function(handler, message_type)
    annotation = _resolve(_parameters(function, name, message_type)[0], function)
    if batch:
        (annotation,) = get_args(annotation) or (None,)
    if isinstance(annotation, type) and issubclass(annotation, message_type):
        return annotation
    return message_type


def annotated_classes(
    handler: Callable[..., Any], message_type: type[Message]
) -> tuple[tuple[type[Message], ...], bool]:
    """Return the subclasses that the handler's parameter is annotated with, and whether as a list.

    Raises:
        HandlerSignatureError: It could never be called.
    """
    function, name = _handler_function(handler, message_type)
    annotation = _resolve(_parameters(function, name, message_type)[0], function)
    origin = get_origin(annotation)
    is_list = isinstance(origin, type) and issubclass(list, origin)
    if is_list:
        (annotation,) = get_args(annotation)
    classes = tuple(
        member
        for member in _members(annotation)
        if isinstance(member, type) and issubclass(member, message_type)
    )
    return classes or (message_type,), is_list


def _handler_function(
    handler: Callable[..., Any], message_type: type[Message]
) -> tuple[Callable[..., Any], str]:
    """Return the function to call for a message, and its name for errors.

    Raises:
        HandlerSignatureError: It cannot be called, or is a generator.
    """
    function = function_of(handler)
    name = handler_name(function)
    if inspect.isclass(function):
        function, name = _method(function, message_type)
    if not callable(function):
        text = (
            f"The handler for {message_type.__name__} is {handler!r}, which cannot be called, and "
            f"has no method `handle`."
        )
        raise HandlerSignatureError(text)
    if inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function):
        text = f"{name} is a generator (it contains `yield`); a handler returns its reply."
        raise HandlerSignatureError(text)
    return function, name


def _method(handler_class: type, message_type: type[Message]) -> tuple[Callable[..., Any], str]:
    """Return the method of a handler class without `self`, and its name for errors."""
    name = handler_name(handler_class)
    method = method_of(handler_class)
    if method is None:
        text = (
            f"{name} is a class with neither `handle` nor `__call__`, so it cannot "
            f"handle {message_type.__name__}. "
            f"Write: async def handle(self, message: {message_type.__name__})."
        )
        raise HandlerSignatureError(text)
    found: object = inspect.getattr_static(handler_class, method)
    function = getattr(handler_class, method)
    is_bound_later = hasattr(type(found), "__get__")
    if is_bound_later and not isinstance(found, staticmethod | classmethod):
        function = functools.partial(function, None)
    return function, f"{name}.{method}"


def _parameters(
    handler: Callable[..., Any], name: str, message_type: type[Message]
) -> list[inspect.Parameter]:
    try:
        parameters = list(inspect.signature(handler).parameters.values())
    except (TypeError, ValueError):
        # Some builtins (list.append) have no signature: one parameter is assumed.
        return [inspect.Parameter("message", inspect.Parameter.POSITIONAL_ONLY)]
    if not parameters or parameters[0].kind not in _POSITIONAL | {inspect.Parameter.VAR_POSITIONAL}:
        *owner, short = name.rsplit(".", 1)
        first = "self, " if owner else ""
        text = (
            f"{name} takes no positional parameter, so it cannot be given a "
            f"{message_type.__name__}. Write: def {short}({first}message: {message_type.__name__})."
        )
        raise HandlerSignatureError(text)
    if _is_unbound(handler, name, parameters):
        register = "subscribe" if issubclass(message_type, Event) else "register_command_handler"
        text = (
            f"{name} is an unbound method: while the class body runs, there is no object yet. "
            f"Register the method of an object, bus.{register}({message_type.__name__}, "
            f"obj.{name.rsplit('.', 1)[-1]}), or a class with a method `handle`."
        )
        raise HandlerSignatureError(text)
    return parameters


def _is_unbound(
    handler: Callable[..., Any], name: str, parameters: Sequence[inspect.Parameter]
) -> bool:
    """Return whether it is a function of a class body that lacks its object."""
    first = parameters[0]
    return (
        inspect.isfunction(handler)
        and "." in name
        and first.name in ("self", "cls")
        and first.annotation is inspect.Parameter.empty
    )


def _resolve(parameter: inspect.Parameter, function: Callable[..., Any]) -> Any:
    """Return the annotation as a type; as text if its names cannot be resolved."""
    annotation = parameter.annotation
    if isinstance(annotation, str):
        annotation = _evaluate(annotation, function)
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    return annotation


def _evaluate(text: str, function: Callable[..., Any]) -> Any:
    if inspect.isclass(function):
        function = inspect.getattr_static(function, "__init__")
    plain = _unwrap(function)
    names = dict(getattr(plain, "__globals__", {}))
    cells = getattr(plain, "__closure__", None) or ()
    code = getattr(plain, "__code__", None)
    for variable, cell in zip(code.co_freevars if code else (), cells, strict=False):
        try:
            names[variable] = cell.cell_contents
        except ValueError:
            continue
    try:
        return eval(text, names)  # noqa: S307 (an annotation of the user's own code)
    except (NameError, AttributeError, TypeError, SyntaxError):
        # A class local to a function, or one imported for type checkers only.
        return text


def _members(annotation: Any) -> tuple[Any, ...]:
    if get_origin(annotation) in (Union, types.UnionType):
        return get_args(annotation)
    return (annotation,)


def _check_message(
    parameter: inspect.Parameter,
    annotation: Any,
    name: str,
    message_type: type[Message],
    *,
    batch: bool,
) -> None:
    if parameter.kind is inspect.Parameter.VAR_POSITIONAL or annotation in (
        inspect.Parameter.empty,
        Any,
        object,
    ):
        return
    wanted = f"list[{message_type.__name__}]" if batch else message_type.__name__
    if isinstance(annotation, str):
        fits = _text_fits(annotation, message_type, batch=batch)
    else:
        fits = any(_fits(member, message_type, batch=batch) for member in _members(annotation))
    if fits:
        return
    shown = annotation if isinstance(annotation, str) else type_name(annotation)
    hint = ""
    if not batch and shown.startswith(("list[", "Sequence[")):
        hint = " To receive lists of events, register it with batch=True."
    text = (
        f"{name} is registered for {message_type.__name__}, but its parameter "
        f"{parameter.name!r} is annotated {shown}; annotate it {wanted}.{hint}"
    )
    raise HandlerSignatureError(text)


def _fits(annotation: Any, message_type: type[Message], *, batch: bool) -> bool:
    origin = get_origin(annotation)
    if batch:
        if not (isinstance(origin, type) and issubclass(list, origin)):
            return annotation is list
        (element,) = get_args(annotation) or (Any,)
        return element is Any or any(
            _fits(member, message_type, batch=False) for member in _members(element)
        )
    if isinstance(annotation, typing.TypeVar):
        return True
    accepted = origin or annotation
    return isinstance(accepted, type) and issubclass(message_type, accepted)


def _text_fits(annotation: str, message_type: type[Message], *, batch: bool) -> bool:
    names = {cls.__name__ for cls in message_type.__mro__}
    inner = annotation
    if "[" in annotation and batch:
        inner = annotation.split("[", 1)[1].rstrip("]")
    elif batch:
        return False
    parts = [part.strip().rsplit(".", 1)[-1] for part in inner.split("|")]
    return any(part.split("[", 1)[0] in names for part in parts)


def _is_context(wanted: Any) -> bool:
    """Return whether it is `Context`, resolved or as text."""
    if isinstance(wanted, str):
        return wanted.split("[", 1)[0] in ("Context", "msgbus.Context")
    kind = get_origin(wanted) or wanted
    return isinstance(kind, type) and issubclass(kind, HandlingContext)


def read_dependencies(
    function: Callable[..., Any], parameters: list[inspect.Parameter], name: str
) -> tuple[str | None, tuple[Dependency, ...]]:
    """Return the name of the context parameter, and the parameters to inject.

    Raises:
        HandlerSignatureError: A parameter has neither annotation nor default.
    """
    context: str | None = None
    dependencies: list[Dependency] = []
    for parameter in parameters:
        if parameter.kind in _VARIADIC:
            continue
        has_default = parameter.default is not inspect.Parameter.empty
        annotation = _resolve(parameter, function)
        if annotation is inspect.Parameter.empty:
            if has_default:
                continue
            text = (
                f"{name} has a parameter {parameter.name!r} with neither annotation nor "
                f"default, so nothing can be injected. Annotate it with Context or with "
                f"a type from provide={{...}}."
            )
            raise HandlerSignatureError(text)
        if parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
            text = f"{name} has a positional-only parameter {parameter.name!r}; drop the '/'."
            raise HandlerSignatureError(text)
        members = [member for member in _members(annotation) if member is not type(None)]
        wanted = members[0] if len(members) == 1 else annotation
        if _is_context(wanted):
            context = parameter.name
            continue
        optional = has_default or len(members) < len(_members(annotation))
        dependencies.append(Dependency(parameter.name, wanted, optional, has_default))
    return context, tuple(dependencies)


@final
class HandlerClass:
    """A class that was registered as a handler.

    Raises:
        HandlerSignatureError: It cannot be instantiated.
    """

    def __init__(self, cls: type, *, per_message: bool) -> None:
        self.cls: type[Any] = cls
        self.method = cast("str", method_of(cls))
        self.per_message = per_message
        """Whether it is instantiated for each message, even if its dependencies live longer."""
        read_constructor(cls)

    @cached_property
    def constructor(self) -> Signature:
        """The signature of its constructor.

        Read at the first use, not at registration: a decorator above, such as `@dataclass`,
        may replace the constructor.
        """
        return read_constructor(self.cls)
