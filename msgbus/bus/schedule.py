"""Delayed events in memory: a heap and one task."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from heapq import heappop, heappush
from itertools import count
from math import isfinite
from typing import TYPE_CHECKING, final

from msgbus.messages.message import Event, metadata_of
from msgbus.runtime.arguments import check_seconds

if TYPE_CHECKING:
    from msgbus.runtime.clock import Clock
    from msgbus.runtime.event_loop import Runtime, Task, Waker


@final
class _Entry:
    __slots__ = ("due", "event", "order")

    def __init__(self, due: float, order: int, event: Event) -> None:
        self.due = due
        self.order = order
        self.event: Event | None = event

    def __lt__(self, other: _Entry) -> bool:
        return (self.due, self.order) < (other.due, other.order)


@final
class EventSchedule:
    """Passes each event to `deliver` when it is due, in order of time.

    `on_cancel` is called with the id of each cancelled event.
    """

    def __init__(
        self,
        clock: Clock,
        deliver: Callable[[Event], Awaitable[None]],
        on_cancel: Callable[[str], None],
    ) -> None:
        self._clock = clock
        self._deliver = deliver
        self._on_cancel = on_cancel
        self._heap: list[_Entry] = []
        self._by_id: dict[str, list[_Entry]] = {}
        self._by_session: dict[str, dict[_Entry, None]] = {}
        self._order = count()
        self._live = 0
        self._delivering: _Entry | None = None
        self._runtime: Runtime | None = None
        self._task: Task | None = None
        self._waker: Waker | None = None

    def __len__(self) -> int:
        return self._live

    def add(self, event: Event, delay: float) -> Callable[[], bool]:
        """Schedule `event` in `delay` seconds; return a function that cancels it."""
        entry = _Entry(self._clock.now() + delay, next(self._order), event)
        heappush(self._heap, entry)
        self._by_id.setdefault(metadata_of(event).message_id, []).append(entry)
        session_id = metadata_of(event).session_id
        if session_id is not None:
            self._by_session.setdefault(session_id, {})[entry] = None
        self._live += 1
        self._start_or_wake()
        return partial(self._cancel, entry)

    def remove(self, message_id: str) -> bool:
        """Cancel the event of this id; false if it is not scheduled."""
        cancelled = [self._cancel(entry) for entry in list(self._by_id.get(message_id, ()))]
        return any(cancelled)

    def of_session(self, session_id: str) -> list[Event]:
        """List the events of one session, in the order of their time."""
        entries = sorted(self._by_session.get(session_id, ()))
        return [entry.event for entry in entries if entry.event is not None]

    def _cancel(self, entry: _Entry) -> bool:
        if entry.event is None or entry is self._delivering:
            return False
        self._on_cancel(metadata_of(entry.event).message_id)
        self._forget(entry, entry.event)
        return True

    def _forget(self, entry: _Entry, event: Event) -> None:
        message_id = metadata_of(event).message_id
        entry.event = None
        self._live -= 1
        same = self._by_id.get(message_id, [])
        if entry in same:
            same.remove(entry)
        if not same:
            self._by_id.pop(message_id, None)
        session_id = metadata_of(event).session_id
        in_session = self._by_session.get(session_id or "", {})
        in_session.pop(entry, None)
        if not in_session:
            self._by_session.pop(session_id or "", None)

    def open(self, runtime: Runtime) -> None:
        """Begin to deliver."""
        self._runtime = runtime
        self._start_or_wake()

    def close(self) -> None:
        """Stop delivering; what is added from now on is kept for `hand_back`."""
        self._runtime = None
        if self._task is not None:
            self._task.cancel()
            self._task = None

    def hand_back(self) -> tuple[Event, ...]:
        """Remove and return what was not delivered, in the order of time."""
        left: list[Event] = []
        if self._delivering is not None:
            self._heap.append(self._delivering)
        for entry in sorted(self._heap):
            if entry.event is not None:
                left.append(entry.event)
                entry.event = None
        self._heap.clear()
        self._by_id.clear()
        self._by_session.clear()
        self._live = 0
        return tuple(left)

    def _start_or_wake(self) -> None:
        if self._runtime is None or not self._heap:
            return
        if self._task is None:
            self._waker = self._runtime.waker()
            self._task = self._runtime.spawn(self._work, name="msgbus schedule")
        elif self._waker is not None:
            self._waker.wake()

    async def _deliver_entry(self, entry: _Entry, event: Event) -> None:
        self._delivering = entry
        try:
            await self._deliver(event)
        except BaseException:
            # Cancelled inside a filter: it was not published, so it stays scheduled.
            if entry.event is not None:
                heappush(self._heap, entry)
            raise
        else:
            self._forget(entry, event)
        finally:
            self._delivering = None

    async def _work(self) -> None:
        while self._heap:
            head = self._heap[0]
            wait = head.due - self._clock.now()
            if head.event is None:
                heappop(self._heap)
            elif wait > 0:
                # A new event may be due before the head: then the waker ends this wait.
                with self._clock.cancel_after(wait):
                    await self._waker.wait()  # type: ignore[union-attr]  # set with the task
            else:
                heappop(self._heap)
                await self._deliver_entry(head, head.event)
        self._task = None


def check_delay(delay: float | None) -> float:
    """Check a delay in seconds; 0 for a time in the past.

    Raises:
        ValueError: It is not a finite number of seconds.
        TypeError: It is not a number.
    """
    check_seconds("delay", delay)
    if delay is not None and not isfinite(delay):
        message = f"delay must be a number of seconds, not {delay}."
        raise ValueError(message)
    return max(delay or 0.0, 0.0)
