"""How far a subscription has come: in this process, and over all processes.

`progress_now` reads the memory of this process; everything else here reads the journal.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, final

from msgbus.errors import ConfigurationError, SettleTimeoutError
from msgbus.journal.records import Cursor, Kind, Pending, Record, Selection, State
from msgbus.runtime.timeouts import time_limit
from msgbus.subscriptions.figures import PAGE, acked_of, lag_of
from msgbus.subscriptions.loop import SubscriptionLoop
from msgbus.subscriptions.loops import PartitionedLoop
from msgbus.subscriptions.shared import SharedState
from msgbus.subscriptions.state import DeliveryCounts

if TYPE_CHECKING:
    from collections.abc import Mapping

    from msgbus.handlers.delivery import StartAt
    from msgbus.journal.ports import Journal
    from msgbus.runtime.clock import Clock

_OPEN: Final = (State.WAITING, State.CLAIMED)

READS_AT_END: Final = 20
"""Reads of the log in which messages that are left are counted when a bus stops."""


class Standing(StrEnum):
    """State of a subscription in this process."""

    NEW = "new"
    """It has not been started."""

    STANDBY = "standby"
    """Other processes deliver it; this one takes over when they end."""

    ACTIVE = "active"
    """It delivers."""

    PAUSED = "paused"
    """It begins no further delivery until `resume`."""

    BLOCKED = "blocked"
    """It has stopped at a message whose last attempt failed, until `resume` or `seek`."""

    CLOSED = "closed"
    """It has ended."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How a subscription stands in this process, as far as its memory knows."""

    name: str
    standing: Standing
    owner: str | None
    """Process id of a process that delivers it, while this one is on standby."""
    last_acked: int
    """Everything up to this offset is done here, dead-lettered, or waits in the journal."""
    acked: int
    """The same, as far as it is written."""
    head: int
    """The newest offset of the journal, as last seen."""
    lag: int
    """Messages for it that are not done: in memory here, or not yet handed out. On standby, those
    behind its stored cursor. Without those that wait in the journal; exact unless it is far behind
    and gets on, else at most so many."""
    oldest_unacked_age: float
    """Seconds since the oldest message that is not done was recorded; 0 if there is none."""
    in_flight: int
    """Messages that are being handled."""
    buffered: int
    """Messages in memory, those in flight included."""
    waiting: int
    """Of these, those that wait for a retry in this process."""
    scheduled: int
    """Messages that wait for a retry in the journal, as last counted."""
    damaged: int
    """Messages of which the record or the row is damaged or missing, set aside in the journal."""
    trimmed: int
    """Messages that retention has removed before they were handed out, at most, in all time."""
    consumers: int
    parked_keys: int
    """Keys whose later messages wait in the journal for an earlier one."""
    blocked_at: int | None
    """Offset of the message at which `Poison.BLOCK` has stopped it."""
    is_recovering: bool
    """Whether messages that were in flight when their process ended wait to run alone, run alone,
    or run beside others that did not end in time."""
    counts: DeliveryCounts
    last_error: str | None
    """Text of the last error of the journal, redacted."""


def progress_now(
    loop: SubscriptionLoop[Any], *, consumers: int = 1, standing: Standing | None = None
) -> Progress:
    """Return how a subscription stands here; no I/O, and called on the event loop.

    Args:
        loop: Its loop.
        consumers: Number of its consumers in this process.
        standing: Its state, if the loop does not know it.
    """
    state = loop.state
    with state.lock:
        figures = loop.figures
        last_acked, acked = acked_of(state, figures.cursors)
        standing = standing or standing_of(loop)
        oldest = min((one.record.time for one in state.in_flight), default=figures.unread.oldest)
        lag = lag_of(state, figures)
        return Progress(
            name=loop.name,
            standing=standing,
            owner=figures.owner if standing is Standing.STANDBY else None,
            last_acked=last_acked,
            acked=min(acked, last_acked),
            head=max(state.head, last_acked),
            lag=lag,
            oldest_unacked_age=(
                max(state.clock.time() - oldest, 0.0) if oldest is not None and lag else 0.0
            ),
            in_flight=figures.running,
            buffered=len(state.in_flight),
            waiting=figures.retrying,
            scheduled=figures.scheduled,
            damaged=figures.damaged,
            trimmed=figures.skipped,
            consumers=consumers,
            parked_keys=_parked_keys(loop),
            blocked_at=loop.blocked_at,
            is_recovering=(
                figures.is_recovering
                or any(one.offset in figures.beside for one in state.in_flight)
            ),
            counts=replace(state.counts),
            last_error=loop.last_error,
        )


def standing_of(loop: SubscriptionLoop[Any]) -> Standing:
    """Return what a subscription does in this process."""
    if loop.state.member is None and not loop.is_standby:
        return Standing.CLOSED if loop.state.is_draining else Standing.NEW
    if loop.is_standby or (isinstance(loop, PartitionedLoop) and not loop.state.owned):
        return Standing.STANDBY
    if loop.blocked_at is not None:
        return Standing.BLOCKED
    return Standing.PAUSED if loop.is_paused else Standing.ACTIVE


