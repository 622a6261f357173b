"""What is written, on one open transaction: messages, leases, and any mix of operations."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from itertools import chain, groupby
from typing import TYPE_CHECKING, Final, TypeVar, cast, final

from msgbus.errors import LeaseLostError, StoredMessageError
from msgbus.journal import operations as op
from msgbus.journal.records import Ack, AckLevel, Lease, Record
from msgbus.journal.sqlite import reads
from msgbus.journal.sqlite.effects import add_deliveries, effect
from msgbus.journal.sqlite.guard import GuardedConnection
from msgbus.journal.sqlite.rows import COLUMNS, PLAIN_COLUMNS, SIZES, Row, insert, to_row

if TYPE_CHECKING:
    from msgbus.journal.codec import PayloadCodec

T = TypeVar("T")

_ack: Final[Callable[[tuple[int, AckLevel, bool]], Ack]] = Ack._make

_PLAIN_LENGTH: Final = PLAIN_COLUMNS.count(",") + 1
_INSERTS: Final = {
    columns: [(size, insert(columns, size)) for size in SIZES]
    for columns in (COLUMNS, PLAIN_COLUMNS)
}
FEW: Final = 4
"""Below this many records it is quicker to ask for each whether it is there."""

_FIND: Final = "SELECT offset FROM msgbus_messages WHERE message_id = ?"


@final
class Store:
    """Writes on one connection; only its owner's thread calls it, inside a transaction."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        path: str,
        level: AckLevel,
        codec: PayloadCodec | None,
    ) -> None:
        self.connection = connection
        self.path = path
        self.level = level
        self.codec = codec
        self.head = 0

    # -- transactions ------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin a transaction, with the sole right to write from its first moment on."""
        self.connection.execute("BEGIN IMMEDIATE")
        # Read anew each time: another process may have written since.
        self.head = reads.head(self.connection)

    def commit(self) -> None:
        """End it; when this returns, the disk has it."""
        self.connection.execute("COMMIT")

    def rollback(self) -> None:
        """Undo it; SQLite may have done so itself."""
        if self.connection.in_transaction:
            self.connection.execute("ROLLBACK")

    def attempt(self, function: Callable[[], T]) -> T:
        """The value of `function`; if it raises, nothing that it did is kept."""
        head = self.head
        self.connection.execute("SAVEPOINT request")
        try:
            value = function()
        except BaseException:
            self.head = head
            # After some errors, such as a full disk, there is no transaction left at all.
            if self.connection.in_transaction:
                self.connection.execute("ROLLBACK TO request")
                self.connection.execute("RELEASE request")
            raise
        self.connection.execute("RELEASE request")
        return value

    # -- messages ----------------------------------------------------------------------------

    def append_new(self, records: Sequence[Record]) -> list[Ack]:
        """Add records that are not there yet, in one go.

        Raises:
            sqlite3.IntegrityError: One of them is there already.
        """
        offset = self.head
        rows = [self._row(record, offset + place) for place, record in enumerate(records, 1)]
        plain = [row for row in rows if len(row) == _PLAIN_LENGTH]
        self._insert(PLAIN_COLUMNS, plain)
        if len(plain) != len(rows):
            self._insert(COLUMNS, [row for row in rows if len(row) != _PLAIN_LENGTH])
        self.head = offset + len(rows)
        level = self.level
        return [_ack((offset + place, level, False)) for place in range(1, len(rows) + 1)]

    def append(self, records: Sequence[Record]) -> list[Ack]:
        """Add those records that are not there yet."""
        if len(records) < FEW:
            return [self._append_one(record) for record in records]
        known = reads.offsets(self.connection, [record.message_id for record in records])
        fresh = {one.message_id: one for one in records if one.message_id not in known}
        offsets = {
            record.message_id: ack.offset
            for record, ack in zip(
                fresh.values(), self.append_new(list(fresh.values())), strict=True
            )
        }
        acks: list[Ack] = []
        for record in records:
            # Of two with one id the first is new, the second is not.
            new = offsets.pop(record.message_id, None)
            if new is not None:
                known[record.message_id] = new
            acks.append(Ack(known[record.message_id], self.level, duplicate=new is None))
        return acks

    def _append_one(self, record: Record) -> Ack:
        found = self.connection.execute(_FIND, (record.message_id,)).fetchone()
        if found is not None:
            return Ack(int(found[0]), self.level, duplicate=True)
        row = self._row(record, self.head + 1)
        self._insert(PLAIN_COLUMNS if len(row) == _PLAIN_LENGTH else COLUMNS, [row])
        self.head += 1
        return Ack(self.head, self.level)

    def _insert(self, columns: str, rows: list[Row]) -> None:
        """Add rows of one shape; their offsets say where, so the order does not matter."""
        start = 0
        for size, statement in _INSERTS[columns]:
            while len(rows) - start >= size:
                flat = list(chain.from_iterable(rows[start : start + size]))
                self.connection.execute(statement, flat)
                start += size

    def _row(self, record: Record, offset: int) -> Row:
        try:
            return to_row(record, offset, self.codec)
        except UnicodeEncodeError as error:
            message = (
                f"{record.name} {record.message_id!r} has text that is not Unicode in its topic, "
                f"key, ids or headers: {error}."
            )
            raise StoredMessageError(message, message_id=record.message_id) from error

    # -- any mix -----------------------------------------------------------------------------

    def apply_all(self, operations: Sequence[op.Operation]) -> list[Ack]:
        """All operations in order; the acks of those that append."""
        acks: list[Ack] = []
        for kind, run in groupby(operations, type):
            if kind is op.Append:
                acks += self.append([cast("op.Append", one).record for one in run])
            elif kind is op.AddDelivery:
                add_deliveries(self, [cast("op.AddDelivery", one).delivery for one in run])
            else:
                for operation in run:
                    effect(self, operation)
        return acks

    def check_epoch(self, name: str, epoch: int | None) -> int:
        """The epoch as stored, if it is the lease's; 0 if nobody holds one.

        Raises:
            LeaseLostError: Another holder has the lease, or it was released.
        """
        lease = reads.lease(self.connection, name)
        current = 0 if lease is None or lease.holder is None else lease.epoch
        if current != (epoch or 0):
            raise LeaseLostError(name, epoch=epoch, current=current)
        return current

    def call(self, function: Callable[[sqlite3.Connection], T]) -> T:
        """The value of a user's function, which can do everything but end the transaction."""
        connection = cast("GuardedConnection", self.connection)
        with connection.guarded():
            return function(connection)

    # -- leases ------------------------------------------------------------------------------

    def acquire(self, name: str, holder: str, seen: Lease | None) -> Lease:
        """Take a lease that is free, this holder's, or still as it was seen."""
        lease = reads.lease(self.connection, name)
        if lease is not None and lease.holder == holder:
            return lease
        if lease is not None and lease.holder is not None and lease != seen:
            return lease
        taken = Lease(name, holder, 1 if lease is None else lease.epoch + 1, 0)
        self.connection.execute("INSERT OR REPLACE INTO msgbus_leases VALUES (?, ?, ?, ?)", taken)
        return taken

    def renew(self, lease: Lease) -> Lease:
        """Move the counter of a lease that is still the holder's.

        Raises:
            LeaseLostError: It is not.
        """
        current = reads.lease(self.connection, lease.name)
        if current is None or (current.epoch, current.holder) != (lease.epoch, lease.holder):
            now = 0 if current is None else current.epoch
            raise LeaseLostError(lease.name, epoch=lease.epoch, current=now)
        renewed = current._replace(renewals=current.renewals + 1)
        self.connection.execute(
            "UPDATE msgbus_leases SET renewals = ? WHERE name = ?",
            (renewed.renewals, renewed.name),
        )
        return renewed

    def release(self, lease: Lease) -> None:
        """Free a lease if it is still the holder's; its epoch stays."""
        self.connection.execute(
            "UPDATE msgbus_leases SET holder = NULL WHERE name = ? AND epoch = ? AND holder = ?",
            (lease.name, lease.epoch, lease.holder),
        )
