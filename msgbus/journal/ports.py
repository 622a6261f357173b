"""The ports that an engine implements: `Log`, `Members`, `Deliveries` and `Rows`.

No SQL and no file is known here. An engine needs an ordered log and compare-and-set.
`Questions` (look-ups for people) and `Tables` (SQL of the user) are optional beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, Self, TypeVar

from msgbus.journal.operations import Operation
from msgbus.journal.records import (
    Appended,
    Cursor,
    DeliveryRecord,
    Instance,
    Kind,
    Letter,
    Member,
    Pending,
    Promises,
    Record,
    Result,
    Selection,
    State,
)
from msgbus.journal.reports import DeliveryCount, FlowNode, LetterCount, Page

T = TypeVar("T")


class Scan(NamedTuple):
    """A part of the log, as a subscription reads it."""

    records: Sequence[Record | int]
    """In order; an offset in place of a record that is damaged."""
    upto: int
    """The last offset that was looked at: nothing at or below it appears later."""
    trimmed: int = 0
    """The offset up to which retention had removed messages by then; 0 if the engine has none."""


class Claim(NamedTuple):
    """A row that a member has claimed, with its message."""

    row: Pending
    record: Record


class Due(NamedTuple):
    """When a subscription has something to claim."""

    time: float | None
    """The earliest `due`, seconds since the epoch; `None` if no row waits."""
    has_suspects: bool
    """Whether a waiting row has to run alone."""
    damaged: int = 0
    """Rows that were set aside as damaged."""
    skipped: int = 0
    """Messages that retention has removed before the subscription was given them, at most."""


class KeyRows(NamedTuple):
    """Rows of one key of a partition."""

    first: int | None
    """The lowest offset of one; `None` if there is none."""
    size: int
    """Number of rows."""


class CommitParticipant(Protocol):
    """A subscription as the journal sees it: its operations ride in every commit of its process.

    `operations` and `committed` are called in turn, one pair per commit, never at the same time,
    maybe on a thread of the journal: they must be quick, must not block and must not raise.
    """

    def operations(self, appended: Sequence[Claim], before: int) -> Sequence[Operation]:
        """Return what to write with this commit.

        They are applied as a group: if one is refused, all of them are left out, and the rest of
        the commit goes on.

        Args:
            appended: What this commit has appended; an enqueued command comes with its row, an
                event with a row of version 0.
            before: The head before this commit.
        """
        ...

    def committed(self, kept: bool) -> Callable[[], object] | None:
        """Take note of the end of the commit.

        Only now is anything handed out that the commit made the subscription's own. If not
        `kept`, everything that `operations` took is to be taken back.

        Returns:
            What to call on the event loop before the callers of this commit go on.
        """
        ...


class Log(Protocol):
    """An append-only log, and the commit. Offsets begin at 1, grow, and are never used again."""

    @property
    def id(self) -> str:
        """Identity of the journal, which never changes; a backup has the same."""
        ...

    @property
    def promises(self) -> Promises:
        """What a commit has reached when it returns."""
        ...

    async def commit(
        self, operations: Sequence[Operation], member: Member | None = None
    ) -> list[Appended]:
        """Apply all of this or nothing; return the results of the `Append`s, in order.

        Commits that are called on one event loop are applied in the order of the calls. A call
        that is cancelled while it waits may still be written: the id of a message makes its
        repetition harmless.

        Args:
            operations: What to do.
            member: On whose behalf; refused if this member was ended. Claimed rows and cursors
                of owned partitions can be changed by their own member only.

        Raises:
            StaleError: A guard fails, or `member` was ended. Nothing is written.
            JournalError: It cannot be written. Nothing is written.
        """
        ...

    async def read(
        self,
        after: int,
        limit: int,
        selection: Selection,
        partitions: Collection[int] | None = None,
    ) -> Scan:
        """Read at most `limit` records behind the offset `after`, of these partitions or of all.

        In place of a record that is damaged, or was removed other than by a trim, comes its offset.
        """
        ...

    async def head(self) -> int:
        """Return the highest offset ever given; 0 if there was none."""
        ...

    async def first(self) -> int:
        """Return the lowest offset that was not trimmed; behind the head if all were.

        Messages before it may still be there: those that a pending row needs.
        """
        ...

    async def offset_at(self, time: float) -> int:
        """Return the lowest offset recorded at `time` or later; behind the head if none was."""
        ...

    async def message(self, message_id: str) -> Record | None:
        """Return a message of the log; raise `JournalCorruptError` if it is damaged."""
        ...

    async def changed(
        self, since: int, timeout: float | None = None, *, others: bool = False
    ) -> int:
        """Return a number that grows with commits of any process, once it is not `since`.

        It may return early or without a change. The first call is with -1 and returns at once.

        Args:
            since: The number of the last call.
            timeout: Seconds to wait at most.
            others: Only count commits that were not made through this journal object.
        """
        ...

    async def close(self) -> None:
        """Finish what was begun and release everything; may be called again."""
        ...

    async def __aenter__(self) -> Self:
        """Return the journal itself."""
        ...

    async def __aexit__(self, *exc_info: object) -> None:
        """Close it."""
        ...


class Members(Protocol):
    """Which processes are at work, and which of them owns which partition."""

    @property
    def member_ttl(self) -> float | None:
        """Seconds without a renewal after which others end a member; `None` if it does not say."""
        ...

    async def join(
        self,
        process: str,
        serves: Mapping[str, str],
        *,
        every: float | None = None,
        on_lost: Callable[[], object] | None = None,
    ) -> Member:
        """Become a member.

        Args:
            process: Identity of the process.
            serves: Names of its subscriptions, with the text of their selection.
            every: Seconds between renewals, which do not depend on the event loop; `None` to
                call `renew` instead.
            on_lost: Called on the event loop, once, when a commit or a renewal finds that the
                member was ended by others, not by `end` of this journal object.
        """
        ...

    async def renew(self, member: Member) -> Member:
        """Show that the member is alive, and write what it serves now.

        Raises:
            StaleError: It was ended.
        """
        ...

    async def members(self) -> list[Member]:
        """Return all members, by id."""
        ...

    async def end(self, member: Member) -> bool:
        """Delete a member that was not renewed since it was read; tell whether it was there.

        Its partitions have no owner then; the rows it had claimed wait again, to run alone,
        with no attempt counted.
        """
        ...

    async def open(self, name: str, selection: Selection, start: int) -> list[Cursor]:
        """Return the cursors of a subscription, made behind the offset `start` if it is new.

        `start` is at most the head.

        A selection of another text replaces the stored one only if no member serves that any
        more; otherwise the cursors come with the stored text, and the caller has to stand by.

        Raises:
            ConfigurationError: It has another number of partitions.
            CursorError: A cursor is damaged.
        """
        ...

    async def cursors(self, name: str | None = None) -> list[Cursor]:
        """Return the cursors of one subscription, or of all, by name and partition."""
        ...

    async def acquire(
        self, member: Member, name: str, partition: int, selection: Selection
    ) -> Cursor | None:
        """Take a partition that has no owner, under a new epoch; `None` if it has one.

        What lies between `acked` and `fetched` gets rows that run alone: the first of each key
        waiting, the others parked behind it. Then `acked` is `fetched`, and `DONE` rows up to
        there are deleted.

        Raises:
            StaleError: The member was ended, or the subscription removed.
        """
        ...


class Deliveries(Protocol):
    """How a subscription gets its messages, beside `Log.read`."""

    def attach(self, participants: Sequence[CommitParticipant], member: Member | None) -> None:
        """Let these, and no others, ride in every commit made through this journal object.

        They are left out once the member was ended. Called on the event loop.
        """
        ...

    async def claim(
        self,
        member: Member,
        name: str,
        limit: int,
        now: float,
        *,
        selection: Selection | None = None,
        partitions: Collection[int] | None = None,
        alone: bool = False,
    ) -> list[Claim]:
        """Claim rows that are due; no row goes to two members.

        Args:
            member: The claimer.
            name: The subscription or queue.
            limit: At most so many.
            now: Seconds since the epoch.
            selection: Also claim messages beyond the cursor of the subscription (`Order.NONE`).
            partitions: Only rows of these.
            alone: Only rows that run alone; their attempt is counted now, before it begins.

        Raises:
            StaleError: The member was ended; or the subscription was removed, if `selection` or
                `partitions` tell that it is one and not a queue.
        """
        ...


class Rows(Protocol):
    """Pending rows, their letters, results of commands, and instances."""

    async def find(
        self,
        name: str | None,
        states: Collection[State],
        *,
        key: str | None = None,
        after: Pending | None = None,
        limit: int = 100,
    ) -> list[Pending]:
        """Return rows of a subscription (`None`: of all), by offset and name.

        Args:
            name: The subscription or queue.
            states: Only rows in these.
            key: Only rows of this key.
            after: The last row of the page before.
            limit: At most so many.
        """
        ...

    async def count(self, name: str | None = None) -> dict[State, int]:
        """Count the rows of a subscription, or of all, by state; absent states are left out."""
        ...

    async def blocked_keys(self, name: str, partition: int) -> set[str]:
        """Return the keys of a partition that have rows: later messages have to be parked."""
        ...

    async def key_rows(self, name: str, partition: int, key: str) -> KeyRows:
        """Return how many rows a key of a partition has, and the first."""
        ...

    async def next_due(self, name: str, partitions: Collection[int] | None = None) -> Due:
        """Return when the next row is due."""
        ...

    async def due(self, name: str, now: float, limit: int = 100) -> list[Pending]:
        """Return waiting rows whose time has come, the longest overdue first; claims nothing."""
        ...

    async def row(self, name: str, offset: int) -> Pending | None:
        """Return one row."""
        ...

    async def record(self, row: Pending) -> Record | None:
        """Return the message of a row; it is there as long as the row, whatever was trimmed."""
        ...

    async def letter(self, row: Pending) -> Letter | None:
        """Return the letter of a dead row."""
        ...

    async def result(self, message_id: str) -> Result | None:
        """Return the result of an enqueued command."""
        ...

    async def results(self, message_ids: Collection[str]) -> list[Result]:
        """Return those results of these commands that are there, without damaged ones."""
        ...

    async def instance(self, name: str, key: str) -> Instance | None:
        """Return one instance."""
        ...

    async def due_instances(self, now: float, limit: int = 100) -> list[Instance]:
        """Return instances whose `wake` has come, the longest overdue first."""
        ...


class Journal(Log, Members, Deliveries, Rows, Protocol):
    """A log of messages, its members, and what each subscription has done with them."""


class Tables(Protocol):
    """SQL of the user in the journal's own database; optional."""

    async def transact(
        self,
        function: Callable[[Any], T],
        operations: Sequence[Operation] = (),
        *,
        member: Member | None = None,
    ) -> tuple[T, list[Appended]]:
        """Run SQL inside the next commit, with these operations, all or nothing.

        Args:
            function: Called with the connection of the engine on a thread of the journal. It
                must be quick, and cannot end the transaction.
            operations: Applied after it.
            member: On whose behalf; refused if this member was ended.

        Returns:
            The value of `function`, and the results of the `Append`s.

        Raises:
            ForbiddenStatementError: It tried a COMMIT, a PRAGMA, an ATTACH or the like.
            StaleError: A guard fails, or `member` was ended. Nothing is written.
        """
        ...


class Questions(Protocol):
    """Look-ups for people and tools; optional. None of them reads the whole journal."""

    async def find_messages(
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
        start: int | None = None,
        limit: int = 100,
        newest_first: bool = False,
    ) -> Page:
        """Return messages that have everything given, `until` not included, by offset.

        Pass `page.next` as `start` for the next page: the first offset to look at.
        """
        ...

    async def flow(self, correlation_id: str) -> tuple[FlowNode, ...]:
        """Return the messages of a flow as trees; one whose cause is missing is a root."""
        ...

    async def deliveries(self, message_id: str) -> list[DeliveryRecord]:
        """Return the deliveries of a message, by time."""
        ...

    async def delivery_counts(self, since: float, until: float) -> list[DeliveryCount]:
        """Count deliveries by minute, handler and outcome; `until` is not included."""
        ...

    async def letter_groups(self) -> list[LetterCount]:
        """Group the dead rows by subscription, type of error and name of the message."""
        ...
