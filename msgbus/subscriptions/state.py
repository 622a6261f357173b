"""`SubscriptionState`: what a subscription has in flight, and what it has to write.

All modes share it. It does no I/O: the journal asks it for operations in every commit, the loop
tells it how deliveries ended. Both may be on different threads, so every step takes its lock.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Final, NamedTuple

from msgbus.journal.operations import Drop, Fence, Note, Operation, Put, Reply
from msgbus.journal.records import (
    DeliveryRecord,
    Letter,
    Member,
    Order,
    Pending,
    Selection,
    State,
)
from msgbus.subscriptions.in_flight import InFlight

if TYPE_CHECKING:
    from msgbus.journal.ports import Claim
    from msgbus.runtime.clock import Clock

PACE: Final = 0.05
"""Seconds of work that are handed out ahead, once the pace is known."""

LEAST: Final = 64
"""Messages that are handed out ahead at least, where no other process waits for them."""


@dataclass(slots=True)
class DeliveryCounts:
    """What happened since the start; only grows."""

    delivered: int = 0
    """Attempts that were begun."""
    acked: int = 0
    failed: int = 0
    retried: int = 0
    dead_lettered: int = 0
    parked: int = 0
    stale: int = 0
    """Acknowledgements that were refused, as another process had the message."""
    refused: int = 0
    """Messages whose handler raised a `Refusal`; they are acknowledged."""
    timed_out: int = 0
    """Attempts that took longer than they may."""
    redelivered: int = 0
    """Attempts that were not the first of their message."""
    dropped: int = 0
    """Messages acknowledged by `on_poison=Poison.DROP` after the last attempt."""
    skipped: int = 0
    """Messages that were handled before, and not delivered again (`idempotent=True`)."""
    errors: int = 0
    """Times that the journal could not be read or written; it is asked again."""
    stalls: int = 0
    """Times that messages were found which nobody had begun."""
    not_alone: int = 0
    """Messages that had to run alone, and ran beside others that did not end in time."""


NOTES: Final = 64
"""Deliveries that a commit records together if it appends messages; fewer wait for the next one."""


class Settlement(NamedTuple):
    """Deliveries that end with the next commit, and what it has to write for them."""

    ended: Sequence[InFlight]
    operations: Sequence[Operation]


class SubscriptionState(ABC):
    """Base of the states of all modes.

    Args:
        name: Name of the subscription.
        selection: Which messages it takes.
        clock: Time.
        max_in_flight: Deliveries that may run at the same time.
        buffer: Messages that are handed out at most; `max_in_flight` if that is more.
        least: Messages that are handed out ahead where no other process waits for them, before
            the pace is known.
        quota: Returns how many more may be handed out, if others share a limit with it; called on
            any thread.
    """

    def __init__(
        self,
        name: str,
        selection: Selection,
        clock: Clock,
        *,
        max_in_flight: int = 1,
        buffer: int = 1000,
        least: int = LEAST,
        quota: Callable[[], int] | None = None,
    ) -> None:
        self.name = name
        self.selection = selection
        self.clock = clock
        self.max_in_flight = max_in_flight
        self.counts = DeliveryCounts()
        self.member: Member | None = None
        self.head = 0
        """The head of the log, as last seen."""
        self._appended = 0
        """The head after the commit that is being written."""
        self.on_ready: Callable[[], object] = lambda: None
        """Called on the event loop when deliveries can begin."""
        self.on_written: Callable[[], object] = lambda: None
        """Called on the event loop when deliveries have ended in a commit, and can begin."""
        self.on_rows: Callable[[], object] = lambda: None
        """Called on the event loop when rows may be due, or something was refused."""
        self.is_draining = False
        self.is_refused = False
        """What rode in a commit was refused: ownership has to be read again."""
        self.lock = threading.RLock()
        self.ready: deque[InFlight] = deque()
        self.in_flight: dict[InFlight, None] = {}
        """Deliveries that were handed out and have not ended."""
        self._running: dict[str, int] = {}
        self._behind: dict[str, deque[InFlight]] = {}
        self._notes: list[DeliveryRecord] = []
        self._settled: list[Settlement] = []
        self._writing: tuple[list[DeliveryRecord], list[Settlement]] = ([], [])
        self._buffer = buffer
        self._ahead = least
        self._least = self._stock()
        self._quota = quota
        self._pace = (clock.now(), 0)
        self._most = self._least

    def _stock(self) -> int:
        """Return how many are handed out ahead before the pace is known."""
        return max(min(self._ahead, self._buffer), self.max_in_flight)

    # -- membership ------------------------------------------------------------------------------

    def begin(self, member: Member) -> None:
        """Start anew as this member; nothing of an earlier membership is left."""
        with self.lock:
            self.member = member
            self.ready.clear()
            self.in_flight.clear()
            self._running.clear()
            self._behind.clear()
            self._settled = []
            # A commit may be on its way in which this took part: it hands out nothing more.
            self._writing = ([], [])
            self._refused()
            self._most = self._least
            self.is_refused = False

    def lose_member(self) -> None:
        """Take note that others have all that was in flight: whatever it writes is refused."""
        with self.lock:
            self.member = None
            for one in self.in_flight:
                one.is_lost = one.is_ended = True

    def resize(self, max_in_flight: int) -> None:
        """Let another number of deliveries run at the same time."""
        with self.lock:
            self.max_in_flight = max_in_flight
            self._least = self._stock()
            self._most = max(self._most, max_in_flight)
            if self.selection.order is Order.LOG:
                for key, behind in self._behind.items():  # before what comes later
                    while behind and self._running[key] < max_in_flight:
                        self._running[key] += 1
                        self.ready.append(behind.popleft())

    def room(self) -> int:
        """Return how many more to hand out: about what is handled in `PACE` seconds.

        So little is in doubt when this process ends, and the rest is left to other processes.
        """
        since, acked = self._pace
        now, count = self.clock.now(), self.counts.acked
        handled = count - acked
        if handled and (now - since >= PACE or handled >= self._most):
            pace = int(handled / max(now - since, 0.001) * PACE)
            most = max(self._buffer, self.max_in_flight)
            self._most = min(max(self._least, pace), self._most * 2, most)
            self._pace = (now, count)
        if self.is_draining or self.member is None:
            return 0
        left = self._most - len(self.in_flight)
        return left if self._quota is None else min(left, self._quota())

    def has_in_flight(self, upto: int) -> bool:
        """Tell whether a message up to an offset is in flight here."""
        with self.lock:
            return any(one.offset <= upto and not one.is_ended for one in self.in_flight)

    @property
    def has_low_stock(self) -> bool:
        """Whether it is time to read or claim more."""
        return len(self.in_flight) * 2 <= self._most and self.room() > 0

    @property
    @abstractmethod
    def is_behind(self) -> bool:
        """Whether the log has messages that it has not looked at."""

    # -- handing out -----------------------------------------------------------------------------

    def admit(self, one: InFlight) -> None:
        """Hand out a delivery, behind those of its key that are not done."""
        self.in_flight[one] = None
        one.received = self.clock.time()
        key = one.key
        if key is None:
            self.ready.append(one)
            return
        limit = self.max_in_flight if self.selection.order is Order.LOG else 1
        running = self._running.get(key, 0)
        if running < limit:
            self._running[key] = running + 1
            self.ready.append(one)
        else:
            self._behind.setdefault(key, deque()).append(one)

    def _release(self, one: InFlight) -> None:
        """End a delivery: the next of its key may begin."""
        self.in_flight.pop(one, None)
        key = one.key
        if key is None or key not in self._running:
            return
        behind = self._behind.get(key)
        if behind:
            self.ready.append(behind.popleft())
            return
        self._behind.pop(key, None)
        running = self._running.get(key, 0) - 1
        if running > 0:
            self._running[key] = running
        else:
            self._running.pop(key, None)

    @abstractmethod
    def admit_claims(self, claims: Sequence[Claim], *, alone: bool = False) -> list[InFlight]:
        """Hand out rows that were claimed; those that run alone are the caller's to run."""

    def abandon(self, several: Iterable[InFlight]) -> list[InFlight]:
        """End deliveries that others have now; return those whose handler is running."""
        with self.lock:
            running: list[InFlight] = []
            for one in several:
                one.is_lost = one.is_ended = True
                if one in self.ready:
                    self.ready.remove(one)
                elif one.key in self._behind and one in self._behind[one.key]:
                    self._behind[one.key].remove(one)
                    self.in_flight.pop(one, None)
                    continue
                else:
                    running.append(one)
                self._release(one)
            return running

    # -- how deliveries end ----------------------------------------------------------------------

    def note(self, delivery: DeliveryRecord) -> None:
        """Record a delivery with the next commit."""
        with self.lock:
            self._notes.append(delivery)

    def acknowledge(
        self, one: InFlight, reply: Reply | None = None, note: DeliveryRecord | None = None
    ) -> bool:
        """End a delivery that was handled; a row goes with the next commit.

        Returns:
            Whether something waits for that commit: the caller, a key, or its own repetition.
        """
        with self.lock:
            if note is not None:
                self._notes.append(note)
            if one.is_lost:
                self.counts.stale += 1
                return False
            self.counts.acked += 1
            operations: list[Operation] = []
            if self.selection.keeps_done:
                row = one.as_row(State.KEPT, time=self.clock.time())
                operations = [*self._guard(one), Put(row, promote=True)]
            elif one.row is not None:
                operations = [Drop(one.row)]
            is_awaited = self.selection.keeps_done or (one.row is not None and one.key is not None)
            if reply is not None:
                operations.append(reply)
            if operations:
                self._settled.append(Settlement((one,), operations))
            if reply is None:  # else it ends when its result is written
                self._end(one)
                self._release(one)
            return is_awaited or reply is not None

    def acknowledged_in_commit(self, one: InFlight) -> None:
        """End a delivery that a commit of the handler itself has acknowledged."""
        with self.lock:
            if one.is_ended:
                return
            self.counts.acked += 1
            self._end(one)
            self._release(one)

    def set_aside(
        self,
        one: InFlight,
        state: State,
        *,
        due: float | None = None,
        attempt: int | None = None,
        error: str | None = None,
        letter: Letter | None = None,
        beside: Sequence[Operation] = (),
    ) -> None:
        """Give a message a row of its own: to wait for a retry, or as a dead letter.

        Those of its key that were handed out, and have not begun, are parked behind it if the
        row holds its key back. All of them end when it is written, with what goes `beside` it.
        """
        with self.lock:
            if one.is_lost:
                self.counts.stale += 1
                return
            time = self.clock.time()
            holds = one.key is not None and self.selection.holds(state)
            row = one.as_row(state, time=time, due=due, attempt=attempt, error=error, holds=holds)
            operations: list[Operation] = [*self._guard(one), Put(row, letter, promote=not holds)]
            operations += beside
            ended = [one]
            if holds:
                operations += self._mark_handled(one, time)
                behind = self._hold_back(one)
                operations += [Put(self._parked(other)) for other in behind]
                ended += behind
                self.counts.parked += len(behind)
            self._settled.append(Settlement(ended, operations))

    @abstractmethod
    def _guard(self, one: InFlight) -> list[Operation]:
        """Return what has to hold before a message gets its first row."""

    def _parked(self, one: InFlight) -> Pending:
        """Return the row of a message that waits for an earlier one of its key."""
        attempt = one.attempt - 1
        return one.as_row(State.PARKED, time=self.clock.time(), attempt=attempt, holds=True)

    def _mark_handled(self, one: InFlight, time: float) -> list[Operation]:
        """Return rows for earlier messages of its key that the cursor has not passed."""
        del one, time
        return []

    def _hold_back(self, one: InFlight) -> list[InFlight]:
        """Take back those behind a delivery that holds its key."""
        assert one.key is not None  # noqa: S101 (only a key can be held back)
        return list(self._behind.pop(one.key, ()))

    def give_back(self, several: Iterable[InFlight]) -> None:
        """Let other processes have claims that have not begun."""
        with self.lock:
            time = self.clock.time()
            for one in several:
                row = one.as_row(State.WAITING, time=time, due=0.0, attempt=one.attempt - 1)
                is_suspect = one.row is not None and one.row.alone
                self._settled.append(Settlement((one,), (Put(row._replace(alone=is_suspect)),)))

    def release(self) -> list[Operation]:
        """Return what lets other members have everything that this one still has."""
        with self.lock:
            time, settled = self.clock.time(), self.take_settled()
            ended = {one for settlement in settled for one in settlement.ended}
            left = [one for one in self.in_flight if one not in ended]
            rows = [self._unbegun(one, time) for one in sorted(left, key=_offset)]
            return [
                *(one for settlement in settled for one in settlement.operations),
                *map(Put, rows),
            ]

    @staticmethod
    def _unbegun(one: InFlight, time: float) -> Pending:
        """Return the row of a delivery for others; only the first of a key waits, not those behind.

        An attempt that was cut off is not counted.
        """
        row, attempt = one.row, one.attempt - 1
        if row is None and one.key is None:
            return one.as_row(State.WAITING, time=time, due=0.0, attempt=attempt)
        if row is None:
            return one.as_row(State.PARKED, time=time, attempt=attempt, holds=True)
        if row.key is not None:
            return row.moved(State.PARKED, time=time, attempt=attempt)
        return row.moved(State.WAITING, time=time, due=0.0, attempt=attempt)

    @abstractmethod
    def _end(self, one: InFlight) -> None:
        """Take note that a delivery has ended."""

    def owns(self, fence: Fence) -> bool:
        """Tell whether the partition of a delivery is still this process's own."""
        del fence
        return True

    def take_settled(self) -> list[Settlement]:
        """Take what waits to be written, to find out which of it still holds."""
        with self.lock:
            settled, self._settled = self._settled, []
            return settled

    def forget(self, settlement: Settlement) -> None:
        """Drop a settlement that was refused: others have dealt with its messages."""
        with self.lock:
            self.counts.stale += 1
            self.abandon([one for one in settlement.ended if not one.is_ended])

    def settle_again(self, settled: list[Settlement]) -> None:
        """Write these with the next commit, before all others."""
        with self.lock:
            self._settled[:0] = settled

    # -- commits ---------------------------------------------------------------------------------

    @property
    def is_dirty(self) -> bool:
        """Whether something waits to be written."""
        return bool(self._notes or self._settled)

    @property
    def has_unwritten(self) -> bool:
        """Whether something waits to be written, or is being written."""
        return self.is_dirty or any(self._writing)

    def operations(self, appended: Sequence[Claim], before: int) -> Sequence[Operation]:
        """Return what to write with this commit; see `CommitParticipant`."""
        with self.lock:
            self._appended = appended[-1].record.offset if appended else 0
            notes, settled = self._writing = (self._take_notes(appended), self._settled)
            self._settled = []
            operations: list[Operation] = [Note(delivery) for delivery in notes]
            for settlement in settled:
                operations += settlement.operations
            operations += self._own_operations(appended, before)
            return operations

    def _take_notes(self, appended: Sequence[Claim]) -> list[DeliveryRecord]:
        """Return the history to write: some of it at once, or all if nothing is appended.

        Nothing depends on it, and in a commit with one message it would be most of the pages.
        """
        if appended and len(self._notes) < NOTES and not self.is_draining:
            return []
        notes, self._notes = self._notes, []
        return notes

    def committed(self, kept: bool) -> Callable[[], object] | None:
        """Take note of the end of a commit; see `CommitParticipant`."""
        with self.lock:
            notes, settled = self._writing
            self._writing = ([], [])
            if not kept:
                self._notes[:0] = notes
                self._settled[:0] = settled
                self.is_refused = True
                self._refused()
                return self.on_rows
            self.head = max(self.head, self._appended)
            for settlement in settled:
                self._written(settlement)
            is_fed = self._kept()
            if self._needs_look(settled):
                return self.on_rows
            if settled:
                return self.on_written
            return self.on_ready if is_fed else None

    def _written(self, settlement: Settlement) -> None:
        for one in settlement.ended:
            if not one.is_ended:
                self._end(one)
                self._release(one)

    @abstractmethod
    def _own_operations(self, appended: Sequence[Claim], before: int) -> list[Operation]:
        """Return what the mode writes beside settlements and history."""

    @abstractmethod
    def _kept(self) -> bool:
        """Hand out what the commit made its own; return whether that is anything."""

    @abstractmethod
    def _needs_look(self, settled: Sequence[Settlement]) -> bool:
        """Tell whether a commit has left something for the loop to get."""

    @abstractmethod
    def _refused(self) -> None:
        """Take back what `_own_operations` has taken."""


_offset: Final = attrgetter("offset")
