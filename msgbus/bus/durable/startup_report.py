"""The log event `journal_opened`: what a bus finds in its journal when it starts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final

from msgbus.journal.records import DELAYED, State
from msgbus.telemetry.logging import log

if TYPE_CHECKING:
    from msgbus.bus.durable.hub import DurableBus
    from msgbus.journal.records import Cursor

LOOKED_AT: Final = 1000
"""Messages of one handler, and delayed events, that are counted at most."""

NAMED: Final = 10
"""Subscriptions that are named."""

_OPEN: Final = (State.WAITING, State.CLAIMED, State.PARKED)


async def startup_report(hub: DurableBus) -> None:
    """Log what is in the journal, by a few short queries, before anybody works on it.

    Raises:
        JournalError: It cannot be read.
    """
    journal, now = hub.journal, hub.state.clock.time()
    head = await journal.head()
    cursors = await journal.cursors()
    names = hub.handlers.names
    here = [cursor for cursor in cursors if cursor.name in names]
    in_doubt = Counter[str]()
    for cursor in here:
        in_doubt[cursor.name] += await _handed_out(hub, cursor)
    for name in {cursor.name for cursor in here}:
        in_doubt[name] += await _interrupted(hub, name)
    log.info(
        "journal_opened",
        bus=hub.state.config.name,
        journal=hub.location,
        messages_up_to=head,
        subscriptions=len({cursor.name for cursor in cursors}),
        behind=sum(max(head - cursor.acked, 0) for cursor in here if cursor.partition == 0),
        in_doubt=in_doubt.total(),
        unclean=_first(+in_doubt),
        unattended=_first({cursor.name for cursor in cursors} - names),
        scheduled=hub.scheduler.count,
        overdue=len(await journal.due(DELAYED, now, LOOKED_AT)),
        next_due=(await journal.next_due(DELAYED)).time,
        enqueued=await _enqueued(hub, {cursor.name for cursor in cursors}),
        dead_letters=hub.count_dead_letters(),
    )


async def _handed_out(hub: DurableBus, cursor: Cursor) -> int:
    """Count messages of a partition that were handed out and are not known to be done.

    They are delivered again, unless the process that has them is still at work.
    """
    handler = hub.handlers.named(cursor.name)
    if cursor.fetched <= cursor.acked or handler is None:
        return 0
    selection = handler.selection
    scan = await hub.journal.read(cursor.acked, LOOKED_AT, selection, [cursor.partition])
    offsets = [one if isinstance(one, int) else one.offset for one in scan.records]
    rows = [await hub.journal.row(cursor.name, one) for one in offsets if one <= cursor.fetched]
    return rows.count(None)


async def _interrupted(hub: DurableBus, name: str) -> int:
    """Count rows that are in flight, or were when their process ended."""
    rows = await hub.journal.find(name, _OPEN, limit=LOOKED_AT)
    return sum(row.alone or row.state is State.CLAIMED for row in rows)


async def _enqueued(hub: DurableBus, subscriptions: set[str]) -> int:
    """Count the enqueued commands of all queues that have no result yet."""
    total = _open(await hub.journal.count())
    for name in (*subscriptions, DELAYED):
        total -= _open(await hub.journal.count(name))
    return max(total, 0)


def _open(rows: Mapping[State, int]) -> int:
    return sum(rows.get(state, 0) for state in _OPEN)


def _first(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(names)[:NAMED])
