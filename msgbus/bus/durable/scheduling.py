"""Delayed events: they wait in the journal, survive a crash, and are published once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, final

from msgbus.bus.durable.fencing import owned_deliveries
from msgbus.bus.durable.listening import journal_task
from msgbus.bus.durable.transactions import current_transaction
from msgbus.errors import BusClosedError, JournalError, StaleError, StoredMessageError
from msgbus.journal.codec import type_named
from msgbus.journal.operations import Append, Drop, Operation
from msgbus.journal.records import DELAYED, Pending, Record, State
from msgbus.messages.frame import current_frame
from msgbus.messages.message import Event
from msgbus.messages.receipts import PublishReceipt, PublishStatus
from msgbus.telemetry.redaction import redact_exception

if TYPE_CHECKING:
    from msgbus.bus.durable.hub import DurableBus
    from msgbus.bus.durable.publishing import Placed
    from msgbus.bus.plans import EventPlan
    from msgbus.runtime.event_loop import Runtime

GROUP: Final = 100
"""Events that are published in one commit."""


@final
class _Due:
    """A delayed event that is due, and what happens to it."""

    def __init__(self, row: Pending, record: Record, event: Event | None) -> None:
        self.row = row
        self.record = record
        self.event = event
        """`None` if this process cannot read it: it is published as it stands."""
        self.plan: EventPlan | None = None
        self.placed: Placed | None = None
        self.receipt: PublishReceipt | None = None
        """The receipt of its publish, if that is known."""
        self.reason = ""
        """The reason for its refusal, if it is refused."""

    @property
    def is_filtered(self) -> bool:
        return self.receipt is not None and self.receipt.status is PublishStatus.FILTERED

    @property
    def is_wanted(self) -> bool:
        return not self.is_filtered and not self.reason

    def refuse(self, error: Exception) -> None:
        self.reason = redact_exception(error)

    def not_ours(self) -> None:
        """Take back what was counted: another process publishes it, or nobody yet."""
        if self.plan is None:
            return
        if self.is_filtered:
            self.plan.counts.filtered -= 1
        elif self.reason or self.placed is not None:
            self.plan.counts.rejected -= 1


@final
class Scheduler:
    """Keeps delayed events in the journal, and publishes them when they are due.

    Every bus on a journal does so. The row of an event is dropped in the commit that appends
    it, so exactly one process publishes it.
    """

    def __init__(self, hub: DurableBus) -> None:
        self._hub = hub
        self._task = journal_task(hub, "delayed events", self._publish_due)
        self._changes = 0
        self.count = 0
        """Number of delayed events, as last counted."""

    # -- in and out ------------------------------------------------------------------------------

    async def add(self, event: Event, delay: float, *, handlers: int) -> PublishReceipt:
        """Keep `event` for `delay` seconds.

        Raises:
            StoredMessageError: It would not come back as it is.
            StaleError: The handler that publishes it has lost its message to another process.
            JournalError: The journal did not take it.
        """
        hub = self._hub
        owned_deliveries(current_frame.get())
        now = hub.state.clock.time()
        record = hub.codec.encode(event, time=now)
        operation = Append(record, DELAYED, now + delay)
        transaction = current_transaction.get()
        if transaction is not None and (transaction := transaction.of(hub)) is not None:
            transaction.add(operation)
            return PublishReceipt(PublishStatus.ACCEPTED, handlers=handlers)
        await hub.publisher.commit([operation])
        self._changed(1)
        self._task.wake()
        return PublishReceipt(PublishStatus.DURABLE, handlers=handlers)

    async def remove(self, message_id: str) -> bool:
        """Cancel a delayed event; false if it does not wait any more."""
        waiting = (State.WAITING,)
        rows = await self._hub.journal.find(DELAYED, waiting, key=message_id, limit=1)
        try:
            await self._hub.publisher.commit([Drop(row) for row in rows])
        except StaleError:
            return False
        if not rows:
            return False
        self._changed(-1)
        self._hub.state.observers.unscheduled(message_id)
        return True

    def _changed(self, by: int) -> None:
        self._changes += 1
        self.count = max(self.count + by, 0)

    async def recount(self) -> int:
        """Count the delayed events of all processes."""
        seen = self._changes
        count = (await self._hub.journal.count(DELAYED)).get(State.WAITING, 0)
        if seen == self._changes:
            self.count = count
        return self.count

    # -- life ------------------------------------------------------------------------------------

    def open(self, runtime: Runtime) -> None:
        """Begin to publish what is due."""
        self._task.open(runtime)

    def wake(self) -> None:
        """Look for events that are due."""
        self._task.wake()

    async def stop(self) -> None:
        """Publish nothing more."""
        await self._task.stop()

    async def caught_up(self) -> None:
        """Wait until everything that is due now has been published."""
        hub = self._hub
        while hub.state.accepting and self._task.is_open:
            due = (await hub.journal.next_due(DELAYED)).time
            if due is None or due > hub.state.clock.time():
                return
            await self._task.next()

    # -- what is due -----------------------------------------------------------------------------

    async def _publish_due(self) -> float | None:
        state, journal = self._hub.state, self._hub.journal
        while state.accepting:
            rows = await journal.due(DELAYED, state.clock.time(), GROUP)
            if not rows:
                break
            await self._publish(rows)
        if not state.accepting:
            return None
        due = (await journal.next_due(DELAYED)).time
        return None if due is None else due - state.clock.time()

    async def _publish(self, rows: Sequence[Pending]) -> None:
        """Publish them in one commit; one by one if another process was faster with some."""
        batch = [await self._examined(row) for row in rows]
        try:
            await self._commit(batch)
        except (JournalError, BusClosedError) as error:
            for one in batch:
                one.not_ours()
            if not isinstance(error, StaleError):
                raise  # they still wait, and are due
            if len(rows) > 1:
                for row in rows:
                    await self._publish([row])
            return
        self._changed(-len(batch))
        for one in batch:
            if one.event is not None:
                self._notify(one.event, one)

    def _notify(self, event: Event, due: _Due) -> None:
        state = self._hub.state
        receipt = due.receipt or PublishReceipt(PublishStatus.REJECTED, reason=due.reason)
        state.observers.publishing(event, is_due=True)
        state.observers.published(event, receipt)
        if due.reason:
            state.event_publisher.report_refused(event, due.reason)

    async def _examined(self, row: Pending) -> _Due:
        """Decode an event and ask the bus's filters, before it is put into any queue."""
        assert row.body is not None  # noqa: S101 (rows of delayed events have their message)
        due = _Due(row, row.body, self._event(row.body))
        if due.event is None:
            return due
        publishing = self._hub.state.event_publisher
        due.plan = publishing.prepare(due.event, None)
        try:
            due.receipt = await publishing.ask_filters(due.event, due.plan)
        except (JournalError, BusClosedError):
            raise
        except Exception as error:
            due.refuse(error)
        return due

    def _event(self, record: Record) -> Event | None:
        # Its class may have no handler here yet.
        type_named(record.name, Event, self._hub.codec)
        try:
            event = self._hub.codec.decode(record)
        except StoredMessageError:
            return None
        return event if isinstance(event, Event) else None

    async def _commit(self, batch: Sequence[_Due]) -> None:
        now = self._hub.state.clock.time()
        operations: list[Operation] = [Drop(one.row) for one in batch]
        placed: list[Placed] = []
        owners: list[_Due] = []
        try:
            for one in batch:
                if one.event is None:
                    operations.append(Append(one.record._replace(time=now, offset=0)))
                elif one.is_wanted:
                    await self._place(one, one.event)
                if one.placed is not None:
                    placed.append(one.placed)
                    owners.append(one)
        except BaseException:
            for each in placed:
                each.refused()
            raise
        receipts = await self._hub.publisher.commit(operations, placed)
        for one, receipt in zip(owners, receipts, strict=True):
            one.receipt = receipt

    async def _place(self, due: _Due, event: Event) -> None:
        # A filter may have awaited: handlers may have come or gone.
        due.plan = self._hub.state.event_publisher.prepare(event, None)
        try:
            # As on a lane: nobody may be kept waiting for a delayed event's room.
            placed = await self._hub.publisher.place(event, due.plan, None, may_wait=False)
        except (JournalError, BusClosedError):
            raise
        except Exception as error:
            due.refuse(error)
            return
        if isinstance(placed, PublishReceipt):
            due.reason = placed.reason
        else:
            due.placed = placed
