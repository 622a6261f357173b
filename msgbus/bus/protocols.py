"""The ways to send a message: one set for bus, session and context, and for the portal."""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterable, Mapping
from typing import TYPE_CHECKING, Protocol

from typing_extensions import TypeVar

from msgbus.messages.message import Command, Event, R

if TYPE_CHECKING:
    from datetime import datetime

    from msgbus.bus.streams import EventStream
    from msgbus.durability.tickets import Ticket
    from msgbus.expectations import Expectation, Where
    from msgbus.messages.receipts import PublishReceipt, PublishSummary
    from msgbus.messages.results import CommandResult

E = TypeVar("E", bound=Event, default=Event)


class SendingMethods(Protocol):
    """What can be sent, and how.

    - `bus`: as it stands; in a handler, what is sent is caused by the message at hand.
    - `session`: in the session, whose own handlers come first.
    - `context`: caused by the message at hand and in its session, in whatever task.
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
        """Have the one handler of `command` handle it, and give its result.

        Errors of the handler, of middleware and of time become a result with
        `success=False`. Cancellation propagates. A nested call inherits the deadline.

        Args:
            command: What to do.
            timeout: Seconds it may take in all.
            headers: Text that flows with it to everything it causes.

        Raises:
            MissingHandlerError: Nobody handles such commands.
            WrongMessageTypeError: It is no command.
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
        """As `execute`, but gives the value or raises the handler's own exception."""
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
        """Put `event` into the queue of each of its handlers; they run later.

        If a queue is full, what happens is that queue's strategy; by default this waits,
        so a slow handler slows its publishers. A cancelled wait has published nothing.
        Inside an event handler it never waits. Before `start` events are kept.

        Args:
            event: What happened.
            headers: Text that flows with it to everything it causes.
            topic: The topic to publish under, instead of the class's own; the event keeps it.
            delay: Seconds to wait before it is published; `unschedule` takes it back.
            at: The time at which to publish it; must know its time zone.
            wait: Return once every handler in memory is done with this event, with the outcome
                of each in `receipt.outcomes`. Durable handlers read the journal and are not
                waited for. A wait that is cancelled takes nothing back.

        Raises:
            WrongMessageTypeError: It is no event.
            InvalidTopicError: `topic` is no topic; patterns are for handlers.
            BusClosedError: The bus is stopping or has stopped.
            SessionClosedError: The session is not open.
            QueueFullError: A queue is full and waiting is impossible: in a handler whose
                overflow is used up, or before `start`.
            InsideHandlerError: With `wait=True`, the event handler that calls this would wait
                for itself, by way of its own queue or of another handler that waits for it.
            BusNotStartedError: With `wait=True`, nobody would handle it.
        """
        ...

    async def publish_many(
        self, events: Iterable[Event] | AsyncIterable[Event], *, chunk: int = 1000
    ) -> PublishSummary:
        """Publish all `events`, giving other tasks a turn after each `chunk`.

        On a bus with a journal as many events as there are, up to `chunk` and to 1,000, are
        committed together; it may read that many ahead of what it has published.

        Raises:
            WrongMessageTypeError: One is no event; those before it are published.
        """
        ...

    async def request(
        self,
        command: Command[R],
        *,
        timeout: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> R:
        """Have `command` answered, here or in another process, and give the answer.

        A request always ends: without an answer after `timeout` seconds, 30 if not given,
        or when the deadline of the handler that asks has come.

        Raises:
            RequestTimeoutError: No answer came in time.
            NoReplierError: There is nobody who could answer.
            WrongMessageTypeError: It is no command.
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
    ) -> Ticket[R]:
        """Keep `command` in the journal, to be handled later by whoever handles such commands.

        When this returns it is durable: this process or another on the same journal handles
        it, at least once, and tries again if it fails or if its process dies. The handler may
        run more than once, so it should be idempotent. Enqueuing a command twice does it once.
        A session's own handlers are not asked: the command may be handled long after it.

        Args:
            command: What to do; its reply is kept as JSON for the ticket.
            delay: Seconds before it may begin.
            headers: Text that flows with it to everything it causes.

        Raises:
            ConfigurationError: The bus has no journal, or the reply has no JSON form.
            WrongMessageTypeError: It is no command, or a query, which nobody wants to know later.
            StoredMessageError: It cannot be written as JSON.
            BusClosedError: The bus is stopping or has stopped.
            SessionClosedError: The session is not open.
            JournalError: The journal did not take it.
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
        """The next event that fits: `paid = await bus.expect(Paid, timeout=5)`.

        It looks from the moment of this call, not of the `await`: nothing that is published
        after the call is missed. Of a class and its subclasses, or of topics; that of a session
        looks at the session's events. On a bus with a journal it sees what this process publishes.

        Args:
            event_type: A class of events, or a topic pattern.
            where: A condition on the event, sync or async; what it raises is raised by `await`.
            timeout: Seconds from this call.

        Raises:
            ConfigurationError: `event_type` is no class of events.
            ExpectTimeoutError: By `await`: none came in time.
            BusClosedError: By `await`: the bus or the session ended before one came.
        """
        ...
