"""Protocols of senders: the methods that bus, session, context and portal share."""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

from typing_extensions import TypeVar

from msgbus.messages.message import Command, Event, R

if TYPE_CHECKING:
    from datetime import datetime

    from msgbus.bus.durable.tickets import Ticket
    from msgbus.bus.monitoring.handler_info import HandlerInfo
    from msgbus.bus.session import BusSession
    from msgbus.bus.streams import EventStream, Expectation, Where
    from msgbus.handlers.filters import FilterLike
    from msgbus.handlers.registry import HandlerRegistry
    from msgbus.messages.message import Message
    from msgbus.messages.receipts import DrainReport, PublishReceipt, PublishSummary
    from msgbus.messages.results import CommandResult
    from msgbus.middleware.chain import Middleware, Per
    from msgbus.telemetry.stats import BusStats

E = TypeVar("E", bound=Event, default=Event)


class SendingMethods(Protocol):
    """Methods that send messages.

    - `bus`: in a handler, what is sent is caused by the message being handled.
    - `session`: in the session, whose own handlers come first.
    - `context`: caused by the message being handled and in its session, from any task.
    - `portal`: the same calls for other threads, blocking instead of awaited.
    """

    __slots__ = ()

    async def execute(
        self,
        command: Command[R],
        *,
        timeout: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> CommandResult[R]:
        """Execute `command` in its one handler, and return the result.

        Errors of the handler and of middleware, and timeouts, become a result with
        `success=False`. Cancellation propagates. A nested call inherits the deadline.

        Args:
            command: The command.
            timeout: Seconds it may take in all.
            headers: Text inherited by every message that it causes.

        Raises:
            MissingHandlerError: The command has no handler.
            WrongMessageTypeError: It is not a command.
            BusClosedError: The bus is stopping or has stopped.
            SessionClosedError: The session is not open.
        """
        ...

    async def call(
        self,
        command: Command[R],
        *,
        timeout: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> R:
        """Execute `command`; return the value, or raise the handler's own exception."""
        return (await self.execute(command, timeout=timeout, headers=headers)).unwrap()

    async def publish(
        self,
        event: Event,
        *,
        headers: Mapping[str, str] | None = None,
        topic: str | None = None,
        delay: float | None = None,
        at: datetime | None = None,
        wait: bool = False,
    ) -> PublishReceipt:
        """Put `event` into the queue of each of its handlers, which run later.

        If a queue is full, its strategy decides; by default this waits, so a slow handler
        slows its publishers. A cancelled wait has published nothing. Inside an event handler
        it never waits. Before `start` events are kept.

        Args:
            event: The event.
            headers: Text inherited by every message that it causes.
            topic: The topic to publish under, instead of the class's own; the event keeps it.
            delay: Seconds until it is published; `unschedule` cancels it.
            at: The time at which to publish it; must be timezone-aware.
            wait: Return once every in-memory handler has finished this event, with the outcome
                of each in `receipt.outcomes`. Durable handlers read the journal and are not
                waited for. Cancelling the wait does not unpublish the event.

        Raises:
            WrongMessageTypeError: It is not an event.
            InvalidTopicError: `topic` is not a topic; patterns are for handlers.
            BusClosedError: The bus is stopping or has stopped.
            SessionClosedError: The session is not open.
            QueueFullError: A queue is full and waiting is impossible: in a handler whose
                overflow is used up, or before `start`.
            InsideHandlerError: With `wait=True`, the event handler that calls this would wait
                for itself, through its own queue or another handler that waits for it.
            BusNotStartedError: With `wait=True`, no handler runs yet.
        """
        ...

    async def publish_many(
        self, events: Iterable[Event] | AsyncIterable[Event], *, chunk: int = 1000
    ) -> PublishSummary:
        """Publish all `events`, and yield to other tasks after each `chunk`.

        On a bus with a journal, up to `chunk` events, at most 1,000, are committed together;
        it may read that many ahead of what it has published.

        Raises:
            WrongMessageTypeError: One is not an event; those before it are published.
        """
        ...

    async def request(
        self,
        command: Command[R],
        *,
        timeout: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> R:
        """Send `command` to its handler, and return the reply.

        A request always ends: without a reply after `timeout` seconds, 30 if not given, or at
        the deadline of the calling handler.

        Raises:
            RequestTimeoutError: No reply came in time.
            NoReplierError: Nothing can reply to such a command.
            WrongMessageTypeError: It is not a command.
            BusClosedError: The bus is stopping or has stopped.
            SessionClosedError: The session is not open.
            Exception: What the handler raised.
        """
        ...

    async def enqueue(
        self,
        command: Command[R],
        delay: float | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        unique: str | None = None,
        on_duplicate: Literal["join", "refuse"] = "join",
    ) -> Ticket[R]:
        """Store `command` in the journal, to be handled later, here or in another process.

        When this returns it is durable: this process or another on the same journal handles
        it at least once, and retries it if it fails or if its process dies. The handler may
        run more than once, so it should be idempotent. Enqueuing a command twice handles it
        once. A session's own handlers are not used: the session may have ended by then.

        Args:
            command: The command; its reply is stored as JSON for the ticket.
            delay: Seconds before it may begin.
            headers: Text inherited by every message that it causes.
            unique: While a command of this class and this key waits or runs, in whichever
                process, no other is enqueued. Not inside `bus.transaction()`.
            on_duplicate: What a second command of a `unique` key gets: `"join"` the ticket of
                the first, `"refuse"` a `DuplicateCommandError`.

        Raises:
            ConfigurationError: The bus has no journal, or the reply has no JSON form.
            DuplicateCommandError: One of its `unique` key waits or runs already.
            WrongMessageTypeError: It is not a command, or it is a query.
            StoredMessageError: It would not come back as it is.
            BusClosedError: The bus is stopping or has stopped.
            SessionClosedError: The session is not open.
            JournalError: The journal could not write it.
        """
        ...

    def stream(self, event_type: type[E] | str, *, buffer: int = 1000) -> EventStream[E]:
        """Events as an iterator: `async with bus.stream(OrderPlaced) as events:`.

        Of a class and its subclasses, or of topics: `bus.stream("shop.**")`. That of a session
        gives the session's events, and ends with it; all others give those of the whole bus.

        Raises:
            ValueError: `buffer` is below 1.
        """
        ...

    def expect(
        self,
        event_type: type[E] | str,
        *,
        where: Where[E] | None = None,
        timeout: float | None = None,
    ) -> Expectation[E]:
        """Wait for the next event that matches: `paid = await bus.expect(Paid, timeout=5)`.

        It starts at this call, not at the `await`, so no event published after the call is
        missed. Of a class and its subclasses, or of topics; that of a session sees the session's
        events. On a bus with a journal it sees what this process publishes.

        Args:
            event_type: A class of events, or a topic pattern.
            where: A condition on the event, sync or async; what it raises is raised by `await`.
            timeout: Seconds from this call.

        Raises:
            ConfigurationError: `event_type` is not an event class.
            ExpectTimeoutError: By `await`: no event matched in time.
            BusClosedError: By `await`: the bus or the session ended first.
        """
        ...


class IMessageBus(SendingMethods, Protocol):
    """The calls that application code makes. `MessageBus` satisfies it."""

    async def start(self) -> None:
        """Begin to deliver."""
        ...

    async def stop(self, timeout: float | None = 30.0) -> DrainReport:
        """Drain the queues and stop."""
        ...

    def register_command_handler(self, command_type: Any, handler: Any) -> None:
        """Make `handler` the one handler of a command."""
        ...

    def register_event_handler(self, event_type: Any, handler: Any) -> Any:
        """Call `handler` for every such event."""
        ...

    def handlers(self) -> Sequence[HandlerInfo]:
        """All handlers of the bus, then those of each live session."""
        ...

    @property
    def sessions(self) -> Mapping[str, BusSession]:
        """The live sessions, by id."""
        ...

    def session(
        self,
        session_id: str | None = None,
        *,
        registries: Sequence[HandlerRegistry] = (),
        provide: Mapping[Any, object] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> BusSession:
        """A scope for one job: `async with bus.session("job-1") as session:`."""
        ...

    def add_filter(self, filter: FilterLike) -> None:
        """Add a filter that every event must pass to be published."""
        ...

    def add_middleware(
        self,
        middleware: Middleware,
        *,
        types: type[Message] | Sequence[type[Message]] | None = None,
        per: Per = "attempt",
    ) -> None:
        """Put `middleware` around every handler, inside of those added before."""
        ...

    async def settled(self, timeout: float | None = None) -> None:
        """Wait until no handler has work left."""
        ...

    def stats(self) -> BusStats:
        """All counters at this moment."""
        ...
