"""The observer port: how the journal's recording, tracing and `record(bus)` see a bus at work.

The bus tells its observers at fixed moments and is not changed by them. What happens around a
handler is told by functions that each observer gives once, when the handler's chain is built,
so a handler that nobody observes is called as if there were no port.

The journal's recording and `record(bus)` are observers of a bus. Tracing is put among the
middleware by the user, who chooses what is inside its spans; there it uses `observed`.
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
"""Called once when a call has ended, with its error if it failed or was cancelled. If it gives
something to await, the handler's worker or caller waits for that; after a cancellation it must
give `None`."""

CallBegan: TypeAlias = Callable[[Any], CallEnded | None]
"""Called with the message, or the list of a batch handler, before it goes to the handler. Gives
what is to be called at the end, or `None`. Both run in the task of the handler, where the
current frame is that of the message."""


class BusObserver:
    """Base of observers, which a bus tells what it does. Override the methods you need.

    They are called on the bus's event loop. They must not raise.
    """

    only_watches: bool = False
    """True for one that only uses `watch`: then publishes may take the fast path."""

    def watch(
        self,
        registration: Registration,  # noqa: ARG002 (for subclasses, as all below)
        scope: str | None,  # noqa: ARG002
        per: Literal["attempt", "message"],  # noqa: ARG002
    ) -> CallBegan | None:
        """Give the function to call before each call of a handler; `None` for none.

        Asked when the handler's chain is built, and again when the observers change.

        Args:
            registration: The handler.
            scope: The session that it belongs to; `None` for a handler of the bus.
            per: `"attempt"` for each attempt, inside of retries and outside of the timeout and
                of the middleware per attempt; `"message"` for one message with all its
                attempts, outside of everything.
        """
        return None

    def failed(
        self, registration: Registration, scope: str | None, message: Message, error: BaseException
    ) -> None:
        """Note that a handler is done with a message, and that it failed or was cancelled.

        This is final, whatever the end of the call was: what a handler has emitted may have been
        refused afterwards. A handler whose own filter failed was never called. A failure after
        which the journal tries again is not told here.
        """

    def publishing(self, event: Event, *, is_due: bool = False) -> None:
        """Note that an event is handed to the bus; `is_due` for one that was delayed."""

    def published(self, event: Event, receipt: PublishReceipt) -> None:
        """Note what became of it; `receipt` may say that it was filtered or rejected."""

    def not_published(self, event: Event, error: BaseException) -> None:
        """Note that publishing it raised, or was cancelled."""

    def scheduled(self, event: Event) -> None:
        """Note that the event is kept for later; `publishing` is told again when it is due."""

    def enqueued(self, command: Command[Any]) -> None:
        """Note that a command is kept in the journal."""

    def unscheduled(self, message_id: str) -> None:
        """Note that a delayed event or an enqueued command was taken back."""


@final
class Observers:
    """All observers of one bus."""

    __slots__ = ("_all", "told")

    def __init__(self) -> None:
        self._all: tuple[BusObserver, ...] = ()
        self.told: tuple[BusObserver, ...] = ()
        """Those that do not only watch; mostly none."""

    def add(self, observer: BusObserver) -> None:
        """Tell one more; for `BusCore`, which builds the chains anew."""
        self._set((*self._all, observer))

    def remove(self, observer: BusObserver) -> None:
        """Tell one less; for `BusCore`, which builds the chains anew."""
        self._set(tuple(one for one in self._all if one is not observer))

    def _set(self, observers: tuple[BusObserver, ...]) -> None:
        self._all = observers
        self.told = tuple(one for one in observers if not one.only_watches)

    def around(
        self,
        call: Call,
        registration: Registration,
        scope: str | None,
        per: Literal["attempt", "message"],
    ) -> Call:
        """`call`, told to those who watch this handler."""
        for observer in self._all:
            began = observer.watch(registration, scope, per)
            if began is not None:
                call = observed(began, call)
        return call

    def failed(
        self, registration: Registration, scope: str | None, message: Message, error: BaseException
    ) -> None:
        """As `BusObserver.failed`."""
        for observer in self.told:
            observer.failed(registration, scope, message, error)

    def publishing(self, event: Event, *, is_due: bool = False) -> None:
        """As `BusObserver.publishing`."""
        for observer in self.told:
            observer.publishing(event, is_due=is_due)

    def published(self, event: Event, receipt: PublishReceipt) -> None:
        """As `BusObserver.published`."""
        for observer in self.told:
            observer.published(event, receipt)

    def not_published(self, event: Event, error: BaseException) -> None:
        """As `BusObserver.not_published`."""
        for observer in self.told:
            observer.not_published(event, error)

    def scheduled(self, event: Event) -> None:
        """As `BusObserver.scheduled`."""
        for observer in self.told:
            observer.scheduled(event)

    def enqueued(self, command: Command[Any]) -> None:
        """As `BusObserver.enqueued`."""
        for observer in self.told:
            observer.enqueued(command)

    def unscheduled(self, message_id: str) -> None:
        """As `BusObserver.unscheduled`."""
        for observer in self.told:
            observer.unscheduled(message_id)


def observed(began: CallBegan, call: Call) -> Call:
    """`call`, with the beginning and the end of each call told."""

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
