"""`SharedState`: messages that any process may claim; also the queues of enqueued commands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, final

from msgbus.journal import rows
from msgbus.journal.operations import Operation, Pass, Put
from msgbus.journal.ports import Claim
from msgbus.journal.records import Cursor, Member, Record
from msgbus.subscriptions.in_flight import InFlight
from msgbus.subscriptions.state import Settlement, SubscriptionState

if TYPE_CHECKING:
    from msgbus.journal.records import Pending


@final
class SharedState(SubscriptionState):
    """The state of a SHARED subscription, or of a queue of commands.

    Args:
        is_queue: Rows are made by `Append`, so nothing is read from the log.
    """

    def __init__(self, *args: Any, is_queue: bool = False, **options: Any) -> None:
        super().__init__(*args, **options)
        self.is_queue = is_queue
        self.others = 0
        """Other processes that serve the subscription."""
        self._claimed: list[Claim] = []
        self._has_missed = False
        """The last commit made rows of this queue that were not claimed here."""
        self.acking: Sequence[Claim] = ()
        """Claims that are acknowledged before they are handed out."""
        self.feed = SharedFeed(self)

    def begin(self, member: Member) -> None:
        """Start anew as this member."""
        with self.lock:
            super().begin(member)
            self.feed.forget()

    def has_in_flight(self, upto: int) -> bool:
        """Tell whether a message up to an offset is in flight here."""
        with self.lock:
            is_acking = any(claim.row.offset <= upto for claim in self.acking)
            return is_acking or super().has_in_flight(upto)

    def resize(self, max_in_flight: int) -> None:
        """Let another number of deliveries run at the same time."""
        with self.lock:
            super().resize(max_in_flight)
            if self.others:
                self._least = max_in_flight

    def set_others(self, others: int) -> None:
        """Take note of how many other processes share the work.

        When the first of them comes, it gets what has not begun here.
        """
        with self.lock:
            if others and not self.others:
                self._least = self._most = self.max_in_flight
                back = [self.ready.pop() for _ in range(len(self.ready) - self.max_in_flight)]
                self.give_back(back)
            elif not others and self.others:
                self._least = self._stock()
            self.others = others

    def admit_claims(self, claims: Sequence[Claim], *, alone: bool = False) -> list[InFlight]:
        """Hand out rows that were claimed."""
        with self.lock:
            return [self._admit(row, record, alone=alone) for row, record in claims]

    def _admit(self, row: Pending, record: Record, *, alone: bool = False) -> InFlight:
        assert self.member is not None  # noqa: S101 (only a member claims)
        attempt = row.attempt if alone else row.attempt + 1
        one = InFlight(self.name, record, attempt, None, self.member, None, row)
        one.is_kept = self.selection.keeps_done
        if alone:
            self.in_flight[one] = None
        else:
            self.admit(one)
        return one

    @property
    def is_behind(self) -> bool:
        """Whether there is something to claim beyond the cursor."""
        return not self.is_queue and self.feed.looked < self.head

    def _end(self, one: InFlight) -> None:
        one.is_ended = True

    def _guard(self, one: InFlight) -> list[Operation]:
        del one  # it is claimed; at most once, it has no row any more
        return []

    # -- commits ---------------------------------------------------------------------------------

    def _own_operations(self, appended: Sequence[Claim], before: int) -> list[Operation]:
        """Claim commands of this queue that the commit appends, as far as there is room."""
        del before
        self._claimed = []
        if not self.is_queue or self.member is None:
            return []
        now = self.clock.time()
        new = [one for one in appended if one.row.subscription == self.name]
        due = [one for one in new if one.row.due is not None and one.row.due <= now]
        for row, record in due[: 0 if self.others else max(self.room(), 0)]:
            claimed = rows.claimed(row, self.member, now, alone=False)
            self._claimed.append(Claim(claimed, record))
        self._has_missed = len(new) > len(self._claimed)
        return [Put(claim.row) for claim in self._claimed]

    def _needs_look(self, settled: Sequence[Settlement]) -> bool:
        return self._has_missed or any(
            isinstance(operation, Put) and operation.row.due is not None
            for settlement in settled
            for operation in settlement.operations
        )

    def _kept(self) -> bool:
        claimed, self._claimed = self._claimed, []
        for row, record in claimed:
            self._admit(row, record)
        return bool(claimed)

    def _refused(self) -> None:
        self._claimed = []


@final
class SharedFeed:
    """Claims what a commit appends for a subscription that has claimed all before it.

    A participant of its own: when another process was faster, only the feed is refused.
    """

    def __init__(self, state: SharedState) -> None:
        self._state = state
        self._cursor: Cursor | None = None
        """As it is stored, as far as this process knows."""
        self._looked = 0
        """Nothing up to here is left to claim."""
        self.claimed: int | None = None
        """The highest offset known to be claimed, here or by others: for `progress()`."""
        self._feeding: tuple[list[Claim], Cursor, int] | None = None
        self._has_missed = False
        """The last commit appended messages that were not claimed here."""

    def forget(self) -> None:
        """Feed nothing before the cursor is known again."""
        self._cursor = self._feeding = None

    def know(self, cursor: Cursor, looked: int) -> None:
        """Take note of the stored cursor, and that nothing up to `looked` is left to claim."""
        with self._state.lock:
            self._cursor, self._looked = cursor, looked
            self.claimed = looked

    @property
    def looked(self) -> int:
        """The offset up to which nothing is left to claim; 0 if that is not known."""
        return 0 if self._cursor is None else self._looked

    def operations(self, appended: Sequence[Claim], before: int) -> Sequence[Operation]:
        """Return what claims the appended messages; see `CommitParticipant`."""
        state = self._state
        with state.lock:
            self._feeding, cursor = None, self._cursor
            takes = state.selection.takes
            is_current = cursor is not None and self._looked == before
            room = 0 if state.others or not is_current else max(state.room(), 0)
            wanted = (one.record for one in appended if takes(one.record))
            taken = list(islice(wanted, room))
            self._has_missed = next(wanted, None) is not None
            is_full = self._has_missed and not taken
            if cursor is None or not is_current or not appended or is_full:
                return ()
            upto = taken[-1].offset if self._has_missed else appended[-1].record.offset
            return self._claim(taken, cursor, upto)

    def _claim(self, taken: list[Record], cursor: Cursor, upto: int) -> list[Operation]:
        state = self._state
        if not taken:  # nothing for it: that needs no write
            self._feeding = ([], cursor, upto)
            return []
        assert state.member is not None  # noqa: S101 (without a member there is no room)
        now = state.clock.time()
        claims = [
            Claim(rows.newly_claimed(state.name, record, state.member, now), record)
            for record in taken
        ]
        moved = Pass(cursor, upto, upto)
        self._feeding = (claims, moved.after, upto)
        return [*(Put(claim.row) for claim in claims), moved]

    def committed(self, kept: bool) -> Callable[[], object] | None:
        """Hand out what was claimed; see `CommitParticipant`."""
        state = self._state
        with state.lock:
            feeding, self._feeding = self._feeding, None
            if not kept:
                self._cursor = None
                return state.on_rows
            if feeding is not None:
                claims, self._cursor, self._looked = feeding
                self.claimed = self._looked
                state.admit_claims(claims)
                if claims and not self._has_missed:
                    return state.on_ready
            return state.on_rows if self._has_missed else None
