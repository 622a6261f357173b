"""How far a subscription has come, over all processes, read from the journal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, final

from msgbus._next.journal.records import Cursor, Kind, Record, Selection, State
from msgbus.errors import SettleTimeoutError
from msgbus.runtime.timeouts import time_limit

if TYPE_CHECKING:
    from collections.abc import Mapping

    from msgbus._next.journal.ports import Journal
    from msgbus.runtime.clock import Clock

_OPEN: Final = (State.WAITING, State.CLAIMED, State.PARKED)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SubscriptionProgress:
    """How a subscription stands, over all processes."""

    name: str
    acked: int
    """Everything up to this offset is done or has a row."""
    head: int
    """The newest offset of the log."""
    owners: Mapping[int, int | None]
    """The member that owns each partition; of a shared subscription nobody does."""
    rows: Mapping[State, int]
    """Pending rows by state."""


async def progress_of(journal: Journal, name: str) -> SubscriptionProgress:
    """Read how a subscription stands."""
    cursors = await journal.cursors(name)
    head = await journal.head()
    return SubscriptionProgress(
        name=name,
        acked=min((cursor.acked for cursor in cursors), default=head),
        head=head,
        owners={cursor.partition: cursor.owner for cursor in cursors},
        rows=await journal.count(name),
    )


async def is_done(journal: Journal, name: str, selection: Selection, upto: int) -> bool:
    """Tell whether every message up to an offset is handled or dead-lettered.

    Cursors are read before rows, as a take-over turns what is beyond a cursor into rows.
    """
    if selection.kind is not Kind.COMMAND:
        for cursor in await journal.cursors(name):
            if await _has_more(journal, selection, cursor, upto):
                return False
    rows = await journal.find(name, _OPEN, limit=1)
    return not rows or rows[0].offset > upto


async def _has_more(journal: Journal, selection: Selection, cursor: Cursor, upto: int) -> bool:
    """Tell whether the log has messages of a partition between its cursor and an offset."""
    after = cursor.acked
    while after < upto:
        scan = await journal.read(after, 1, selection, [cursor.partition])
        for one in scan.records:
            return (one.offset if isinstance(one, Record) else one) <= upto
        after = max(scan.upto, after + 1)
    return False


async def caught_up(
    journal: Journal,
    clock: Clock,
    name: str,
    selection: Selection,
    upto: int,
    timeout: float | None = None,
) -> None:
    """Return when every message up to an offset is done, in whichever process.

    Raises:
        SettleTimeoutError: It is not after `timeout` seconds.
    """
    version = -1
    with time_limit(timeout, clock):
        while not await is_done(journal, name, selection, upto):
            version = await journal.changed(version)
        return
    progress = await progress_of(journal, name)
    busy = f"{name} at offset {progress.acked} of {upto}"
    raise SettleTimeoutError([busy], seconds=timeout or 0.0)
