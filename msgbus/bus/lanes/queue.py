"""The bounded queue of one handler, and admission of an event into all its queues or none.

Admission is one step without an await: either every queue of the event's handlers has
room, or none gets it. What happens otherwise is the full queue's `BackpressureStrategy`.

Publishers that wait are served in order of arrival. A waiter is woken when it is first *and*
there is room, and then admits its event itself; so a wait that is cancelled, even at that
moment, has published nothing.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, final

import anyio

from msgbus.errors import QueueFullError
from msgbus.handlers.config import BackpressureStrategy, QueueConfig, QueueLevel
from msgbus.messages.message import Event
from msgbus.messages.receipts import PublishReceipt, PublishStatus, Undelivered
from msgbus.telemetry.logging import log
from msgbus.telemetry.redaction import redact_exception
from msgbus.telemetry.stats import LaneCounts

if TYPE_CHECKING:
    from msgbus.bus.lanes.outcomes import Outcomes
    from msgbus.bus.plans import EventPlan
    from msgbus.messages.message import Event
    from msgbus.runtime.clock import Clock
    from msgbus.runtime.event_loop import Waker

WAITING_STRATEGIES: Final = frozenset(
    {BackpressureStrategy.WAIT, BackpressureStrategy.ADAPTIVE_RATE_LIMIT}
)


@final
class Gate:
    """Opens for an event once all handlers of higher priority have finished it."""

    __slots__ = ("_opened", "is_cancelled", "remaining")

    def __init__(self, remaining: int) -> None:
        self.remaining = remaining
        self.is_cancelled = False
        """Whether the event behind it was not published, as the journal refused it."""
        self._opened: anyio.Event | None = None

    def cancel(self) -> None:
        """Open it with the event cancelled: the journal has not taken it."""
        self.is_cancelled = True
        self.count_down()

    def count_down(self) -> None:
        """Count one handler of higher priority as finished, whatever the outcome."""
        self.remaining -= 1
        if self.remaining == 0 and self._opened is not None:
            self._opened.set()

    async def wait(self) -> None:
        """Return once the gate is open."""
        if self.remaining:
            if self._opened is None:
                self._opened = anyio.Event()
            await self._opened.wait()


@final
class Gated:
    """An event in one handler's queue, whose outcome others wait for.

    Those are handlers of lower priority, behind their gates, or a caller that sent the event to
    this handler alone. On a bus with a journal all events are behind a gate that opens once the
    event is committed.
    """

    __slots__ = (
        "_lower_gates",
        "_report",
        "commit",
        "delivery",
        "error",
        "event",
        "gate",
        "is_filtered",
        "is_handled",
        "is_withdrawn",
    )

    def __init__(
        self,
        event: Event,
        gate: Gate | None,
        later: tuple[Gate, ...],
        report: Callable[[Gated], None] | None = None,
        *,
        commit: Gate | None = None,
        delivery: object = None,
    ) -> None:
        self.event = event
        self.gate = gate
        self._lower_gates = later
        self._report = report
        self.commit = commit
        """Opens when the journal has the event."""
        self.delivery = delivery
        """The delivery of a durable handler, which fences all that it writes."""
        self.is_withdrawn = False
        """True once another process has the event."""
        self.is_handled = False
        """Whether the handler succeeded, or its filter rejected the event."""
        self.is_filtered = False
        """Whether the handler's own filter rejected it."""
        self.error: BaseException | None = None
        """The error, if the handler failed."""

    def report_to(self, report: Callable[[Gated], None]) -> None:
        """Call `report` when this handler has finished it."""
        self._report = report

    @property
    def is_cancelled(self) -> bool:
        """Whether the event was not published, and must not be handled."""
        return self.commit is not None and self.commit.is_cancelled

    @property
    def closed_gate(self) -> Gate | None:
        """The gate that it still waits for, if any."""
        for gate in (self.gate, self.commit):
            if gate is not None and gate.remaining:
                return gate
        return None

    @property
    def holds_others(self) -> bool:
        """Whether handlers of lower priority wait for this one."""
        return bool(self._lower_gates)

    @property
    def is_held(self) -> bool:
        """Whether it waits for handlers of higher priority."""
        return self.gate is not None and self.gate is not self.commit and self.gate.remaining > 0

    def release_lower(self) -> None:
        """Let handlers of lower priority continue without this one."""
        later, self._lower_gates = self._lower_gates, ()
        for gate in later:
            gate.count_down()

    def done(self) -> None:
        """Mark it as finished by this handler: success, failure, timeout or drop."""
        self.release_lower()
        if self._report is not None:
            self._report(self)


