"""Rows and cursors as operations make them; guards and errors that all engines have in common."""

from __future__ import annotations

from msgbus.errors import ConfigurationError, CursorError, StaleError
from msgbus.journal.operations import Fence
from msgbus.journal.records import (
    DELAYED,
    Cursor,
    Instance,
    Member,
    Pending,
    Record,
    Selection,
    State,
)


def _new(name: str, offset: int, state: State, time: float) -> Pending:
    return Pending(name, offset, 0, None, state, 0, None, None, 1, False, None, time)


def queued(
    queue: str | None, record: Record, offset: int, due: float | None, unique: str | None
) -> Pending:
    """Make the row of an appended message: waiting in its queue, or of version 0 without one."""
    key, version, body = None, 1, None
    if queue is None:
        queue, version = "", 0
    elif queue == DELAYED:
        key, body = record.message_id, record  # found again by its id
    due, time = due or 0.0, record.time
    state = State.WAITING
    return Pending(
        queue, offset, 0, key, state, 0, due, None, version, False, None, time, body, unique
    )


def newly_claimed(name: str, record: Record, member: Member, now: float) -> Pending:
    """Make the row of a message that nobody has had before, claimed by a member."""
    offset, state, owner = record.offset, State.CLAIMED, member.id
    return Pending(name, offset, 0, None, state, 0, None, owner, 1, False, None, now)


def claimed(row: Pending, member: Member, now: float, *, alone: bool) -> Pending:
    """Return a waiting row as claimed; one that runs alone has its attempt counted."""
    attempt = row.attempt + alone
    return row.moved(State.CLAIMED, time=now, owner=member.id, attempt=attempt)


def doubtful(
    name: str, record: Record, partition: int, selection: Selection, held: dict[str, int]
) -> Pending:
    """Make the row of a message that may have been in flight when its process ended.

    Args:
        name: The subscription.
        record: The message.
        partition: Its partition.
        selection: Gives the key of its order.
        held: The lowest offset of a row of each key; this row is added.
    """
    key = selection.order_key(record)
    is_free = key is None or held.get(key, record.offset) >= record.offset
    if key is not None:
        held[key] = min(held.get(key, record.offset), record.offset)
    row = _new(name, record.offset, State.WAITING if is_free else State.PARKED, record.time)
    return row._replace(partition=partition, key=key, due=0.0 if is_free else None, alone=True)


def first_of_key(row: Pending) -> Pending:
    """Return a parked row that has no row of its key before it: it may begin."""
    return row._replace(state=State.WAITING, due=0.0)


def promoted(row: Pending) -> Pending:
    """Return a parked row that is the first of its key now: it may begin."""
    return row.moved(State.WAITING, time=row.time, due=0.0)


def in_doubt(row: Pending) -> Pending:
    """Return a claimed row whose process has ended: it runs alone, with nothing counted."""
    return row.moved(State.WAITING, time=row.time, due=0.0, alone=True)


def done(row: Pending) -> Pending:
    """Return a row as acknowledged ahead of the cursor."""
    return row.moved(State.DONE, time=row.time)._replace(key=None, unique=None)


def opened(
    name: str, selection: Selection, start: int, stored: list[Cursor], members: list[Member]
) -> list[Cursor]:
    """Return the cursors of a subscription as `Members.open` leaves them.

    Args:
        name: The subscription.
        selection: What the caller wants of it.
        start: Where a new one begins.
        stored: The cursors it has.
        members: All members: the stored selection stays while one of them serves it.

    Raises:
        ConfigurationError: It has another number of partitions.
    """
    found = stored or [
        Cursor(name, partition, start, start, None, 0, selection.text)
        for partition in range(selection.partitions)
    ]
    size = len(found)
    if size != selection.partitions:
        raise ConfigurationError(
            f"Subscription {name!r} was made with {size} partitions and cannot be opened with "
            f"{selection.partitions}: their number is fixed. Give it another name, or {size} "
            f"partitions."
        )
    text = found[0].selection
    if any(member.serves.get(name) == text for member in members):
        return found
    return [cursor._replace(selection=selection.text) for cursor in found]


def taken(cursor: Cursor, member: Member) -> Cursor:
    """Return a partition with a new owner; what was fetched has rows by then."""
    return cursor._replace(acked=cursor.fetched, owner=member.id, epoch=cursor.epoch + 1)


# -- guards --------------------------------------------------------------------------------------


def check_version(row: Pending, stored: Pending | None, version: int, acting: int | None) -> None:
    """Raise `StaleError` unless a row may be changed.

    Args:
        row: The row as the caller knows it.
        stored: The row as it is stored, if it is.
        version: The version at which it must be; 0 for none.
        acting: The member on whose behalf it is changed.
    """
    if (0 if stored is None else stored.version) != version:
        raise row_changed(row)
    if stored is not None and stored.owner not in (None, acting):
        message = f"Message {row.offset} of {row.subscription!r} is in flight in another process."
        raise StaleError(message)


def check_fence(
    fence: Fence, row: Pending | None, cursor: Cursor | None, acting: int | None
) -> None:
    """Raise `StaleError` unless a delivery is that of the acting member.

    Args:
        fence: What its process knows of the delivery.
        row: The stored row of the message, if there is one.
        cursor: The stored cursor of its partition.
        acting: The member.
    """
    owner: int | None = None
    if fence.version is not None:
        if row is not None and row.version == fence.version:
            owner = row.owner
    elif row is None and cursor is not None and cursor.acked < fence.offset:
        owner = cursor.owner if cursor.epoch == fence.epoch else None
    if owner is None or owner != acting:
        message = f"Message {fence.offset} of {fence.subscription!r} is with another process."
        raise StaleError(message)


# -- errors --------------------------------------------------------------------------------------


def row_changed(row: Pending) -> StaleError:
    """Make the error for a row that is no longer at its version."""
    return StaleError(f"Message {row.offset} of {row.subscription!r} has changed since.")


def unique_taken(row: Pending) -> StaleError:
    """Make the error for a dead row that is replayed while another has its unique key."""
    return StaleError(
        f"Message {row.offset} of {row.subscription!r} cannot be replayed: another one of the "
        f"unique key {row.unique!r} waits or runs."
    )


def removed(name: str) -> StaleError:
    """Make the error for a subscription that does not exist."""
    return StaleError(f"Subscription {name!r} was removed.")


def trimmed_since(name: str) -> StaleError:
    """Make the error for messages that were read, and are handed out after they were removed."""
    return StaleError(f"Retention has removed messages of {name!r} since they were read.")


def owner_changed(cursor: Cursor) -> StaleError:
    """Make the error for a partition that is no longer the caller's."""
    return StaleError(f"Partition {cursor.partition} of {cursor.name!r} has another owner.")


def beyond_head(name: str, offset: int, head: int, path: str | None = None) -> CursorError:
    """Make the error for a cursor behind which messages would be missed."""
    problem = (
        f"is at {offset}, beyond the head at {head}: was a backup restored? Seek it to where it "
        f"should be; else it would skip what is written up to there."
    )
    return CursorError(name, problem, path=path)


def instance_changed(instance: Instance) -> StaleError:
    """Make the error for an instance that is no longer at its version."""
    return StaleError(f"Instance {instance.key!r} of {instance.name!r} has changed since.")


def not_an_operation(value: object) -> TypeError:
    """Make the error for a value that a commit cannot apply."""
    kind = type(value).__name__
    return TypeError(f"A {kind} is no operation of a journal; see msgbus.journal.operations.")
