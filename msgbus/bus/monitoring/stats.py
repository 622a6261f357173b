"""Snapshot of the counters of a bus."""

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

    from msgbus.bus.bus_state import BusState
    from msgbus.bus.lanes.lane import Lane


def snapshot(state: BusState, *, scheduled: int, dead_letters: int) -> BusStats:
    """Take a snapshot of all counters."""
    registered = list(state.registry.registrations())
    state.flush_counts()
    durable = None if state.durability is None else state.durability.stats()
    return BusStats(
        name=state.config.name,
        state=state.phase.value,
        timestamp=state.clock.time(),
        commands=_commands(state),
        handlers=_handlers(state),
        events={
            name: EventTypeStats(
                message_type=name,
                published=counts.published,
                admitted=counts.admitted,
                pairs=counts.pairs,
                filtered=counts.filtered,
                rejected=counts.rejected,
            )
            for name, counts in state.counters.events.items()
            if counts.published
        },
        active_sessions=len(state.sessions),
        registered_handlers=len(registered),
        scheduled=scheduled,
        dead_letters=dead_letters,
        subscriptions={} if durable is None else durable[0],
        journal=None if durable is None else durable[1],
    )


def _names(keys: Iterable[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """Name each handler; with the message type if it handles several."""
    keys = list(keys)
    uses = Counter(handler for handler, _ in keys)
    return {
        (handler, message_type): handler if uses[handler] == 1 else f"{handler}[{message_type}]"
        for handler, message_type in keys
    }


def _commands(state: BusState) -> dict[str, CommandHandlerStats]:
    names = _names(state.counters.commands)
    stats: dict[str, CommandHandlerStats] = {}
    for key, counts in state.counters.commands.items():
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


def _handlers(state: BusState) -> dict[str, EventHandlerStats]:
    live: dict[tuple[str, str], list[Lane]] = {}
    for lane in state.lanes.values():
        key = lane.registration.stats_key(in_session=lane.session_id is not None)
        live.setdefault(key, []).append(lane)
    names = _names(state.counters.lanes)
    stats: dict[str, EventHandlerStats] = {}
    for key, counts in state.counters.lanes.items():
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
            running=sum(lane.in_flight for lane in lanes),
            backpressure=any(lane.queue.is_backpressured for lane in lanes),
            seconds=seconds,
            buckets=tuple(buckets),
        )
    return stats
