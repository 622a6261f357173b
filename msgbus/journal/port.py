"""`Journal`: the port that buses, subscriptions and pipelines write to and read from."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol, Self, TypeVar

from msgbus.journal.operations import Operation
from msgbus.journal.records import (
    Ack,
    AckLevel,
    Cursor,
    DeadLetter,
    DeliveryRecord,
    FlowNode,
    Kind,
    Lease,
    Page,
    Record,
    Scheduled,
    TicketRow,
)

T = TypeVar("T")


class Journal(Protocol):
    """An append-only log of messages, and what belongs in the same transaction as they do.

    Offsets are whole numbers that grow from 1; there may be gaps, so they are compared, never
    counted with. `offset + 1` is always a valid start behind `offset`.

    Calls may come from any task, on asyncio or trio. What is written is written in the order in
    which the calls were made. A call that is cancelled while it waits
    may still have been written: append the same message again, and the journal knows it.
    """

    @property
    def level(self) -> AckLevel:
        """What an append has reached when it returns."""
        ...

    # -- writing -----------------------------------------------------------------------------

    async def append(self, records: Sequence[Record]) -> list[Ack]:
        """Add messages, all or none, and return when they have reached `level`.

        A message whose id is there already keeps its first offset, and is not added again.
        """
        ...

    async def commit(self, operations: Sequence[Operation]) -> list[Ack]:
        """Do all of this or nothing; gives the acks of the `Append`s, in order.

        Raises:
            LeaseLostError: An epoch is not the current one.
            JournalConflictError: A condition of an operation does not hold.
            CursorError: A cursor that is to be moved does not exist, or is damaged.
        """
        ...

    async def transact(self, function: Callable[[sqlite3.Connection], T]) -> T:
        """The value of `function`, called inside a transaction that it cannot end itself.

        It runs on the journal's own thread and may read and write the user's tables. If it
        raises, nothing of it is kept. It may be called again if the group that it is written
        with has to be repeated, so it should touch nothing but the connection.

        Raises:
            ForbiddenStatementError: It tried to commit, attach or change settings.
        """
        ...

    # -- reading -----------------------------------------------------------------------------

    async def read(
        self,
        start: int,
        limit: int = 1000,
        topic: str | None = None,
        *,
        names: Collection[str] | None = None,
    ) -> Page:
        """Records from offset `start` on, at most `limit`; `page.next` goes on behind them.

        With `topic` or `names` (wire names) only those; `page.next` is then behind all that
        was looked at.

        Raises:
            CorruptRecordError: The first record is damaged; damage further on ends the page.
        """
        ...

    async def head(self) -> int:
        """The highest offset ever given, 0 if there was none."""
        ...

    async def first(self) -> int:
        """The lowest offset that is left; behind the head if none is."""
        ...

    async def offset_at(self, time: float) -> int:
        """The lowest offset recorded at `time` or later; behind the head if there is none."""
        ...

    async def wait(self, after: int, timeout: float | None = None) -> int:
        """The head, as soon as it is beyond `after`, or as it is when time has run out.

        Sees what other processes write as well.
        """
        ...

    async def changed(self, since: int, timeout: float | None = None) -> int:
        """A number that grows with every commit seen, as soon as it is not `since`.

        The first call is with -1 and returns at once. For waiting on what is not a message:
        tickets, schedules, leases.
        """
        ...

    async def message(self, message_id: str) -> Record | None:
        """The message of this id."""
        ...

    async def flow(self, correlation_id: str) -> tuple[FlowNode, ...]:
        """All messages of one flow as trees; what has lost its cause is a root of its own."""
        ...

    async def find(
        self,
        *,
        topic: str | None = None,
        name: str | None = None,
        key: str | None = None,
        kind: Kind | None = None,
        session_id: str | None = None,
        correlation_id: str | None = None,
        since: float | None = None,
        until: float | None = None,
        start: int = 0,
        limit: int = 100,
        newest_first: bool = False,
    ) -> Page:
        """Messages that fit everything given, page by page: pass `page.next` as `start`.

        With `newest_first`, `start` is the highest offset to look at, 0 for the head;
        `page.next` is 0 when there is no more.
        """
        ...

    async def deliveries(self, message_id: str) -> list[DeliveryRecord]:
        """How the deliveries of one message ended, in the order they were recorded."""
        ...

    # -- subscriptions -----------------------------------------------------------------------

    async def cursor(self, name: str) -> Cursor | None:
        """How far a subscription has come; `None` only if it has never begun.

        Raises:
            CursorError: It cannot be read, or is beyond the end of the journal.
        """
        ...

    async def cursors(self) -> list[Cursor]:
        """All of them, by name."""
        ...

    async def attempts(self, name: str) -> dict[int, int]:
        """How often messages beyond the cursor were tried, by offset, if counted."""
        ...

    async def marked(self, subscription: str, message_ids: Iterable[str]) -> set[str]:
        """Those of the ids that the subscription has marked as handled."""
        ...

    async def dead_letters(
        self, subscription: str | None = None, *, after: int = 0, limit: int = 100
    ) -> list[DeadLetter]:
        """Dead letters with an id beyond `after`, oldest first.

        Those about which nothing is left to do, as they were replayed or discarded, are not
        among them. `JournalDeadLetterStore` finds all, and deals with them.
        """
        ...

    async def due(
        self,
        time: float,
        limit: int = 100,
        *,
        subscription: str | None = None,
        names: Collection[str] | None = None,
    ) -> list[Scheduled]:
        """What is due at `time`, the longest overdue first. Stays until it is unscheduled.

        Only what is for exactly this `subscription`; without one, only what is for everybody.
        With `names` (wire names) only those messages.
        """
        ...

    async def next_due(
        self, *, subscription: str | None = None, names: Collection[str] | None = None
    ) -> float | None:
        """When the next of those that `due` is about is due."""
        ...

    async def scheduled(self, ids: Iterable[str]) -> list[Scheduled]:
        """Those of these entries that are in the schedule, whoever they are for."""
        ...

    async def count_scheduled(
        self, *, subscription: str | None = None, names: Collection[str] | None = None
    ) -> int:
        """How many of those that `due` is about wait in all, due or not."""
        ...

    async def ticket(self, message_id: str) -> TicketRow | None:
        """How an enqueued command stands."""
        ...

    async def tickets(self, message_ids: Iterable[str]) -> list[TicketRow]:
        """How several of them stand; those that were never enqueued are left out."""
        ...

    # -- leases ------------------------------------------------------------------------------

    async def acquire(self, name: str, holder: str, *, seen: Lease | None = None) -> Lease:
        """The lease as it now stands; it is the caller's if `lease.holder` is `holder`.

        A lease that is free, or already this holder's, is taken. One that another holds is
        taken only if it still is as it was `seen`, not renewed since: see `LeaseWatch`.
        """
        ...

    async def renew(self, lease: Lease) -> Lease:
        """Show that the holder is alive.

        Raises:
            LeaseLostError: Another holder has it.
        """
        ...

    async def keep(
        self, lease: Lease, every: float, *, on_lost: Callable[[], object] | None = None
    ) -> None:
        """Renew by itself every so many seconds, until released, lost or closed.

        A blocked event loop does not stop it. `on_lost` is called on the event loop.
        """
        ...

    async def release(self, lease: Lease) -> None:
        """Let the next holder in at once; nothing happens if it is lost already."""
        ...

    async def lease(self, name: str) -> Lease | None:
        """Who holds it, if anybody ever did."""
        ...

    # -- the end -----------------------------------------------------------------------------

    async def close(self) -> None:
        """Finish what was begun and let go of everything; may be called again."""
        ...

    async def __aenter__(self) -> Self:
        """The journal itself: `async with MemoryJournal() as journal:`."""
        ...

    async def __aexit__(self, *exc_info: object) -> None:
        """Close it."""
        ...