def is_held_up(loop: SubscriptionLoop[Any]) -> bool:
    """Tell whether a subscription that is not done goes on only after `resume`."""
    state = loop.state
    with state.lock:
        is_stopped = loop.is_paused or loop.blocked_at is not None
        if not is_stopped or loop.figures.running or state.has_unwritten:
            return False
        if isinstance(state, SharedState):
            return bool(state.in_flight) or not state.others
        # What others own, they do.
        return len(state.owned) == state.selection.partitions or lag_of(state, loop.figures) > 0


def describe_left(progress: Progress) -> str:
    """Say in words what a subscription has left to do, and what holds it up."""
    reason = ""
    if progress.standing is Standing.PAUSED:
        reason = ", paused until resume()"
    elif progress.standing is Standing.BLOCKED:
        reason = f", blocked by offset {progress.blocked_at} until resume() or seek()"
    elif progress.standing is Standing.STANDBY:
        reason = f", process {progress.owner} delivers it"
    left = f"at most {progress.lag} left{reason}"
    return f"{progress.name} at offset {progress.last_acked} of {progress.head} ({left})"


def _parked_keys(loop: SubscriptionLoop[Any]) -> int:
    if not isinstance(loop, PartitionedLoop):
        return 0
    return sum(len(one.blocked) for one in loop.state.owned.values())


# -- the start ---------------------------------------------------------------------------------


async def start_offset(journal: Journal, start: StartAt) -> int:
    """Return the offset behind which a new subscription begins.

    Raises:
        ConfigurationError: It is beyond the head of the journal.
    """
    head = await journal.head()
    if start.is_latest:
        return head
    if start.time is not None:
        return await journal.offset_at(start.time) - 1
    if start.offset is not None and start.offset > head + 1:
        message = (
            f"start={start.offset} is beyond the head of the journal, which is at offset {head}. "
            f"Give an offset that exists, or StartAt.LATEST."
        )
        raise ConfigurationError(message)
    if start.offset is not None:
        return max(start.offset - 1, 0)
    return await journal.first() - 1


# -- over all processes ------------------------------------------------------------------------


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


async def count_left(journal: Journal, name: str, selection: Selection) -> int:
    """Return how many messages a subscription still has to handle, at most.

    Exact up to about a hundred thousand of other handlers, or twenty thousand of its own;
    from there on, all messages of the journal are counted.
    """
    rows = await journal.count(name)
    left = sum(rows.get(state, 0) for state in (*_OPEN, State.PARKED))
    acked = {cursor.partition: cursor.acked for cursor in await journal.cursors(name)}
    head = await journal.head()
    after = min(acked.values(), default=head)
    for _ in range(READS_AT_END):
        if after >= head:
            break
        scan = await journal.read(after, PAGE, selection)
        for one in scan.records:
            partition = selection.partition(one) if isinstance(one, Record) else 0
            left += (one.offset if isinstance(one, Record) else one) > acked.get(partition, 0)
        after = max(scan.upto, after + 1)
    return left + max(head - after, 0)


async def is_done(journal: Journal, name: str, selection: Selection, upto: int, now: float) -> bool:
    """Tell whether every message up to an offset is handled, dead-lettered, or waits for later.

    A parked message waits as long as the one before it. Cursors are read before rows, as a
    take-over turns what is beyond a cursor into rows.
    """
    if selection.kind is not Kind.COMMAND:
        for cursor in await journal.cursors(name):
            if await _has_more(journal, selection, cursor, upto):
                return False
    after: Pending | None = None
    while rows := await journal.find(name, _OPEN, after=after):
        for after in rows:
            if after.offset > upto:
                return True
            if after.due is None or after.due <= now:
                return False
    return True


async def _has_more(journal: Journal, selection: Selection, cursor: Cursor, upto: int) -> bool:
    """Tell whether the log has messages of a partition between its cursor and an offset."""
    after = cursor.acked
    while after < upto:
        scan = await journal.read(after, 1, selection, [cursor.partition])
        for one in scan.records:
            return (one.offset if isinstance(one, Record) else one) <= upto
        after = max(scan.upto, after + 1)
    return False


async def require_reached(journal: Journal, upto: int) -> None:
    """Raise if there is no message at an offset yet: nobody could say when it is done.

    Raises:
        ConfigurationError: It is beyond the head of the journal.
    """
    head = await journal.head()
    if upto > head:
        message = (
            f"caught_up({upto}) is beyond the head of the journal, which is at offset {head}. "
            f"Give the offset of a message that was published."
        )
        raise ConfigurationError(message)


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
    await require_reached(journal, upto)
    version = -1
    with time_limit(timeout, clock):
        while not await is_done(journal, name, selection, upto, clock.time()):
            version = await journal.changed(version)
        return
    progress = await progress_of(journal, name)
    busy = f"{name} at offset {progress.acked} of {upto}"
    raise SettleTimeoutError([busy], seconds=timeout or 0.0)
