"""`Lane`: the queue and the workers of one event handler."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, final

from msgbus.bus.lanes.queue import BoundedEventQueue, Gated
from msgbus.bus.lanes.worker import ListWorker, Worker
from msgbus.messages.receipts import Undelivered
from msgbus.telemetry.logging import log

if TYPE_CHECKING:
    from msgbus.bus.config import BusConfig
    from msgbus.bus.protocols import IMessageBus
    from msgbus.handlers.injection import Call
    from msgbus.handlers.registration import Registration
    from msgbus.messages.frame import Frame
    from msgbus.messages.message import Event
    from msgbus.runtime.clock import Clock
    from msgbus.runtime.event_loop import Runtime


class LaneHost(Protocol):
    """The bus, as far as a lane uses it."""

    clock: Clock
    config: BusConfig
    watched: bool
    """Whether a caller may wait until idle."""

    @property
    def bus(self) -> IMessageBus:
        """The bus itself, for handlers that ask for it."""
        ...

    @property
    def is_settling(self) -> bool:
        """Whether a caller waits until idle: then nothing lingers."""
        ...

    def require_own_loop(self, what: str) -> None:
        """Raise if the caller is on another event loop."""
        ...

    def require_runtime(self) -> Runtime:
        """The running event loop."""
        ...

    def notify_idle_waiters(self) -> None:
        """Wake the callers that wait until idle: some work has ended."""
        ...

    def remove_lane(self, lane: Lane) -> None:
        """Remove a lane that has finished."""
        ...

    def event_failed(self, lane: Lane, message: Any, error: BaseException) -> None:
        """Count and report that a handler failed."""
        ...

    async def flush(self, frame: Frame) -> None:
        """Publish the events that a handler emitted."""
        ...


@final
class Lane:
    """The queue and the workers of one event handler.

    Workers persist and sleep while the queue is empty; there is never a task per event.
    """

    __slots__ = (
        "backing_off",
        "bus",
        "counts",
        "host",
        "invoke",
        "is_aborted",
        "is_closing",
        "is_detached",
        "is_durable",
        "is_paused",
        "is_retried",
        "name",
        "queue",
        "registration",
        "session_id",
        "workers",
    )

    def __init__(
        self,
        host: LaneHost,
        registration: Registration,
        queue: BoundedEventQueue,
        session_id: str | None,
    ) -> None:
        self.host = host
        self.bus = host.bus
        self.name = registration.name
        self.registration = registration
        self.queue = queue
        self.counts = queue.counts
        """The handler's counters."""
        self.session_id = session_id
        self.invoke: Call | None = None
        self.workers: list[Worker] = []
        self.is_paused = False
        """Takes no events for now."""
        self.is_closing = False
        """Its workers end once the queue is empty."""
        self.is_aborted = False
        """Whether it was stopped with events in flight, which are no longer counted."""
        self.is_durable = False
        """Whether its events come from the journal, whose subscription also retries."""
        self.is_detached = False
        """Whether the bus removes it once its last worker has ended."""
        self.is_retried = False
        """Whether `invoke` retries."""
        self.backing_off: list[Event] = []
        """Events in flight that wait for a retry, so that no handler runs on them."""

    @property
    def priority(self) -> int:
        """Higher runs first."""
        return self.registration.priority

    @property
    def in_flight(self) -> int:
        """Events taken from the queue and not finished."""
        return sum(worker.in_flight for worker in self.workers)

    @property
    def is_busy(self) -> bool:
        """Whether an event is queued or being handled."""
        queue = self.queue
        return bool(queue.items) or len(queue.sleepers) < len(self.workers) or self.in_flight > 0

    @property
    def is_held_up(self) -> bool:
        """Tell whether it is paused and nothing of it runs: the rest waits for `resume`."""
        return self.is_paused and bool(self.queue.items) and not self.in_flight

    def open(self, invoke: Call) -> None:
        """Start workers, now that the bus runs."""
        self.invoke = invoke
        self.queue.on_work = self._add_worker
        self.start_workers()

    def _add_worker(self) -> None:
        if self.is_paused or len(self.workers) == self.registration.concurrency:
            return
        self.host.require_own_loop("publish on")
        runtime = self.host.require_runtime()
        kind = ListWorker if self.registration.batch else Worker
        worker = kind(self, runtime)
        self.workers.append(worker)
        if len(self.workers) == self.registration.concurrency:
            self.queue.on_work = None
        worker.task = runtime.spawn(worker.run, name=f"msgbus lane {self.name}")

    def worker_ended(self, worker: Worker) -> None:
        """Remove a worker that has ended."""
        self.workers.remove(worker)
        if not self.is_closing:
            # Its handler cancelled the whole task, or the program ends without `stop`: the next
            # event, if any, starts a new worker.
            self.queue.on_work = self._add_worker
            if worker.lost or self.queue.items:
                log.warning(
                    "worker_cancelled",
                    bus=self.host.config.name,
                    handler=self.name,
                    abandoned=worker.lost,
                    queued=len(self.queue.items),
                )
        if self.is_detached and not self.workers:
            self.host.remove_lane(self)
        self.host.notify_idle_waiters()

    def detach(self) -> list[Undelivered]:
        """Abandon the queue; the bus removes the lane once events in flight have finished."""
        queued = self.abandon_queue()
        self.is_detached = True
        if not self.workers:
            self.host.remove_lane(self)
        return queued

    def start_workers(self) -> None:
        """Start workers for queued events, up to the handler's concurrency."""
        if self.invoke is None or self.is_closing:
            return
        wanted = min(len(self.queue.items), self.registration.concurrency)
        for _ in range(len(self.workers), wanted):
            self._add_worker()

    def is_gated_by(self, event: Event) -> bool:
        """Whether it waits for handlers of higher priority to finish `event`."""
        return any(
            worker.at_gate is not None and worker.at_gate.event is event for worker in self.workers
        ) or any(type(item) is Gated and item.event is event for item in self.queue.items)

    @property
    def holds_others(self) -> bool:
        """Whether handlers of lower priority wait for its events in flight."""
        return any(item.holds_others for worker in self.workers for item in worker.gated)

    @property
    def is_held(self) -> bool:
        """Whether one of its events waits for handlers of higher priority."""
        at_gate = [worker.at_gate for worker in self.workers]
        return self.queue.has_gated and any(
            type(item) is Gated and item.is_held for item in (*at_gate, *self.queue.items)
        )

    @contextmanager
    def waiting_for_circuit(self, events: Sequence[Event]) -> Generator[None]:
        """Release lower priorities while a worker waits with `events` for an open circuit.

        They wait neither for these events nor for those queued behind them: otherwise the
        outage of one service would stop handlers that do not use it.
        """
        for worker in self.workers:
            for item in worker.gated:
                if any(item.event is event for event in events):
                    item.release_lower()
        self.queue.hold()
        try:
            yield
        finally:
            self.queue.release()

    def interrupt(self, item: Gated) -> None:
        """Cancel what runs on an event that another process has now, or remove it."""
        item.is_withdrawn = True
        if item in self.queue.items:
            self.queue.items.remove(item)
            self.queue.counts.abandoned += 1
            self.host.notify_idle_waiters()
            return
        for worker in self.workers:
            if any(one is item for one in worker.gated):
                worker.task.cancel()

    def pause(self) -> None:
        """Take no more events until `resume`; those in flight finish."""
        self.is_paused = True
        self.host.notify_idle_waiters()

    def resume(self) -> None:
        """Continue after `pause`."""
        self.is_paused = False
        self._wake_all()
        self.start_workers()

    def _wake_all(self) -> None:
        while self.queue.sleepers:
            self.queue.wake_one()

    def stop_lingering(self) -> None:
        """Deliver an incomplete batch now."""
        if self.registration.batch and self.in_flight:
            self._wake_all()

    def close(self) -> None:
        """Let the workers end once the queue is empty."""
        self.is_closing = True
        self.queue.on_work = None
        self._wake_all()

    def end(self) -> tuple[int, list[Undelivered]]:
        """Stop now: idle workers end, busy ones are cancelled.

        Returns:
            How many events this abandons, and those of them that no handler was running on.
        """
        queued = self.abandon_queue()
        backing_off = [Undelivered(event, self.name) for event in self.backing_off]
        # Aborted before, by the stop of the bus: then its events are counted already.
        in_flight = 0 if self.is_aborted else self.in_flight
        # Only busy ones: a task cancelled before its first step would never remove its worker,
        # and the others end by themselves.
        busy = [one for one in self.workers if one.in_flight or one.at_gate is not None]
        if busy:
            self.is_aborted = True
            self.queue.counts.abandoned += in_flight
            for worker in busy:
                worker.task.cancel()
        return len(queued) + in_flight, backing_off + queued

    def abandon_queue(self) -> list[Undelivered]:
        """Close the lane, and return what is queued."""
        queue = self.queue
        queued: list[Undelivered] = []
        while queue.items:
            item = queue.items.popleft()
            queue.counts.abandoned += 1
            if type(item) is Gated:
                item.done()
                item = item.event
            queued.append(Undelivered(item, self.name))
        while queue.waiting:
            queue.waiting[0].cancel()
        queue.made_room()
        self.close()
        return queued
