"""New pending rows, and errors that every engine raises alike."""

from __future__ import annotations

from msgbus._next.journal.errors import StaleError
from msgbus._next.journal.records import (
    DELAYED,
    Cursor,
    Instance,
    Member,
    Pending,
    Record,
    Selection,
    State,
)
from msgbus.errors import ConfigurationError


def _new(name: str, offset: int, state: State, time: float) -> Pending:
    return Pending(name, offset, 0, None, state, 0, None, None, 1, False, None, time)


def queued(
    queue: str | None, record: Record, offset: int, due: float | None, unique: str | None
) -> Pending:
    """Make the row of an appended message: waiting in its queue, or of version 0 without one."""
    row = _new(queue or "", offset, State.WAITING, record.time)
    body = record if queue == DELAYED else None
    if queue is None:
        return row._replace(due=due or 0.0, version=0)
    return row._replace(due=due or 0.0, body=body, unique=unique)


def newly_claimed(name: str, record: Record, member: Member, now: float) -> Pending:
    """Make the row of a message that nobody has had before, claimed by a member."""
    return _new(name, record.offset, State.CLAIMED, now)._replace(owner=member.id)


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


def done(row: Pending) -> Pending:
    """Return a row as acknowledged ahead of the cursor."""
    return row.moved(State.DONE, time=row.time)._replace(key=None, unique=None)


def row_changed(row: Pending) -> StaleError:
    """Make the error for a row that is no longer at its version."""
    return StaleError(f"Message {row.offset} of {row.subscription!r} has changed since.")


def not_the_owner(row: Pending) -> StaleError:
    """Make the error for a claimed row that another member wants to change."""
    message = f"Message {row.offset} of {row.subscription!r} is in flight in another process."
    return StaleError(message)


def unique_taken(row: Pending) -> StaleError:
    """Make the error for a dead row that is replayed while another has its unique key."""
    return StaleError(
        f"Message {row.offset} of {row.subscription!r} cannot be replayed: another one of the "
        f"unique key {row.unique!r} waits or runs."
    )


def removed(name: str) -> StaleError:
    """Make the error for a subscription that does not exist."""
    return StaleError(f"Subscription {name!r} was removed.")


def owner_changed(cursor: Cursor) -> StaleError:
    """Make the error for a partition that is no longer the caller's."""
    return StaleError(f"Partition {cursor.partition} of {cursor.name!r} has another owner.")


def delivery_taken(name: str, offset: int) -> StaleError:
    """Make the error for a delivery that another process has."""
    return StaleError(f"Message {offset} of {name!r} is with another process.")


def instance_changed(instance: Instance) -> StaleError:
    """Make the error for an instance that is no longer at its version."""
    return StaleError(f"Instance {instance.key!r} of {instance.name!r} has changed since.")


def other_partitions(name: str, stored: int, wanted: int) -> ConfigurationError:
    """Make the error for another number of partitions than the subscription was made with."""
    return ConfigurationError(
        f"Subscription {name!r} was made with {stored} partitions and cannot be opened with "
        f"{wanted}: their number is fixed. Give it another name, or {stored} partitions."
    )
