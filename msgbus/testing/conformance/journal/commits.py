"""Conformance tests: a commit is all or nothing, offsets grow, an id is kept once."""

from __future__ import annotations

from itertools import product
from typing import Any, NamedTuple

import anyio
import anyio.lowlevel

from msgbus.errors import StaleError
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
from msgbus.journal.ports import Journal
from msgbus.journal.records import (
    DELAYED,
    Cursor,
    DeliveryRecord,
    Instance,
    Kind,
    Member,
    Outcome,
    Pending,
    Record,
    Selection,
    State,
)
from msgbus.testing.conformance.journal.kit import (
    EVENTS,
    LETTER,
    TIME,
    JournalSuite,
    append,
    end,
    expected,
    fill,
    join,
    make_command,
    make_record,
    make_row,
    numbers,
    read_all,
    row_of,
    snapshot,
    take,
)


class _Start(NamedTuple):
    """A journal with something of everything; see `_prepare`."""

    member: Member
    cursor: Cursor
    waiting: Pending
    dead: Pending
    claimed: Pending
    foreign: Pending
    """Claimed by another member."""
    command: Record


async def _prepare(journal: Journal) -> _Start:
    member = await join(journal)
    await fill(journal, 6)
    cursor = await take(journal, member, "orders", EVENTS)
    command = make_command(6)
    waiting = make_row("orders", 1, key="", due=TIME)
    dead = make_row("orders", 2, State.DEAD)
    claimed = make_row("bills", 1, State.CLAIMED, owner=member.id, unique="1")
    foreign = make_row("bills", 2, State.CLAIMED, owner=(await join(journal)).id)
    await journal.open("soon", EVENTS, 4)
    await journal.open("gone", EVENTS, 2)
    await journal.commit(
        [
            Append(command, queue="commands:shop.Pack"),
            Put(waiting),
            Put(dead, LETTER),
            Put(make_row("orders", 3, State.PARKED, key="")),
            Put(claimed),
            Put(foreign),
            Put(make_row("soon", 5)),
            Put(make_row("gone", 2, State.DEAD), LETTER),
            Pass(cursor, 3, 5),
            Save(Instance("billing", "7", b"{}", TIME, 1)),
        ],
        member,
    )
    cursor = cursor._replace(acked=3, fetched=5)
    return _Start(member, cursor, waiting, dead, claimed, foreign, command)


def _accepted(start: _Start) -> list[Operation]:
    """Operations whose guards hold, one of each kind at least."""
    delivery = DeliveryRecord("id", "handler", 1, Outcome.OK, 0.1, 0.2, TIME, offset=1)
    return [
        Append(make_record(7)),
        Append(make_command(8), queue="commands:shop.Pack", due=TIME, unique="8"),
        Append(make_record(9), queue=DELAYED, due=TIME),
        Fence("orders", 4, epoch=start.cursor.epoch),
        Fence("bills", 1, version=1),
        Put(start.claimed.moved(State.WAITING, time=TIME, due=TIME)),
        Put(make_row("orders", 5, State.CLAIMED, owner=start.member.id)),
        Put(start.dead.moved(State.WAITING, time=TIME, due=0.0), promote=True),
        Drop(start.waiting),
        Pass(start.cursor, 5, 6),
        Seek("soon", 1),
        Remove("gone"),
        Reply(start.command.message_id, TIME, b"1"),
        Note(delivery),
        Save(Instance("billing", "7", b"[]", TIME + 1, 2)),
        Save(Instance("billing", "8", b"[]", None, 1)),
    ]


def _refused(start: _Start) -> list[Operation]:
    """Operations whose guards fail."""
    return [
        Put(start.dead),
        Put(make_row("orders", 4, version=2)),
        Put(make_row("orders", 4, version=0)),
        Drop(start.waiting._replace(version=2)),
        Drop(make_row("orders", 4)),
        Put(start.foreign.moved(State.WAITING, time=TIME, due=TIME)),
        Drop(start.foreign),
        Put(make_row("bills", 3, unique="1")),
        Pass(start.cursor._replace(epoch=0), 6, 6),
        Pass(start.cursor._replace(owner=start.member.id + 1), 6, 6),
        Fence("bills", 1, version=3),
        Fence("bills", 2, version=1),
        Fence("orders", 4, epoch=start.cursor.epoch + 1),
        Save(Instance("billing", "7", b"", None, 1)),
        Save(Instance("billing", "9", b"", None, 2)),
    ]


