"""The bounded queue of one handler, and how an event gets into all its queues or none.

Admission is one step without an await: either every queue of the event's handlers has
room, or none gets it. What happens otherwise is the full queue's `BackpressureStrategy`.

Publishers that wait are served in order of arrival. A waiter is woken when it is its
turn *and* there is room, and then admits itself; so a wait that is cancelled, even at
the very moment of its turn, has published nothing.
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
from msgbus.messages.receipts import Undelivered
from msgbus.telemetry.logging import log
from msgbus.telemetry.redaction import redact_exception
from msgbus.telemetry.stats import LaneCounts

if TYPE_CHECKING:
    from msgbus.runtime.clock import Clock
    from msgbus.runtime.event_loop import Waker

WAITING_STRATEGIES: Final = frozenset(
    {BackpressureStrategy.WAIT, BackpressureStrategy.ADAPTIVE_RATE_LIMIT}
)


@final
class Gate:
    """Opens for an event once all handlers of higher priority are done with it."""

    __slots__ = ("_opened", "is_void", "remaining")

    def __init__(self, remaining: int) -> None:
        self.remaining = remaining
        self.is_void = False
        """Whether the event behind it was never published after all."""
        self._opened: anyio.Event | None = None

    def call_off(self) -> None:
        """Open it for nobody: the journal has not taken the event."""
        self.is_void = True
        self.one_done()

    def one_done(self) -> None:
        """One more handler of higher priority is done, in whatever way."""
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
    """An event in one handler's queue, with somebody who waits for its end.

    Those are handlers of lower priority, behind their gates, or one who sent the event to
    this handler alone and wants to know what became of it. On a bus with a journal all are
    behind a gate that opens once the event is committed.
    """

    __slots__ = (
        "_later",
        "_report",
        "attempt",
        "commit",
        "error",
        "event",
        "gate",
        "is_filtered",
        "is_handled",
    )

    def __init__(
        self,
        event: Event,
        gate: Gate | None,
        later: tuple[Gate, ...],
        report: Callable[[Gated], None] | None = None,
        *,
        commit: Gate | None = None,
        attempt: int = 1,
    ) -> None:
        self.event = event
        self.gate = gate
        self._later = later
        self._report = report
        self.commit = commit
        """Opens when the journal has the event."""
        self.attempt = attempt
        """The number of the first try of this delivery."""
        self.is_handled = False
        """Whether the handler succeeded, or did not want it."""
        self.is_filtered = False
        """Whether the handler's own filter turned it away."""
        self.error: BaseException | None = None
        """What it failed with."""

    def report_to(self, report: Callable[[Gated], None]) -> None:
        """Have `report` called when this handler is done with it."""
        self._report = report

    @property
    def is_void(self) -> bool:
        """Whether the event was never published after all, and is nobody's to handle."""
        return self.commit is not None and self.commit.is_void

    @property
    def closed_gate(self) -> Gate | None:
        """The gate that it must still wait for, if there is one."""
        for gate in (self.gate, self.commit):
            if gate is not None and gate.remaining:
                return gate
        return None

    @property
    def holds_others(self) -> bool:
        """Whether handlers of lower priority wait for this one."""
        return bool(self._later)

    @property
    def is_held(self) -> bool:
        """Whether it waits for handlers of higher priority."""
        return self.gate is not None and self.gate is not self.commit and self.gate.remaining > 0

    def let_others_pass(self) -> None:
        """Handlers of lower priority need not wait for this one any longer."""
        later, self._later = self._later, ()
        for gate in later:
            gate.one_done()

    def done(self) -> None:
        """This handler is done with it: success, failure, timeout and drop alike."""
        self.let_others_pass()
        if self._report is not None:
            self._report(self)


