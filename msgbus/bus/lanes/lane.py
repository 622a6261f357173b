"""A lane: one event handler, its queue, and the workers that empty it."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, final

from msgbus.bus.lanes.queue import BoundedEventQueue, Gated
from msgbus.bus.lanes.worker import ListWorker, Worker
from msgbus.messages.receipts import Undelivered
from msgbus.telemetry.logging import log

if TYPE_CHECKING:
    from msgbus.bus.bus import MessageBus
    from msgbus.bus.context import Frame
    from msgbus.handlers.injection import Call
    from msgbus.handlers.registration import Registration
    from msgbus.messages.message import Event
    from msgbus.runtime.clock import Clock
    from msgbus.runtime.event_loop import Runtime
    from msgbus.telemetry.stats import LaneCounts


class LaneHost(Protocol):
    """What a lane needs of the bus it runs on."""

    clock: Clock

    @property
    def bus(self) -> MessageBus:
        """The bus itself, for handlers that ask for it."""
        ...

    @property
    def hurry(self) -> bool:
        """Whether somebody waits for all work to be done: then nothing lingers."""
        ...

    def require_own_loop(self, what: str) -> None:
        """Raise if the caller is on another event loop."""
        ...

    def require_runtime(self) -> Runtime:
        """The running event loop."""
        ...

    def work_ended(self) -> None:
        """A worker has nothing more to do."""
        ...

    def lane_left(self, lane: Lane) -> None:
        """A lane that was to leave has finished."""
        ...

    def event_failed(self, lane: Lane, message: Any, error: BaseException) -> None:
        """A handler failed."""
        ...

    async def flush(self, frame: Frame) -> None:
        """Publish what a handler emitted."""
        ...


@final
class Lane:
    """One handler's queue and workers.

    Workers are persistent and sleep when there is nothing to do; there is never a task
    per event.
    """

    __slots__ = (
        "bus",
        "host",
        "invoke",
        "is_closing",
        "is_dead",
        "is_durable",
        "is_leaving",
        "is_paused",
        "is_retried",
        "name",
        "parked",
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
        self.session_id = session_id
        self.invoke: Call | None = None
        self.workers: list[Worker] = []
        self.is_paused = False
        """Takes no events for now."""
        self.is_closing = False
        """Its workers end once the queue is empty."""
        self.is_dead = False
        """Was given up: what still runs no longer counts."""
        self.is_durable = False
        """Whether it is fed from the journal, which also decides on other tries."""
        self.is_leaving = False
        """Is forgotten by the bus once its last worker has gone."""
        self.is_retried = False
        """Whether `invoke` tries again by itself."""
        self.parked: list[Event] = []
        """Events in hand that no handler is at work on: they wait to be tried again."""

    @property
    def priority(self) -> int:
        """Higher runs first."""
        return self.registration.priority

    @property
    def counts(self) -> LaneCounts:
        """The handler's numbers."""
        return self.queue.counts

    @property
    def in_hand(self) -> int:
        """Events taken from the queue and not finished."""
        return sum(worker.in_hand for worker in self.workers)

    @property
    def is_busy(self) -> bool:
        """Whether an event is queued or being handled."""
        queue = self.queue
        return bool(queue.items) or len(queue.sleepers) < len(self.workers) or self.in_hand > 0

    def open(self, invoke: Call) -> None:
        """Begin to work, now that the bus runs."""
        self.invoke = invoke
        self.queue.on_work = self._add_worker
        self.see_to_work()

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
        """A worker has gone home."""
        self.workers.remove(worker)
        if not self.is_closing:
            # Its handler cancelled the whole task, or the program ends without `stop`: let
            # the next event bring a new one, if there is one.
            self.queue.on_work = self._add_worker
            if worker.cut_off or self.queue.items:
                log.warning(
                    "worker_cancelled",
                    bus=self.bus.config.name,
                    handler=self.name,
                    abandoned=worker.cut_off,
                    queued=len(self.queue.items),
                )
        if self.is_leaving and not self.workers:
            self.host.lane_left(self)
        self.host.work_ended()

    def leave(self) -> list[Undelivered]:
        """Give up the queue, and be forgotten once what is in hand is finished."""
        queued = self.abandon_queue()
        self.is_leaving = True
        if not self.workers:
            self.host.lane_left(self)
        return queued

    def see_to_work(self) -> None:
        """Bring workers to what is queued, if there are too few."""
        if self.invoke is None or self.is_closing:
            return
        wanted = min(len(self.queue.items), self.registration.concurrency)
        for _ in range(len(self.workers), wanted):
            self._add_worker()

    def waits_behind(self, event: Event) -> bool:
        """Whether it cannot go on before higher handlers are done with `event`."""
        return any(
            worker.at_gate is not None and worker.at_gate.event is event for worker in self.workers
        ) or any(type(item) is Gated and item.event is event for item in self.queue.items)

    @property
    def holds_others(self) -> bool:
        """Whether handlers of lower priority wait for what it has in hand."""
        return any(item.holds_others for worker in self.workers for item in worker.gated)

    @property
    def is_held(self) -> bool:
        """Whether something that it is to handle waits for handlers of higher priority."""
        at_gate = [worker.at_gate for worker in self.workers]
        return self.queue.has_gated and any(
            type(item) is Gated and item.is_held for item in (*at_gate, *self.queue.items)
        )

    @contextmanager
    def waiting_for_circuit(self, events: Sequence[Event]) -> Generator[None]:
        """While a worker waits with `events` for an open circuit, lower priorities go on.

        Neither they nor what is queued behind them is waited for: the outage of one service
        would stop handlers that do not even use it.
        """
        for worker in self.workers:
            for item in worker.gated:
                if any(item.event is event for event in events):
                    item.let_others_pass()
        self.queue.hold()
        try:
            yield
        finally:
            self.queue.release()

    def pause(self) -> None:
        """Take no more events for now; those in hand are finished."""
        self.is_paused = True

    def resume(self) -> None:
        """Go on after `pause`."""
        self.is_paused = False
        self._wake_all()
        self.see_to_work()

    def _wake_all(self) -> None:
        while self.queue.sleepers:
            self.queue.wake_one()

    def stop_lingering(self) -> None:
        """Let a batch handler have what it has, now."""
        if self.registration.batch and self.in_hand:
            self._wake_all()

    def close(self) -> None:
        """Let the workers end once the queue is empty."""
        self.is_closing = True
        self.queue.on_work = None
        self._wake_all()

    def end(self) -> tuple[int, list[Undelivered]]:
        """Stop now: idle workers go home, busy ones are cancelled.

        Returns:
            How many events this abandons, and those of them that no handler was at work on.
        """
        queued = self.abandon_queue()
        parked = [Undelivered(event, self.name) for event in self.parked]
        # Ended before, by the stop of the bus: then its events are counted.
        in_hand = 0 if self.is_dead else self.in_hand
        # Only those at work: a task that is cancelled before its first step never ends its
        # worker, and the others go home by themselves.
        at_work = [one for one in self.workers if one.in_hand or one.at_gate is not None]
        if at_work:
            self.is_dead = True
            self.queue.counts.abandoned += in_hand
            for worker in at_work:
                worker.task.cancel()
        return len(queued) + in_hand, parked + queued

    def abandon_queue(self) -> list[Undelivered]:
        """Take nothing more; give back what is queued, and let the workers end."""
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
            queue.waiting[0].give_up()
        queue.made_room()
        self.close()
        return queued

    def failed(self, message: Any, error: BaseException, count: int) -> None:
        """Count and report a handler that failed on `count` events."""
        if not self.is_dead:
            self.queue.counts.failed += count
            self.host.event_failed(self, message, error)
