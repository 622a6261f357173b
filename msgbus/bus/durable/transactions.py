"""SQL of the user and events in one commit: `async with bus.transaction() as tx:`."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextvars import ContextVar, Token
from typing import TYPE_CHECKING, Any, Final, Self, cast, final

from msgbus.bus.durable.fencing import guards_of, member_of, owned_deliveries
from msgbus.errors import BusStateError, ConfigurationError, TransactionRefusedError
from msgbus.journal.ports import Tables
from msgbus.messages.frame import Frame, current_frame
from msgbus.messages.receipts import ENLISTED, PublishReceipt
from msgbus.runtime.arguments import missing_members

if TYPE_CHECKING:
    import sqlite3
    from types import TracebackType

    from msgbus.bus.durable.hub import DurableBus
    from msgbus.bus.durable.publishing import Placed
    from msgbus.journal.operations import Operation
    from msgbus.journal.records import Appended
    from msgbus.messages.message import Event
    from msgbus.subscriptions.in_flight import InFlight


@final
class _Done:
    """An awaitable that does not wait."""

    def __await__(self) -> Generator[Any, None, None]:
        yield from ()


_DONE: Final = _Done()

Statement = tuple[str, Sequence[Any] | Mapping[str, Any]]


@final
class Transaction:
    """Statements and events that are written together when the block ends.

    ```python
    async with bus.transaction() as tx:
        tx.execute("UPDATE stock SET left = left - 1 WHERE sku = ?", [sku])
        await bus.publish(StockTaken(sku=sku))
    ```

    Nothing is written before the end of the block, and nothing at all if it raises. The
    statements run on tables of the user's in the journal's own file. In a durable handler, all
    of it is refused once another process has the message.
    """

    def __init__(self, hub: DurableBus) -> None:
        self.hub = hub
        self._statements: list[Statement] = []
        self._operations: list[Operation] = []
        self._events: list[tuple[Event, Frame | None]] = []
        self._deliveries: Sequence[InFlight] = ()
        self._acknowledged = False
        self._acknowledging: Sequence[InFlight] = ()
        """Deliveries that the commit acknowledges."""
        self.is_open = False
        self._token: Token[Transaction | None] | None = None
        self.outer: Transaction | None = None
        """The block around this one; of another bus, or one that has ended."""
        self.receipts: list[PublishReceipt] = []
        """Receipts of the events, in the order they were published; after the block."""

    def execute(self, statement: str, parameters: Sequence[Any] | Mapping[str, Any] = ()) -> _Done:
        """Have `statement` run when the block ends. It may be awaited; it does not wait.

        Raises:
            ConfigurationError: The journal has no SQL.
        """
        self.require_open()
        self.hub.tables("tx.execute()")
        # Copied: they are those of this call, whatever becomes of the list or dict.
        is_named = isinstance(parameters, Mapping)
        self._statements.append((statement, dict(parameters) if is_named else tuple(parameters)))
        return _DONE

    def add(self, *operations: Operation) -> None:
        """Have something else written when the block ends; for the bus's parts."""
        self.require_open()
        self._operations += operations

    async def publish(self, event: Event) -> PublishReceipt:
        """Have `event` published when the block ends; `bus.publish` in the block does this.

        Raises:
            StoredMessageError: It would not come back as it is.
        """
        self.require_open()
        self.hub.codec.encode(event, time=self.hub.state.clock.time())  # raises now, not later
        self._events.append((event, current_frame.get()))
        return ENLISTED

    def acknowledge(self) -> None:
        """In a durable handler: commit, with all this, that its message is handled.

        From the end of the block on it is done: what the handler raises then is logged and not
        retried, and neither a crash nor another process repeats it. In a replay this does
        nothing.

        Raises:
            BusStateError: Not called in a durable handler.
        """
        self.require_open()
        frame = current_frame.get()
        while frame is not None:
            if frame.is_replay:
                return  # it was acknowledged in its time
            frame = frame.parent
        subscriptions = {one.subscription for one in self._deliveries}
        if not subscriptions or not subscriptions <= self.hub.handlers.names:
            message = "There is no message to acknowledge: this is not inside a durable handler."
            raise BusStateError(message)
        self._acknowledged = True

    def of(self, hub: DurableBus) -> Transaction | None:
        """Return this block or the next around it that is one of the bus `hub`.

        Raises:
            BusStateError: It has ended, and what runs was started in it.
        """
        found = _nearest(self, hub)
        if found is not None:
            found.require_open()
        return found

    def require_open(self) -> None:
        """Raise unless its block has begun and not ended.

        Raises:
            BusStateError: It has not, or it has.
        """
        if self.is_open:
            return
        if self._token is None:
            message = "This transaction is not open. Use `async with bus.transaction() as tx:`."
        else:
            message = (
                "This bus.transaction() has ended: what is used here, or runs in a task or "
                "thread that was started in its block, cannot be written with it any more. "
                "Wait for the task inside the block, or start it outside."
            )
        raise BusStateError(message)

    async def __aenter__(self) -> Self:
        if self._token is not None:
            message = "A transaction can be used once; ask the bus for another."
            raise BusStateError(message)
        self.outer = current_transaction.get()
        around = _nearest(self.outer, self.hub)
        if around is not None and around.is_open:
            message = (
                "This bus.transaction() is inside another one of the same bus, which is not "
                "written yet, and may never be. Use the `tx` of the outer block, or end it first."
            )
            raise BusStateError(message)
        frame = current_frame.get()
        self.hub.state.require_open("begin a transaction on", frame)
        self._deliveries = owned_deliveries(frame)
        self.is_open = True
        self._token = current_transaction.set(self)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.is_open = False
        assert self._token is not None  # noqa: S101 (set on the way in)
        try:
            self._leave(self._token)
            if error is None and self._has_content:
                await self._commit()
        except BaseException as failure:
            self._tell_not_published(failure)
            raise
        if error is not None:
            self._tell_not_published(error)

    def _leave(self, token: Token[Transaction | None]) -> None:
        try:
            current_transaction.reset(token)
        except ValueError as error:
            message = (
                "A bus.transaction() was entered in one task and left in another task, so "
                "nothing of it was written. Enter and leave the block in the same task."
            )
            raise BusStateError(message) from error

    @property
    def _has_content(self) -> bool:
        return bool(self._statements or self._operations or self._events or self._acknowledged)

    def _tell_not_published(self, error: BaseException) -> None:
        for event, _ in self._events:
            self.hub.state.observers.not_published(event, error)

    # -- the commit ------------------------------------------------------------------------------

    async def _commit(self) -> None:
        placed: list[Placed] = []
        try:
            for event, outer in self._events:
                # The first may wait for room. A later one that did would wait for handlers
                # which wait for this commit.
                placed.append(await self._place(event, outer, may_wait=not placed))
            operations = [*self._guards(), *self._operations]
        except BaseException:
            for one in placed:
                one.refused()
            raise
        self.receipts = await self.hub.publisher.commit(
            operations,
            placed,
            member=member_of(self._deliveries),
            write=self._write if self._statements else None,
        )
        for (event, _), receipt in zip(self._events, self.receipts, strict=True):
            self.hub.state.observers.published(event, receipt)
        for delivery in self._acknowledging:
            self.hub.handlers.acknowledged(delivery)

    def _guards(self) -> list[Operation]:
        """Return what refuses the commit once another process has the message."""
        guards = guards_of(self._deliveries)
        if not self._acknowledged:
            return guards
        now = self.hub.state.clock.time()
        self._acknowledging = [one for one in self._deliveries if not one.is_ended]
        return [step for one in self._acknowledging for step in one.acknowledgement(now)]

    async def _write(self, operations: Sequence[Operation]) -> list[Appended]:
        def run(connection: sqlite3.Connection) -> None:
            for statement, parameters in self._statements:
                connection.execute(statement, parameters)

        tables = self.hub.tables("tx.execute()")
        member = member_of(self._deliveries)
        _, appended = await tables.transact(run, operations, member=member)
        return appended

    async def _place(self, event: Event, outer: Frame | None, *, may_wait: bool) -> Placed:
        publisher = self.hub.publisher
        plan = self.hub.state.event_publisher.prepare(event, outer)
        placed = await publisher.place(event, plan, outer, may_wait=may_wait)
        if isinstance(placed, PublishReceipt):
            raise TransactionRefusedError(type(event), placed.reason)
        return placed


def _nearest(transaction: Transaction | None, hub: DurableBus) -> Transaction | None:
    """Return the innermost block that is one of the bus `hub`."""
    while transaction is not None and transaction.hub is not hub:
        transaction = transaction.outer
    return transaction


current_transaction: Final[ContextVar[Transaction | None]] = ContextVar(
    "msgbus_transaction", default=None
)


def tables_of(journal: object, what: str) -> Tables:
    """Return the journal as one that runs SQL of the user.

    Raises:
        ConfigurationError: It does not.
    """
    if missing_members(journal, Tables):
        message = (
            f"{what} runs SQL in the journal's own database, and {journal!r} has none. Use "
            f'"sqlite:///shop.db", or "sqlite:///:memory:" in tests.'
        )
        raise ConfigurationError(message)
    return cast("Tables", journal)