class BoundedEventQueue:
    """The events that wait for one handler.

    `sleepers` are workers with nothing to do, `waiting` are publishers with no room.
    Only one of the two is ever non-empty.
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
        """Asks for one more worker; `None` while there is none to ask for."""
        adaptive = config.strategy is BackpressureStrategy.ADAPTIVE_RATE_LIMIT
        self.pace = Pace(clock) if adaptive else None
        self._room = 0 if adaptive else config.max_size
        self._high = sys.maxsize if config.high_water is None else config.high_water
        self._low = self._high // 2 if config.low_water is None else config.low_water
        self._on_high = config.on_high
        self._on_low = config.on_low
        self._is_high = False
        self.alarm = self._high
        """The size at which it is to say that it is high."""
        self.fast_size = min(self._room, self.alarm - 1)
        """Below this an event may simply be appended; never, if publishers are paced or one
        of them is waiting."""
        self.is_watched = False
        """Whether `made_room` is to be told of every item that is taken."""
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
        """Take one item, room or not, and see that somebody works on it."""
        if type(item) is Gated:
            self.has_gated = True
            if self._held:
                item.let_others_pass()
        self.items.append(item)
        if self.waiting:
            self._see_to_watch()
        if self.sleepers:
            self.wake_one()
        elif self.on_work is not None:
            self.on_work()
        if len(self.items) >= self.alarm:
            self._cross(self._on_high, is_high=True)

    def wake_one(self) -> None:
        """Wake a worker with nothing to do; on another thread raises, and nothing has changed."""
        self.sleepers[-1].wake()
        self.sleepers.pop()

    def _cross(self, callback: Callable[[QueueLevel], object] | None, *, is_high: bool) -> None:
        """It has filled up to the high mark, or emptied to the low one."""
        self._is_high = is_high
        self.alarm = sys.maxsize if is_high else self._high
        self._see_to_watch()
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

    def _see_to_watch(self) -> None:
        """Bring up to date what the hot paths ask.

        Who waits for room is told when there is some, not of each item that is taken then.
        """
        self.is_watched = self._is_high or (bool(self.waiting) and not self.has_room)
        self.fast_size = 0 if self.waiting else min(self._room, self.alarm - 1)

    def hold(self) -> None:
        """A worker waits for an open circuit: nobody waits for what is queued behind it."""
        self._held += 1
        if self.has_gated:
            for item in self.items:
                if type(item) is Gated:
                    item.let_others_pass()

    def release(self) -> None:
        """The wait is over: what comes from now on is waited for again."""
        self._held -= 1

    def drop_oldest(self) -> Undelivered:
        """Let the oldest item fall out."""
        item = self.items.popleft()
        self.counts.dropped += 1
        if type(item) is Gated:
            item.done()
            item = item.event
        return Undelivered(item, self.name)

    def join_line(self, waiter: Waiter) -> None:
        """Have a publisher wait for room: from now on nobody may pass it."""
        self.waiting.append(waiter)
        self._see_to_watch()

    def leave_line(self, waiter: Waiter) -> None:
        """Forget a publisher that waited, if it is still in line."""
        if waiter in self.waiting:
            self.waiting.remove(waiter)
        self._see_to_watch()

    def made_room(self) -> None:
        """Say if it is low again, and tell the first waiting publisher, if it is its turn."""
        if self._is_high and len(self.items) <= self._low:
            self._cross(self._on_low, is_high=False)
        if self.waiting:
            self._see_to_watch()
            if self.waiting[0].may_go():
                self.waiting[0].turn.set()


@final
class Waiter:
    """A publisher in line for room in all the queues of one event."""

    __slots__ = ("_gave_up", "_queues", "turn")

    def __init__(self, queues: Sequence[BoundedEventQueue]) -> None:
        # Joining all lines in one step gives all of them the same order of waiters, so
        # the first of all waiters is first everywhere and no two wait for each other.
        # Queues that drop or refuse have no line: nobody waits for them.
        self._queues = [queue for queue in queues if queue.strategy in WAITING_STRATEGIES]
        self._gave_up = False
        self.turn = anyio.Event()
        for queue in self._queues:
            queue.join_line(self)

    def may_go(self) -> bool:
        """Whether it is first in all its lines and there is room in all of them."""
        return all(queue.waiting[0] is self and queue.has_room for queue in self._queues)

    async def wait(self) -> None:
        """Return when it is its turn, or a queue went away; then `leave` without awaiting."""
        while not self._gave_up and not self.may_go():
            self.turn = anyio.Event()
            await self.turn.wait()

    def leave(self) -> None:
        """Step out of all lines, admitted or not, and let the next one look."""
        for queue in self._queues:
            queue.leave_line(self)
        for queue in self._queues:
            queue.made_room()

    def give_up(self) -> None:
        """Send it away: its queue is being closed."""
        self._gave_up = True
        self.leave()
        self.turn.set()


@final
class Pace:
    """Slows publishers by AIMD: halve the rate when nearly full, add to it when emptier."""

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
        """Admissions a second, or `None` while nobody is slowed."""

    @property
    def is_slowing(self) -> bool:
        """Whether publishers are being slowed."""
        return self.rate is not None

    def delay(self, fill: float) -> float:
        """Seconds that the next publisher must wait, the queue being `fill` full."""
        now = self._clock.now()
        self._adapt(fill, now)
        if self.rate is None:
            return 0.0
        self._next = max(now, self._next) + 1 / self.rate
        return self._next - now

    def _adapt(self, fill: float, now: float) -> None:
        # One change per ten admissions: the queue must have time to answer.
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
    """The first full queue that refuses new events, if any."""
    for queue in queues:
        if queue.strategy is BackpressureStrategy.REJECT_NEW and not queue.has_room:
            return queue
    return None


def must_wait(queues: Sequence[BoundedEventQueue]) -> bool:
    """Whether an event would have to wait for room, or behind others who wait."""
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
    """Items for queues of these priorities (highest first) that open one after another.

    With `commit`, the first of them open when it does.
    """
    gates: dict[int, Gate] = {}
    for place, priority in enumerate(priorities):
        if priority != priorities[0]:
            # A gate counts every handler before it, not just those of the group above: a
            # drop in that group must not let this one overtake a group still higher up.
            gates.setdefault(priority, Gate(place))
    return [
        Gated(
            event,
            gates.get(priority, commit),
            tuple(gate for lower, gate in gates.items() if lower < priority),
            commit=commit,
        )
        for priority in priorities
    ]
