"""The user's own rows and events in one commit: both are there, or neither is."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextvars import ContextVar, Token
from typing import TYPE_CHECKING, Any, Final, Self, final

from msgbus.errors import BusStateError, TransactionRefusedError
from msgbus.journal.operations import Fence, Mark, Operation, Sql
from msgbus.messages.frame import Frame, current_frame
from msgbus.messages.message import metadata_of
from msgbus.messages.receipts import ENLISTED, PublishReceipt

if TYPE_CHECKING:
    from types import TracebackType

    from msgbus.durability.hub import Durability
    from msgbus.durability.publishing import Placed
    from msgbus.durability.subscribers import DurableHandler
    from msgbus.messages.message import Event


@final
class _Done:
    """Nothing to wait for; may be awaited all the same."""

    def __await__(self) -> Generator[Any, None, None]:
        yield from ()


_DONE: Final = _Done()


@final
class Transaction:
    """Statements and events that are written together when the block ends.

    ```python
    async with bus.transaction() as tx:
        tx.execute("UPDATE stock SET left = left - 1 WHERE sku = ?", [sku])
        await bus.publish(StockTaken(sku=sku))
    ```

    Nothing is written before the end of the block, and nothing at all if it raises. The
    statements run on tables of the user's in the journal's own file.
    """

    def __init__(self, hub: Durability) -> None:
        self.hub = hub
        self._operations: list[Operation] = []
        self._events: list[tuple[Event, Frame | None]] = []
        self._acknowledged: list[tuple[DurableHandler, str]] = []
        self._is_open = False
        self._token: Token[Transaction | None] | None = None
        self.receipts: list[PublishReceipt] = []
        """What became of the events, in the order they were published; after the block."""

    def execute(self, statement: str, parameters: Sequence[Any] | Mapping[str, Any] = ()) -> _Done:
        """Have `statement` run when the block ends. It may be awaited; it does not wait."""
        self._require_open()
        self._operations.append(Sql(statement, parameters))
        return _DONE

    def add(self, *operations: Operation) -> None:
        """For the bus's parts: have something else written when the block ends."""
        self._require_open()
        self._operations += operations

    async def publish(self, event: Event) -> PublishReceipt:
        """Have `event` published when the block ends; `bus.publish` in the block does this.

        Raises:
            StoredMessageError: It cannot be written as JSON.
        """
        self._require_open()
        self.hub.codec.encode(event, time=self.hub.state.clock.time())  # raises now, not later
        self._events.append((event, current_frame.get()))
        return ENLISTED

    def acknowledge(self) -> None:
        """In a durable handler: commit, with all this, that its message is handled.

        From the end of the block on it is done: what the handler raises then is logged and
        not tried again, and a crash repeats nothing if the subscription is `idempotent`. In
        a replay this does nothing.

        Raises:
            BusStateError: Not called in a durable handler.
        """
        self._require_open()
        frame = current_frame.get()
        while frame is not None:
            if frame.is_replay:
                return  # it was acknowledged in its time
            handler = self.hub.subscribers.of(frame.owner.registration)
            if handler is not None and frame.events is None:
                message_id = metadata_of(frame.message).message_id
                self._operations.append(Fence(handler.name, handler.epoch))
                self._operations.append(Mark(handler.name, message_id))
                self._acknowledged.append((handler, message_id))
                return
            frame = frame.parent
        message = "There is no message to acknowledge: this is not inside a durable handler."
        raise BusStateError(message)

    def _require_open(self) -> None:
        if not self._is_open:
            message = "This transaction is not open. Use `async with bus.transaction() as tx:`."
            raise BusStateError(message)

    async def __aenter__(self) -> Self:
        if self._token is not None:
            message = "A transaction can be used once; ask the bus for another."
            raise BusStateError(message)
        self.hub.state.require_open("begin a transaction on", current_frame.get())
        self._is_open = True
        self._token = current_transaction.set(self)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_open = False
        assert self._token is not None  # noqa: S101 (set on the way in)
        current_transaction.reset(self._token)
        try:
            if error is None and (self._operations or self._events):
                await self._commit()
        except BaseException as failure:
            self._tell_not_published(failure)
            raise
        if error is not None:
            self._tell_not_published(error)

    def _tell_not_published(self, error: BaseException) -> None:
        for event, _ in self._events:
            self.hub.state.observers.not_published(event, error)

    async def _commit(self) -> None:
        placed: list[Placed] = []
        try:
            for event, outer in self._events:
                # The first may wait for room. A later one that did would wait for handlers
                # which wait for this commit.
                placed.append(await self._place(event, outer, may_wait=not placed))
        except BaseException:
            for one in placed:
                one.refused()
            raise
        self.receipts = await self.hub.publisher.commit(self._operations, placed)
        for (event, _), receipt in zip(self._events, self.receipts, strict=True):
            self.hub.state.observers.published(event, receipt)
        for handler, message_id in self._acknowledged:
            handler.acknowledged.add(message_id)

    async def _place(self, event: Event, outer: Frame | None, *, may_wait: bool) -> Placed:
        publisher = self.hub.publisher
        plan = self.hub.state.event_publisher.prepare(event, outer)
        placed = await publisher.place(event, plan, outer, may_wait=may_wait)
        if isinstance(placed, PublishReceipt):
            raise TransactionRefusedError(type(event), placed.reason)
        return placed


current_transaction: Final[ContextVar[Transaction | None]] = ContextVar(
    "msgbus_transaction", default=None
)