class BoundedEventQueue:
    """The events that wait for one handler.

    `sleepers` are idle workers, `waiting` are publishers that wait for room. At most one of
    the two is non-empty.
    """

    __slots__ = (
        "_held",
        "_high",
        "_is_high",
        "_low",
        "_on_high",
        "_on_low",
        "_room",
        "alarm",
        "batch_size",
        "counts",
        "fast_size",
        "has_gated",
        "is_watched",
        "items",
        "linger",
        "max_overflow",
        "max_size",
        "name",
        "on_work",
        "pace",
        "sleepers",
        "strategy",
        "waiting",
    )

    def __init__(
        self, name: str, config: QueueConfig, clock: Clock, counts: LaneCounts | None = None
    ) -> None:
        self.name = name
        self.max_size = config.max_size
        self.max_overflow = config.max_overflow
        self.batch_size = config.batch_size
        self.linger = config.linger
        self.strategy = config.strategy
        self.items: deque[Any] = deque()
        self.counts = counts or LaneCounts()
        self.sleepers: list[Waker] = []
        self.waiting: deque[Waiter] = deque()
        self.on_work: Callable[[], None] | None = None
        """Starts one more worker; `None` if no more may be started."""
        adaptive = config.strategy is BackpressureStrategy.ADAPTIVE_RATE_LIMIT
        self.pace = Pace(clock) if adaptive else None
        self._room = 0 if adaptive else config.max_size
        self._high = sys.maxsize if config.high_water is None else config.high_water
        self._low = self._high // 2 if config.low_water is None else config.low_water
        self._on_high = config.on_high
        self._on_low = config.on_low
        self._is_high = False
        self.alarm = self._high
        """The size at which it reports its high-water mark."""
        self.fast_size = min(self._room, self.alarm - 1)
        """Below this an event may be appended directly; 0 if publishers are paced or one of
        them waits."""
        self.is_watched = False
        """Whether `made_room` must be called for every item that is taken."""
        self.has_gated = False
        """Whether it ever took an event whose handlers have different priorities."""
        self._held = 0

    @property
    def has_room(self) -> bool:
        """Whether one more event fits."""
        return len(self.items) < self.max_size

    @property
    def must_block(self) -> bool:
        """Whether one more event would have to wait for room."""
        return len(self.items) >= self.max_size and self.strategy in WAITING_STRATEGIES

    @property
    def is_backpressured(self) -> bool:
        """Whether its strategy acts.

        Publishers wait or are slowed, or it is full and drops or refuses, or handlers have
        filled it beyond its bound.
        """
        if self.waiting or (self.pace is not None and self.pace.is_slowing):
            return True
        room = self.max_size - len(self.items)
        return room < 0 or (room == 0 and self.strategy not in WAITING_STRATEGIES)

    def push(self, item: Event | Gated) -> None:
        """Append one item, with or without room, and wake or start a worker."""
        if type(item) is Gated:
            self.has_gated = True
            if self._held:
                item.release_lower()
        self.items.append(item)
        if self.waiting:
            self._update_limits()
        if self.sleepers:
            self.wake_one()
        elif self.on_work is not None:
            self.on_work()
        if len(self.items) >= self.alarm:
            self._cross(self._on_high, is_high=True)

    def wake_one(self) -> None:
        """Wake an idle worker; raises on another thread, and nothing has changed."""
        try:
            waker = self.sleepers[-1]
        except IndexError:
            return  # on another thread only: it was woken between the caller's look and this one
        waker.wake()
        self.sleepers.pop()

    def _cross(self, callback: Callable[[QueueLevel], object] | None, *, is_high: bool) -> None:
        """Report that it has reached its high-water or low-water mark."""
        self._is_high = is_high
        self.alarm = sys.maxsize if is_high else self._high
        self._update_limits()
        if callback is None:
            return
        try:
            callback(QueueLevel(self.name, len(self.items)))
        except Exception as error:  # a broken callback must not break the publish
            log.error(
                "queue_callback_failed",
                handler=self.name,
                error=redact_exception(error),
                traceback=error,
            )

    def _update_limits(self) -> None:
        """Update what the hot paths check.

        A waiting publisher is notified once there is room, not for each item taken then.
        """
        self.is_watched = self._is_high or (bool(self.waiting) and not self.has_room)
        self.fast_size = 0 if self.waiting else min(self._room, self.alarm - 1)

    def hold(self) -> None:
        """Release lower priorities from all queued events: a worker waits for a circuit."""
        self._held += 1
        if self.has_gated:
            for item in self.items:
                if type(item) is Gated:
                    item.release_lower()

    def release(self) -> None:
        """End `hold`: lower priorities wait for events queued from now on."""
        self._held -= 1

    def drop_oldest(self) -> Undelivered:
        """Drop the oldest item."""
        item = self.items.popleft()
        self.counts.dropped += 1
        if type(item) is Gated:
            item.done()
            item = item.event
        return Undelivered(item, self.name)

    def add_waiter(self, waiter: Waiter) -> None:
        """Add a publisher that waits for room; no other may overtake it."""
        self.waiting.append(waiter)
        self._update_limits()

    def remove_waiter(self, waiter: Waiter) -> None:
        """Remove a publisher that waited, if it still does."""
        if waiter in self.waiting:
            self.waiting.remove(waiter)
        self._update_limits()

    def made_room(self) -> None:
        """Report the low-water mark, and notify the first waiting publisher if it can admit."""
        if self._is_high and len(self.items) <= self._low:
            self._cross(self._on_low, is_high=False)
        if self.waiting:
            self._update_limits()
            if self.waiting[0].can_admit():
                self.waiting[0].ready.set()


