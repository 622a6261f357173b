"""The operations of a commit: guarded steps inside one open transaction, on one thread."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import groupby
from typing import Any, Final, final

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
    checksum,
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
from msgbus.journal.sqlite.reads import SKIPPED, WARNED, Source
from msgbus.journal.sqlite.schema import read_meta, write_meta
from msgbus.journal.sqlite.transactions import NotAtOnce, WriteTransaction, each, inserting

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
_FORGET_DONE: Final = """
DELETE FROM msgbus_pending INDEXED BY msgbus_pending_done
WHERE subscription = ? AND partition = ? AND state = 'done' AND offset <= ?
"""
_LAST: Final = (Note, Reply)
"""Operations that are applied after all others, in this order."""

_HAS_DONE: Final = """
SELECT 1 FROM msgbus_pending INDEXED BY msgbus_pending_done
WHERE subscription = ? AND partition = ? AND state = 'done' LIMIT 1
"""
_MOST_KNOWN: Final = 10_000
"""Entries of the table of blocks that are remembered; more begin anew."""


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
        self._steps: dict[type, Callable[[Sequence[Any]], Any]] = {
            Append: self.append,
            Put: self.rows.put_all,
            Drop: self.rows.drop_all,
            Pass: self._move,
            Fence: partial(each, self._fence),
            Seek: partial(each, self._seek),
            Remove: partial(each, self._remove),
            Save: partial(each, self._save),
            Note: self._note,
            Reply: self._reply,
        }

    def apply(
        self, operations: Sequence[Operation], member: Member | None = None
    ) -> list[Appended]:
        """Apply operations of a member in order; return the results of the `Append`s.

        Notes and replies come last: nothing depends on them, and the runs of the others, which
        become few statements each, are longer without them.

        Raises:
            MemberEndedError: The member was ended.
            StaleError: A guard fails.
        """
        if member is not None and member.id not in self.transaction.known_members:
            self.transaction.require_member(member.id)
        self.rows.acting = None if member is None else member.id
        appended: list[Appended] = []
        ordered = [one for one in operations if type(one) not in _LAST]
        if len(ordered) < len(operations):
            for last in _LAST:
                ordered += [one for one in operations if type(one) is last]
        for kind, run in groupby(ordered, key=type):
            step, together = self._steps.get(kind), list(run)
            if step is None:
                raise rows.not_an_operation(together[0])
            found = step(together)
            if kind is Append:
                appended += found
        return appended

    # -- the log -------------------------------------------------------------------------------

    def append(self, appends: Sequence[Append]) -> list[Appended]:
        """Add messages that are not there yet, and rows in their queues."""
        try:
            if len(appends) == 1 and appends[0].queue is None:
                return self.append_new(appends)
            return self.transaction.attempt(self.append_new, appends)
        except (NotAtOnce, sqlite3.IntegrityError):
            return [self._append(one) for one in appends]

    def append_new(self, appends: Sequence[Append]) -> list[Appended]:
        """Add messages that are all new.

        Raises:
            NotAtOnce: One of them has to be looked at on its own.
            sqlite3.IntegrityError: One of them is there.
        """
        transaction = self.transaction
        start = offset = transaction.head + 1
        plain: list[Row] = []
        others: list[Row] = []
        blocks: set[tuple[str, str, float, int]] = set()
        queued: list[Pending] = []
        size = 0
        for offset, (record, queue, due, unique) in enumerate(appends, start):
            if queue == DELAYED:
                raise NotAtOnce
            try:
                row = message_row(record, offset, self._codec)
            except UnicodeEncodeError as error:
                raise _not_unicode(record, error) from error
            (plain if len(row) == _PLAIN else others).append(row)
            blocks.add((record.name, record.topic, record.time // SPAN, offset // BLOCK))
            size += len(record.payload)
            if queue is not None:
                queued.append(rows.queued(queue, record, offset, due, unique))
        # First: a lone message has no savepoint, so nothing may fail after it. An entry too many
        # does no harm.
        if not blocks <= transaction.known_blocks:
            self._add_blocks(blocks)
        _PLAIN_MESSAGES.run(self._connection, plain)
        _MESSAGES.run(self._connection, others)
        if queued:
            self.rows.add(queued)
        transaction.head = offset
        offsets = range(start, offset + 1)
        if transaction.is_feeding:
            transaction.appended += map(_claim, appends, offsets)
            transaction.appended_size += size
        return list(map(Appended, offsets))

    def _add_blocks(self, blocks: set[tuple[str, str, float, int]]) -> None:
        known = self.transaction.known_blocks
        _BLOCKS.run(self._connection, block_rows(blocks - known))
        if len(known) > _MOST_KNOWN:
            known.clear()
        known |= blocks

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
        if not is_delayed:
            return self.append_new([append])[0]
        offset = self._next_delayed()
        self.rows.add([rows.queued(queue, record, offset, due, unique)])
        return Appended(offset)

    def _next_delayed(self) -> int:
        count = int(read_meta(self._connection, "delayed")) + 1
        write_meta(self._connection, "delayed", str(count))
        return count

    # -- cursors -------------------------------------------------------------------------------

    def _move(self, moves: Sequence[Pass]) -> None:
        for move in moves:
            before, acked, fetched, is_released, trimmed = move
            if trimmed is not None and self.reader.trimmed() > trimmed:
                raise rows.trimmed_since(before.name)
            if max(acked, fetched) > self.transaction.head:
                raise rows.beyond_head(before.name, fetched, self.transaction.head, self.path)
            if before.owner not in (None, self.rows.acting):
                raise rows.owner_changed(before)
            owner = None if is_released else before.owner
            after = before._replace(acked=acked, fetched=fetched, owner=owner)
            if not self._has_moved(before, after):
                self._move_anew(before, after)
            if acked != before.acked:
                self.forget_done(after)

    def _has_moved(self, before: Cursor, after: Cursor) -> bool:
        name, partition, acked, _, owner, epoch, selection = before
        values = (
            *(after.acked, after.fetched, after.owner, checksum(*after)),
            *(name, partition, epoch, selection, owner, acked),
        )
        return self._connection.execute(_MOVE_CURSOR, values).rowcount == 1

    def _move_anew(self, before: Cursor, after: Cursor) -> None:
        """Move a cursor whose selection may have been replaced since it was read."""
        stored = self.reader.cursor(before.name, before.partition)
        if stored is None or stored.selection == before.selection:
            raise rows.owner_changed(before)
        known = before._replace(selection=stored.selection)
        if not self._has_moved(known, after._replace(selection=stored.selection)):
            raise rows.owner_changed(before)

    def forget_done(self, cursor: Cursor) -> None:
        """Delete rows of acknowledged messages that the cursor has passed."""
        place, known = (cursor.name, cursor.partition), self.transaction.without_done
        if place not in known:
            self._connection.execute(_FORGET_DONE, (*place, cursor.acked))
            if self._connection.execute(_HAS_DONE, place).fetchone() is None:
                known.add(place)

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
            self.forget_done(cursor)

    def _remove(self, remove: Remove) -> None:
        for column in ("letters WHERE subscription", "pending WHERE subscription"):
            self._connection.execute(f"DELETE FROM msgbus_{column} = ?", remove)  # noqa: S608
        self._connection.execute("DELETE FROM msgbus_subscriptions WHERE name = ?", remove)
        notes = (WARNED + remove.name, SKIPPED + remove.name)
        self._connection.execute("DELETE FROM msgbus_meta WHERE key IN (?, ?)", notes)

    # -- deliveries, results and instances -----------------------------------------------------

    def _note(self, notes: Sequence[Note]) -> None:
        _DELIVERIES.run(
            self._connection, [delivery_row(one.delivery, self._codec) for one in notes]
        )

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
    if queue is None:
        state, time = State.WAITING, record.time
        return Claim(
            Pending("", offset, 0, None, state, 0, 0.0, None, 0, False, None, time), placed
        )
    return Claim(rows.queued(queue, placed, offset, due, unique), placed)


def _not_unicode(record: Record, error: UnicodeEncodeError) -> StoredMessageError:
    message = (
        f"{record.name} {record.message_id!r} has text that is not Unicode in its topic, "
        f"key, ids or headers: {error}."
    )
    return StoredMessageError(message, message_id=record.message_id)
