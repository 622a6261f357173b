"""`ChangeListener`: tells parts of the bus that another process has changed the journal."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final, final

import anyio

from msgbus.errors import BusClosedError, JournalClosedError
from msgbus.runtime.clock import VirtualClock
from msgbus.runtime.clock_jumps import ClockJumps
from msgbus.runtime.periodic import PeriodicTask
from msgbus.telemetry.logging import log
from msgbus.telemetry.redaction import redact_exception

if TYPE_CHECKING:
    from msgbus.bus.durable.hub import DurableBus
    from msgbus.runtime.event_loop import Runtime

PAUSE: Final = 0.5
"""Seconds before a journal that failed is asked again."""

REST: Final = 0.05
"""Seconds after a change before the next is passed on. Real ones, whatever the bus's clock: it is
about the work that a busy journal would otherwise make."""


def journal_task(
    hub: DurableBus, name: str, work: Callable[[], Awaitable[float | None]]
) -> PeriodicTask:
    """Make a periodic task that goes on when the journal fails, and ends when it is closed."""

    def failed(error: Exception) -> float | None:
        if isinstance(error, JournalClosedError | BusClosedError):
            return None
        log.error(
            "journal_task_failed",
            bus=hub.state.config.name,
            task=name,
            error=redact_exception(error),
        )
        return PAUSE

    return PeriodicTask(name, work, hub.state.clock, failed)


LOOK: Final = 1.0
"""Seconds between two looks whether the wall clock was set."""


@final
class ClockWatch:
    """Notices that the wall clock has jumped forward: then something may be due.

    Args:
        hub: Whose clock it is.
        notify: Called after each jump.
    """

    def __init__(self, hub: DurableBus, notify: Callable[[], Awaitable[None]]) -> None:
        self._hub = hub
        self._notify = notify
        self._jumps = ClockJumps(hub.state.clock)
        self._task = journal_task(hub, "clock", self._look)
        self.stop = self._task.stop

    def open(self, runtime: Runtime) -> None:
        """Begin."""
        if not isinstance(self._hub.state.clock, VirtualClock):  # its two times are one
            self._task.open(runtime)

    async def _look(self) -> float:
        seconds = self._jumps.seconds()
        if seconds:
            log.info("clock_jumped", bus=self._hub.state.config.name, seconds=seconds)
            await self._notify()
        return LOOK


RECOUNT: Final = 1.0
"""Seconds between two counts of what is in the journal, at least."""


@final
class ChangeListener:
    """Passes on that another process has changed the journal.

    Args:
        hub: Whose journal it is.
        notify: Called after each change.
    """

    def __init__(self, hub: DurableBus, *notify: Callable[[], object]) -> None:
        self._since = -1
        self._hub = hub
        self._notify = notify
        self._counted_at = 0.0
        self._is_counted = True
        self._task = journal_task(hub, "journal changes", self._listen)

    def open(self, runtime: Runtime) -> None:
        """Begin; a journal that was opened again counts its changes anew."""
        self._since = -1
        self._counted_at = self._hub.state.clock.now()
        self._task.open(runtime)

    async def stop(self) -> None:
        """End."""
        await self._task.stop()

    async def _listen(self) -> float | None:
        timeout = None if self._is_counted else RECOUNT
        since = await self._hub.journal.changed(self._since, timeout, others=True)
        if since != self._since:
            self._since, self._is_counted = since, False
            for notify in self._notify:
                notify()
        now = self._hub.state.clock.now()
        if not self._is_counted and now - self._counted_at >= RECOUNT:
            self._counted_at, self._is_counted = now, True
            await self._hub.recount()
        await anyio.sleep(REST)
        return 0.0
