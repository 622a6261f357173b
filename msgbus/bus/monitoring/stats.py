"""A bus's counters at one moment, put together on request."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from msgbus.telemetry.stats import (
    BusStats,
    CommandHandlerStats,
    EventHandlerStats,
    EventTypeStats,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from msgbus.bus.bus_state import BusCore
    from msgbus.bus.lanes.lane import Lane


def snapshot(core: BusCore, *, scheduled: int, dead_letters: int) -> BusStats:
    """Everything the bus counts."""
    registered = list(core.registry.registrations())
    core.settle_accounts()
    durable = None if core.durability is None else core.durability.stats()
    return BusStats(
        name=core.config.name,
        state=core.phase.value,
        timestamp=core.clock.time(),
        commands=_commands(core),
        handlers=_handlers(core),
        events={
            name: EventTypeStats(
                message_type=name,
                published=counts.published,
                admitted=counts.admitted,
                pairs=counts.pairs,
                filtered=counts.filtered,
                rejected=counts.rejected,
            )
            for name, counts in core.ledger.events.items()
            if counts.published
        },
        active_sessions=len(core.sessions),
        registered_handlers=len(registered),
        scheduled=scheduled,
        dead_letters=dead_letters,
        subscriptions={} if durable is None else durable[0],
        journal=None if durable is None else durable[1],
    )


def _names(keys: Iterable[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """A name for each handler; one that handles several types has the type in it."""
    keys = list(keys)
    uses = Counter(handler for handler, _ in keys)
    return {
        (handler, message_type): handler if uses[handler] == 1 else f"{handler}[{message_type}]"
        for handler, message_type in keys
    }


def _commands(core: BusCore) -> dict[str, CommandHandlerStats]:
    names = _names(core.ledger.commands)
    stats: dict[str, CommandHandlerStats] = {}
    for key, counts in core.ledger.commands.items():
        finished, seconds, buckets = counts.read()
        stats[names[key]] = CommandHandlerStats(
            handler=key[0],
            message_type=key[1],
            sent=counts.sent,
            handled=finished - counts.failed - counts.cancelled,
            failed=counts.failed,
            cancelled=counts.cancelled,
            retried=counts.retried,
            running=counts.sent - finished,
            seconds=seconds,
            buckets=tuple(buckets),
        )
    return stats


def _handlers(core: BusCore) -> dict[str, EventHandlerStats]:
    live: dict[tuple[str, str], list[Lane]] = {}
    for lane in core.lanes.values():
        key = lane.registration.row(in_session=lane.session_id is not None)
        live.setdefault(key, []).append(lane)
    names = _names(core.ledger.lanes)
    stats: dict[str, EventHandlerStats] = {}
    for key, counts in core.ledger.lanes.items():
        lanes = live.get(key, [])
        finished, seconds, buckets = counts.read()
        stats[names[key]] = EventHandlerStats(
            handler=key[0],
            message_type=key[1],
            handled=counts.handled_of(finished),
            failed=counts.failed,
            filtered=counts.filtered,
            dropped=counts.dropped,
            abandoned=counts.abandoned,
            overflowed=counts.overflowed,
            retried=counts.retried,
            queued=sum(len(lane.queue.items) for lane in lanes),
            running=sum(lane.in_hand for lane in lanes),
            backpressure=any(lane.queue.is_backpressured for lane in lanes),
            seconds=seconds,
            buckets=tuple(buckets),
        )
    return stats
