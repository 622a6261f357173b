"""Events that wait in the journal for their time: kept by a crash, published once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, final

from msgbus.durability.rounds import Rounds
from msgbus.durability.transactions import current_transaction
from msgbus.durability.wire_names import type_named
from msgbus.errors import BusClosedError, JournalConflictError, JournalError, StoredMessageError
from msgbus.journal.operations import Append, Operation, Schedule, Unschedule
from msgbus.journal.records import Scheduled
from msgbus.messages.message import Event
from msgbus.messages.receipts import PublishReceipt, PublishStatus
from msgbus.telemetry.redaction import redact_exception

if TYPE_CHECKING:
    from msgbus.bus.plans import EventPlan
    from msgbus.durability.hub import Durability
    from msgbus.durability.publishing import Placed
    from msgbus.runtime.event_loop import Runtime

GROUP: Final = 100
"""Events that are published in one commit."""

RECOUNT: Final = 1.0
"""Seconds between looks at how many there are, for those that other processes add."""


@final
class _Due:
    """A scheduled event whose time has come, and what is to become of it."""

    def __init__(self, entry: Scheduled, event: Event | None) -> None:
        self.entry = entry
        self.event = event
        """`None` if this process cannot read it: it is published as it stands."""
        self.plan: EventPlan | None = None
        self.placed: Placed | None = None
        self.receipt: PublishReceipt | None = None
        """What became of it, if that is known."""
        self.reason = ""
        """Why it is refused, if it is."""

    @property
    def is_filtered(self) -> bool:
        return self.receipt is not None and self.receipt.status is PublishStatus.FILTERED

    @property
    def is_wanted(self) -> bool:
        return not self.is_filtered and not self.reason

    def refuse(self, error: Exception) -> None:
        self.reason = redact_exception(error)

    def not_ours(self) -> None:
        """Another process has it, or nobody yet: as if it had never been looked at."""
        if self.plan is None:
            return
        if self.is_filtered:
            self.plan.counts.filtered -= 1
        elif self.reason or self.placed is not None:
            self.plan.counts.rejected -= 1


@final
class Scheduler:
    """Keeps events in the journal, and publishes them when they are due.

    Every bus on a journal does so. What is due is taken out of the schedule in the commit that
    appends it, so one of them gets it, whoever was first to keep it.
    """

    def __init__(self, hub: Durability) -> None:
        self._hub = hub
        self._rounds = Rounds(hub, "schedule", self._round)
        self._changes = 0
        self._counted_at = float("-inf")
        self.count = 0
        """How many wait, as far as is known."""

    # -- in and out ------------------------------------------------------------------------------

    async def add(self, event: Event, delay: float, *, handlers: int) -> PublishReceipt:
        """Keep `event` for `delay` seconds.

        Raises:
            StoredMessageError: It cannot be written as JSON.
            JournalError: The journal did not take it.
        """
        hub = self._hub
        now = hub.state.clock.time()
        record = hub.codec.encode(event, time=now)
        operation = Schedule(Scheduled(record.message_id, now + delay, record))
        transaction = current_transaction.get()
        if transaction is not None and transaction.hub is hub:
            transaction.add(operation)
            return PublishReceipt(PublishStatus.ACCEPTED, handlers=handlers)
        await hub.publisher.commit([operation], ())
        self._changed(1)
        self._rounds.wake()
        return PublishReceipt(PublishStatus.DURABLE, handlers=handlers)

    async def remove(self, message_id: str) -> bool:
        """Take an event out of the schedule; false if it is not there any more."""
        try:
            await self._hub.publisher.commit([Unschedule(message_id, required=True)], ())
        except JournalConflictError:
            return False
        self._changed(-1)
        self._hub.state.observers.unscheduled(message_id)
        return True

    def _changed(self, by: int) -> None:
        self._changes += 1
        self.count = max(self.count + by, 0)

    async def recount(self) -> int:
        """How many wait, whoever has scheduled them."""
        seen = self._changes
        count = await self._hub.journal.count_scheduled()
        self._counted_at = self._hub.state.clock.now()
        if seen == self._changes:
            self.count = count
        return self.count

    # -- life ------------------------------------------------------------------------------------

    def open(self, runtime: Runtime) -> None:
        """Begin to publish, first of all what became due meanwhile."""
        self._rounds.open(runtime)

    def wake(self) -> None:
        """Look whether there is something new."""
        self._rounds.wake()

    async def stop(self) -> None:
        """Publish nothing more."""
        await self._rounds.stop()

    async def caught_up(self) -> None:
        """Wait until everything that is due now has been published."""
        hub = self._hub
        while hub.state.accepting and self._rounds.is_open:
            due = await hub.journal.next_due()
            if due is None or due > hub.state.clock.time():
                return
            await self._rounds.next()

    # -- what is due -----------------------------------------------------------------------------

    async def _round(self) -> float | None:
        state, journal = self._hub.state, self._hub.journal
        while state.accepting:
            entries = await journal.due(state.clock.time(), GROUP)
            if not entries:
                break
            await self._publish(entries)
        if not state.accepting:
            return None
        if state.clock.now() - self._counted_at >= RECOUNT:
            await self.recount()
        due = await journal.next_due()
        return None if due is None else due - state.clock.time()

    async def _publish(self, entries: Sequence[Scheduled]) -> None:
        """All of them in one commit; one by one if somebody else has taken some."""
        batch = [await self._examined(entry) for entry in entries]
        try:
            await self._commit(batch)
        except (JournalError, BusClosedError) as error:
            for one in batch:
                one.not_ours()
            if not isinstance(error, JournalConflictError):
                raise  # they stay where they are, and are tried again
            if len(entries) > 1:
                for entry in entries:
                    await self._publish([entry])
            return
        self._changed(-len(batch))
        for one in batch:
            if one.event is not None:
                self._tell(one.event, one)

    def _tell(self, event: Event, due: _Due) -> None:
        state = self._hub.state
        receipt = due.receipt or PublishReceipt(PublishStatus.REJECTED, reason=due.reason)
        state.observers.publishing(event, is_due=True)
        state.observers.published(event, receipt)
        if due.reason:
            state.event_publisher.report_refused(event, due.reason)

    async def _examined(self, entry: Scheduled) -> _Due:
        """The event, once the bus's filters have been asked: before anything has its place."""
        due = _Due(entry, self._event(entry))
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

    def _event(self, entry: Scheduled) -> Event | None:
        # Its class may have no handler here yet.
        type_named(entry.record.name, Event, self._hub.codec)
        try:
            event = self._hub.decode(entry.record)
        except StoredMessageError:
            return None
        return event if isinstance(event, Event) else None

    async def _commit(self, batch: Sequence[_Due]) -> None:
        now = self._hub.state.clock.time()
        operations: list[Operation] = [Unschedule(one.entry.id, required=True) for one in batch]
        placed: list[Placed] = []
        owners: list[_Due] = []
        try:
            for one in batch:
                if one.event is None:
                    operations.append(Append(one.entry.record._replace(time=now)))
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