class CommitTests(JournalSuite):
    """A commit is written as a whole, or not at all."""

    async def test_a_mix_of_all_operations_is_written(self) -> None:
        async with self.both() as (journal, other):
            start = await _prepare(journal)

            results = await journal.commit(_accepted(start), start.member)

            assert [one.is_duplicate for one in results] == [False, False, False]
            assert [one.offset for one in results[:2]] == [8, 9]
            assert await snapshot(journal) == await snapshot(other)
            assert await journal.head() == 9
            assert numbers(await read_all(other)) == [0, 1, 2, 3, 4, 5, 7]
            assert numbers(await read_all(other, Selection(kind=Kind.COMMAND))) == [6, 8]
            rows = {row.offset: row for row in await other.find("orders", tuple(State))}
            assert sorted(rows) == [2, 3, 5]
            assert rows[2].state is State.WAITING
            assert rows[5].owner == start.member.id
            (cursor,) = await other.cursors("orders")
            assert (cursor.acked, cursor.fetched) == (5, 6)
            (moved,) = await other.cursors("soon")
            assert (moved.acked, moved.fetched) == (1, 1)
            assert await other.cursors("gone") == []
            result = await other.result(start.command.message_id)
            assert result is not None
            assert result.body == b"1"
            assert await other.instance("billing", "7") == Instance(
                "billing", "7", b"[]", TIME + 1, 2
            )

    async def test_one_refused_operation_refuses_all(self) -> None:
        async with self.opened() as journal:
            start = await _prepare(journal)
            before = await snapshot(journal)
            for accepted, refused in product(_accepted(start), _refused(start)):
                with expected(StaleError):
                    await journal.commit([accepted, refused], start.member)
            for refused in _refused(start):
                with expected(StaleError):
                    await journal.commit([*_accepted(start), refused], start.member)
                with expected(StaleError):
                    await journal.commit([refused, *_accepted(start)], start.member)

            assert await snapshot(journal) == before

    async def test_operations_are_applied_in_their_order(self) -> None:
        async with self.opened() as journal:
            await fill(journal, 2)
            row = make_row("orders", 1)
            again = row.moved(State.WAITING, time=TIME, due=TIME)

            await journal.commit([Put(row), Put(again), Drop(again), Put(row), Put(again)])

            assert await journal.row("orders", 1) == again
            with expected(StaleError):
                await journal.commit([Put(make_row("orders", 2, version=2)), Put(row)])

    async def test_something_else_than_an_operation_is_refused(self) -> None:
        nonsense: Any = "DELETE FROM orders"
        async with self.opened() as journal:
            with expected(TypeError):
                await journal.commit([Append(make_record()), nonsense])

            assert await journal.head() == 0

    async def test_a_commit_for_an_ended_member_is_refused(self) -> None:
        async with self.both() as (journal, other):
            member = await join(journal)
            await end(other, member)
            before = await snapshot(journal)

            with expected(StaleError):
                await journal.commit([Append(make_record())], member)

            assert await snapshot(journal) == before
            assert await fill(journal, 1) == [1]

    # -- offsets and ids -------------------------------------------------------------------------

    async def test_offsets_begin_at_one_and_grow(self) -> None:
        async with self.both() as (journal, other):
            offsets = await fill(journal, 3)
            offsets += await fill(other, 2)
            offsets += await fill(journal, 1)

            assert offsets[0] == 1
            assert offsets == sorted(set(offsets))
            assert numbers(await read_all(journal)) == [0, 1, 2, 0, 1, 0]

    async def test_offsets_are_in_the_order_of_the_commits(self) -> None:
        async with self.both() as (journal, other):
            results: dict[int, list[int]] = {}

            async def publish(writer: Journal, number: int) -> None:
                results[number] = await append(
                    writer, make_record(2 * number), make_record(2 * number + 1)
                )

            async with anyio.create_task_group() as tasks:
                for number in range(20):
                    tasks.start_soon(publish, (journal, other)[number % 2], number)

            found = {record.json()["number"]: record.offset for record in await read_all(other)}
            assert len(found) == 40
            assert len(set(found.values())) == 40
            for number, (first, second) in results.items():
                assert second == first + 1
                assert (found[2 * number], found[2 * number + 1]) == (first, second)

    async def test_an_id_is_kept_once(self) -> None:
        async with self.both() as (journal, other):
            first = make_record(0)
            (offset,) = await append(journal, first)

            again = make_record(1, message_id=first.message_id)
            results = await other.commit([Append(again), Append(make_record(2))])

            assert [tuple(one) for one in results] == [(offset, True), (offset + 1, False)]
            assert numbers(await read_all(journal)) == [0, 2]

    async def test_an_id_is_kept_once_inside_one_commit(self) -> None:
        async with self.opened() as journal:
            record, other = make_record(0), make_record(1)

            results = await journal.commit([Append(record), Append(other), Append(record)])

            assert [tuple(one) for one in results] == [(1, False), (2, False), (1, True)]
            assert await journal.head() == 2

    async def test_an_enqueued_id_is_kept_once_and_has_one_row(self) -> None:
        async with self.opened() as journal:
            command = make_command(0)
            one = Append(command, queue="commands:shop.Pack")

            results = await journal.commit([one, one])
            results += await journal.commit([one])

            assert [result.is_duplicate for result in results] == [False, True, True]
            assert {result.offset for result in results} == {1}
            assert await journal.count("commands:shop.Pack") == {State.WAITING: 1}
            await journal.commit([Drop(await row_of(journal, "commands:shop.Pack", 1))])
            assert [tuple(result) for result in await journal.commit([one])] == [(1, True)]
            assert await journal.count("commands:shop.Pack") == {}

    # -- cancellation ----------------------------------------------------------------------------

    async def test_a_cancelled_commit_leaves_the_journal_usable(self) -> None:
        async with self.opened() as journal:
            with anyio.CancelScope() as scope:
                scope.cancel()
                await journal.commit([Append(make_record(0))])

            assert scope.cancelled_caught
            (offset,) = await append(journal, make_record(1))
            assert offset == await journal.head()

    async def test_a_cancelled_commit_may_be_repeated(self) -> None:
        async with self.both() as (journal, other):
            commits = [[make_record(2 * n), make_record(2 * n + 1)] for n in range(20)]
            scopes = [anyio.CancelScope() for _ in commits]

            async def publish(records: list[Record], scope: anyio.CancelScope) -> None:
                with scope:
                    await append(journal, *records)

            async with anyio.create_task_group() as tasks:
                for records, scope in zip(commits, scopes, strict=True):
                    tasks.start_soon(publish, records, scope)
                for number, scope in enumerate(scopes):
                    if number % 4 == 0:
                        await anyio.lowlevel.checkpoint()
                    if number % 3:
                        scope.cancel()

            found = set(numbers(await read_all(other)))
            assert all((2 * n in found) is (2 * n + 1 in found) for n in range(20))
            for records in commits:
                await append(other, *records)
            assert sorted(numbers(await read_all(journal))) == list(range(40))
