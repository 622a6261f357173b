"""A bus that remembers what went through it, for tests."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, cast, final, overload

import anyio

from msgbus.messages import RESERVED, Command, Event, Message, R
from msgbus.testing.history import History, HistoryEntry, Outcome
from msgbus.testing.tap import listening, workers_at_rest
from msgbus.testing.tree import causation_tree

if TYPE_CHECKING:
    from datetime import datetime

    from msgbus.bus import MessageBus
    from msgbus.receipts import PublishReceipt, PublishStatus, PublishSummary
    from msgbus.registry import HandlerRegistry
    from msgbus.results import CommandResult
    from msgbus.session import BusSession

M = TypeVar("M", bound=Message)
M_co = TypeVar("M_co", bound=Message, covariant=True)
C = TypeVar("C", bound=Command[Any])
E = TypeVar("E", bound=Event)

_MOST_SHOWN: Final = 50


@final
@dataclass(frozen=True, slots=True)
class Handled(Generic[M_co]):
    """A message that one handler has handled."""

    message: M_co
    handler: str


@final
@dataclass(frozen=True, slots=True)
class Failed(Generic[M_co]):
    """A message that one handler has failed on, for good."""

    message: M_co
    handler: str
    error: BaseException


@final
class Recorder:
    """What went through a bus while it was recorded. Made by `record(bus)`.

    It can be asked during the block and after it. All answers are in the order in which
    things happened. A class stands for its subclasses too.
    """

    def __init__(self, bus: MessageBus, history: History) -> None:
        self.bus = bus
        self._history = history

    # -- the bus ---------------------------------------------------------------------------

    async def execute(
        self,
        command: Command[R],
        *,
        timeout: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> CommandResult[R]:
        """The same as `bus.execute`."""
        return await self.bus.execute(command, timeout=timeout, headers=headers)

    async def call(self, command: Command[R], *, timeout: float | None = None) -> R:
        """The same as `bus.call`."""
        return await self.bus.call(command, timeout=timeout)

    async def publish(
        self,
        event: Event,
        *,
        headers: Mapping[str, str] | None = None,
        topic: str | None = None,
        delay: float | None = None,
        at: datetime | None = None,
    ) -> PublishReceipt:
        """The same as `bus.publish`."""
        return await self.bus.publish(event, headers=headers, topic=topic, delay=delay, at=at)

    async def publish_many(
        self, events: Iterable[Event] | AsyncIterable[Event], *, chunk: int = 1000
    ) -> PublishSummary:
        """The same as `bus.publish_many`."""
        return await self.bus.publish_many(events, chunk=chunk)

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
        history = self._history
        return [
            one.event
            for one in history.publishings
            if isinstance(one.event, wanted)
            and one.error is None
            and history.is_due(one)
            and (status is None or (one.receipt is not None and one.receipt.status is status))
        ]

    @overload
    def handled(self) -> list[Handled[Message]]: ...
    @overload
    def handled(self, message_type: type[M]) -> list[Handled[M]]: ...
    def handled(self, message_type: type[Message] | None = None) -> list[Any]:
        """The messages that were handled, each with the `handler` that did it."""
        return [
            Handled(one.message, one.handler)
            for one in self._deliveries(Outcome.HANDLED, message_type)
        ]

    @overload
    def failed(self) -> list[Failed[Message]]: ...
    @overload
    def failed(self, message_type: type[M]) -> list[Failed[M]]: ...
    def failed(self, message_type: type[Message] | None = None) -> list[Any]:
        """The messages on which a `handler` failed for good, each with the `error`."""
        return [
            Failed(one.message, one.handler, cast("BaseException", one.error))
            for one in self._deliveries(Outcome.FAILED, message_type)
        ]

    def _deliveries(
        self, outcome: Outcome, message_type: type[Message] | None
    ) -> Iterable[HistoryEntry]:
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

    A call through a method that was taken from the bus before the block
    (`send = bus.publish`) is seen once a handler gets the message.

    Raises:
        ConfigurationError: The bus cannot start.
        BusClosedError: It is stopping.
        InsideHandlerError: A running bus, by one of its own handlers.
    """
    history = History(bus.clock)
    starts_it = not bus.is_running
    if not starts_it:
        await workers_at_rest(bus)
    with listening(bus, history):
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
