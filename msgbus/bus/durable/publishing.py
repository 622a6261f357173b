"""Publishing on a bus with a journal: room first, then the journal, then the handlers.

An event is put into the queues of the handlers in this process before it is appended, behind
a gate that opens when the journal has it. So there is room for it, all handlers see
events in the order of the journal, and what the journal refuses is handled by nobody.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeAlias, final

import anyio

from msgbus.bus.durable.batching import Batch
from msgbus.bus.durable.fencing import owned_deliveries
from msgbus.bus.durable.transactions import current_transaction
from msgbus.bus.lanes.queue import Gate
from msgbus.errors import BusStateError
from msgbus.journal.operations import Append, Operation
from msgbus.messages.message import metadata_of
from msgbus.messages.receipts import PublishReceipt, PublishStatus, PublishSummary

if TYPE_CHECKING:
    from msgbus.bus.durable.hub import DurableBus
    from msgbus.bus.lanes.outcomes import Outcomes
    from msgbus.bus.plans import EventPlan
    from msgbus.journal.records import Appended, Member, Record
    from msgbus.messages.frame import Frame
    from msgbus.messages.message import Event

Write: TypeAlias = "Callable[[Sequence[Operation]], Awaitable[list[Appended]]]"


@final
class Placed:
    """An event that is in all queues, behind a gate that opens when the journal has it.

    There is no gate if no handler of this process has a queue: durable ones read the journal.
    """

    __slots__ = ("_gate", "_receipt", "event", "plan", "record")

    def __init__(
        self,
        event: Event,
        record: Record,
        plan: EventPlan,
        receipt: PublishReceipt,
        gate: Gate | None,
    ) -> None:
        self.event = event
        self.record = record
        self.plan = plan
        self._receipt = receipt
        self._gate = gate

    def committed(self, appended: Appended) -> PublishReceipt:
        """Let the handlers begin, as the journal has it."""
        metadata_of(self.event).recorded = (appended.offset, self.record.time)
        if appended.is_duplicate:
            self.refused()
            return PublishReceipt(PublishStatus.DURABLE, offset=appended.offset, duplicate=True)
        if self._gate is not None:
            self._gate.count_down()
        dropped = self._receipt.dropped
        return PublishReceipt(
            PublishStatus.DROPPED if dropped else PublishStatus.DURABLE,
            handlers=self._receipt.handlers,
            dropped=dropped,
            offset=appended.offset,
        )

    def refused(self) -> None:
        """Take it back, as the journal does not have it."""
        self.plan.take_back()
        if self._gate is not None:
            self._gate.cancel()


@final
class Publisher:
    """Takes events to the journal and to the handlers in this process."""

    def __init__(self, hub: DurableBus) -> None:
        self._hub = hub
        self.appended = 0
        """The highest offset that this bus was given."""

    async def publish(
        self, event: Event, plan: EventPlan, outer: Frame | None, outcomes: Outcomes | None = None
    ) -> PublishReceipt:
        """Publish an event that has passed the filters; see `bus.publish`.

        Raises:
            StoredMessageError: It would not come back as it is; nothing was published.
            JournalError: The journal did not take it; nothing was published.
        """
        transaction = current_transaction.get()
        if transaction is not None and (transaction := transaction.of(self._hub)) is not None:
            if outcomes is not None:
                message = (
                    "publish(wait=True) inside bus.transaction() would wait for handlers that "
                    "get the event only when the block has ended. Publish it without wait=True."
                )
                raise BusStateError(message)
            return await transaction.publish(event)
        if plan.queues or outcomes is not None:
            placed = await self.place(event, plan, outer, outcomes=outcomes)
            if isinstance(placed, PublishReceipt):
                return placed
            return (await self.commit((), [placed]))[0]
        # Only durable handlers want it, or none: what `place` and `commit` do, in one piece.
        if outer is not None:
            owned_deliveries(outer)
        record = self._hub.codec.encode(event, time=self._hub.state.clock.time())
        totals = plan.totals
        try:
            ((offset, is_duplicate),) = await self.append([Append(record)])
        except BaseException:
            totals.rejected += 1
            raise
        self.appended = max(self.appended, offset)
        metadata_of(event).recorded = (offset, record.time)
        if is_duplicate:
            totals.rejected += 1
            return PublishReceipt(PublishStatus.DURABLE, offset=offset, duplicate=True)
        totals.admitted += 1
        handlers = plan.receipt.handlers
        return PublishReceipt(PublishStatus.DURABLE, handlers=handlers, offset=offset)

    async def publish_many(
        self, events: Iterable[Event] | AsyncIterable[Event], chunk: int
    ) -> PublishSummary:
        """Publish many events with few commits; see `bus.publish_many`.

        Raises:
            StoredMessageError: One would not come back as it is; those before it are published.
            JournalError: The journal did not take a commit; nothing of that one is published.
        """
        summary = PublishSummary()
        await Batch(self._hub, lambda _, receipt: summary.add(receipt), chunk).publish(events)
        return summary

    async def place(
        self,
        event: Event,
        plan: EventPlan,
        outer: Frame | None,
        *,
        may_wait: bool = True,
        outcomes: Outcomes | None = None,
    ) -> Placed | PublishReceipt:
        """Put `event` into the queues; return the receipt if it is refused.

        Raises:
            StaleError: The handler that publishes it has lost its message to another process.
        """
        if not plan.queues and outcomes is None:
            plan.count_admitted()
            return self.prepare(event, plan, outer)
        owned_deliveries(outer)
        record = self._hub.codec.encode(event, time=self._hub.state.clock.time())
        gate = Gate(1)
        receipt = await self._hub.state.event_publisher.admit(
            event, plan, outer, gate, may_wait=may_wait, outcomes=outcomes
        )
        if not receipt.accepted:
            return receipt
        return Placed(event, record, plan, receipt, gate)

    def prepare(self, event: Event, plan: EventPlan, outer: Frame | None) -> Placed:
        """Prepare an event that no queue of this process wants; it is not counted yet.

        Raises:
            StaleError: The handler that publishes it has lost its message to another process.
        """
        if outer is not None:
            owned_deliveries(outer)
        record = self._hub.codec.encode(event, time=self._hub.state.clock.time())
        return Placed(event, record, plan, plan.receipt, None)

    async def commit(
        self,
        operations: Sequence[Operation],
        placed: Sequence[Placed] = (),
        *,
        member: Member | None = None,
        write: Write | None = None,
    ) -> list[PublishReceipt]:
        """Write all of it or nothing, and let the handlers begin.

        Args:
            operations: Written before the events.
            placed: Events that wait for this commit.
            member: On whose behalf; refused if it was ended.
            write: Writes the operations and events, with something else in the same commit.
        """
        try:
            everything = [*operations, *(Append(one.record) for one in placed)]
            appended = await self.append(everything, member=member, write=write)
        except BaseException:
            for one in placed:
                one.refused()
            raise
        appended = appended[len(appended) - len(placed) :]
        if appended:
            self.appended = max(self.appended, appended[-1].offset)
        return [one.committed(each) for one, each in zip(placed, appended, strict=True)]

    async def append(
        self,
        operations: Sequence[Operation],
        *,
        member: Member | None = None,
        write: Write | None = None,
    ) -> list[Appended]:
        """Write all of it or nothing, behind the commands that caused it."""
        recorder = self._hub.recorder
        waiting = recorder.take() if recorder.has_commands else []
        appended: list[Appended] = []
        try:
            # Whoever is cut off now would not know whether it is written.
            with anyio.CancelScope(shield=True):
                if write is None:
                    appended = await self._hub.journal.commit([*waiting, *operations], member)
                else:
                    appended = await write([*waiting, *operations])
        except BaseException:
            recorder.give_back(waiting)
            raise
        if waiting:
            del appended[: sum(type(one) is Append for one in waiting)]
        return appended
