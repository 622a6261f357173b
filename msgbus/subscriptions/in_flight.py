"""`InFlight`: one message that was handed out, with what fences everything it writes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, final

from msgbus.journal.operations import Drop, Fence, Operation, Put
from msgbus.journal.records import Member, Pending, Record, State

if TYPE_CHECKING:
    from msgbus.runtime.event_loop import Task
    from msgbus.subscriptions.partition import Partition


@final
@dataclass(slots=True, eq=False)
class InFlight:
    """One message of one subscription, from its hand-out until it has ended."""

    subscription: str
    record: Record
    attempt: int
    """Number of the attempt that is running or comes next, from 1."""
    key: str | None
    """The key within which it keeps its order."""
    member: Member
    partition: Partition | None = None
    """Its partition, unless it was claimed."""
    row: Pending | None = None
    """Its row, if it has one; claimed by this process."""
    received: float = 0.0
    """Seconds since the epoch when it was handed out."""
    is_ended: bool = False
    is_marked: bool = False
    """It has ended and has a row that says so."""
    is_lost: bool = False
    """Another process has it now: whatever it still writes is refused."""
    is_kept: bool = False
    """Its row stays once it is acknowledged (`idempotent=True`)."""
    is_acked_first: bool = False
    """It was acknowledged before its delivery (`AT_MOST_ONCE`): no other process gets it."""
    worker: Task | None = field(default=None, repr=False)
    """The task that runs its handler, or ran it last."""
    is_running: bool = False
    """Its handler is running."""

    @property
    def offset(self) -> int:
        """Offset of its message."""
        return self.record.offset if self.row is None else self.row.offset

    def fence(self) -> Fence:
        """Return the operation that refuses a commit once another process has the message."""
        if self.row is not None:
            return Fence(self.row.subscription, self.row.offset, version=self.row.version)
        assert self.partition is not None  # noqa: S101 (it has a row or a partition)
        cursor = self.partition.cursor
        return Fence(self.subscription, self.offset, cursor.partition, cursor.epoch)

    def fences(self) -> list[Operation]:
        """Return what a commit of its handler needs to be refused once another process has it."""
        return [] if self.row is None and self.is_acked_first else [self.fence()]

    def acknowledgement(self, time: float) -> list[Operation]:
        """Return the operations that acknowledge it at once, in a commit of the caller.

        An effect in the same commit happens once.
        """
        if self.row is not None and not self.is_kept:
            return [Drop(self.row)]
        if self.row is None and self.is_acked_first:
            return []
        state = State.KEPT if self.is_kept else State.DONE
        return [self.fence(), Put(self.as_row(state, time=time), promote=True)]

    def as_row(
        self,
        state: State,
        *,
        time: float,
        due: float | None = None,
        attempt: int | None = None,
        error: str | None = None,
        holds: bool = False,
    ) -> Pending:
        """Return its row in another state; a new one if it has none.

        Args:
            state: The new state.
            time: Seconds since the epoch.
            due: When it may be claimed.
            attempt: Attempts counted so far; by default up to the one that is running.
            error: Text of the error.
            holds: Whether later messages of its key have to wait for the row.
        """
        attempt = self.attempt if attempt is None else attempt
        key = self.key if holds else None
        if self.row is not None:
            return self.row.moved(
                state, time=time, due=due, attempt=attempt, error=error, alone=False, key=key
            )
        number = 0 if self.partition is None else self.partition.cursor.partition
        return Pending(
            self.subscription,
            self.offset,
            number,
            key,
            state,
            attempt,
            due,
            None,
            1,
            False,
            error,
            time,
            # Acknowledged first, it may have been trimmed by now.
            self.record if self.is_acked_first else None,
        )
