"""What a bus finds in its journal when it starts: what is left to do, and what is in doubt."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, final

from msgbus.durability.claims import COMMANDS
from msgbus.errors import CorruptRecordError

if TYPE_CHECKING:
    from msgbus.durability.hub import Durability
    from msgbus.durability.subscribers import DurableHandler
    from msgbus.journal.records import Cursor

LOOKED_AT: Final = 1000
"""Messages of one handler that are looked at to say which are in doubt."""

NAMED: Final = 10
"""Subscriptions that are named; the rest is counted."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What is in the journal, before anybody works on it."""

    head: int
    subscriptions: int
    """Subscriptions in the journal, of whatever bus."""
    behind: int
    """Offsets that the handlers of this bus have before them, at most so many messages."""
    in_doubt: int
    """Messages that handlers of this bus were given and that are not known to be done. They
    are delivered again, unless the process that has them is still at work."""
    unclean: tuple[str, ...]
    """Subscriptions with such messages."""
    unattended: tuple[str, ...]
    """Subscriptions that no handler of this bus goes on with: another bus's, or forgotten."""
    scheduled: int
    """Events that wait for their time."""
    overdue: int
    """Of these, those whose time has passed, counted up to a thousand."""
    next_due: float | None
    """When the first of them is due, in seconds since the epoch."""
    enqueued: int
    """Commands that were enqueued and have no result yet."""


async def find(hub: Durability) -> Findings:
    """Look at everything, a few short queries each.

    Raises:
        JournalError: It cannot be read.
    """
    journal = hub.journal
    head = await journal.head()
    cursors = {cursor.name: cursor for cursor in await journal.cursors()}
    handlers = {handler.name: handler for handler in hub.subscribers}
    here = [cursors[name] for name in handlers if name in cursors]
    in_doubt: dict[str, int] = {}
    for cursor in here:
        count = await _in_doubt(hub, handlers[cursor.name], cursor)
        if count:
            in_doubt[cursor.name] = count
    overdue = await journal.due(hub.state.clock.time(), LOOKED_AT)
    return Findings(
        head=head,
        subscriptions=len(cursors),
        behind=sum(max(head - cursor.offset, 0) for cursor in here),
        in_doubt=sum(in_doubt.values()),
        unclean=_first(in_doubt),
        unattended=_first(name for name in cursors if name not in handlers),
        scheduled=await hub.scheduler.recount(),
        overdue=len(overdue),
        next_due=await journal.next_due(),
        enqueued=await journal.count_scheduled(subscription=COMMANDS),
    )


async def _in_doubt(hub: Durability, handler: DurableHandler, cursor: Cursor) -> int:
    """How many messages it was given and may not have done: its window, without what is marked."""
    if cursor.is_clean:
        return 0
    try:
        page = await hub.journal.read(cursor.offset + 1, LOOKED_AT, names=handler.names)
    except CorruptRecordError:
        return cursor.fetched - cursor.offset  # the subscription itself will say what is wrong
    wanted = [one for one in page if one.offset <= cursor.fetched and handler.wants(one)]
    if handler.config.idempotent:
        ids = [record.message_id for record in wanted]
        return len(wanted) - len(await hub.journal.marked(cursor.name, ids))
    return len(wanted)


def _first(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(names)[:NAMED])
