"""EventPublisher on a bus with a journal: room first, then the journal, then the handlers.

An event takes its place in the queues of the handlers in this process before it is appended,
behind a gate that opens when the journal has it. So there is room for it, all handlers see
events in the order of the journal, and what the journal refuses is handled by nobody.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterable, Sequence
from typing import TYPE_CHECKING, final

import anyio

from msgbus.bus.lanes.queue import Gate
from msgbus.durability.batching import Batch
from msgbus.durability.transactions import current_transaction
from msgbus.errors import BusStateError
from msgbus.journal.operations import Append, Operation
from msgbus.messages.message import metadata_of
from msgbus.messages.receipts import PublishReceipt, PublishStatus, PublishSummary

if TYPE_CHECKING:
    from msgbus.bus.lanes.outcomes import Outcomes
    from msgbus.bus.plans import EventPlan
    from msgbus.durability.hub import Durability
    from msgbus.journal.records import Ack, Record
    from msgbus.messages.frame import Frame
    from msgbus.messages.message import Event


@final
class Placed:
    """An event that has its place in all queues, and waits for the journal."""

    __slots__ = ("_gate", "_plan", "_receipt", "event", "record")

    def __init__(
        self, event: Event, record: Record, plan: EventPlan, receipt: PublishReceipt, gate: Gate
    ) -> None:
        self.event = event
        self.record = record
        self._plan = plan
        self._receipt = receipt
        self._gate = gate

    def committed(self, ack: Ack) -> PublishReceipt:
        """The journal has it: let the handlers begin."""
        metadata_of(self.event).recorded = (ack.offset, self.record.time)
        if ack.duplicate:
            self._plan.take_back()
            self._gate.cancel()
            return PublishReceipt(PublishStatus.DURABLE, offset=ack.offset, duplicate=True)
        self._gate.count_down()
        dropped = self._receipt.dropped
        return PublishReceipt(
            PublishStatus.DROPPED if dropped else PublishStatus.DURABLE,
            handlers=self._receipt.handlers,
            dropped=dropped,
            offset=ack.offset,
        )

    def refused(self) -> None:
        """The journal does not have it: nobody gets it."""
        self._plan.take_back()
        self._gate.cancel()


@final
class Publisher:
    """Takes events to the journal and to the handlers in this process."""

    def __init__(self, hub: Durability) -> None:
        self._hub = hub
        self.appended = 0
        """The highest offset that this bus was given."""

    async def publish(
        self, event: Event, plan: EventPlan, outer: Frame | None, outcomes: Outcomes | None = None
    ) -> PublishReceipt:
        """As `bus.publish`, behind the filters.

        Raises:
            StoredMessageError: It cannot be written as JSON; nothing was published.
            JournalError: The journal did not take it; nothing was published.
        """
        transaction = current_transaction.get()
        if transaction is not None and transaction.hub is self._hub:
            if outcomes is not None:
                message = (
                    "publish(wait=True) inside bus.transaction() would wait for handlers that "
                    "get the event only when the block has ended. Publish it without wait=True."
                )
                raise BusStateError(message)
            return await transaction.publish(event)
        placed = await self.place(event, plan, outer, outcomes=outcomes)
        if isinstance(placed, PublishReceipt):
            return placed
        return (await self.commit((), [placed]))[0]

    async def publish_many(
        self, events: Iterable[Event] | AsyncIterable[Event], chunk: int
    ) -> PublishSummary:
        """As `bus.publish_many`: many events to a commit.

        Raises:
            StoredMessageError: One cannot be written as JSON; those before it are published.
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
        """Give `event` its place in the queues; the receipt if it gets none."""
        record = self._hub.codec.encode(event, time=self._hub.state.clock.time())
        gate = Gate(1)
        receipt = await self._hub.state.event_publisher.admit(
            event, plan, outer, gate, may_wait=may_wait, outcomes=outcomes
        )
        if not receipt.accepted:
            return receipt
        return Placed(event, record, plan, receipt, gate)

    async def commit(
        self, operations: Sequence[Operation], placed: Sequence[Placed]
    ) -> list[PublishReceipt]:
        """Write all of it, or nothing, and let the handlers begin."""
        recorder = self._hub.recorder
        waiting = recorder.take_causes()
        acks: list[Ack] = []
        try:
            # Whoever gives up now would not know whether it is written.
            with anyio.CancelScope(shield=True):
                acks = await self._write([*waiting, *operations], [one.record for one in placed])
        except BaseException:
            recorder.give_back(waiting)
            for one in placed:
                one.refused()
            raise
        acks = acks[len(acks) - len(placed) :]
        if acks:
            self.appended = max(self.appended, acks[-1].offset)
        return [one.committed(ack) for one, ack in zip(placed, acks, strict=True)]

    async def _write(self, operations: Sequence[Operation], records: Sequence[Record]) -> list[Ack]:
        if not operations:
            # Several times cheaper: a journal writes the records of many callers at once.
            return await self._hub.journal.append(records)
        return await self._hub.journal.commit([*operations, *map(Append, records)])
