"""`record(bus)`: record messages and outcomes of a bus, and assert on them in tests."""

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
from msgbus.messages.receipts import PublishStatus
from msgbus.telemetry.redaction import redact_exception
from msgbus.testing.recording.observer import (
    PublishState,
    RecordedDelivery,
    RecordedOutcome,
    RecordingObserver,
)

if TYPE_CHECKING:
    from msgbus.bus.bus import MessageBus
    from msgbus.bus.bus_state import BusState
    from msgbus.bus.lanes.lane import Lane
    from msgbus.bus.session import BusSession
    from msgbus.bus.streams import EventStream, Expectation, Where
    from msgbus.handlers.registry import HandlerRegistry
    from msgbus.testing.recording.observer import RecordedMessage, RecordedPublish

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
    """A message that one handler has finally failed on."""

    message: M_co
    handler: str
    error: BaseException
    attempts: int = 1
    """How often the handler was called, as far as is known; 0 if it never was."""


def _of_bus(method: F) -> F:
    """Call a method of the bus."""
    name = method.__name__

    @wraps(method)
    async def send(self: Recorder, *args: Any, **options: Any) -> Any:
        return await getattr(self.bus, name)(*args, **options)

    return cast("F", send)


@final
class Recorder(SendingMethods):
    """Messages and outcomes of a recorded bus. Made by `record(bus)`.

    Use it during the block and after it. All lists are in the order in which things
    happened. A class includes its subclasses.
    """

    def __init__(self, bus: MessageBus, observer: RecordingObserver) -> None:
        self.bus = bus
        self._observer = observer

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
        """Wait until no handler has work left, as `bus.settled` does."""
        await self.bus.settled(timeout)

    def session(
        self,
        session_id: str | None = None,
        *,
        registries: Sequence[HandlerRegistry] = (),
        provide: Mapping[Any, object] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> BusSession:
        """Make a session, as `bus.session` does."""
        return self.bus.session(session_id, registries=registries, provide=provide, headers=headers)

    # -- what happened ---------------------------------------------------------------------

    @overload
    def executed(self) -> list[Command[Any]]: ...
    @overload
    def executed(self, command_type: type[C]) -> list[C]: ...
    def executed(self, command_type: type[Command[Any]] | None = None) -> list[Any]:
        """List the commands that reached their handler, whatever the outcome."""
        wanted: type[Any] = Command if command_type is None else command_type
        return [one for one in self._observer.executed if isinstance(one, wanted)]

    @overload
    def published(self, *, status: PublishStatus | None = None) -> list[Event]: ...
    @overload
    def published(self, event_type: type[E], *, status: PublishStatus | None = None) -> list[E]: ...
    def published(
        self, event_type: type[Event] | None = None, *, status: PublishStatus | None = None
    ) -> list[Any]:
        """List published events, including those that a filter or a queue rejected.

        A delayed event counts once it is due. System events count if they have a handler.

        Args:
            event_type: Only events of this class.
            status: Only those with this status of their receipt.
        """
        wanted: type[Any] = Event if event_type is None else event_type
        return [
            one.event
            for one in self._observer.publishes
            if isinstance(one.event, wanted)
            and one.error is None
            and (status is None or (one.receipt is not None and one.receipt.status is status))
        ]

    @overload
    def handled(self) -> list[Handled[Message]]: ...
    @overload
    def handled(self, message_type: type[M]) -> list[Handled[M]]: ...
    def handled(self, message_type: type[Message] | None = None) -> list[Any]:
        """List handled messages, each with its `handler`."""
        return [
            Handled(one.message, one.handler, one.attempts)
            for one in self._deliveries(RecordedOutcome.HANDLED, message_type)
        ]

    @overload
    def failed(self) -> list[Failed[Message]]: ...
    @overload
    def failed(self, message_type: type[M]) -> list[Failed[M]]: ...
    def failed(self, message_type: type[Message] | None = None) -> list[Any]:
        """List messages on which a `handler` finally failed, each with the `error`."""
        return [
            Failed(one.message, one.handler, cast("BaseException", one.error), one.attempts)
            for one in self._deliveries(RecordedOutcome.FAILED, message_type)
        ]

    def _deliveries(
        self, outcome: RecordedOutcome, message_type: type[Message] | None
    ) -> Iterable[RecordedDelivery]:
        wanted: type[Any] = Message if message_type is None else message_type
        return (
            one for one in self._observer.deliveries(outcome) if isinstance(one.message, wanted)
        )

    def causation_tree(self, *, ids: bool = False) -> str:
        """Show which message caused which, and their outcomes, as text.

        ```text
        PlaceOrder: handled by place_order
        ├─ OrderPlaced: handled by update_stock; failed in send_receipt: OSError: no route
        └─ StockLow: no handlers
        ```

        Args:
            ids: Show the messages' ids too.
        """
        return causation_tree(self._observer, ids=ids)

    # -- assertions ------------------------------------------------------------------------

    def assert_executed(self, command_type: type[C], /, **fields: object) -> C:
        """Get the first executed command of this class with these fields.

        Raises:
            AssertionError: There is none; the text shows what was executed instead.
        """
        __tracebackhide__ = True
        return _first(command_type, fields, self.executed(), "executed")

    def assert_published(self, event_type: type[E], /, **fields: object) -> E:
        """Get the first published event of this class with these fields.

        Raises:
            AssertionError: There is none; the text shows what was published instead.
        """
        __tracebackhide__ = True
        return _first(event_type, fields, self.published(), "published")

    def assert_not_published(self, event_type: type[Event], /, **fields: object) -> None:
        """Assert that no event of this class with these fields was published.

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
    """Record all messages of `bus`, including those that handlers and sessions send.

    ```python
    async with record(MessageBus(registries=[handlers])) as recorder:
        await recorder.execute(PlaceOrder(sku="tea"))
        await recorder.settled()

    recorder.assert_published(OrderPlaced, sku="tea")
    ```

    A bus that does not run is started, and stopped at the end; if the block raises, without
    waiting for handlers that still run. A running bus keeps running; recording begins once its
    event handlers have finished what is in flight. Several may record a bus at once.

    Raises:
        ConfigurationError: The bus cannot start.
        BusClosedError: It is stopping.
        InsideHandlerError: Called by a handler of the running bus.
    """
    state = bus._state  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    observer = RecordingObserver()
    starts_bus = not bus.is_running
    if not starts_bus:
        await _wait_for_batches(state)
    state.observe(observer)
    try:
        if starts_bus:
            await bus.start()
        timeout = 0.0
        try:
            yield Recorder(bus, observer)
            timeout = bus.config.drain_timeout
        finally:
            if starts_bus:
                with anyio.CancelScope(shield=True):
                    observer.left(await bus.stop(timeout))
    finally:
        observer.end()
        state.stop_observing(observer)


async def _wait_for_batches(state: BusState) -> None:
    """Wait until no worker of a running bus is in the middle of a batch.

    A worker keeps its call chain during a batch, so its remaining events would not be recorded.

    Raises:
        InsideHandlerError: Called by a handler, which would wait for itself.
    """
    state.refuse_inside_handler("record(bus)")

    def in_batch() -> list[Lane]:
        return [
            lane for lane in state.lanes.values() if len(lane.queue.sleepers) < len(lane.workers)
        ]

    await state.settle(in_batch, None, commands=False, is_patient=True)


_REJECTIONS: Final = {
    PublishStatus.FILTERED: "filtered by",
    PublishStatus.REJECTED: "rejected:",
}


def causation_tree(observer: RecordingObserver, *, ids: bool) -> str:
    """Show all messages, each below the one that caused it."""
    entries = {entry.message.message_id: entry for entry in observer.messages}
    effects: dict[str | None, list[RecordedMessage]] = {}
    for entry in entries.values():
        cause = entry.message.causation_id
        effects.setdefault(cause if cause in entries else None, []).append(entry)

    lines: list[str] = []
    # A stack, not recursion: a chain of causes may be longer than Python's stack.
    pending = [(entry, "", "") for entry in reversed(effects.get(None, []))]
    while pending:
        entry, first, rest = pending.pop()
        lines.append(first + _line(entry, ids=ids))
        children = effects.get(entry.message.message_id, [])
        for index, child in enumerate(reversed(children)):
            last = index == 0
            pending.append(
                (child, rest + ("└─ " if last else "├─ "), rest + ("   " if last else "│  "))
            )
    return "\n".join(lines)


def _line(entry: RecordedMessage, *, ids: bool) -> str:
    name = type(entry.message).__name__
    if ids:
        name = f"{name} {entry.message.message_id}"
    return f"{name}: {'; '.join(_outcomes(entry)) or 'no handlers'}"


def _outcomes(entry: RecordedMessage) -> list[str]:
    texts = [text for one in entry.publishes if (text := _publish_text(one))]
    if entry.queue_state and not entry.deliveries:
        texts.append(entry.queue_state)
    for outcome in RecordedOutcome:
        # By name: the order of several handlers is not determined.
        mine = [one for one in entry.deliveries if one.outcome is outcome]
        mine.sort(key=lambda one: one.handler)
        if outcome is RecordedOutcome.FAILED:
            texts += [f"{outcome.value} {one.handler}: {_shown(one)}" for one in mine]
        elif mine:
            texts.append(f"{outcome.value} {', '.join(one.handler for one in mine)}")
    expected = sum(one.receipt.handlers for one in entry.publishes if one.receipt is not None)
    missing = expected - len(entry.deliveries)
    if missing > 0:
        # Still queued, or rejected by the handler's own filter: observers are not notified.
        texts.append(f"not run by {missing} of {expected} handlers")
    return texts


def _shown(delivery: RecordedDelivery) -> str:
    return "" if delivery.error is None else redact_exception(delivery.error)


def _publish_text(publish: RecordedPublish) -> str:
    """Describe the outcome of the publish itself; empty if it was accepted."""
    if publish.state is not PublishState.ENDED:
        text: str = publish.state.value
        return text
    if publish.error is not None:
        return f"not published: {redact_exception(publish.error)}"
    receipt = publish.receipt
    if receipt is not None and receipt.duplicate:
        return "already published"
    if receipt is None or receipt.status not in _REJECTIONS:
        return ""
    return f"{_REJECTIONS[receipt.status]} {receipt.reason}"
