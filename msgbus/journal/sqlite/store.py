"""The operations of a commit: guarded steps inside one open transaction, on one thread."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import groupby
from typing import Any, Final, cast, final

from msgbus.errors import StoredMessageError
from msgbus.journal import rows
from msgbus.journal.operations import (
    Append,
    Drop,
    Fence,
    Note,
    Operation,
    Pass,
    Put,
    Remove,
    Reply,
    Save,
    Seek,
)
from msgbus.journal.ports import Claim
from msgbus.journal.records import DELAYED, Appended, Cursor, Member, Pending, Record, State
from msgbus.journal.sqlite.columns import (
    CURSOR,
    DELIVERY,
    INSTANCE,
    RESULT,
    cursor_row,
    delivery_row,
    instance_row,
    number,
    result_row,
    text,
)
from msgbus.journal.sqlite.messages import (
    BLOCK,
    MESSAGE,
    PLAIN_MESSAGE,
    SPAN,
    Row,
    block_rows,
    message_row,
)
from msgbus.journal.sqlite.pending import PendingRows
from msgbus.journal.sqlite.reads import Source
from msgbus.journal.sqlite.schema import read_meta
from msgbus.journal.sqlite.transactions import NotAtOnce, WriteTransaction, inserting

_MESSAGES: Final = inserting("messages", MESSAGE)
_PLAIN_MESSAGES: Final = inserting("messages", PLAIN_MESSAGE)
_PLAIN: Final = PLAIN_MESSAGE.count(",") + 1
_BLOCKS: Final = inserting("blocks", "value, block", "INSERT OR IGNORE")
_RESULTS: Final = inserting("results", RESULT, "INSERT OR IGNORE")
_DELIVERIES: Final = inserting("deliveries", DELIVERY)
_CURSORS: Final = inserting("subscriptions", CURSOR, "INSERT OR REPLACE")
_INSTANCES: Final = inserting("instances", INSTANCE, "INSERT OR REPLACE")
_MOVE_CURSOR: Final = """
UPDATE msgbus_subscriptions SET acked = ?, fetched = ?, owner = ?, crc = ?
WHERE name = ? AND partition = ? AND epoch = ? AND selection = ? AND owner IS ?
    AND (owner IS NOT NULL OR acked = ?)
