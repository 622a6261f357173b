"""Dispatchers: the protocol, the registry, and running them concurrently with time limits."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast, final

from anyio.lowlevel import RunVar

from msgbus.errors import ConfigurationError, DuplicateHandlerError, EngineFrozenError
from msgbus.messages.topics.pattern import is_topic
from msgbus.routing.dispatch.logging import Dispatched, DispatchLog
from msgbus.routing.dispatch.results import DispatchOutcome, DispatchResult, DispatchStatus
from msgbus.routing.envelope import (
    EventEnvelope,
    MessageCategory,
    message_type_name,
    require_category,
)
from msgbus.runtime.arguments import require_id, require_members
from msgbus.runtime.clock import Clock
from msgbus.runtime.event_loop import LATE, current_runtime, in_time, run_together
from msgbus.runtime.threads import ThreadPool
from msgbus.telemetry.redaction import redact, redact_exception

if TYPE_CHECKING:
    from msgbus.routing.dispatch.metrics import DispatcherCounts

DispatcherOutput: TypeAlias = str | list[str] | DispatchResult | None
"""What a dispatcher returns: output topics, or a whole result."""

DispatchFunction: TypeAlias = Callable[
    [EventEnvelope[Any]], Awaitable[DispatcherOutput] | DispatcherOutput
]
"""A dispatcher function; a sync one runs in a thread."""

MessageTypes: TypeAlias = Collection[str | type]


class MessageDispatcher(Protocol):
    """A dispatcher object, which declares the messages it takes."""

    @property
    def dispatcher_id(self) -> str:
        """Its id, unique in an engine."""
        ...

    @property
    def category(self) -> MessageCategory:
        """The category of messages it takes."""
        ...

    @property
    def message_types(self) -> MessageTypes | None:
        """The types it takes, by name or class, subclasses included; `None` or empty for all."""
        ...

    @property
    def node_kind(self) -> str:
        """Its role, such as `"reducer"`; descriptive only."""
        ...

    def handle(
        self, envelope: EventEnvelope[Any]
    ) -> Awaitable[DispatcherOutput] | DispatcherOutput:
        """Handle a message; return output topics, a result or `None`."""
        ...


@final
@dataclass(frozen=True, slots=True)
class AcceptedTypes:
    """The message types that a dispatcher takes: by name, and by class with subclasses."""

    names: frozenset[str]
    """The names, including those of `classes`."""

    classes: tuple[type, ...]

    def take(self, name: str, payload_type: type) -> bool:
        """Return whether a message of this name and payload class is taken."""
        return name in self.names or issubclass(payload_type, self.classes)


@final
@dataclass(frozen=True, slots=True)
class DispatcherEntry:
    """A registered dispatcher of an engine."""

    dispatcher_id: str
    function: DispatchFunction
    category: MessageCategory
    message_types: AcceptedTypes | None
    timeout: float | None
    is_async: bool
    counts: DispatcherCounts

    def takes(self, message_type: str, payload_type: type) -> bool:
        """Return whether it takes messages of this name and payload class."""
        return self.message_types is None or self.message_types.take(message_type, payload_type)


def accepted_types(message_types: MessageTypes | None) -> AcceptedTypes | None:
    """Parse message types, given by name or class; `None` for all.

    Raises:
        ConfigurationError: It is a single string, or an item is neither a name nor a class that
            `issubclass` accepts.
    """
    if isinstance(message_types, str):
        message = f"message_types={message_types!r} is a string; give a set: {{{message_types!r}}}."
        raise ConfigurationError(message)
    if not message_types:
        return None
    classes = tuple(one for one in message_types if isinstance(one, type))
    for one in classes:
        _require_class(one)
    return AcceptedTypes(frozenset(_type_name(one) for one in message_types), classes)


def _require_class(one: type) -> None:
    try:
        issubclass(object, one)
    except TypeError as error:  # a protocol, for instance
        message = f"{one.__name__} in message_types cannot be used to find subclasses: {error}."
        raise ConfigurationError(message) from None


def _type_name(message_type: str | type) -> str:
    if isinstance(message_type, type):
        return message_type_name(message_type)
    require_id("Each of message_types", message_type)
    return message_type


def is_async(function: Callable[..., Any]) -> bool:
    """Return whether calling `function` returns an awaitable."""
    while hasattr(function, "func"):  # functools.partial
        function = cast("Any", function).func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 (the method itself is inspected)
    )


@final
class DispatcherRegistry:
    """Dispatcher objects, to be included in an engine.

    ```python
    registry = DispatcherRegistry()
    registry.register_dispatcher(OrderDispatcher())
    engine.include(registry)
    ```
    """

    def __init__(self) -> None:
        self._dispatchers: dict[str, MessageDispatcher] = {}
        self._lock = threading.Lock()
        self._is_frozen = False

    def register_dispatcher(self, dispatcher: MessageDispatcher) -> None:
        """Add a dispatcher.

        Raises:
            ConfigurationError: It lacks a member of the `MessageDispatcher` protocol, its id is
                blank, or its category is not a `MessageCategory`.
            DuplicateHandlerError: Its id is registered.
            EngineFrozenError: The registry is frozen.
        """
        fix = "See msgbus.routing.MessageDispatcher."
        require_members(dispatcher, MessageDispatcher, "The dispatcher", fix)
        if not callable(dispatcher.handle):
            message = f"The dispatcher {dispatcher!r:.60} has a handle that is not callable."
            raise ConfigurationError(message)
        require_id(f"The dispatcher_id of {type(dispatcher).__name__}", dispatcher.dispatcher_id)
        require_category(f"dispatcher {dispatcher.dispatcher_id!r}", dispatcher.category)
        accepted_types(dispatcher.message_types)
        with self._lock:
            if self._is_frozen:
                raise EngineFrozenError(what=f"dispatcher {dispatcher.dispatcher_id!r}")
            if dispatcher.dispatcher_id in self._dispatchers:
                raise duplicate("dispatcher", dispatcher.dispatcher_id)
            self._dispatchers[dispatcher.dispatcher_id] = dispatcher

    def unregister_dispatcher(self, dispatcher_id: str) -> bool:
        """Remove a dispatcher; return whether it was registered.

        Raises:
            EngineFrozenError: The registry is frozen.
        """
        with self._lock:
            if self._is_frozen:
                raise EngineFrozenError(what=f"removal of dispatcher {dispatcher_id!r}")
            return self._dispatchers.pop(dispatcher_id, None) is not None

    def freeze(self) -> None:
        """Refuse all further changes."""
        with self._lock:
            self._is_frozen = True

    @property
    def is_frozen(self) -> bool:
        """Whether `freeze` was called."""
        return self._is_frozen

    def get_dispatcher(self, dispatcher_id: str) -> MessageDispatcher | None:
        """Return the dispatcher of this id, or `None`."""
        return self._dispatchers.get(dispatcher_id)

    def get_dispatchers(
        self, category: MessageCategory, message_type: str | type | None = None
    ) -> list[MessageDispatcher]:
        """Return the dispatchers that take such messages, in order of registration.

        A class, unlike a name, also finds dispatchers of its base classes.

        Raises:
            ConfigurationError: `category` is not a `MessageCategory`.
        """
        require_category("get_dispatchers()", category)
        found = [one for one in self if one.category is category]
        if message_type is None:
            return found
        kind = message_type if isinstance(message_type, type) else object
        name = _type_name(message_type)
        return [
            one
            for one in found
            if (types := accepted_types(one.message_types)) is None or types.take(name, kind)
        ]

    def __iter__(self) -> Iterator[MessageDispatcher]:
        return iter(list(self._dispatchers.values()))

    def __len__(self) -> int:
        return len(self._dispatchers)


def duplicate(what: str, name: str) -> DuplicateHandlerError:
    """Return the error for an id that is registered already."""
    message = f"There is already a {what} {name!r}. Give this one another id."
    return DuplicateHandlerError(message)


@final
class Step:
    """One dispatcher of a message, and its route."""

    __slots__ = ("entry", "route_id")

    def __init__(self, entry: DispatcherEntry, route_id: str) -> None:
        self.entry = entry
        self.route_id = route_id


class InvalidOutputError(TypeError):
    """A dispatcher returned something that is not an output."""


@final
class FanOut:
    """Run dispatchers concurrently, on any event loop; each loop has its own threads."""

    def __init__(self, clock: Clock, max_threads: int, log: DispatchLog) -> None:
        self._log = log
        self._clock = clock
        self._now: Callable[[], float] = clock.now
        self._max_threads = max_threads
        self._threads: RunVar[ThreadPool] = RunVar("msgbus_dispatch_threads")

    async def run(
        self,
        steps: Sequence[Step],
        envelope: EventEnvelope[Any],
        outcomes: list[DispatchOutcome | None],
    ) -> None:
        """Run all steps concurrently, started in order, and store each outcome at its index."""

        async def run(index: int) -> None:
            outcomes[index] = await self.run_one(steps[index], envelope)

        await run_together(run, len(steps))

    async def run_one(self, step: Step, envelope: EventEnvelope[Any]) -> DispatchOutcome:
        """Run one step and return its outcome; only cancellation is raised."""
        entry = step.entry
        outcome = DispatchOutcome(entry.dispatcher_id, step.route_id, DispatchStatus.SUCCESS)
        began = self._now()
        try:
            # Any: a dispatcher may return anything; `_read_output` checks it.
            call: Any = (
                entry.function(envelope) if entry.is_async else self._in_thread(entry, envelope)
            )
            if entry.timeout is None:
                output = await call
            else:
                output = await in_time(call, entry.timeout, self._clock)
            if output is LATE:
                _set_timeout(outcome, entry)
            elif output is not None:
                _read_output(output, outcome)
        except Exception as error:
            _set_error(outcome, error)
        except BaseException as error:
            # A cancellation that escapes from the dispatcher's own scope does not end others.
            if current_runtime().is_ending(error):
                raise
            _set_error(outcome, error)
        outcome.duration_ms = (self._now() - began) * 1000
        if outcome.error_code is not None and outcome.is_error():
            self._log.failed(Dispatched(envelope.topic, entry.category, envelope), outcome)
        return outcome

    async def _in_thread(self, entry: DispatcherEntry, envelope: EventEnvelope[Any]) -> Any:
        # A sync function may return an awaitable, as a lambda around a coroutine does. In a list,
        # as trio refuses to return an awaitable from a thread.
        [output] = await self._pool().run(lambda: [cast("Any", entry.function(envelope))])
        return await output if inspect.isawaitable(output) else output

    def _pool(self) -> ThreadPool:
        pool = self._threads.get(None)
        if pool is None:
            pool = ThreadPool(self._max_threads)
            self._threads.set(pool)
        return pool


def _set_timeout(outcome: DispatchOutcome, entry: DispatcherEntry) -> None:
    outcome.status = DispatchStatus.TIMEOUT
    outcome.error_message = f"{entry.dispatcher_id} did not finish within {entry.timeout:g} s."
    outcome.error_code = "TIMEOUT"


def _set_error(outcome: DispatchOutcome, error: BaseException) -> None:
    outcome.status = DispatchStatus.HANDLER_ERROR
    outcome.outputs = []
    outcome.error_message = redact_exception(error)
    outcome.error_code = (
        "INVALID_OUTPUT" if isinstance(error, InvalidOutputError) else "HANDLER_ERROR"
    )
    outcome.exception = error


def _read_output(output: Any, outcome: DispatchOutcome) -> None:
    """Read what a dispatcher returned.

    Raises:
        InvalidOutputError: It is neither topics nor a result.
    """
    if isinstance(output, DispatchResult):
        outcome.status = output.status
        outcome.outputs = _topics(output.outputs)
        if output.error_message is not None:
            outcome.error_message = redact(output.error_message)
        outcome.error_code = output.error_code
        if output.is_error() and outcome.error_code is None:
            outcome.error_code = output.status.name
    elif isinstance(output, str):
        outcome.outputs = _topics([output])
    else:
        outcome.outputs = _topics(output)


def _topics(output: Any) -> list[str]:
    if isinstance(output, list | tuple):
        topics = cast("Sequence[object]", output)
        wrong = [one for one in topics if not (isinstance(one, str) and is_topic(one))]
        if not wrong:
            return list(cast("Sequence[str]", topics))
        what = "text" if isinstance(wrong[0], str) else type(wrong[0]).__name__
        message = f"The output has {what} that is not a topic."
    else:
        message = f"{type(output).__name__} is not an output."
    message += " Return a topic, a list of topics, a DispatchResult or None."
    raise InvalidOutputError(message)
