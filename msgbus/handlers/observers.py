"""Observers of a bus: the journal's recording and `record(bus)`.

Calls of handlers are observed by functions that each observer returns once, when the handler's
chain is built, so a handler without observers has no extra cost. Tracing is a middleware, so
that users choose what is inside its spans; it uses `observed`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, final

if TYPE_CHECKING:
    from msgbus.handlers.injection import Call
    from msgbus.handlers.registration import Registration
    from msgbus.messages.message import Command, Event, Message
    from msgbus.messages.receipts import PublishReceipt

CallEnded: TypeAlias = Callable[[BaseException | None], Awaitable[None] | None]
"""Called once when a call has ended, with its error if it failed or was cancelled. The handler's
worker or caller awaits what it returns; after a cancellation it must return `None`."""

CallBegan: TypeAlias = Callable[[Any], CallEnded | None]
"""Called with the message, or the list of a batch handler, before the handler is called. Returns
what to call at the end, or `None`. Both run in the task of the handler, with its current frame."""


class BusObserver:
    """Base of observers of a bus: override the methods you need.

    They are called on the event loop of the bus, and must not raise.
    """

    only_watches: bool = False
    """Whether only `watch` is used: then publishes may take the fast path."""

    def watch(
        self,
        registration: Registration,  # noqa: ARG002 (for subclasses, as all below)
        scope: str | None,  # noqa: ARG002
        per: Literal["attempt", "message"],  # noqa: ARG002
    ) -> CallBegan | None:
        """Return the function to call before each call of a handler; `None` for none.

        Called when the handler's chain is built, and again when the observers change.

        Args:
            registration: The handler.
            scope: Its session; `None` for a handler of the bus.
            per: `"attempt"` for each attempt, inside of retries and outside of the timeout and
                of the middleware per attempt; `"message"` for one message with all its
                attempts, outside of everything.
        """
        return None

    def failed(
        self, registration: Registration, scope: str | None, message: Message, error: BaseException
    ) -> None:
        """Note that a handler failed on a message, or was cancelled, and no attempt follows.

        Also called if the call succeeded but an event it emitted was refused, and if the
        handler's own filter failed. Failures that the journal retries are not reported.
        """

    def publishing(self, event: Event, *, is_due: bool = False) -> None:
        """Note that an event is about to be published; `is_due` for a delayed one."""

    def published(self, event: Event, receipt: PublishReceipt) -> None:
        """Note the receipt of a publish, which may be filtered or rejected."""

    def not_published(self, event: Event, error: BaseException) -> None:
        """Note that a publish raised or was cancelled."""

    def scheduled(self, event: Event) -> None:
        """Note that an event is delayed; `publishing` follows when it is due."""

    def enqueued(self, command: Command[Any]) -> None:
        """Note that a command was enqueued in the journal."""

    def unscheduled(self, message_id: str) -> None:
        """Note that a delayed event or an enqueued command was cancelled."""


@final
class Observers:
    """All observers of one bus."""

    __slots__ = ("_all", "active")

    def __init__(self) -> None:
        self._all: tuple[BusObserver, ...] = ()
        self.active: tuple[BusObserver, ...] = ()
        """Observers that do not only watch; mostly none."""

    def add(self, observer: BusObserver) -> None:
        """Add an observer; the caller rebuilds the chains."""
        self._set((*self._all, observer))

    def remove(self, observer: BusObserver) -> None:
        """Remove an observer; the caller rebuilds the chains."""
        self._set(tuple(one for one in self._all if one is not observer))

    def _set(self, observers: tuple[BusObserver, ...]) -> None:
        self._all = observers
        self.active = tuple(one for one in observers if not one.only_watches)

    def around(
        self,
        call: Call,
        registration: Registration,
        scope: str | None,
        per: Literal["attempt", "message"],
    ) -> Call:
        """Wrap `call` for the observers that watch this handler."""
        for observer in self._all:
            began = observer.watch(registration, scope, per)
            if began is not None:
                call = observed(began, call)
        return call

    def failed(
        self, registration: Registration, scope: str | None, message: Message, error: BaseException
    ) -> None:
        """As `BusObserver.failed`."""
        for observer in self.active:
            observer.failed(registration, scope, message, error)

    def publishing(self, event: Event, *, is_due: bool = False) -> None:
        """As `BusObserver.publishing`."""
        for observer in self.active:
            observer.publishing(event, is_due=is_due)

    def published(self, event: Event, receipt: PublishReceipt) -> None:
        """As `BusObserver.published`."""
        for observer in self.active:
            observer.published(event, receipt)

    def not_published(self, event: Event, error: BaseException) -> None:
        """As `BusObserver.not_published`."""
        for observer in self.active:
            observer.not_published(event, error)

    def scheduled(self, event: Event) -> None:
        """As `BusObserver.scheduled`."""
        for observer in self.active:
            observer.scheduled(event)

    def enqueued(self, command: Command[Any]) -> None:
        """As `BusObserver.enqueued`."""
        for observer in self.active:
            observer.enqueued(command)

    def unscheduled(self, message_id: str) -> None:
        """As `BusObserver.unscheduled`."""
        for observer in self.active:
            observer.unscheduled(message_id)


def observed(began: CallBegan, call: Call) -> Call:
    """Wrap `call` so that the start and the end of each call are reported."""

    async def call_observed(message: Any) -> Any:
        ended = began(message)
        if ended is None:
            return await call(message)
        try:
            value = await call(message)
        except Exception as error:
            wait = ended(error)
            if wait is not None:
                await wait
            raise
        except BaseException as error:
            ended(error)
            raise
        wait = ended(None)
        if wait is not None:
            await wait
        return value

    return call_observed
