"""Waiting until nothing is left to do: by counting, never by timers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from threading import get_ident
from typing import TYPE_CHECKING

import anyio

from msgbus.bus.context import current_frame
from msgbus.errors import SettleTimeoutError

if TYPE_CHECKING:
    from msgbus.bus.lanes.lane import Lane
    from msgbus.handlers.registration import Registration
    from msgbus.messages.receipts import Undelivered
    from msgbus.runtime.clock import Clock
    from msgbus.runtime.event_loop import Runtime
    from msgbus.telemetry.stats import Ledger


class Quiescence:
    """The part of a bus that knows what still runs, and lets others wait for it."""

    lanes: dict[tuple[Registration, str | None], Lane]
    accepting: bool

    def __init__(self, clock: Clock, ledger: Ledger) -> None:
        self.clock = clock
        self.ledger = ledger
        self.runtime: Runtime | None = None
        """The event loop that handlers run on; `None` while the bus does not run."""
        self.home: Runtime | None = None
        """The same, from the beginning of a start to the end of a stop."""
        self.waiting_publishers = 0
        """Publishes that wait for room, or are about to."""
        self.watched = False
        """Whether somebody waits for work to end, or may want to hear of commands: the one
        thing that is asked for every command."""
        self._observed = False
        self._settlers: list[anyio.Event] = []

    def is_elsewhere(self) -> bool:
        """Whether the caller is on another thread than the event loop of the bus."""
        return self.home is not None and self.home.thread_id != get_ident()

    def lane_left(self, lane: Lane) -> None:
        """A lane that was to leave has finished."""
        key = lane.registration, lane.session_id
        if self.lanes.get(key) is lane:
            del self.lanes[key]

    def observe_commands(self, observed: bool) -> None:
        """Somebody may want to hear of commands, or nobody does any more."""
        self._observed = observed
        self.watched = observed or bool(self._settlers)

    def _wait_for_work(self) -> anyio.Event:
        settler = anyio.Event()
        self._settlers.append(settler)
        self.watched = True
        return settler

    @property
    def hurry(self) -> bool:
        """Whether somebody waits for all work to be done."""
        return bool(self._settlers)

    def work_ended(self) -> None:
        """Something finished: let those who wait for quiescence look again."""
        if self._settlers:
            if self.home is not None and self.is_elsewhere():
                self.home.call_soon(self.work_ended)  # a command of another thread's event loop
                return
            settlers, self._settlers = self._settlers, []
            self.watched = self._observed
            for settler in settlers:
                settler.set()

    def busy(self, lanes: Iterable[Lane], *, commands: bool) -> list[str]:
        """What still runs."""
        names = [
            f"{lane.name} ({len(lane.queue.items)} queued, {lane.in_hand} running"
            f"{f', {len(lane.parked)} of them waiting to be tried again' if lane.parked else ''}"
            f"{', paused' if lane.is_paused else ''})"
            for lane in lanes
            if lane.is_busy
        ]
        if commands and self.waiting_publishers and self.accepting:
            names.append(f"{self.waiting_publishers} publishes waiting for room")
        if commands:
            names += [
                f"{handler} ({counts.running} running)"
                for (handler, _), counts in self.ledger.commands.items()
                if counts.running
            ]
        return names

    async def settle(
        self,
        lanes: Callable[[], Iterable[Lane]],
        timeout: float | None,
        *,
        commands: bool,
    ) -> None:
        """Wait until none of the lanes has anything left to do.

        Raises:
            SettleTimeoutError: Something still runs after `timeout`; it is named.
        """
        if not self.busy(lanes(), commands=commands):
            return  # idle: no scope, no timer
        if timeout is None:
            await self._settle(lanes, lambda: False, commands=commands)
            return
        # Real time is a second limit: a test that never advances its virtual clock should
        # fail, not hang.
        with anyio.move_on_after(timeout) as real, self.clock.cancel_after(timeout) as scope:
            await self._settle(
                lanes, lambda: real.cancel_called or scope.cancel_called, commands=commands
            )
        if scope.cancel_called or real.cancel_called:
            busy = self.busy(lanes(), commands=commands)
            if busy:
                raise SettleTimeoutError(busy, seconds=timeout)

    async def _settle(
        self, lanes: Callable[[], Iterable[Lane]], expired: Callable[[], bool], *, commands: bool
    ) -> None:
        # `expired` is asked as well: work that ends again and again keeps waking this task,
        # and a cancellation is only delivered to a task that sleeps.
        while self.busy(lanes(), commands=commands) and not expired():
            settler = self._wait_for_work()
            for lane in lanes():
                lane.stop_lingering()
                lane.see_to_work()
            try:
                await settler.wait()
            finally:
                if settler in self._settlers:
                    self._settlers.remove(settler)

    async def workers_gone(self) -> None:
        """Wait until every worker has ended."""
        while any(lane.workers for lane in self.lanes.values()):
            await self._wait_for_work().wait()

    async def retire(
        self,
        lanes: Sequence[Lane],
        timeout: float | None,
        unregister: Callable[[], None] = lambda: None,
    ) -> tuple[int, list[Undelivered]]:
        """Empty lanes and end them.

        A lane that would have to wait for the caller is not waited for: its queue is given
        up, and what it has in hand it finishes by itself.

        Returns:
            How many events could not be finished in time, and those of them that no handler
            was at work on.
        """
        blocked = [lane for lane in lanes if self._waits_for_us(lane)]
        others = [lane for lane in lanes if lane not in blocked]
        if self.runtime is None:
            timeout = 0  # not started: nobody would ever empty them
        with suppress(SettleTimeoutError):
            await self.settle(lambda: others, timeout, commands=False)
        unregister()
        leftovers = [one for lane in blocked for one in lane.leave()]
        abandoned = len(leftovers)
        for lane in others:
            count, left = lane.end()
            abandoned += count
            leftovers += left
            self.lane_left(lane)
        return abandoned, leftovers

    def _waits_for_us(self, lane: Lane) -> bool:
        frame = current_frame.get()
        while frame is not None:
            if frame.owner is lane:
                return True
            if frame.events is None and lane.waits_behind(frame.message):
                return True
            frame = frame.parent
        return False
