"""What one transaction of a journal may do: any mix of these, all of it or nothing.

`journal.commit([...])` runs them in the order given. Operations on a subscription take the
epoch of its lease; if the lease has gone to another holder, the whole transaction is refused
with `LeaseLostError`. Without a lease the epoch is `None`.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from msgbus.journal.records import DeadLetter, DeliveryRecord, Record, Scheduled


class Append(NamedTuple):
    """Add a message at the end; its `Ack` is in the result of the commit."""

    record: Record


class CreateCursor(NamedTuple):
    """Begin a subscription at `offset`, which counts as done; keeps a cursor that is there."""

    name: str
    offset: int
    epoch: int | None = None


class MoveCursor(NamedTuple):
    """Say that everything up to `offset` is done; never moves back."""

    name: str
    offset: int
    epoch: int | None = None
    close: bool = False
    """Forget the window: a clean end."""


class SeekCursor(NamedTuple):
    """Put the cursor to `offset`, backwards too, and forget its window and attempts."""

    name: str
    offset: int
    epoch: int | None = None


class DropCursor(NamedTuple):
    """Forget a subscription: its cursor, attempts and lease."""

    name: str
    epoch: int | None = None


class OpenWindow(NamedTuple):
    """Say, before they are delivered, that messages up to `last` are handed out."""

    name: str
    last: int
    epoch: int | None = None


class CountAttempts(NamedTuple):
    """Count one more try of each of these messages, before it begins."""

    name: str
    offsets: Sequence[int]
    epoch: int | None = None


class AddDeadLetter(NamedTuple):
    """Keep a message that a subscription has given up on.

    If there is a letter about it already, the attempts add up, and the last error counts.
    """

    letter: DeadLetter


class DropDeadLetter(NamedTuple):
    """Forget a dead letter."""

    id: int


class Mark(NamedTuple):
    """Remember that a subscription has handled a message; kept as long as the message."""

    subscription: str
    message_id: str
    once: bool = False
    """Refuse the whole transaction if it is marked already."""


class Schedule(NamedTuple):
    """Keep a message until it is due; the same id again replaces the first."""

    entry: Scheduled


class Unschedule(NamedTuple):
    """Take a message out of the schedule."""

    id: str
    required: bool = False
    """Refuse the whole transaction if it is not there: someone else has taken it."""


class AddDelivery(NamedTuple):
    """Record how a delivery ended."""

    delivery: DeliveryRecord


class OpenTicket(NamedTuple):
    """Begin to wait for the result of an enqueued command."""

    message_id: str
    time: float


class CloseTicket(NamedTuple):
    """Store the result of an enqueued command; the first result stays."""

    message_id: str
    time: float
    result: bytes | None = None
    error: str | None = None
    """If given, the command has failed."""


class Fence(NamedTuple):
    """Refuse the whole transaction unless the lease is at this epoch."""

    name: str
    epoch: int | None


class Sql(NamedTuple):
    """A statement of the user's on tables in the journal's own file."""

    statement: str
    parameters: Sequence[Any] | Mapping[str, Any] = ()


class Call(NamedTuple):
    """A function of the user's, called with the connection inside the transaction."""

    function: Callable[[sqlite3.Connection], object]


Operation: TypeAlias = (
    Append
    | CreateCursor
    | MoveCursor
    | SeekCursor
    | DropCursor
    | OpenWindow
    | CountAttempts
    | AddDeadLetter
    | DropDeadLetter
    | Mark
    | Schedule
    | Unschedule
    | AddDelivery
    | OpenTicket
    | CloseTicket
    | Fence
    | Sql
    | Call
)
