"""Getting an event into its queues when that is not simply an append."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgbus.queue import Waiter, admit, check_overflow, must_wait, refusing
from msgbus.receipts import PublishReceipt, PublishStatus

if TYPE_CHECKING:
    from msgbus.clock import Clock
    from msgbus.messages import Event
    from msgbus.plans import EventPlan


async def admit_event(
    plan: EventPlan, event: Event, clock: Clock, *, may_wait: bool
) -> PublishReceipt:
    """Put `event` into all its queues, by each full queue's strategy.

    Args:
        plan: Where it goes.
        event: What goes there.
        clock: For queues that slow their publishers.
        may_wait: False on a lane: then queues overflow instead of blocking, as a handler
            that waited for its own queue would wait for ever.

    Raises:
        QueueFullError: It may not wait, and the overflow is used up too.
        BusClosedError: The bus stopped while it waited.
    """
    queues = plan.queues
    if may_wait:
        await _slow_down(plan, clock)
    full = refusing(queues)
    if full is not None:
        return reject(plan, f"the queue of {full.name} is full ({full.max_size} events)")
    if not may_wait:
        try:
            check_overflow(queues)
        except Exception:
            plan.counts.rejected += 1
            raise
        return _admit(plan, event)
    if must_wait(queues):
        return await _wait_and_admit(plan, event)
    return _admit(plan, event)


async def _wait_and_admit(plan: EventPlan, event: Event) -> PublishReceipt:
    waiter = Waiter(plan.queues)
    admitted = False
    try:
        await waiter.wait()
        full = refusing(plan.queues)
        admitted = True
        if full is not None:
            return reject(plan, f"the queue of {full.name} is full ({full.max_size} events)")
        return _admit(plan, event)
    finally:
        if not admitted:
            plan.counts.rejected += 1  # cancelled, or the bus stopped: nothing was published
        waiter.leave()


def _admit(plan: EventPlan, event: Event) -> PublishReceipt:
    plan.count_admitted()
    dropped = admit(plan.queues, plan.items(event))
    if not dropped:
        return plan.receipt
    return PublishReceipt(PublishStatus.DROPPED, handlers=plan.receipt.handlers, dropped=dropped)


def reject(plan: EventPlan, reason: str) -> PublishReceipt:
    """Refuse an event, and count it."""
    plan.counts.rejected += 1
    return PublishReceipt(PublishStatus.REJECTED, reason=reason)


async def _slow_down(plan: EventPlan, clock: Clock) -> None:
    delay = 0.0
    for queue in plan.queues:
        if queue.pace is not None:
            delay = max(delay, queue.pace.delay(len(queue.items) / queue.max_size))
    if delay > 0:
        try:
            await clock.sleep(delay)
        except BaseException:
            plan.counts.rejected += 1
            raise