"""
_SINGLE, _APPENDS, _NEW_ROWS, _CHANGED_ROWS, _DROPS = range(5)


@final
class Store:
    """Applies operations in the open transaction of one connection."""

    def __init__(self, connection: sqlite3.Connection, source: Source) -> None:
        self.path = source.path
        self.transaction = WriteTransaction(connection, source)
        self.reader = self.transaction.reader
        self.rows = PendingRows(self.transaction, source.codec)
        self._connection = connection
        self._codec = source.codec
        self._steps: dict[type, Callable[[Any], None]] = {
            Put: self.rows.put,
            Drop: self.rows.drop,
            Pass: self._move,
            Fence: self._fence,
            Seek: self._seek,
            Remove: self._remove,
            Save: self._save,
        }

    def apply(
        self, operations: Sequence[Operation], member: Member | None = None
    ) -> list[Appended]:
        """Apply operations of a member in order; return the results of the `Append`s.

        Notes and replies come last: nothing depends on them, and the runs of the others, which
        become one statement each, are longer without them.
        """
        self.rows.acting = None if member is None else member.id
        appended: list[Appended] = []
        later: dict[type, list[Any]] = {Note: [], Reply: []}
        rest: list[Operation] = []
        for operation in operations:
            later.get(type(operation), rest).append(operation)
        for lot, run in groupby(rest, key=_lot):
            together: list[Any] = list(run)
            if lot == _APPENDS:
                appended += self.append(together)
            else:
                self._apply_run(lot, together)
        if later[Note]:
            _DELIVERIES.run(self._connection, [delivery_row(one.delivery) for one in later[Note]])
        if later[Reply]:
            self._reply(later[Reply])
        return appended

    def _apply_run(self, lot: int, run: list[Any]) -> None:
        if lot == _NEW_ROWS:
            self.rows.put_new([put.row for put in run])
        elif lot == _CHANGED_ROWS:
            self.rows.update([put.row for put in run])
        elif lot == _DROPS:
            self.rows.drop_many(run)
        else:
            for operation in cast("list[Operation]", run):
                step = self._steps.get(type(operation))
                if step is None:
                    raise rows.not_an_operation(operation)
                step(operation)

    # -- the log -------------------------------------------------------------------------------

    def append(self, appends: Sequence[Append]) -> list[Appended]:
        """Add messages that are not there yet, and rows in their queues."""
        if len(appends) == 1:
            return [self._append_one(appends[0])]
        return self.transaction.together(
            partial(self.append_new, appends), lambda: [self._append(one) for one in appends]
        )

    def append_new(self, appends: Sequence[Append]) -> list[Appended]:
        """Add messages that are all new.

        Raises:
            NotAtOnce: One of them has to be looked at on its own.
            sqlite3.IntegrityError: One of them is there.
        """
        start = offset = self.transaction.head + 1
        messages: list[Row] = []
        blocks: set[tuple[str, str, float, int]] = set()
        queued: list[Pending] = []
        for offset, (record, queue, due, unique) in enumerate(appends, start):
            if queue == DELAYED:
                raise NotAtOnce
            messages.append(self._message(record, offset))
            blocks.add((record.name, record.topic, record.time // SPAN, offset // BLOCK))
            if queue is not None:
                queued.append(rows.queued(queue, record, offset, due, unique))
        plain = [row for row in messages if len(row) == _PLAIN]
        _PLAIN_MESSAGES.run(self._connection, plain)
        if len(plain) != len(messages):
            _MESSAGES.run(self._connection, [row for row in messages if len(row) != _PLAIN])
        _BLOCKS.run(self._connection, block_rows(blocks))
        self.rows.add(queued)
        self.transaction.head = offset
        offsets = range(start, offset + 1)
        if self.transaction.is_feeding:
            self.transaction.appended += map(_claim, appends, offsets)
        return list(map(Appended, offsets))

    def _append_one(self, append: Append) -> Appended:
        if append.queue is None:
            try:
                return Appended(self._add(append))
            except sqlite3.IntegrityError:
                pass  # the log has it
        return self._append(append)

    def _append(self, append: Append) -> Appended:
        """Add one message, unless the log has it or a row has its unique key."""
        record, queue, due, unique = append
        is_delayed = queue == DELAYED
        unique = record.message_id if is_delayed else unique
        known = self.reader.offset_of(record.message_id)
        if known is None and queue is not None and unique is not None:
            known = self.rows.holder(queue, unique)
        if known is not None:
            return Appended(known, is_duplicate=True)
        offset = self._next_delayed() if is_delayed else self._add(append)
        if queue is not None:
            self.rows.add([rows.queued(queue, record, offset, due, unique)])
        return Appended(offset)

    def _add(self, append: Append) -> int:
        offset = self.transaction.head + 1
        record = append.record
        row = self._message(record, offset)
        (_PLAIN_MESSAGES if len(row) == _PLAIN else _MESSAGES).run(self._connection, [row])
        block = (record.name, record.topic, record.time // SPAN, offset // BLOCK)
        _BLOCKS.run(self._connection, block_rows([block]))
        self.transaction.head = offset
        if self.transaction.is_feeding:
            self.transaction.appended.append(_claim(append, offset))
        return offset

    def _next_delayed(self) -> int:
        count = int(read_meta(self._connection, "delayed") or 0) + 1
        self._connection.execute(
            "UPDATE msgbus_meta SET value = ? WHERE key = 'delayed'", (str(count),)
        )
        return count

    def _message(self, record: Record, offset: int) -> Row:
        try:
            return message_row(record, offset, self._codec)
        except UnicodeEncodeError as error:
            message = (
                f"{record.name} {record.message_id!r} has text that is not Unicode in its topic, "
                f"key, ids or headers: {error}."
            )
            raise StoredMessageError(message, message_id=record.message_id) from error

    # -- cursors -------------------------------------------------------------------------------

    def _move(self, operation: Pass) -> None:
        before, head = operation.cursor, self.transaction.head
        if max(operation.acked, operation.fetched) > head:
            raise rows.beyond_head(before.name, operation.fetched, head, self.path)
        if before.owner not in (None, self.rows.acting):
            raise rows.owner_changed(before)
        if not self._has_moved(operation):
            stored = self.reader.cursor(before.name, before.partition)
            # The selection may have been replaced since the cursor was read.
            known = before._replace(
                selection=before.selection if stored is None else stored.selection
            )
            if known == before or not self._has_moved(operation._replace(cursor=known)):
                raise rows.owner_changed(before)
        self.rows.forget_done(operation.after)

    def _has_moved(self, operation: Pass) -> bool:
        before, after = operation.cursor, cursor_row(operation.after)
        where = (before.name, before.partition, before.epoch, before.selection, before.owner)
        values = (*after[2:5], after[-1], *where, before.acked)
        return self._connection.execute(_MOVE_CURSOR, values).rowcount == 1

    def set_cursors(self, cursors: Iterable[Cursor]) -> None:
        """Write cursors as they are, whatever is stored."""
        _CURSORS.run(self._connection, [cursor_row(cursor) for cursor in cursors])

    def _fence(self, fence: Fence) -> None:
        row = self.reader.row(fence.subscription, fence.offset)
        cursor = self.reader.cursor(fence.subscription, fence.partition)
        rows.check_fence(fence, row, cursor, self.rows.acting)

    def _seek(self, seek: Seek) -> None:
        """Put all cursors to an offset, also damaged ones: this is how to repair them."""
        name, offset = seek.name, min(seek.offset, self.transaction.head)
        for table in ("letters WHERE", "pending WHERE state <> 'kept' AND"):
            self._connection.execute(
                f"DELETE FROM msgbus_{table} subscription = ? AND offset > ?",  # noqa: S608
                (name, offset),
            )
        query = "SELECT partition, epoch, selection FROM msgbus_subscriptions WHERE name = ?"
        found = self._connection.execute(query, (name,)).fetchall()
        cursors = [
            Cursor(name, partition, offset, offset, None, number(epoch) + 1, text(selection) or "")
            for partition, epoch, selection in found
        ]
        self.set_cursors(cursors)
        for cursor in cursors:
            self.rows.forget_done(cursor)

    def _remove(self, remove: Remove) -> None:
        for column in ("letters WHERE subscription", "pending WHERE subscription"):
            self._connection.execute(f"DELETE FROM msgbus_{column} = ?", remove)  # noqa: S608
        self._connection.execute("DELETE FROM msgbus_subscriptions WHERE name = ?", remove)

    # -- results and instances -----------------------------------------------------------------

    def _reply(self, replies: Sequence[Reply]) -> None:
        values = [
            result_row(message_id, body, error, time, self._codec)
            for message_id, time, body, error in replies
        ]
        _RESULTS.run(self._connection, values)

    def _save(self, save: Save) -> None:
        instance = save.instance
        stored = self.reader.instance(instance.name, instance.key)
        if (0 if stored is None else stored.version) != instance.version - 1:
            raise rows.instance_changed(instance)
        _INSTANCES.run(self._connection, [instance_row(instance, self._codec)])


def _claim(append: Append, offset: int) -> Claim:
    record, queue, due, unique = append
    placed = Record._make((*record[:-1], offset))
    return Claim(rows.queued(queue, placed, offset, due, unique), placed)


def _lot(operation: Operation) -> int:
    """Tell which operations become one statement."""
    kind = type(operation)
    if kind is Append:
        return _APPENDS
    if kind is Put:
        row, letter, promote, _ = cast("Put", operation)
        if letter is not None or promote:
            return _SINGLE
        if row.version == 1:
            return _NEW_ROWS
        return _SINGLE if row.state is State.PARKED else _CHANGED_ROWS
    if kind is Drop:
        row = cast("Drop", operation).row
        return _DROPS if row.key is None and row.state is not State.DAMAGED else _SINGLE
    return _SINGLE
