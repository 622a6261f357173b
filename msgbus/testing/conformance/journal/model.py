"""Two processes of a random history, and a model of what they acknowledged."""

from __future__ import annotations

from typing import Final, final

from msgbus.journal.operations import Operation, Pass
from msgbus.journal.ports import Claim, Journal
from msgbus.journal.records import (
    DELAYED,
    Cursor,
    Member,
    Order,
    Pending,
    Record,
    Selection,
    State,
)
from msgbus.testing.conformance.journal.invariants import broken_invariants
from msgbus.testing.conformance.journal.kit import SETTLED, STATES, make_row, read_all

QUEUE: Final = "commands:shop.Pack"

SELECTIONS: Final = {
    "ordered": Selection(names=["a"], parks=True),
    "keyed": Selection(order=Order.KEY, partitions=2, parks=True),
    "passing": Selection(order=Order.KEY, key=lambda record: record.key or record.name),
    "once": Selection(order=Order.KEY, parks=True, keeps_done=True),
    "shared": Selection(order=Order.NONE, matches=lambda record: record.topic != "none"),
}
"""Subscriptions of a history; "passing" and "shared" go on behind a dead letter."""

ALL: Final = 1_000_000
"""Limit of a question for all rows."""


@final
class PartitionWindow:
    """Messages that the owner of a partition has in flight, beside its rows."""

    def __init__(self, cursor: Cursor) -> None:
        self.cursor = cursor
        self.records: dict[int, Record] = {}
        self.handled: set[int] = set()

    def open_offsets(self) -> list[int]:
        """Return the offsets that are not handled yet."""
        return [offset for offset in self.records if offset not in self.handled]

    def first_of_keys(self) -> list[Record]:
        """Return what may be handled now: the first of each key, and all without a key."""
        first: dict[object, Record] = {}
        for offset in self.open_offsets():
            record = self.records[offset]
            key = SELECTIONS[self.cursor.name].order_key(record)
            first.setdefault(offset if key is None else key, record)
        return list(first.values())

    def keys(self) -> set[str | None]:
        """Return the keys of all that the cursor has not passed."""
        return {SELECTIONS[self.cursor.name].order_key(one) for one in self.records.values()}

    def handled_before(self, record: Record) -> list[Record]:
        """Return handled messages of the same key: after a crash, they must not come again."""
        key = SELECTIONS[self.cursor.name].order_key(record)
        handled = (self.records[offset] for offset in sorted(self.handled))
        return [
            one
            for one in handled
            if key is not None and SELECTIONS[self.cursor.name].order_key(one) == key
        ]

    def behind(self, record: Record) -> list[Record]:
        """Return the messages that have to wait for this one."""
        selection = SELECTIONS[self.cursor.name]
        key = selection.order_key(record)
        others = (self.records[offset] for offset in self.open_offsets() if offset > record.offset)
        return [one for one in others if key is not None and selection.order_key(one) == key]

    def pass_without(self, asided: set[int], fetched: int | None = None) -> Pass:
        """Make the operation that passes all but what is neither handled nor set aside."""
        fetched = self.cursor.fetched if fetched is None else fetched
        left = [offset for offset in self.open_offsets() if offset not in asided]
        return Pass(self.cursor, min(left, default=fetched + 1) - 1, fetched)


@final
class HistoryWorker:
    """One process: its journal, its member, and what it owns."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.member = Member(0, "", {}, 0)
        self.windows: dict[tuple[str, int], PartitionWindow] = {}
        self.claims: list[Claim] = []

    async def join(self) -> None:
        """Become a new member that owns nothing."""
        self.windows, self.claims = {}, []
        self.member = await self.journal.join("process", dict.fromkeys(SELECTIONS, ""))

    async def commit(self, *operations: Operation) -> None:
        """Commit on behalf of the member."""
        await self.journal.commit(operations, self.member)


class HistoryModel:
    """Appended and acknowledged messages, and what must be true of the journal then."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.acked: dict[str, set[int]] = {name: set() for name in (*SELECTIONS, QUEUE)}
        self.taken: dict[str, dict[int, Record]] = {name: {} for name in (*SELECTIONS, QUEUE)}
        self.kept: set[tuple[str, int]] = set()
        self.delayed: set[str] = set()

    def note(self, record: Record, offset: int) -> None:
        """Note which subscriptions take a message."""
        for name, selection in SELECTIONS.items():
            if selection.takes(record):
                self.taken[name][offset] = record._replace(offset=offset)

    def make_row(self, name: str, record: Record, state: State) -> Pending:
        """Make the first version of a row; it has a key if it holds others back."""
        selection = SELECTIONS[name]
        holds = state is State.PARKED or selection.holds(state)
        key, partition = selection.order_key(record), selection.partition(record)
        return make_row(name, record.offset, state, key=key if holds else None, partition=partition)

    def deliver(self, worker: HistoryWorker, name: str, record: Record) -> None:
        """Check that a message may be handled now."""
        offset = record.offset
        assert offset not in self.acked[name], f"{name} gets message {offset} again"
        assert record == self.taken[name][offset]
        if name == QUEUE or not SELECTIONS[name].parks:
            return
        selection = SELECTIONS[name]
        window = worker.windows.get((name, selection.partition(record)))
        done = self.acked[name].union(window.handled if window is not None else ())
        key = selection.order_key(record)
        for one in self.taken[name].values():
            if key is not None and one.offset < offset and selection.order_key(one) == key:
                assert one.offset in done, f"{name} gets {offset} before {one.offset}"

    async def check(self) -> None:
        """Assert that no invariant is broken and no message is lost."""
        journal = self.journal
        assert await broken_invariants(journal, SELECTIONS) == []
        kept = await journal.find(None, [State.KEPT], limit=ALL)
        assert {(row.subscription, row.offset) for row in kept} == self.kept
        published: set[str] = set()
        for name, selection in SELECTIONS.items():
            records = await read_all(journal, selection, limit=100)
            assert records == list(self.taken[name].values())
            published.update(record.message_id for record in records)
            acked = {cursor.partition: cursor.acked for cursor in await journal.cursors(name)}
            rows = {row.offset: row for row in await journal.find(name, STATES, limit=ALL)}
            for record in records:
                row = rows.pop(record.offset, None)
                is_acked = record.offset in self.acked[name]
                is_ahead = record.offset > acked[selection.partition(record)]
                assert row is not None or is_acked or is_ahead, f"{name} lost {record.offset}"
                assert row is None or (row.state in SETTLED) is is_acked, row
            assert rows == {}, f"{name} has rows of messages that it does not take"
        queued = {row.offset for row in await journal.find(QUEUE, STATES, limit=ALL)}
        assert queued.isdisjoint(self.acked[QUEUE])
        assert queued | self.acked[QUEUE] == set(self.taken[QUEUE])
        waiting = [row.body for row in await journal.find(DELAYED, STATES, limit=ALL)]
        ids = {record.message_id for record in waiting if record is not None}
        assert ids <= self.delayed
        assert self.delayed - ids <= published
