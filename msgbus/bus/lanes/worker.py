"""Workers of a lane: one for single events, one for lists.

A worker handles up to `batch_size` events, then yields to other tasks. While the queue is
empty it sleeps; the next publish wakes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import CoroutineType
from typing import TYPE_CHECKING, Any, cast, final

from msgbus.bus.lanes.queue import Gated
from msgbus.handlers.filters import passes
from msgbus.messages.frame import (
    BatchFrame,
    DeliveryFrame,
    EventFrame,
    Frame,
    current_frame,
    frame_handling,
)
from msgbus.messages.message import ids_of
from msgbus.middleware.chain import not_awaited
from msgbus.telemetry.logging import log
from msgbus.telemetry.redaction import redact_exception
from msgbus.telemetry.stats import Durations

if TYPE_CHECKING:
    from msgbus.bus.lanes.lane import Lane
    from msgbus.messages.message import Event
    from msgbus.runtime.event_loop import Runtime, Task

FOLD_AT = Durations.FOLD_AT
set_frame = current_frame.set


class Worker:
    """Worker that handles events one by one."""

    __slots__ = ("_lane", "_runtime", "_waker", "at_gate", "gated", "in_flight", "lost", "task")

    task: Task

    def __init__(self, lane: Lane, runtime: Runtime) -> None:
        self._lane = lane
        self._runtime = runtime
        self._waker = runtime.waker()
        self.in_flight = 0
        """Events taken from the queue and not finished."""
        self.lost = 0
        """Events in flight when its task was cancelled by others than the bus."""
        self.at_gate: Gated | None = None
        """The event that waits for handlers of higher priority, or for the journal."""
        self.gated: Sequence[Gated] = ()
        """Events in flight that others may wait for."""

    async def run(self) -> None:
        """Handle events until the lane is closed."""
        lane = self._lane
        items = lane.queue.items
        try:
            while not lane.is_aborted:
                if items and not lane.is_paused:
                    await self.handle_batch()
                    if items:
                        await self._runtime.checkpoint()
                elif lane.is_closing and not items:
                    return
                else:
                    lane.queue.sleepers.append(self._waker)
                    if lane.host.watched:
                        lane.host.notify_idle_waiters()
                    if items and not lane.is_paused:
                        # Another thread appended it and found no worker to wake.
                        lane.queue.sleepers.remove(self._waker)
                        continue
                    await self._waker.wait()
        finally:
            if self._waker in lane.queue.sleepers:
                lane.queue.sleepers.remove(self._waker)
            lane.worker_ended(self)

    async def handle_batch(self) -> None:  # noqa: C901, PLR0912, PLR0915 (the hot path)
        """Handle up to `batch_size` events."""
        lane = self._lane
        queue = lane.queue
        items = queue.items
        counts = queue.counts
        if len(counts.recent) >= FOLD_AT:
            counts.fold()
        invoke = lane.invoke
        assert invoke is not None  # noqa: S101 (workers are made only after `open`)
        predicate = lane.registration.filter
        now = lane.host.clock.now
        began = now()
        for _ in range(queue.batch_size):
            if not items or lane.is_paused:
                return
            event = items.popleft()
            self.in_flight = 1
            if queue.is_watched:
                queue.made_room()
            gated = None
            frame: Frame = EventFrame()
            if type(event) is Gated:
                gated, event = event, event.event
                await self._pass_gate(gated)
                if gated.is_cancelled:
                    self.in_flight = 0
                    gated.done()
                    continue
                began = now()
                self.gated = (gated,)
                if gated.delivery is not None:
                    frame = DeliveryFrame(event, lane, gated.delivery)
            frame.message = event
            frame.owner = lane
            frame.context = None
            set_frame(frame)
            try:
                if predicate is not None and not await passes(predicate, event):
                    if not lane.is_aborted:
                        counts.filtered += 1
                    if gated is not None:
                        gated.is_filtered = True
                    continue
                value = await invoke(event)
                if value is not None and type(value) is CoroutineType:
                    value.close()
                    raise not_awaited(lane.name, event)
                if frame.context is not None and frame.context.emitted:
                    await lane.host.flush(frame)
            except Exception as error:
                lane.host.event_failed(lane, event, error)
                if gated is not None:
                    gated.error = error
            except BaseException as error:
                if gated is not None:
                    gated.error = error
                self._interrupted(event, error)
            finally:
                self.in_flight = 0
                if gated is not None:
                    self.gated = ()
                    gated.is_handled = gated.error is None
                    gated.done()
            if lane.is_aborted:
                return
            ended = now()
            counts.recent.append(ended - began)
            began = ended

    async def _pass_gate(self, gated: Gated) -> None:
        self.at_gate = gated
        try:
            while (gate := gated.closed_gate) is not None:
                await gate.wait()
        except BaseException:
            self._abandon(1)
            self.in_flight = 0
            gated.done()
            raise
        finally:
            self.at_gate = None

    def _interrupted(self, event: Event, error: BaseException) -> None:
        """Handle a cancellation: of the handler alone, which fails its event, or of the worker."""
        if not self._runtime.is_ending(error):
            self._lane.host.event_failed(self._lane, event, error)
            return
        self._abandon(1)
        raise error

    def _abandon(self, count: int) -> None:
        if not self._lane.is_aborted:
            self._lane.queue.counts.abandoned += count
            self.lost += count


@final
class ListWorker(Worker):
    """Worker that handles lists of events, for handlers registered with `batch=True`."""

    __slots__ = ("_errors", "_filtered")

    async def handle_batch(self) -> None:
        """Handle one list of up to `batch_size` events."""
        lane = self._lane
        counts = lane.queue.counts
        self._errors: dict[int, BaseException] = {}
        self._filtered: set[int] = set()
        taken: list[Event | Gated] = []
        try:
            await self._collect(taken)
            began = lane.host.clock.now()
            events = await self._wanted(taken)
            if lane.queue.has_gated:
                self.gated = [item for item in taken if type(item) is Gated]
                events = self._not_withdrawn(events)
            if events:
                await self._handle_list(events)
            self._report_outcomes(taken, all_attempted=not lane.is_aborted)
        except BaseException:
            self._report_outcomes(taken, all_attempted=False)
            raise
        finally:
            self.in_flight = 0
            self.gated = ()
        if events and not lane.is_aborted:
            counts.lists += 1
            counts.recent.append(lane.host.clock.now() - began)
            if len(counts.recent) >= FOLD_AT:
                counts.fold()

    def _report_outcomes(self, taken: list[Event | Gated], *, all_attempted: bool) -> None:
        if not self._lane.queue.has_gated:
            return
        for item in taken:
            if type(item) is Gated:
                item.error = self._errors.get(id(item.event))
                item.is_filtered = id(item.event) in self._filtered
                item.is_handled = all_attempted and item.error is None
                item.done()

    async def _collect(self, taken: list[Event | Gated]) -> None:
        """Take queued events, and linger for more if configured."""
        lane = self._lane
        queue = lane.queue
        until = lane.host.clock.now() + queue.linger
        while True:
            if not await self._take_open(taken):
                return
            left = until - lane.host.clock.now()
            full = len(taken) >= queue.batch_size
            no_linger = lane.host.is_settling or lane.is_closing or lane.is_paused
            if full or left <= 0 or no_linger:
                return
            await self._linger(left, taken)

    async def _take_open(self, taken: list[Event | Gated]) -> bool:
        """Take events up to the first that is behind a gate; false if there is one.

        The gate of a commit is waited for: it opens soon.
        """
        queue = self._lane.queue
        if not queue.has_gated and not self._lane.is_paused:
            count = min(len(queue.items), queue.batch_size - len(taken))
            taken += [queue.items.popleft() for _ in range(count)]
            self.in_flight += count
            queue.made_room()
            return True
        while queue.items and len(taken) < queue.batch_size and not self._lane.is_paused:
            head = queue.items[0]
            gate = head.closed_gate if type(head) is Gated else None
            if gate is not None:
                if taken and gate is not head.commit:
                    return False
                self.at_gate = head
                try:
                    await gate.wait()
                finally:
                    self.at_gate = None
                continue
            queue.items.popleft()
            queue.made_room()
            if type(head) is Gated and head.is_cancelled:
                head.done()
                continue
            taken.append(head)
            self.in_flight += 1
        return True

    async def _linger(self, seconds: float, taken: list[Event | Gated]) -> None:
        sleepers = self._lane.queue.sleepers
        sleepers.append(self._waker)
        try:
            with self._lane.host.clock.cancel_after(seconds):
                await self._waker.wait()
        except BaseException:
            self._abandon(len(taken))
            raise
        finally:
            if self._waker in sleepers:
                sleepers.remove(self._waker)

    async def _wanted(self, taken: list[Event | Gated]) -> list[Event]:
        """Apply the handler's own filter; return the events that pass."""
        lane = self._lane
        events = cast("list[Event]", taken)
        if lane.queue.has_gated:
            events = [item.event if type(item) is Gated else item for item in taken]
        predicate = lane.registration.filter
        if predicate is None:
            return events
        wanted: list[Event] = []
        for event in events:
            try:
                passed = await passes(predicate, event)
            except Exception as error:
                self._finish(0, [event], error)
                continue
            except BaseException:
                self._abandon(self.in_flight)
                raise
            if passed:
                wanted.append(event)
                continue
            self._filtered.add(id(event))
            if not lane.is_aborted:
                lane.queue.counts.filtered += 1
                self.in_flight -= 1
        return wanted

    def _not_withdrawn(self, events: list[Event]) -> list[Event]:
        """Leave out events that another process has now."""
        withdrawn = {id(item.event) for item in self.gated if item.is_withdrawn}
        left = [event for event in events if id(event) not in withdrawn]
        self._abandon(len(events) - len(left))
        self.in_flight -= len(events) - len(left)
        return left

    def _deliveries_of(self, events: list[Event]) -> tuple[Any, ...] | None:
        if not self._lane.is_durable:
            return None
        known = {id(item.event): item.delivery for item in self.gated}
        return tuple(known[id(event)] for event in events)

    def _unfinished(self, events: list[Event]) -> list[Event]:
        return [event for event in events if id(event) not in self._errors]

    async def _handle_list(self, events: list[Event]) -> None:
        """Deliver the list; if it fails, retry it once, then deliver each event alone."""
        lane = self._lane
        error = await self._call(events, 1)
        events = self._unfinished(events)
        if error is not None and events and not lane.is_aborted and not lane.is_retried:
            self._log_retry(events, error)
            error = await self._call(events, 2)
            events = self._unfinished(events)
        if error is None:
            self._finish(len(events), [], None)
            return
        if len(events) <= 1:
            self._finish(0, events, error)
            return
        if not lane.is_aborted:
            self._log_retry(events, error)
        for event in events:
            if lane.is_aborted:
                return
            error = await self._call([event], 3)
            failed = self._unfinished([event]) if error else []
            self._finish(1 if error is None else 0, failed, error)

    def _log_retry(self, events: list[Event], error: BaseException) -> None:
        frame = frame_handling(events[0])
        log.warning(
            "batch_retried",
            bus=self._lane.host.config.name,
            handler=self._lane.name,
            **ids_of(events[0]),
            count=len(events),
            attempt=1 if frame is None else frame.attempt,
            error=redact_exception(error),
            traceback=error,
        )

    def _finish(self, handled: int, failed: list[Event], error: BaseException | None) -> None:
        """Count events that are finished."""
        lane = self._lane
        if lane.is_aborted:
            return
        self.in_flight -= handled + len(failed)
        lane.queue.counts.handled_in_lists += handled
        for event in failed:
            lane.queue.counts.failed_in_lists += 1
            if error is not None:
                self._errors[id(event)] = error
                lane.host.event_failed(lane, event, error)

    async def _call(self, events: list[Event], attempt: int) -> BaseException | None:
        """Call the handler; return its error, if it failed.

        Events that a transaction of a failed handler has acknowledged are finished.
        """
        deliveries = self._deliveries_of(events)
        error = await self._invoke(events, attempt, deliveries)
        if error is not None and deliveries is not None:
            pairs = zip(events, deliveries, strict=True)
            self._finish(0, [event for event, one in pairs if one and one.is_ended], error)
        return error

    async def _invoke(
        self, events: list[Event], attempt: int, deliveries: tuple[Any, ...] | None
    ) -> BaseException | None:
        lane = self._lane
        invoke = lane.invoke
        assert invoke is not None  # noqa: S101 (workers are made only after `open`)
        if attempt > 1:
            lane.queue.counts.retried += len(events)
        frame = BatchFrame(events, lane, attempt, deliveries)
        set_frame(frame)
        try:
            # A copy: a handler that empties its list must neither change the counts nor leave
            # the next attempt without events.
            value = await invoke(events.copy())
            if value is not None and type(value) is CoroutineType:
                value.close()
                raise not_awaited(lane.name, events)
            if frame.context is not None and frame.context.emitted:
                await lane.host.flush(frame)
        except Exception as error:
            return error
        except BaseException as error:
            if self._runtime.is_ending(error):
                self._abandon(self.in_flight)
                raise
            return error
        return None
