"""Stopping a bus: drain, then end what is left, and count all of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from msgbus.bus.bus_state import Phase
from msgbus.errors import JournalError, SettleTimeoutError
from msgbus.messages.receipts import DrainReport, Undelivered
from msgbus.telemetry.logging import log
from msgbus.telemetry.redaction import redact_exception

if TYPE_CHECKING:
    from msgbus.bus.bus_state import BusCore
    from msgbus.durability.hub import Durability
    from msgbus.messages.message import Event

# For cancelled handlers to clean up. In real seconds, whatever the bus's clock: it is
# about other people's sockets and files.
_GRACE = 1.0


async def drain(core: BusCore, timeout: float | None) -> None:
    """Let all lanes and commands finish, for as long as `timeout`."""
    core.drained_from = _finished(core)
    if core.runtime is not None and not core.runtime.has_ended():
        try:
            await quiet(core, timeout)
        except SettleTimeoutError:
            pass  # the report says what is left
        except JournalError as error:
            log.error("journal_failed", bus=core.config.name, error=redact_exception(error))


async def quiet(core: BusCore, timeout: float | None) -> None:
    """Wait until nothing is left to do, in the queues and in the journal.

    Raises:
        SettleTimeoutError: Something still runs after `timeout`; it is named.
    """
    if core.durability is None or core.phase is Phase.NEW:
        await _lanes_quiet(core, timeout)
    elif timeout is None:
        await _all_quiet(core, core.durability)
    else:
        # Real time is a second limit, as for the lanes.
        with anyio.move_on_after(timeout) as real, core.clock.cancel_after(timeout) as scope:
            await _all_quiet(core, core.durability)
        if real.cancel_called or scope.cancel_called:
            busy = core.busy(core.lanes.values(), commands=True) + core.durability.busy()
            if busy:
                raise SettleTimeoutError(busy, seconds=timeout)


async def _all_quiet(core: BusCore, durability: Durability) -> None:
    while True:
        await _lanes_quiet(core, None)
        await durability.caught_up()
        if not core.busy(core.lanes.values(), commands=True):
            return


async def _lanes_quiet(core: BusCore, timeout: float | None) -> None:
    await core.settle(lambda: list(core.lanes.values()), timeout, commands=True)


async def end(core: BusCore, scheduled: tuple[Event, ...]) -> DrainReport:
    """Close the bus, and say what became of everything."""
    persisted = 0
    if core.durability is not None and core.runtime is not None:
        # Those first: they hand out nothing more, and what they have in hand goes back.
        persisted = await core.durability.stop()
    core.phase = Phase.STOPPED
    handled = _finished(core) - core.drained_from
    for stream in list(core.streams):
        stream.end()
    abandoned = 0
    leftovers: list[Undelivered] = []
    for lane in core.lanes.values():
        count, queued = lane.end()
        if lane.is_durable:
            continue  # still in the journal, and counted as such
        abandoned += count
        leftovers += queued
    if abandoned or scheduled:
        log.warning(
            "bus_stopped_with_leftovers",
            bus=core.config.name,
            handled=handled,
            abandoned=abandoned,
            scheduled=len(scheduled),
        )
    return DrainReport(
        handled=handled,
        persisted=persisted,
        abandoned=abandoned,
        leftovers=tuple(leftovers),
        scheduled=scheduled,
    )


async def workers_gone(core: BusCore) -> None:
    """Give cancelled handlers a moment to clean up."""
    with anyio.move_on_after(_GRACE):
        await core.workers_gone()


def _finished(core: BusCore) -> int:
    return sum(counts.handled + counts.failed for counts in core.ledger.lanes.values())
