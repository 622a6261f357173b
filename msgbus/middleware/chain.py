"""The middleware chain: closures, built once per handler, never per call."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias, final

from msgbus.errors import ConfigurationError, Fault, HandlerTimeoutError, MiddlewareError
from msgbus.handlers.signatures import handler_name, is_async_callable
from msgbus.messages.message import Message, message_type_of
from msgbus.runtime.clock import Clock
from msgbus.runtime.event_loop import LATE, in_time

CallNext: TypeAlias = Callable[[Any], Awaitable[Any]]
"""Calls the rest of the chain: returns the raw value, raises the handler's exception."""

Middleware: TypeAlias = Callable[[Any, CallNext], Awaitable[Any]]
"""Any callable `(message, call_next)`; with `batch = True` it also sees lists of events."""

Per: TypeAlias = Literal["attempt", "message"]


@final
@dataclass(frozen=True, slots=True)
class MiddlewareEntry:
    """A middleware and the messages it applies to."""

    middleware: Middleware
    types: tuple[type[Message], ...] | None
    per: Per

    @property
    def name(self) -> str:
        """Its name in errors and logs."""
        return handler_name(self.middleware)

    @property
    def batch(self) -> bool | None:
        """Whether it takes lists of events; `None` if not declared."""
        declared = getattr(self.middleware, "batch", None)
        return None if declared is None else bool(declared)

    def may_apply_to(self, message_type: type[Message]) -> bool:
        """Whether a handler of `message_type` can receive a message that it applies to."""
        return self.types is None or any(
            issubclass(message_type, cls) or issubclass(cls, message_type) for cls in self.types
        )


def make_entry(
    middleware: Middleware,
    types: type[Message] | Sequence[type[Message]] | None,
    per: Per,
) -> MiddlewareEntry:
    """Check a middleware and make its entry.

    Raises:
        ConfigurationError: It cannot be called with `(message, call_next)`.
    """
    name = handler_name(middleware)
    if inspect.isclass(middleware):
        message = f"{name} is a class; add an instance of it: {name}(...)."
        raise ConfigurationError(message)
    try:
        inspect.signature(middleware).bind(None, None)
    except TypeError as error:
        message = f"The middleware {name} must take (message, call_next): {error}."
        raise ConfigurationError(message) from None
    if per not in ("attempt", "message"):
        message = f"per must be 'attempt' or 'message', not {per!r}."
        raise ConfigurationError(message)
    if isinstance(types, type):
        types = (types,)
    return MiddlewareEntry(middleware, None if types is None else tuple(types), per)


def build_chain(
    entries: Sequence[MiddlewareEntry],
    call: CallNext,
    message_type: type[Message],
    *,
    handler: str,
    batch: bool = False,
) -> CallNext:
    """Wrap `call` in all entries that can apply to it; the first listed is the outermost."""
    for entry in reversed(entries):
        if batch and not entry.batch:
            continue
        wrapped = _wrap(entry, call, handler)
        if entry.types is None or issubclass(message_type, entry.types):
            call = wrapped
        elif any(issubclass(cls, message_type) for cls in entry.types):
            # The handler takes a base class: which messages it applies to is known only per call.
            call = _choose(entry.types, wrapped, call)
    return call


def batch_faults(
    entries: Sequence[MiddlewareEntry], message_types: Sequence[type[Message]], *, handler: str
) -> list[Fault]:
    """Find middleware around a batch handler that does not declare whether it takes lists."""
    return [
        Fault(
            handler,
            f"takes lists of events, and the middleware {entry.name} does not "
            f"declare whether it does, so it would be skipped.",
            f"Set {entry.name}.batch = True if it takes a list as its message, or False to "
            f"skip it around batch handlers.",
        )
        for entry in entries
        if entry.batch is None and any(map(entry.may_apply_to, message_types))
    ]


def _wrap(entry: MiddlewareEntry, call_next: CallNext, handler: str) -> CallNext:
    middleware = entry.middleware
    if is_async_callable(middleware):
        # No extra coroutine: the middleware's own is awaited directly.
        return lambda message: middleware(message, call_next)

    async def checked(message: Any) -> Any:
        result = middleware(message, call_next)
        if not inspect.isawaitable(result):
            text = (
                f"The middleware {entry.name} returned {type(result).__name__}, which cannot be "
                f"awaited. Write it with `async def`, and `return await call_next(message)`."
            )
            raise MiddlewareError(text, handler=handler, message_type=message_type_of(message))
        return await result

    return checked


def _choose(types: tuple[type[Message], ...], wrapped: CallNext, plain: CallNext) -> CallNext:
    def choose(message: Any) -> Awaitable[Any]:
        return wrapped(message) if issubclass(message_type_of(message), types) else plain(message)

    return choose


def not_awaited(handler: str, message: Any) -> MiddlewareError:
    """Make the error for a chain whose value is a coroutine that was never awaited."""
    return MiddlewareError(
        f"The value of {handler} is a coroutine: a middleware returned call_next(message) "
        f"without awaiting it, or the handler an unawaited call. Write `await` before it.",
        handler=handler,
        message_type=message_type_of(message),
    )


def with_timeout(call: CallNext, seconds: float, handler: str, clock: Clock) -> CallNext:
    """Wrap `call` so that it is cancelled after `seconds`."""
    return partial(within, call, seconds=seconds, handler=handler, clock=clock)


async def within(call: CallNext, message: Any, seconds: float, handler: str, clock: Clock) -> Any:
    """Call within a time limit.

    Raises:
        HandlerTimeoutError: It took longer, and was cancelled.
    """
    value = await in_time(call(message), seconds, clock)
    if value is LATE:
        raise HandlerTimeoutError(
            handler=handler, message_type=message_type_of(message), seconds=seconds
        )
    return value
