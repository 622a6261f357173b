"""`broken_invariants`: what must be true of a journal at any time, checked through the ports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from msgbus.journal.ports import Journal
from msgbus.journal.records import (
    DELAYED,
    HOLDING,
    Cursor,
    Pending,
    Record,
    Selection,
    State,
)
from msgbus.testing.conformance.journal.kit import SETTLED, STATES

_ALL = 1_000_000_000


async def broken_invariants(journal: Journal, selections: Mapping[str, Selection]) -> list[str]:
    """Return a sentence for each broken invariant; none must be written to it meanwhile.

    Args:
        journal: What to check.
        selections: Those of the subscriptions, by name; others are checked as far as possible.
    """
    cursors = await journal.cursors()
    rows = await journal.find(None, STATES, limit=_ALL)
    members = {member.id for member in await journal.members()}
    found = [
        *_of_cursors(cursors, await journal.head(), members, selections),
        *_of_owners(rows, members),
        *_of_parked(rows),
        *_of_fetched(rows, cursors),
        *_of_unique(rows),
    ]
    for row in rows:
        if row.state in SETTLED and await journal.letter(row) is not None:
            found.append(f"{_name(row)} is {row.state} and has a letter.")
        found += _of_message(row, await journal.record(row), selections.get(row.subscription))
    return found


def _name(row: Pending) -> str:
    return f"Row {row.offset} of {row.subscription!r}"


def _of_cursors(
    cursors: Sequence[Cursor],
    head: int,
    members: set[int],
    selections: Mapping[str, Selection],
) -> Iterator[str]:
    for cursor in cursors:
        if not 0 <= cursor.acked <= cursor.fetched <= head:
            yield f"{cursor} is not acked <= fetched <= head ({head})."
        if cursor.owner is not None and cursor.owner not in members:
            yield f"{cursor} has an owner that is no member."
    counts = Counter(cursor.name for cursor in cursors)
    for name, selection in selections.items():
        if counts[name] not in (0, selection.partitions):
            yield f"{name!r} has {counts[name]} cursors and {selection.partitions} partitions."


def _of_owners(rows: Sequence[Pending], members: set[int]) -> Iterator[str]:
    for row in rows:
        if row.state is State.CLAIMED and row.owner not in members:
            yield f"{_name(row)} is claimed by {row.owner}, which is no member."
        if row.state is not State.CLAIMED and row.owner is not None:
            yield f"{_name(row)} is {row.state} and has an owner."
        if (row.state is State.WAITING) is (row.due is None):
            yield f"{_name(row)} is {row.state} and due at {row.due}."


def _of_parked(rows: Sequence[Pending]) -> Iterator[str]:
    blocked: set[tuple[str, int, str]] = set()
    for row in rows:
        if row.key is None:
            if row.state is State.PARKED:
                yield f"{_name(row)} is parked and has no key."
            continue
        if row.state in SETTLED:
            yield f"{_name(row)} is {row.state} and has the key {row.key!r}."
        key = (row.subscription, row.partition, row.key)
        if row.state in HOLDING:
            blocked.add(key)
        elif row.state is State.PARKED and key not in blocked:
            yield f"{_name(row)} is parked behind nothing."


def _of_fetched(rows: Sequence[Pending], cursors: Sequence[Cursor]) -> Iterator[str]:
    """Rows that are kept may lie beyond, as `Seek` leaves them there."""
    fetched = {(cursor.name, cursor.partition): cursor.fetched for cursor in cursors}
    names = {cursor.name for cursor in cursors}
    for row in rows:
        if row.subscription not in names:
            continue
        upto = fetched.get((row.subscription, row.partition))
        if upto is None:
            yield f"{_name(row)} is of partition {row.partition}, which has no cursor."
        elif row.offset > upto and row.state is not State.KEPT:
            yield f"{_name(row)} is {row.state} beyond {upto}, which was fetched."


def _of_unique(rows: Sequence[Pending]) -> Iterator[str]:
    counts = Counter(
        (row.subscription, row.unique)
        for row in rows
        if row.unique is not None and row.holds(row.unique)
    )
    for (name, unique), count in counts.items():
        if count > 1:
            yield f"{count} rows of {name!r} have the unique key {unique!r}."


def _of_message(row: Pending, record: Record | None, selection: Selection | None) -> Iterator[str]:
    if row.subscription == DELAYED and row.body is None:
        yield f"{_name(row)} has no body."
    if record is None:
        if row.state is not State.DAMAGED:
            yield f"{_name(row)} has no message."
        return
    if selection is None:
        return
    if row.partition != selection.partition(record):
        yield f"{_name(row)} is in partition {row.partition}, its message is in another."
    if row.key not in (None, selection.order_key(record)):
        yield f"{_name(row)} has the key {row.key!r}, its message has another."
