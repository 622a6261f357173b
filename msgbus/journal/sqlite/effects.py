"""What each operation of a commit does to the tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final

from msgbus.errors import CursorError, JournalConflictError
from msgbus.journal import operations as op
from msgbus.journal.records import Cursor, DeliveryRecord, TicketState
from msgbus.journal.sqlite import reads
from msgbus.journal.sqlite.letters import JournalRows
from msgbus.journal.sqlite.rows import cursor_checksum, pack

if TYPE_CHECKING:
    from msgbus.journal.sqlite.store import Store


def effect(store: Store, operation: object) -> None:
    """Do one operation that is not an append."""
    function = _EFFECTS.get(type(operation))
    if function is None:
        message = f"{operation!r:.80} is not an operation of msgbus.journal.operations."
        raise TypeError(message)
    function(store, operation)


# -- cursors -------------------------------------------------------------------------------


def _existing(store: Store, name: str) -> Cursor:
    cursor = reads.cursor(store.connection, name, store.path)
    if cursor is None:
        problem = "does not exist: create it with CreateCursor when subscribing."
        raise CursorError(name, problem, path=store.path)
    return cursor


def _write(store: Store, name: str, offset: int, fetched: int, epoch: int) -> None:
    if offset > store.head:
        problem = f"would move to {offset}, beyond the head at {store.head}."
        raise CursorError(name, problem, path=store.path)
    store.connection.execute(
        "INSERT OR REPLACE INTO msgbus_cursors VALUES (?, ?, ?, ?, ?)",
        (name, offset, fetched, epoch, cursor_checksum(name, offset, fetched, epoch)),
    )


def _create_cursor(store: Store, create: op.CreateCursor) -> None:
    epoch = store.check_epoch(create.name, create.epoch)
    if reads.cursor(store.connection, create.name, store.path) is None:
        _write(store, create.name, create.offset, create.offset, epoch)


def _move_cursor(store: Store, move: op.MoveCursor) -> None:
    epoch = store.check_epoch(move.name, move.epoch)
    cursor = _existing(store, move.name)
    offset = max(cursor.offset, move.offset)
    fetched = offset if move.close else max(cursor.fetched, offset)
    _write(store, move.name, offset, fetched, epoch)
    store.connection.execute(
        "DELETE FROM msgbus_attempts WHERE name = ? AND offset <= ?", (move.name, offset)
    )


def _seek_cursor(store: Store, seek: op.SeekCursor) -> None:
    epoch = store.check_epoch(seek.name, seek.epoch)
    _existing(store, seek.name)
    _write(store, seek.name, seek.offset, seek.offset, epoch)
    store.connection.execute("DELETE FROM msgbus_attempts WHERE name = ?", (seek.name,))


def _drop_cursor(store: Store, drop: op.DropCursor) -> None:
    store.check_epoch(drop.name, drop.epoch)
    store.connection.execute("DELETE FROM msgbus_cursors WHERE name = ?", (drop.name,))
    store.connection.execute("DELETE FROM msgbus_attempts WHERE name = ?", (drop.name,))
    # The row of its lease stays: epochs must never begin anew under an old holder.
    store.connection.execute("UPDATE msgbus_leases SET holder = NULL WHERE name = ?", (drop.name,))


def _open_window(store: Store, window: op.OpenWindow) -> None:
    epoch = store.check_epoch(window.name, window.epoch)
    cursor = _existing(store, window.name)
    _write(store, window.name, cursor.offset, max(cursor.fetched, window.last), epoch)


def _count_attempts(store: Store, count: op.CountAttempts) -> None:
    store.check_epoch(count.name, count.epoch)
    store.connection.executemany(
        "INSERT INTO msgbus_attempts VALUES (?, ?, 1) "
        "ON CONFLICT (name, offset) DO UPDATE SET attempts = attempts + 1",
        [(count.name, offset) for offset in count.offsets],
    )


# -- dead letters, markers, schedule -------------------------------------------------------


def _add_dead_letter(store: Store, add: op.AddDeadLetter) -> None:
    JournalRows(store.connection, store.path, store.codec).add(add.letter)


def _drop_dead_letter(store: Store, drop: op.DropDeadLetter) -> None:
    JournalRows(store.connection, store.path, store.codec).drop(drop.id)


def _mark(store: Store, mark: op.Mark) -> None:
    before = store.connection.total_changes
    store.connection.execute(
        "INSERT OR IGNORE INTO msgbus_markers VALUES (?, ?)", (mark.message_id, mark.subscription)
    )
    if mark.once and store.connection.total_changes == before:
        message = (
            f"Message {mark.message_id} has already been handled by {mark.subscription!r}; "
            f"nothing of this transaction was written."
        )
        raise JournalConflictError(message, path=store.path)


def _schedule(store: Store, schedule: op.Schedule) -> None:
    entry = schedule.entry
    name = entry.record.name
    beside = (entry.id, float(entry.due), entry.subscription, entry.attempt, name)
    store.connection.execute(
        "INSERT OR REPLACE INTO msgbus_schedule VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (*beside, *pack(entry.record, store.codec, *beside)),
    )


def _unschedule(store: Store, cancel: op.Unschedule) -> None:
    before = store.connection.total_changes
    store.connection.execute("DELETE FROM msgbus_schedule WHERE id = ?", (cancel.id,))
    if cancel.required and store.connection.total_changes == before:
        message = (
            f"{cancel.id} is not in the schedule any more: it was cancelled, or another "
            f"process has sent it. Nothing of this transaction was written."
        )
        raise JournalConflictError(message, path=store.path)


# -- deliveries and tickets ----------------------------------------------------------------


def add_deliveries(store: Store, deliveries: Iterable[DeliveryRecord]) -> None:
    """Record how deliveries ended, many at a time."""
    store.connection.executemany(
        "INSERT INTO msgbus_deliveries (message_id, handler, attempt, outcome, wait, run, "
        "time, error, offset) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            (message_id, handler, attempt, outcome.value, *rest)
            for message_id, handler, attempt, outcome, *rest in deliveries
        ),
    )


def _open_ticket(store: Store, ticket: op.OpenTicket) -> None:
    store.connection.execute(
        "INSERT OR IGNORE INTO msgbus_tickets (message_id, state, time) VALUES (?, ?, ?)",
        (ticket.message_id, TicketState.PENDING.value, ticket.time),
    )


def _close_ticket(store: Store, ticket: op.CloseTicket) -> None:
    state = TicketState.DONE if ticket.error is None else TicketState.FAILED
    store.connection.execute(
        "INSERT INTO msgbus_tickets VALUES (?, ?, ?, ?, ?) ON CONFLICT (message_id) DO UPDATE "
        "SET state = excluded.state, result = excluded.result, error = excluded.error, "
        "time = excluded.time WHERE state = 'pending'",
        (ticket.message_id, state.value, ticket.result, ticket.error, ticket.time),
    )


# -- conditions and the user's own statements ----------------------------------------------


def _fence(store: Store, fence: op.Fence) -> None:
    store.check_epoch(fence.name, fence.epoch)


def _sql(store: Store, sql: op.Sql) -> None:
    store.call(lambda connection: connection.execute(sql.statement, sql.parameters))


def _call(store: Store, call: op.Call) -> None:
    store.call(call.function)


_EFFECTS: Final[dict[type, Callable[[Store, Any], None]]] = {
    op.CreateCursor: _create_cursor,
    op.MoveCursor: _move_cursor,
    op.SeekCursor: _seek_cursor,
    op.DropCursor: _drop_cursor,
    op.OpenWindow: _open_window,
    op.CountAttempts: _count_attempts,
    op.AddDeadLetter: _add_dead_letter,
    op.DropDeadLetter: _drop_dead_letter,
    op.Mark: _mark,
    op.Schedule: _schedule,
    op.Unschedule: _unschedule,
    op.OpenTicket: _open_ticket,
    op.CloseTicket: _close_ticket,
    op.Fence: _fence,
    op.Sql: _sql,
    op.Call: _call,
}
