"""Operations of one commit: any mix of these, all of them or none.

`journal.commit([...])` applies them in the order given. Each is guarded: a row by its version,
a cursor by owner and epoch, a member by its existence. If a guard fails, the whole commit is
refused with `StaleError`.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from msgbus.journal.records import Cursor, DeliveryRecord, Instance, Letter, Pending, Record


class Append(NamedTuple):
    """Add a message to the log; a known id keeps its first offset.

    With `queue` the message also gets a waiting row there: an enqueued command. In the queue
    `DELAYED` it gets only the row, which holds the message until it is published.
    """

    record: Record
    queue: str | None = None
    due: float | None = None
    """Seconds since the epoch; `None` for at once."""
    unique: str | None = None
    """Add nothing while the queue has a row of this key that is not dead; needs a queue."""


class Put(NamedTuple):
    """Write a pending row: insert version 1, or replace the version before.

    A row that is to be `PARKED` and has no row of its key before it waits for nothing: it is
    stored as `WAITING` and due.

    Guard: the row is absent, or at `row.version - 1`; a claimed one is changed by its owner only;
    no other row that is not dead has its `unique` key.
    """

    row: Pending
    letter: Letter | None = None
    """Kept with the row until that is dropped, done, or kept without a letter.

    If the row had one, its history goes on, unless this one `is_whole`.
    """
    promote: bool = False
    """Let the next parked row of the key go that the row had before."""
    is_whole: bool = False
    """The letter has its whole history, and replaces the one before."""


class Drop(NamedTuple):
    """Delete a pending row and its letter, and let the next parked row of its key go.

    A row that the cursor of its partition has not passed is kept as `DONE` until then: without
    it, the next owner would take the message for one that was in flight.

    Guard: the row is at `row.version`; a claimed one is dropped by its owner only.
    """

    row: Pending


class Pass(NamedTuple):
    """Move a cursor, also back; `DONE` rows that it passes are deleted.

    Guard: owner and epoch are those of `cursor`, and the owner is the member of the commit;
    without an owner, `acked` is that of `cursor` too. Beyond the head is a `CursorError`.
    With `trimmed`: retention has removed nothing behind it since.
    """

    cursor: Cursor
    """The cursor as it was read or last written."""
    acked: int
    fetched: int
    release: bool = False
    """Leave the partition without an owner."""
    trimmed: int | None = None
    """If messages are handed out that were read before: where the log began then, or they did."""

    @property
    def after(self) -> Cursor:
        """The cursor as this operation leaves it."""
        owner = None if self.release else self.cursor.owner
        return self.cursor._replace(acked=self.acked, fetched=self.fetched, owner=owner)


class Fence(NamedTuple):
    """Refuse the commit unless a delivery is still this process's own.

    Guard: the row is at `version`, claimed by the member of the commit; without a version, that
    member owns the partition at `epoch`, and the message is neither passed nor has a row.
    """

    subscription: str
    offset: int
    partition: int = 0
    epoch: int = 0
    version: int | None = None


class Seek(NamedTuple):
    """Put all cursors of a subscription to `offset`, at most the head, and free its partitions.

    Rows beyond `offset` are deleted, apart from those that are `KEPT`, and so are `DONE` rows up
    to there. Former owners are refused from now on.
    """

    name: str
    offset: int


class Remove(NamedTuple):
    """Delete a subscription with its cursors, rows and letters; results of commands stay."""

    name: str


class Reply(NamedTuple):
    """Store the result of a command; the first one stays."""

    message_id: str
    time: float
    body: bytes | None = None
    error: str | None = None


class Note(NamedTuple):
    """Record a delivery."""

    delivery: DeliveryRecord


class Save(NamedTuple):
    """Write an instance: insert version 1, or replace the version before.

    Guard: it is absent, or at `instance.version - 1`.
    """

    instance: Instance


Operation: TypeAlias = Append | Put | Drop | Pass | Fence | Seek | Remove | Reply | Note | Save
