"""Helpers of the conformance tests: records, rows, and journals to write them to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import asynccontextmanager
from itertools import chain
from typing import Any, Final

import anyio
import anyio.lowlevel
from uuid_utils import uuid7

from msgbus.journal.operations import Append
from msgbus.journal.ports import Claim, Journal, Scan
from msgbus.journal.records import (
    Cursor,
    Kind,
    Letter,
    Member,
    Order,
    Pending,
    Record,
    Selection,
    State,
)

TIME: Final = 1_700_000_000.0
"""Time of the records and rows, seconds since the epoch."""

STATES: Final = tuple(State)

SETTLED: Final = frozenset({State.DONE, State.KEPT})
"""States of acknowledged messages."""

EVENTS: Final = Selection()
"""Takes all events, in the order of the log."""

KEYED: Final = Selection(order=Order.KEY)
"""Takes all events, in the order of their keys."""

SHARED: Final = Selection(order=Order.NONE)
"""Takes all events, in no order."""

LETTER: Final = Letter("ValueError", "no stock", TIME, TIME + 1, "Traceback ...", replays=2)


def make_record(number: int = 0, **changes: Any) -> Record:
    """Make a record with an id of its own; `changes` are fields of `Record`."""
    message_id = changes.pop("message_id", None) or str(uuid7())
    fields: dict[str, Any] = {
        "message_id": message_id,
        "name": "shop.OrderPlaced",
        "version": 1,
        "topic": "shop.orders",
        "key": None,
        "kind": Kind.EVENT,
        "time": TIME + number,
        "correlation_id": message_id,
        "causation_id": None,
        "root_id": message_id,
        "depth": 0,
        "session_id": None,
        "headers": {},
        "payload": b'{"number":%d}' % number,
    }
    return Record(**{**fields, **changes})


def make_command(number: int = 0, **changes: Any) -> Record:
    """Make the record of a command; `changes` are fields of `Record`."""
    return make_record(number, **{"kind": Kind.COMMAND, "name": "shop.Pack", **changes})


def make_row(name: str, offset: int, state: State = State.WAITING, **changes: Any) -> Pending:
    """Make the first version of a row; `changes` are fields of `Pending`."""
    due = 0.0 if state is State.WAITING else None
    row = Pending(name, offset, 0, None, state, 0, due, None, 1, False, None, TIME)
    return row._replace(**changes)


def numbers(found: Iterable[Record | int]) -> list[int]:
    """Return the numbers that records were made with."""
    return [record.json()["number"] for record in found if isinstance(record, Record)]


def claimed_offsets(claims: Iterable[Claim]) -> list[int]:
    """Return the offsets of claimed rows."""
    return [claim.row.offset for claim in claims]


async def read_all(
    journal: Journal,
    selection: Selection = EVENTS,
    partitions: Iterable[int] | None = None,
    *,
    limit: int = 7,
) -> list[Record]:
    """Read everything that a selection takes, page by page."""
    chosen = None if partitions is None else list(partitions)
    head, after = await journal.head(), 0
    records: list[Record] = []
    while after < head:
        scan: Scan = await journal.read(after, limit, selection, chosen)
        assert scan.upto > after, f"nothing was looked at behind {after}, the head is {head}"
        assert len(scan.records) <= limit
        records += [record for record in scan.records if isinstance(record, Record)]
        after = scan.upto
    return records


async def append(journal: Journal, *records: Record) -> list[int]:
    """Append records in one commit; return their offsets."""
    return [one.offset for one in await journal.commit([Append(record) for record in records])]


async def fill(journal: Journal, count: int, **changes: Any) -> list[int]:
    """Append records with the numbers from 0; return their offsets."""
    return await append(journal, *(make_record(number, **changes) for number in range(count)))


async def fill_keys(journal: Journal, keys: Iterable[str | None]) -> list[int]:
    """Append one record for each of these keys; return their offsets."""
    return await append(journal, *(make_record(n, key=key) for n, key in enumerate(keys)))


async def join(journal: Journal, **serves: str) -> Member:
    """Become a member that is renewed by nothing."""
    return await journal.join("process", serves)


async def end(journal: Journal, member: Member) -> None:
    """End a member, whatever its renewals are."""
    (found,) = [one for one in await journal.members() if one.id == member.id]
    assert await journal.end(found)


async def take(
    journal: Journal, member: Member, name: str, selection: Selection, partition: int = 0
) -> Cursor:
    """Open a subscription at the beginning of the log, and acquire a partition that is free."""
    await journal.open(name, selection, 0)
    cursor = await journal.acquire(member, name, partition, selection)
    assert cursor is not None, f"partition {partition} of {name} was not free"
    return cursor


async def cursor_of(journal: Journal, name: str, partition: int = 0) -> Cursor:
    """Return one cursor."""
    (found,) = [one for one in await journal.cursors(name) if one.partition == partition]
    return found


async def row_of(journal: Journal, name: str, offset: int) -> Pending:
    """Return a row that must be there."""
    row = await journal.row(name, offset)
    assert row is not None, f"{name} has no row for message {offset}"
    return row


async def states_of(journal: Journal, name: str) -> list[State]:
    """Return the states of the rows of a subscription, by offset."""
    return [row.state for row in await journal.find(name, STATES, limit=10_000)]


async def snapshot(journal: Journal) -> object:
    """Return all that can be read through the ports, to compare it."""
    rows = await journal.find(None, STATES, limit=10_000)
    records = [await read_all(journal, Selection(kind=kind)) for kind in Kind]
    ids = {record.message_id for record in chain(*records)}
    return (
        await journal.head(),
        records,
        rows,
        [await journal.letter(row) for row in rows],
        await journal.cursors(),
        [await journal.result(message_id) for message_id in sorted(ids)],
        await journal.due_instances(float("inf")),
        await journal.members(),
    )


async def until(condition: Callable[[], object]) -> None:
    """Let other tasks run until something is true, at most for some seconds."""
    with anyio.fail_after(10):
        while not condition():
            await anyio.lowlevel.checkpoint()


class expected:  # noqa: N801 (reads as a phrase)
    """Assert that a block raises: `with expected(SomeError):`. Needs no test framework."""

    def __init__(self, kind: type[BaseException]) -> None:
        self._kind = kind

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: object) -> bool:
        assert kind is not None, f"{self._kind.__name__} was not raised"
        return issubclass(kind, self._kind)


class JournalSuite(ABC):
    """Base of the tests: how to get a journal."""

    @abstractmethod
    def make(self) -> Journal:
        """Make a new, empty journal."""

    @abstractmethod
    def beside(self, journal: Journal) -> Journal:
        """Make another journal object on the same data, as another process would have."""

    @asynccontextmanager
    async def opened(self) -> AsyncGenerator[Journal]:
        """Open a new journal, and close it at the end."""
        async with _closing(self.make()) as journal:
            yield journal

    @asynccontextmanager
    async def both(self) -> AsyncGenerator[tuple[Journal, Journal]]:
        """Open a new journal and another one beside it, and close both at the end."""
        async with self.opened() as journal, _closing(self.beside(journal)) as other:
            yield journal, other


@asynccontextmanager
async def _closing(journal: Journal) -> AsyncGenerator[Journal]:
    try:
        yield journal
    finally:
        with anyio.CancelScope(shield=True):
            await journal.close()
