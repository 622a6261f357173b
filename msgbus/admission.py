"""Getting an event into its queues when that is not simply an append."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from msgbus.bus.lanes.queue import Waiter, admit, check_overflow, must_wait, refusing
from msgbus.messages.receipts import PublishReceipt, PublishStatus

if TYPE_CHECKING:
    from msgbus.bus.lanes.outcomes import Outcomes
    from msgbus.bus.lanes.queue import Gate
    from msgbus.bus.plans import EventPlan
    from msgbus.messages.message import Event
    from msgbus.runtime.clock import Clock


async def admit_event(
    event: Event,
    plan: EventPlan,
    replan: Callable[[], EventPlan],
    clock: Clock,
    *,
    may_wait: bool,
    commit: Gate | None = None,
    outcomes: Outcomes | None = None,
) -> PublishReceipt:
    """Put `event` into all its queues, by each full queue's strategy.

    Args:
        event: What goes there.
        plan: Where it goes.
        replan: Where it goes now: asked after every wait, as handlers may have come or
            gone and the bus may have stopped.
        clock: For queues that slow their publishers.
        may_wait: False on a lane: then queues overflow instead of blocking, as a handler
            that waited for its own queue would wait for ever.
        commit: If given, workers wait for this gate: until the journal has the event.
        outcomes: If given, where each handler's end is reported.

    Raises:
        QueueFullError: It may not wait, and the overflow is used up too.
        BusClosedError: The bus stopped while it waited.
    """
    try:
        if may_wait:
            delay = _pace(plan)
            if delay > 0:
                await clock.sleep(delay)
                plan = replan()
        while may_wait and must_wait(plan.queues) and refusing(plan.queues) is None:
            waiter = Waiter(plan.queues)
            try:
                await waiter.wait()
                plan, waited_for = replan(), plan
                if plan.queues == waited_for.queues:
                    return _admit_or_reject(event, plan, commit, outcomes)
            finally:
                waiter.leave()
        if not may_wait and refusing(plan.queues) is None:
            check_overflow(plan.queues)
    except BaseException:
        plan.counts.rejected += 1  # cancelled, full or closed: nothing was published
        raise
    return _admit_or_reject(event, plan, commit, outcomes)


def _admit_or_reject(
    event: Event, plan: EventPlan, commit: Gate | None, outcomes: Outcomes | None
) -> PublishReceipt:
    full = refusing(plan.queues)
    if full is not None:
        plan.counts.rejected += 1
        reason = f"the queue of {full.name} is full ({full.max_size} events)"
        return PublishReceipt(PublishStatus.REJECTED, reason=reason)
    plan.count_admitted()
    dropped = admit(plan.queues, plan.items(event, commit, outcomes))
    if not dropped:
        return plan.receipt
    return PublishReceipt(PublishStatus.DROPPED, handlers=plan.receipt.handlers, dropped=dropped)


def _pace(plan: EventPlan) -> float:
    """How long its queues want this publisher to wait, so that they do not fill up."""
    return max(
        (
            queue.pace.delay(len(queue.items) / queue.max_size)
            for queue in plan.queues
            if queue.pace is not None
        ),
        default=0.0,
    )
