"""A bus that remembers what went through it, for tests."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, cast, final, overload

import anyio
from typing_extensions import override

from msgbus.bus.protocols import E, SendingMethods
from msgbus.messages.message import RESERVED, Command, Event, Message
from msgbus.testing.recording.observer import History, RecordedDelivery, RecordedOutcome
from msgbus.testing.tree import causation_tree

if TYPE_CHECKING:
    from msgbus.bus.bus import MessageBus
    from msgbus.bus.bus_state import BusCore
    from msgbus.bus.lanes.lane import Lane
    from msgbus.bus.session import BusSession
    from msgbus.bus.streams import EventStream
    from msgbus.expectations import Expectation, Where
    from msgbus.handlers.registry import HandlerRegistry
    from msgbus.messages.receipts import PublishStatus

M = TypeVar("M", bound=Message)
M_co = TypeVar("M_co", bound=Message, covariant=True)
C = TypeVar("C", bound=Command[Any])
F = TypeVar("F", bound=Callable[..., Any])

_MOST_SHOWN: Final = 50


@final
@dataclass(frozen=True, slots=True)
class Handled(Generic[M_co]):
    """A message that one handler has handled."""

    message: M_co
    handler: str
    attempts: int = 1
    """How often the handler was called, as far as is known."""


@final
@dataclass(frozen=True, slots=True)
class Failed(Generic[M_co]):
    """A message that one handler has failed on, for good."""

    message: M_co
    handler: str
    error: BaseException
    attempts: int = 1
    """How often the handler was called, as far as is known; 0 if it never was."""


def _of_bus(method: F) -> F:
    """The method of the bus itself."""
    name = method.__name__

    @wraps(method)
    async def send(self: Recorder, *args: Any, **options: Any) -> Any:
        return await getattr(self.bus, name)(*args, **options)

    return cast("F", send)


@final
class Recorder(SendingMethods):
    """What went through a bus while it was recorded. Made by `record(bus)`.

    It can be asked during the block and after it. All answers are in the order in which
    things happened. A class stands for its subclasses too.
    """

    def __init__(self, bus: MessageBus, history: History) -> None:
        self.bus = bus
        self._history = history

    # -- the bus ---------------------------------------------------------------------------

    execute = _of_bus(SendingMethods.execute)
    call = _of_bus(SendingMethods.call)
    publish = _of_bus(SendingMethods.publish)
    publish_many = _of_bus(SendingMethods.publish_many)
    request = _of_bus(SendingMethods.request)
    enqueue = _of_bus(SendingMethods.enqueue)

    @override
    def stream(self, event_type: type[E] | str, *, buffer: int = 1000) -> EventStream[E]:
        return self.bus.stream(event_type, buffer=buffer)

    @override
    def expect(
        self,
        event_type: type[E] | str,
        *,
        where: Where[E] | None = None,
        timeout: float | None = None,
    ) -> Expectation[E]:
        return self.bus.expect(event_type, where=where, timeout=timeout)

    async def settled(self, timeout: float | None = None) -> None:
        """The same as `bus.settled`: wait until no handler has anything left to do."""
        await self.bus.settled(timeout)

    def session(
        self,
        session_id: str | None = None,
        *,
        registries: Sequence[HandlerRegistry] = (),
        provide: Mapping[Any, object] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> BusSession:
        """The same as `bus.session`."""
        return self.bus.session(session_id, registries=registries, provide=provide, headers=headers)

    # -- what happened ---------------------------------------------------------------------

    @overload
    def executed(self) -> list[Command[Any]]: ...
    @overload
    def executed(self, command_type: type[C]) -> list[C]: ...
    def executed(self, command_type: type[Command[Any]] | None = None) -> list[Any]:
        """The commands that reached their handler, whatever became of them."""
        wanted: type[Any] = Command if command_type is None else command_type
        return [one for one in self._history.executed if isinstance(one, wanted)]

    @overload
    def published(self, *, status: PublishStatus | None = None) -> list[Event]: ...
    @overload
    def published(self, event_type: type[E], *, status: PublishStatus | None = None) -> list[E]: ...
    def published(
        self, event_type: type[Event] | None = None, *, status: PublishStatus | None = None
    ) -> list[Any]:
        """The events that were published: also those that a filter or a queue turned away.

        A delayed event counts from its time on. System events count if somebody got them.

        Args:
            event_type: Only events of this class.
            status: Only those whose receipt says this.
        """
        wanted: type[Any] = Event if event_type is None else event_type
        return [
            one.event
            for one in self._history.publishes
            if isinstance(one.event, wanted)
            and one.error is None
            and (status is None or (one.receipt is not None and one.receipt.status is status))
        ]

    @overload
    def handled(self) -> list[Handled[Message]]: ...
    @overload
    def handled(self, message_type: type[M]) -> list[Handled[M]]: ...
    def handled(self, message_type: type[Message] | None = None) -> list[Any]:
        """The messages that were handled, each with the `handler` that did it."""
        return [
            Handled(one.message, one.handler, one.attempts)
            for one in self._deliveries(RecordedOutcome.HANDLED, message_type)
        ]

    @overload
    def failed(self) -> list[Failed[Message]]: ...
    @overload
    def failed(self, message_type: type[M]) -> list[Failed[M]]: ...
    def failed(self, message_type: type[Message] | None = None) -> list[Any]:
        """The messages on which a `handler` failed for good, each with the `error`."""
        return [
            Failed(one.message, one.handler, cast("BaseException", one.error), one.attempts)
            for one in self._deliveries(RecordedOutcome.FAILED, message_type)
        ]

    def _deliveries(
        self, outcome: RecordedOutcome, message_type: type[Message] | None
    ) -> Iterable[RecordedDelivery]:
        wanted: type[Any] = Message if message_type is None else message_type
        return (one for one in self._history.deliveries(outcome) if isinstance(one.message, wanted))

    def causation_tree(self, *, ids: bool = False) -> str:
        """Which message caused which, and what became of each; for people to read.

        ```text
        PlaceOrder: handled by place_order
        ├─ OrderPlaced: handled by update_stock; failed in send_receipt: OSError: no route
        └─ StockLow: no handlers
        ```

        Args:
            ids: Show the messages' ids too.
        """
        return causation_tree(self._history, ids=ids)

    # -- assertions ------------------------------------------------------------------------

    def assert_executed(self, command_type: type[C], /, **fields: object) -> C:
        """The first command of this class, and with these fields, that was executed.

        Raises:
            AssertionError: There is none; the text shows what was executed instead.
        """
        __tracebackhide__ = True
        return _first(command_type, fields, self.executed(), "executed")

    def assert_published(self, event_type: type[E], /, **fields: object) -> E:
        """The first event of this class, and with these fields, that was published.

        Raises:
            AssertionError: There is none; the text shows what was published instead.
        """
        __tracebackhide__ = True
        return _first(event_type, fields, self.published(), "published")

    def assert_not_published(self, event_type: type[Event], /, **fields: object) -> None:
        """Nothing of this class, or nothing with these fields, was published.

        Raises:
            AssertionError: Something was; the text shows it.
        """
        __tracebackhide__ = True
        matches = _matches(event_type, fields, self.published())
        if matches:
            message = f"{_wanted(event_type, fields)} was published:\n{_listed(matches)}"
            raise AssertionError(message)


def _first(
    message_type: type[M], fields: Mapping[str, object], messages: Sequence[Message], done: str
) -> M:
    __tracebackhide__ = True
    matches = _matches(message_type, fields, messages)
    if matches:
        return matches[0]
    instead = f"{done.capitalize()} instead:\n{_listed(messages)}"
    if not messages:
        instead = f"Nothing was {done} at all."
    message = f"No {_wanted(message_type, fields)} was {done}. {instead}"
    raise AssertionError(message)


def _matches(
    message_type: type[M], fields: Mapping[str, object], messages: Iterable[Message]
) -> list[M]:
    __tracebackhide__ = True
    # A misspelt field would match nothing, and `assert_not_published` would always hold.
    unknown = sorted(fields.keys() - message_type.model_fields.keys() - RESERVED)
    if unknown:
        message = (
            f"{message_type.__name__} has no field {', '.join(unknown)}. "
            f"It has: {', '.join(message_type.model_fields) or 'none'}."
        )
        raise TypeError(message)
    return [
        message
        for message in messages
        if isinstance(message, message_type)
        and all(getattr(message, name) == value for name, value in fields.items())
    ]


def _wanted(message_type: type[Message], fields: Mapping[str, object]) -> str:
    wanted = ", ".join(f"{name}={value!r}" for name, value in fields.items())
    return f"{message_type.__name__} with {wanted}" if fields else message_type.__name__


def _listed(messages: Sequence[Message]) -> str:
    lines = [f"  {message!r}" for message in messages[:_MOST_SHOWN]]
    if len(messages) > _MOST_SHOWN:
        lines.append(f"  ... and {len(messages) - _MOST_SHOWN} more")
    return "\n".join(lines)


@asynccontextmanager
async def record(bus: MessageBus) -> AsyncGenerator[Recorder]:
    """Record all that goes through `bus`: also what handlers and sessions send.

    ```python
    async with record(MessageBus(registries=[handlers])) as recorder:
        await recorder.execute(PlaceOrder(sku="tea"))
        await recorder.settled()

    recorder.assert_published(OrderPlaced, sku="tea")
    ```

    A bus that does not run is started, and stopped at the end; if the block raises, without
    waiting for handlers still at work. A running bus goes on running; its event handlers first
    finish what they have at hand. A bus may be recorded by several at once.

    Raises:
        ConfigurationError: The bus cannot start.
        BusClosedError: It is stopping.
        InsideHandlerError: A running bus, by one of its own handlers.
    """
    core = bus._core  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    history = History()
    starts_it = not bus.is_running
    if not starts_it:
        await _workers_at_rest(core)
    core.observe(history)
    try:
        if starts_it:
            await bus.start()
        patience = 0.0
        try:
            yield Recorder(bus, history)
            patience = bus.config.drain_timeout
        finally:
            if starts_it:
                with anyio.CancelScope(shield=True):
                    history.left(await bus.stop(patience))
    finally:
        history.end()
        core.stop_observing(history)


async def _workers_at_rest(core: BusCore) -> None:
    """Wait until no worker of a running bus is in the middle of a turn.

    A worker keeps the handler it began its turn with, and would tell nobody of the events
    that are still to come in it.

    Raises:
        InsideHandlerError: Called by a handler, which would wait for itself.
    """
    core.refuse_inside_handler("record(bus)")

    def in_turn() -> list[Lane]:
        return [
            lane for lane in core.lanes.values() if len(lane.queue.sleepers) < len(lane.workers)
        ]

    await core.settle(in_turn, None, commands=False)
