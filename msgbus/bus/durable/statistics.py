"""Counters of a bus with a journal, for `bus.stats()`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgbus.telemetry.journal_stats import JournalStats, SubscriptionStats

if TYPE_CHECKING:
    from msgbus.bus.durable.handlers import DurableHandler
    from msgbus.bus.durable.hub import DurableBus


def subscription_stats(hub: DurableBus) -> dict[str, SubscriptionStats]:
    """Return the counters of each durable handler, by the name of its subscription."""
    return {handler.name: _figures(handler) for handler in hub.handlers}


def _figures(handler: DurableHandler) -> SubscriptionStats:
    progress = handler.progress()
    if progress is None:
        return SubscriptionStats(name=handler.name, handler=handler.registration.name)
    counts = progress.counts
    return SubscriptionStats(
        name=handler.name,
        handler=handler.registration.name,
        standing=progress.standing.value,
        owner=progress.owner,
        last_acked=progress.last_acked,
        lag=progress.lag,
        oldest_unacked_age=progress.oldest_unacked_age,
        in_flight=progress.in_flight,
        buffered=progress.buffered,
        waiting=progress.waiting,
        scheduled=progress.scheduled,
        damaged=progress.damaged,
        trimmed=progress.trimmed,
        parked_keys=progress.parked_keys,
        is_recovering=progress.is_recovering,
        delivered=counts.delivered,
        acked=counts.acked,
        refused=counts.refused,
        skipped=counts.skipped,
        failed=counts.failed,
        timed_out=counts.timed_out,
        redelivered=counts.redelivered,
        dead_lettered=counts.dead_lettered,
        dropped=counts.dropped,
        errors=counts.errors,
        last_error=progress.last_error,
    )


def journal_stats(hub: DurableBus) -> JournalStats:
    """Return the counters of the journal."""
    promises = hub.promises
    return JournalStats(
        level=None if promises is None else promises.level,
        appended=hub.publisher.appended,
        backlog=hub.recorder.backlog,
        write_failures=hub.recorder.failures,
        relayed=sum(relay.published for relay in hub.relays),
        relay_failures=sum(relay.failures for relay in hub.relays),
    )