@final
class Waiter:
    """A publisher that waits for room in all the queues of one event."""

    __slots__ = ("_is_cancelled", "_queues", "ready")

    def __init__(self, queues: Sequence[BoundedEventQueue]) -> None:
        # Joining all queues in one step gives all of them the same order of waiters, so the
        # first of all waiters is first everywhere and no two wait for each other. Queues that
        # drop or refuse have no waiters.
        self._queues = [queue for queue in queues if queue.strategy in WAITING_STRATEGIES]
        self._is_cancelled = False
        self.ready = anyio.Event()
        for queue in self._queues:
            queue.add_waiter(self)

    def can_admit(self) -> bool:
        """Whether it is first in all its queues and there is room in all of them."""
        return all(queue.waiting[0] is self and queue.has_room for queue in self._queues)

    async def wait(self) -> None:
        """Wait until it can admit, or a queue is closed; then `leave` without awaiting."""
        while not self._is_cancelled and not self.can_admit():
            self.ready = anyio.Event()
            await self.ready.wait()

    def leave(self) -> None:
        """Leave all queues, admitted or not, and notify the next waiter."""
        for queue in self._queues:
            queue.remove_waiter(self)
        for queue in self._queues:
            queue.made_room()

    def cancel(self) -> None:
        """Cancel the wait: its queue is being closed."""
        self._is_cancelled = True
        self.leave()
        self.ready.set()


