"""The workers of a lane: one takes single events, the other takes lists.

A worker handles up to `batch_size` events, then gives the other tasks a turn. With nothing
to do it sleeps; it is woken by the publish that brings it work.
"""

from __future__ import annotations

from types import CoroutineType
from typing import TYPE_CHECKING, Any, final

from msgbus.context import EventFrame, ListFrame, current_frame
from msgbus.filters import passes
from msgbus.middleware.chain import not_awaited
from msgbus.queue import Gated
from msgbus.telemetry.stats import Durations

if TYPE_CHECKING:
    from msgbus.lanes import Lane
    from msgbus.messages import Event
    from msgbus.runtime import Runtime, Task

FOLD_AT = Durations.FOLD_AT
new = object.__new__
set_frame = current_frame.set


class Worker:
    """Takes events one by one."""

    __slots__ = ("_lane", "_runtime", "_waker", "in_hand", "task")

    task: Task

    def __init__(self, lane: Lane, runtime: Runtime) -> None:
        self._lane = lane
        self._runtime = runtime
        self._waker = runtime.waker()
        self.in_hand = 0
        """Events taken from the queue and not finished."""

    async def run(self) -> None:
        """Work until the lane is closed."""
        lane = self._lane
        items = lane.queue.items
        try:
            while not lane.is_dead:
                if items and not lane.is_paused:
                    await self.take_turn()
                    if items:
                        await self._runtime.checkpoint()
                elif lane.is_closing and not items:
                    return
                else:
                    lane.queue.sleepers.append(self._waker)
                    lane.host.work_ended()
                    await self._waker.wait()
        finally:
            if self._waker in lane.queue.sleepers:
                lane.queue.sleepers.remove(self._waker)
            lane.worker_ended(self)

    async def take_turn(self) -> None:  # noqa: C901, PLR0912, PLR0915 (the hot path)
        """Handle up to `batch_size` events."""
        lane = self._lane
        queue = lane.queue
        items = queue.items
        counts = queue.counts
        invoke = lane.invoke
        assert invoke is not None  # noqa: S101 (workers are made only after `open`)
        predicate = lane.registration.filter
        now = lane.host.clock.now
        began = now()
        for _ in range(queue.batch_size):
            if not items or lane.is_paused:
                return
            event = items.popleft()
            self.in_hand = 1
            if queue.waiting:
                queue.made_room()
            gated = None
            if type(event) is Gated:
                gated, event = event, event.event
                await self._pass_gate(gated)
                began = now()
            frame = new(EventFrame)
            frame.message = event
            frame.owner = lane
            frame.context = None
            set_frame(frame)
            try:
                if predicate is not None and not await passes(predicate, event):
                    counts.filtered += 1
                    continue
                value = await invoke(event)
                if value is not None and type(value) is CoroutineType:
                    value.close()
                    raise not_awaited(lane.name, event)
                if frame.context is not None:
                    await lane.host.flush(frame)
            except Exception as error:
                lane.failed(event, error, 1)
            except BaseException as error:
                self._interrupted(event, error, 1)
            finally:
                self.in_hand = 0
                if gated is not None:
                    gated.done()
            if lane.is_dead:
                return
            ended = now()
            recent = counts.recent
            recent.append(ended - began)
            if len(recent) >= FOLD_AT:
                counts.fold()
            began = ended

    async def _pass_gate(self, gated: Gated) -> None:
        if gated.gate is None:
            return
        try:
            await gated.gate.wait()
        except BaseException:
            if not self._lane.is_dead:
                self._lane.queue.counts.abandoned += 1
            self.in_hand = 0
            gated.done()
            raise

    def _interrupted(self, message: Any, error: BaseException, count: int) -> None:
        """A handler was cancelled: by itself, which fails its event, or with this worker."""
        lane = self._lane
        if lane.is_dead:
            raise error
        if self._runtime.is_ending(error):
            lane.queue.counts.abandoned += count
            raise error
        lane.failed(message, error, count)


@final
class ListWorker(Worker):
    """Takes lists of events, for handlers registered with `batch=True`."""

    __slots__ = ()

    async def take_turn(self) -> None:
        """Handle one list of up to `batch_size` events."""
        lane = self._lane
        taken = await self._collect()
        began = lane.host.clock.now()
        try:
            events = await self._wanted(taken)
            if events:
                await self._try_list(events)
        finally:
            self.in_hand = 0
            for item in taken:
                if isinstance(item, Gated):
                    item.done()
        if events and not lane.is_dead:
            counts = lane.queue.counts
            counts.extra += len(events) - 1
            counts.recent.append(lane.host.clock.now() - began)
            if len(counts.recent) >= FOLD_AT:
                counts.fold()

    async def _collect(self) -> list[Event | Gated]:
        """Take what is there, and linger for more if configured."""
        lane = self._lane
        queue = lane.queue
        taken: list[Event | Gated] = []
        until = lane.host.clock.now() + queue.linger
        while True:
            while queue.items and len(taken) < queue.batch_size:
                head = queue.items[0]
                gate = head.gate if type(head) is Gated else None
                if gate is not None and gate.remaining:
                    if taken:
                        return taken
                    await gate.wait()
                    continue
                taken.append(queue.items.popleft())
                self.in_hand += 1
                queue.made_room()
            left = until - lane.host.clock.now()
            full = len(taken) >= queue.batch_size
            if full or left <= 0 or lane.host.hurry or lane.is_closing:
                return taken
            await self._linger(left, taken)

    async def _linger(self, seconds: float, taken: list[Event | Gated]) -> None:
        sleepers = self._lane.queue.sleepers
        sleepers.append(self._waker)
        try:
            with self._lane.host.clock.cancel_after(seconds):
                await self._waker.wait()
        except BaseException:
            if not self._lane.is_dead:
                self._lane.queue.counts.abandoned += len(taken)
            raise
        finally:
            if self._waker in sleepers:
                sleepers.remove(self._waker)

    async def _wanted(self, taken: list[Event | Gated]) -> list[Event]:
        """The events that the handler's own filter lets through."""
        lane = self._lane
        events = [item.event if isinstance(item, Gated) else item for item in taken]
        predicate = lane.registration.filter
        if predicate is None:
            return events
        wanted: list[Event] = []
        for event in events:
            try:
                if await passes(predicate, event):
                    wanted.append(event)
                else:
                    lane.queue.counts.filtered += 1
            except Exception as error:
                lane.failed(event, error, 1)
                lane.queue.counts.extra += 1  # it has no share in the list's duration
        return wanted

    async def _try_list(self, events: list[Event]) -> None:
        """The whole list, once more whole, then event by event, to find the bad one."""
        if len(events) > 1:
            for attempt in (1, 2):
                if await self._call(events, attempt, last=False):
                    return
        for event in events:
            await self._call([event], 3 if len(events) > 1 else 1, last=True)

    async def _call(self, events: list[Event], attempt: int, *, last: bool) -> bool:
        lane = self._lane
        invoke = lane.invoke
        assert invoke is not None  # noqa: S101 (workers are made only after `open`)
        frame = ListFrame(events, lane, attempt)
        set_frame(frame)
        try:
            await invoke(events)
            if frame.context is not None:
                await lane.host.flush(frame)
        except Exception as error:
            if last:
                lane.failed(events[0], error, len(events))
            return False
        except BaseException as error:
            self._interrupted(events[0], error, len(events))
            return True
        return True
