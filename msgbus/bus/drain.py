"""Waiting until a bus is idle, by counting and never by timers; draining and ending it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import anyio

from msgbus.bus.phases import Phase, RunGuards
from msgbus.errors import JournalError, SettleTimeoutError
from msgbus.messages.frame import current_frame
from msgbus.messages.receipts import DrainReport, Undelivered
from msgbus.telemetry.logging import log
from msgbus.telemetry.redaction import redact_exception

if TYPE_CHECKING:
    from msgbus.bus.bus_state import BusState
    from msgbus.bus.durable.hub import DurableBus
    from msgbus.bus.lanes.lane import Lane
    from msgbus.handlers.registration import Registration
    from msgbus.messages.message import Event
    from msgbus.runtime.clock import Clock
    from msgbus.telemetry.stats import BusCounters


# For cancelled handlers to clean up. In real seconds, whatever the bus's clock, as it is
# about sockets and files.
_GRACE = 1.0


async def drain(state: BusState, timeout: float | None) -> None:
    """Let all lanes and commands finish, for at most `timeout` seconds."""
    state.finished_before_drain = _finished(state)
    if state.runtime is not None and not state.runtime.has_ended():
        try:
            await wait_until_idle(state, timeout)
        except SettleTimeoutError:
            pass  # the report says what is left
        except JournalError as error:
            log.error("journal_failed", bus=state.config.name, error=redact_exception(error))


async def wait_until_idle(state: BusState, timeout: float | None) -> None:
    """Wait until no work is left, in the queues and in the journal.

    Raises:
        SettleTimeoutError: Something still runs after `timeout`; it is named.
    """
    if state.durability is None or state.phase is Phase.NEW:
        await _wait_until_lanes_idle(state, timeout)
    elif timeout is None:
        await _wait_until_all_idle(state, state.durability, is_patient=False)
    else:
        # Real time is a second limit, as for the lanes.
        with anyio.move_on_after(timeout), state.clock.cancel_after(timeout):
            await _wait_until_all_idle(state, state.durability, is_patient=True)
            return
        busy = state.busy(state.lanes.values(), commands=True) + state.durability.busy()
        raise SettleTimeoutError(busy, seconds=timeout)


async def _wait_until_all_idle(
    state: BusState, durability: DurableBus, *, is_patient: bool
) -> None:
    while True:
        await state.settle(partial(_open_lanes, state), None, commands=True, is_patient=is_patient)
        await durability.caught_up(is_patient=is_patient)
        if not state.busy(_open_lanes(state), commands=True):
            return


async def _wait_until_lanes_idle(state: BusState, timeout: float | None) -> None:
    is_patient = timeout is not None
    await state.settle(partial(_open_lanes, state), timeout, commands=True, is_patient=is_patient)


def _open_lanes(state: BusState) -> list[Lane]:
    """Return the lanes to wait for: while the bus stops, not those that are paused."""
    lanes = list(state.lanes.values())
    return lanes if state.accepting else [one for one in lanes if not one.is_held_up]


async def end(state: BusState, scheduled: tuple[Event, ...]) -> DrainReport:
    """Stop all lanes, and report what was handled and what was not."""
    persisted: dict[str, int] = {}
    if state.durability is not None and state.runtime is not None:
        # Subscriptions first: they deliver nothing more, and return what is in flight.
        persisted = await state.durability.stop()
    state.phase = Phase.STOPPED
    handled = _finished(state) - state.finished_before_drain
    for stream in list(state.streams):
        stream.end()
    abandoned = 0
    leftovers: list[Undelivered] = []
    for lane in state.lanes.values():
        count, queued = lane.end()
        if lane.is_durable:
            continue  # still in the journal, and counted as such
        abandoned += count
        leftovers += queued
    if abandoned or scheduled:
        log.warning(
            "bus_stopped_with_leftovers",
            bus=state.config.name,
            handled=handled,
            abandoned=abandoned,
            scheduled=len(scheduled),
        )
    if persisted:
        log.warning(
            "messages_stay_in_journal",
            bus=state.config.name,
            persisted=sum(persisted.values()),
            handlers=persisted,
        )
    return DrainReport(
        handled=handled,
        persisted=sum(persisted.values()),
        abandoned=abandoned,
        leftovers=tuple(leftovers),
        scheduled=scheduled,
        persisted_by=persisted,
    )


async def wait_for_workers(state: BusState) -> None:
    """Wait a moment for cancelled handlers to clean up."""
    with anyio.move_on_after(_GRACE):
        await state.wait_for_workers()


def _finished(state: BusState) -> int:
    return sum(counts.handled + counts.failed for counts in state.counters.lanes.values())


class Quiescence(RunGuards):
    """Tracks the work of a bus, and lets callers wait until there is none left."""

    lanes: dict[tuple[Registration, str | None], Lane]

    def __init__(self, clock: Clock, counters: BusCounters) -> None:
        super().__init__()
        self.clock = clock
        self.counters = counters
        self.waiting_publishers = 0
        """Calls of `publish` that wait for room, or are about to."""
        self.watched = False
        """Whether a caller waits until idle, or a handler may subscribe to events about
        commands: the one check that every command pays for."""
        self._observed = False
        self._idle_waiters: list[anyio.Event] = []

    def remove_lane(self, lane: Lane) -> None:
        """Remove a lane that has finished."""
        key = lane.registration, lane.session_id
        if self.lanes.get(key) is lane:
            del self.lanes[key]

    def observe_commands(self, observed: bool) -> None:
        """Set whether system events about commands may have a subscriber."""
        self._observed = observed
        self.watched = observed or bool(self._idle_waiters)

    def _wait_for_work(self) -> anyio.Event:
        waiter = anyio.Event()
        self._idle_waiters.append(waiter)
        self.watched = True
        return waiter

    @property
    def is_settling(self) -> bool:
        """Whether a caller waits until all work is done."""
        return bool(self._idle_waiters)

    def notify_idle_waiters(self) -> None:
        """Wake the callers that wait until idle: some work has ended."""
        if self._idle_waiters:
            if self.bound_runtime is not None and self.is_foreign_thread():
                # A command on the event loop of another thread.
                self.bound_runtime.call_soon(self.notify_idle_waiters)
                return
            waiters, self._idle_waiters = self._idle_waiters, []
            self.watched = self._observed
            for waiter in waiters:
                waiter.set()

    def busy(self, lanes: Iterable[Lane], *, commands: bool) -> list[str]:
        """List what still runs, as text."""
        names = [
            f"{lane.name} ({len(lane.queue.items)} queued, {lane.in_flight} running"
            f"{f', {len(lane.backing_off)} of them backing off' if lane.backing_off else ''}"
            f"{', paused' if lane.is_paused else ''})"
            for lane in lanes
            if lane.is_busy
        ]
        if commands and self.waiting_publishers and self.accepting:
            names.append(f"{self.waiting_publishers} publishes waiting for room")
        if commands:
            names += [
                f"{handler} ({counts.running} running)"
                for (handler, _), counts in self.counters.commands.items()
                if counts.running
            ]
        return names

    async def settle(
        self,
        lanes: Callable[[], Iterable[Lane]],
        timeout: float | None,
        *,
        commands: bool,
        is_patient: bool | None = None,
    ) -> None:
        """Wait until none of the lanes has work left.

        Args:
            lanes: Returns them.
            timeout: Seconds.
            commands: Whether to wait for commands and publishers, too.
            is_patient: Whether to wait for the `resume` of one that is paused; by default if
                there is a timeout.

        Raises:
            SettleTimeoutError: Something still runs after `timeout`; or, if not `is_patient`,
                only lanes that are paused have work left. They are named.
        """
        is_patient = timeout is not None if is_patient is None else is_patient
        if not self.busy(lanes(), commands=commands):
            return  # idle: no scope, no timer
        if timeout is None:
            await self._settle(lanes, lambda: False, commands=commands, is_patient=is_patient)
            return
        # Real time is a second limit: a test that never advances its virtual clock should
        # fail, not hang.
        with anyio.move_on_after(timeout) as real, self.clock.cancel_after(timeout) as scope:
            await self._settle(
                lanes,
                lambda: real.cancel_called or scope.cancel_called,
                commands=commands,
                is_patient=is_patient,
            )
        if scope.cancel_called or real.cancel_called:
            busy = self.busy(lanes(), commands=commands)
            if busy:
                raise SettleTimeoutError(busy, seconds=timeout)

    async def _settle(
        self,
        lanes: Callable[[], Iterable[Lane]],
        expired: Callable[[], bool],
        *,
        commands: bool,
        is_patient: bool,
    ) -> None:
        # `expired` is checked too: work that keeps ending wakes this task again and again, and
        # a cancellation is only delivered to a task that sleeps.
        while self.busy(lanes(), commands=commands) and not expired():
            if not is_patient and self._is_held_up(lanes(), commands=commands):
                raise SettleTimeoutError(self.busy(lanes(), commands=commands), seconds=None)
            waiter = self._wait_for_work()
            for lane in lanes():
                lane.stop_lingering()
                lane.start_workers()
            try:
                await waiter.wait()
            finally:
                if waiter in self._idle_waiters:
                    self._idle_waiters.remove(waiter)

    def _is_held_up(self, lanes: Iterable[Lane], *, commands: bool) -> bool:
        """Tell whether nothing goes on before the `resume` of a lane that is paused."""
        if commands and any(counts.running for counts in self.counters.commands.values()):
            return False
        busy = [lane for lane in lanes if lane.is_busy]
        return bool(busy) and all(lane.is_held_up for lane in busy)

    async def wait_for_workers(self) -> None:
        """Wait until every worker has ended."""
        while any(lane.workers for lane in self.lanes.values()):
            await self._wait_for_work().wait()

    async def retire(
        self,
        lanes: Sequence[Lane],
        timeout: float | None,
        unregister: Callable[[], None] = lambda: None,
    ) -> tuple[int, list[Undelivered]]:
        """Drain lanes and end them.

        A lane that itself waits for the caller is not waited for: its queue is abandoned, and
        events in flight finish later.

        Returns:
            How many events were not finished in time, and those of them that were not in flight.
        """
        blocked = [lane for lane in lanes if self._waits_for_us(lane)]
        others = [lane for lane in lanes if lane not in blocked]
        if self.runtime is None:
            timeout = 0  # not started: no worker empties them
        with suppress(SettleTimeoutError):
            await self.settle(lambda: others, timeout, commands=False)
        unregister()
        leftovers = [one for lane in blocked for one in lane.detach()]
        abandoned = len(leftovers)
        for lane in others:
            count, left = lane.end()
            abandoned += count
            leftovers += left
            self.remove_lane(lane)
        return abandoned, leftovers

    def _waits_for_us(self, lane: Lane) -> bool:
        frame = current_frame.get()
        while frame is not None:
            if frame.owner is lane:
                return True
            if frame.events is None and lane.is_gated_by(frame.message):
                return True
            frame = frame.parent
        return False