@final
class Pace:
    """Adaptive rate of publishers by AIMD: halved when nearly full, raised when emptier."""

    HIGH: Final = 0.8
    LOW: Final = 0.5
    START: Final = 2_000.0
    STEP: Final = 100.0
    FLOOR: Final = 10.0

    __slots__ = ("_changed", "_clock", "_next", "rate")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._next = 0.0
        self._changed = float("-inf")
        self.rate: float | None = None
        """Admissions a second, or `None` while publishers are not slowed."""

    @property
    def is_slowing(self) -> bool:
        """Whether publishers are being slowed."""
        return self.rate is not None

    def delay(self, fill: float) -> float:
        """Compute the seconds that the next publisher must wait; `fill` is from 0 to 1."""
        now = self._clock.now()
        self._adapt(fill, now)
        if self.rate is None:
            return 0.0
        self._next = max(now, self._next) + 1 / self.rate
        return self._next - now

    def _adapt(self, fill: float, now: float) -> None:
        # One change per ten admissions: the queue needs time to react.
        if self.rate is not None and now - self._changed < 10 / self.rate:
            return
        if fill >= self.HIGH:
            self.rate = self.START if self.rate is None else max(self.rate / 2, self.FLOOR)
            self._changed = now
        elif fill < self.LOW and self.rate is not None:
            faster = self.rate + self.STEP
            self.rate = None if faster > self.START else faster
            self._changed = now


def refusing(queues: Sequence[BoundedEventQueue]) -> BoundedEventQueue | None:
    """Find the first full queue that rejects new events, if any."""
    for queue in queues:
        if queue.strategy is BackpressureStrategy.REJECT_NEW and not queue.has_room:
            return queue
    return None


def must_wait(queues: Sequence[BoundedEventQueue]) -> bool:
    """Whether an event would have to wait for room, or behind other waiters."""
    return any(queue.waiting or queue.must_block for queue in queues)


def check_overflow(queues: Sequence[BoundedEventQueue]) -> None:
    """Raise if a handler that cannot wait would push a queue over its overflow bound.

    Raises:
        QueueFullError: Nothing was admitted anywhere.
    """
    for queue in queues:
        if queue.strategy is BackpressureStrategy.DROP_OLDEST:
            continue
        if len(queue.items) >= queue.max_size + queue.max_overflow:
            raise QueueFullError(
                queue.name,
                max_size=queue.max_size,
                reason=(
                    f"a handler cannot wait for room, and its overflow of {queue.max_overflow} "
                    f"is used up. Does a handler publish more than its subscribers can take?"
                ),
            )


def admit(
    queues: Sequence[BoundedEventQueue], items: Sequence[Event | Gated]
) -> tuple[Undelivered, ...]:
    """Put one item into each queue; full ones overflow or drop their oldest."""
    dropped: list[Undelivered] = []
    for queue, item in zip(queues, items, strict=True):
        if not queue.has_room:
            if queue.strategy is BackpressureStrategy.DROP_OLDEST:
                dropped.append(queue.drop_oldest())
            else:
                queue.counts.overflowed += 1
        queue.push(item)
    return tuple(dropped)


def gate_by_priority(
    event: Event, priorities: Sequence[int], commit: Gate | None = None
) -> list[Gated]:
    """Make items for queues of these priorities (highest first) that open one after another.

    With `commit`, the first of them open when it does.
    """
    gates: dict[int, Gate] = {}
    for index, priority in enumerate(priorities):
        if priority != priorities[0]:
            # A gate counts every handler before it, not just those of the group above: a
            # drop in that group must not let this one overtake a group still higher up.
            gates.setdefault(priority, Gate(index))
    return [
        Gated(
            event,
            gates.get(priority, commit),
            tuple(gate for lower, gate in gates.items() if lower < priority),
            commit=commit,
        )
        for priority in priorities
    ]


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
        event: The event.
        plan: Its queues.
        replan: Makes the plan again after every wait, as handlers may have changed and the
            bus may have stopped.
        clock: For queues that slow their publishers.
        may_wait: False on a lane: then queues overflow instead of blocking, as a handler
            that waited for its own queue would wait for ever.
        commit: If given, workers wait for this gate: until the journal has the event.
        outcomes: If given, collects the outcome of each handler.

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
    """Compute the seconds that the queues make this publisher wait."""
    return max(
        (
            queue.pace.delay(len(queue.items) / queue.max_size)
            for queue in plan.queues
            if queue.pace is not None
        ),
        default=0.0,
    )
