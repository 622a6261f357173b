"""Conformance tests: acquiring a partition, and what was in flight when its owner ended."""

from __future__ import annotations

import anyio

from msgbus.errors import StaleError
from msgbus.journal.operations import Pass, Put, Remove
from msgbus.journal.ports import Journal
from msgbus.journal.records import (
    Cursor,
    Kind,
    Member,
    Order,
    Pending,
    Record,
    Selection,
    State,
)
from msgbus.testing.conformance.journal.invariants import broken_invariants
from msgbus.testing.conformance.journal.kit import (
    EVENTS,
    KEYED,
    STATES,
    TIME,
    JournalSuite,
    append,
    end,
    expected,
    fill,
    fill_keys,
    join,
    make_record,
    make_row,
    row_of,
    take,
)


async def _hand_over(
    journal: Journal, other: Journal, selection: Selection, acked: int, fetched: int
) -> tuple[Cursor, list[Pending]]:
    """Let a member end with messages in flight; return the next owner's cursor, and the rows."""
    member = await join(journal)
    cursor = await take(journal, member, "orders", selection)
    await journal.commit([Pass(cursor, acked, fetched)], member)
    await end(other, member)
    taken = await other.acquire(await join(other), "orders", 0, selection)
    assert taken is not None
    return taken, await other.find("orders", STATES)


class PartitionTests(JournalSuite):
    """A partition has one owner, and nothing that was in flight is lost with it."""

    async def test_a_free_partition_is_acquired(self) -> None:
        async with self.both() as (journal, other):
            (opened,) = await journal.open("orders", EVENTS, 0)
            member = await join(journal)

            cursor = await journal.acquire(member, "orders", 0, EVENTS)

            assert cursor is not None
            assert (cursor.owner, cursor.acked, cursor.fetched) == (member.id, 0, 0)
            assert cursor.epoch > opened.epoch
            assert await other.cursors() == [cursor]

    async def test_an_owned_partition_is_not_acquired(self) -> None:
        async with self.both() as (journal, other):
            member = await join(journal)
            cursor = await take(journal, member, "orders", EVENTS)

            assert await other.acquire(await join(other), "orders", 0, EVENTS) is None
            assert await journal.acquire(member, "orders", 0, EVENTS) is None
            assert await other.cursors() == [cursor]

    async def test_each_owner_has_a_higher_epoch(self) -> None:
        async with self.both() as (journal, other):
            epochs: list[int] = []
            for number in range(4):
                one = (journal, other)[number % 2]
                member = await join(one)
                cursor = await take(one, member, "orders", EVENTS)
                epochs.append(cursor.epoch)
                if number % 2:
                    await end(journal, member)
                else:
                    await one.commit([Pass(cursor, 0, 0, release=True)], member)

            assert epochs == sorted(set(epochs))

    async def test_of_many_that_acquire_a_partition_one_does(self) -> None:
        selection = Selection(order=Order.KEY, partitions=8)
        async with self.both() as (journal, other):
            members = [await join(journal), await join(other)]
            await journal.open("orders", selection, 0)
            taken: list[Cursor] = []

            async def acquire(one: Journal, member: Member, partition: int) -> None:
                cursor = await one.acquire(member, "orders", partition, selection)
                taken.extend([cursor] if cursor is not None else [])

            async with anyio.create_task_group() as tasks:
                for number in range(32):
                    side = number % 2
                    one = (journal, other)[side]
                    tasks.start_soon(acquire, one, members[side], number // 4)

            assert sorted(cursor.partition for cursor in taken) == list(range(8))
            assert sorted(taken) == await other.cursors()

    async def test_a_subscription_that_was_removed_is_not_acquired(self) -> None:
        async with self.both() as (journal, other):
            member = await join(journal)
            await journal.open("orders", EVENTS, 0)
            await other.commit([Remove("orders")])

            with expected(StaleError):
                await journal.acquire(member, "orders", 0, EVENTS)

            assert await other.cursors() == []

    # -- what was in flight ----------------------------------------------------------------------

    async def test_what_was_in_flight_gets_rows_that_run_alone(self) -> None:
        async with self.both() as (journal, other):
            await fill_keys(journal, ["a", "a", "b", None, "b", None, "a", "c"])

            cursor, rows = await _hand_over(journal, other, KEYED, 1, 7)

            assert (cursor.acked, cursor.fetched) == (7, 7)
            assert [(row.offset, row.key, row.state.value) for row in rows] == [
                (2, "a", "waiting"),
                (3, "b", "waiting"),
                (4, None, "waiting"),
                (5, "b", "parked"),
                (6, None, "waiting"),
                (7, "a", "parked"),
            ]
            for row in rows:
                assert (row.alone, row.attempt, row.owner, row.partition) == (True, 0, None, 0)
                assert (row.due is not None) is (row.state is State.WAITING)
                record = await other.record(row)
                assert record is not None
                assert record.offset == row.offset

    async def test_in_the_order_of_the_log_all_wait_for_the_first(self) -> None:
        async with self.both() as (journal, other):
            await fill_keys(journal, ["a", "b", None, "c"])

            _, rows = await _hand_over(journal, other, EVENTS, 0, 4)

            assert [row.state.value for row in rows] == ["waiting", "parked", "parked", "parked"]
            assert len({row.key for row in rows}) == 1

    async def test_what_was_released_in_flight_gets_rows_too(self) -> None:
        async with self.both() as (journal, other):
            await fill(journal, 4)
            member = await join(journal)
            cursor = await take(journal, member, "orders", KEYED)
            await journal.commit([Pass(cursor, 1, 3, release=True)], member)

            taken = await take(other, await join(other), "orders", KEYED)

            assert (taken.acked, taken.fetched) == (3, 3)
            assert [row.offset for row in await other.find("orders", STATES)] == [2, 3]

    async def test_rows_are_made_for_what_the_selection_takes(self) -> None:
        async with self.both() as (journal, other):
            await append(
                journal,
                make_record(0),
                make_record(1, name="other"),
                make_record(2, kind=Kind.CONTROL),
                make_record(3),
                make_record(4, topic="other"),
            )
            selection = Selection(
                names=["shop.OrderPlaced"],
                matches=lambda record: record.topic != "other",
                order=Order.KEY,
            )

            _, rows = await _hand_over(journal, other, selection, 0, 5)

            assert [row.offset for row in rows] == [1, 4]

    async def test_rows_are_made_for_the_partition_only(self) -> None:
        def key(record: Record) -> str:
            return f"customer {record.json()['number'] % 9}"

        selection = Selection(order=Order.KEY, partitions=2, key=key)
        async with self.both() as (journal, other):
            await fill(journal, 27)
            member = await join(journal)
            for partition in range(2):
                cursor = await take(journal, member, "orders", selection, partition)
                await journal.commit([Pass(cursor, 0, 27)], member)
            await end(other, member)

            await take(other, await join(other), "orders", selection, 1)

            scan = await other.read(0, 100, selection, [1])
            rows = await other.find("orders", STATES)
            records = [record for record in scan.records if isinstance(record, Record)]
            assert [row.offset for row in rows] == [record.offset for record in records]
            assert [row.key for row in rows] == [key(record) for record in records]
            assert {row.partition for row in rows} == {1}
            assert len(rows) < 27

    async def test_a_row_that_is_there_is_not_doubled(self) -> None:
        async with self.both() as (journal, other):
            await fill_keys(journal, ["a", "b", "a", "b", "c"])
            there = [
                make_row("orders", 1, key="a", due=TIME + 60, attempt=2),
                make_row("orders", 2, State.DEAD),
                make_row("orders", 3, State.PARKED, key="a"),
            ]
            await journal.commit([Put(row) for row in there])

            _, rows = await _hand_over(journal, other, KEYED, 0, 5)

            assert rows[:3] == there
            assert [(row.offset, row.state.value) for row in rows[3:]] == [
                (4, "waiting"),
                (5, "waiting"),
            ]

    async def test_an_acknowledged_message_is_not_in_doubt(self) -> None:
        async with self.both() as (journal, other):
            await fill_keys(journal, ["a", "a", "a", "a", "b", "b"])
            done = [make_row("orders", offset, State.DONE) for offset in (1, 2, 6)]
            kept = make_row("orders", 3, State.KEPT)
            elsewhere = make_row("orders", 5, State.DONE, partition=1)
            bills = make_row("bills", 1, State.DONE)
            await journal.commit([Put(row) for row in (*done, kept, elsewhere, bills)])

            cursor, rows = await _hand_over(journal, other, KEYED, 1, 4)

            assert (cursor.acked, cursor.fetched) == (4, 4)
            assert [row for row in rows if row.offset != 4] == [kept, elsewhere, done[2]]
            assert (await row_of(other, "orders", 4)).state is State.WAITING
            assert await other.row("bills", 1) == bills

    async def test_messages_are_parked_behind_earlier_rows_of_their_key(self) -> None:
        async with self.both() as (journal, other):
            keys = ["wait", "dead", "past", "bad", "far", "far"]
            await fill_keys(journal, keys * 2)
            first = [
                make_row("orders", 1, key="wait", due=TIME + 60),
                make_row("orders", 2, State.DEAD, key="dead"),
                make_row("orders", 3, State.DEAD),
                make_row("orders", 4, State.DAMAGED, key="bad"),
                make_row("orders", 5, partition=1, key="far"),
                make_row("bills", 6, key="far"),
            ]
            await journal.commit([Put(row) for row in first])

            await _hand_over(journal, other, KEYED, 6, 12)

            rows = await other.find("orders", STATES, after=first[4])
            assert [(row.offset, row.key, row.state.value) for row in rows] == [
                (7, "wait", "parked"),
                (8, "dead", "parked"),
                (9, "past", "waiting"),
                (10, "bad", "parked"),
                (11, "far", "waiting"),
                (12, "far", "parked"),
            ]

    async def test_no_message_is_parked_behind_a_later_one(self) -> None:
        for state in (State.WAITING, State.DEAD):
            async with self.both() as (journal, other):
                await fill_keys(journal, ["a", "a", "a"])
                later = make_row("orders", 2, state, key="a")
                await journal.commit([Put(later)])

                _, rows = await _hand_over(journal, other, KEYED, 0, 3)

                assert [row.state for row in rows] == [State.WAITING, state, State.PARKED]
                assert rows[1] == later
                assert await broken_invariants(other, {"orders": KEYED}) == []

    async def test_very_many_in_flight_get_rows(self) -> None:
        async with self.both() as (journal, other):
            await fill_keys(journal, [f"key{number % 7}" for number in range(600)])

            cursor, _ = await _hand_over(journal, other, KEYED, 0, 600)

            assert cursor.acked == 600
            assert await other.count("orders") == {State.WAITING: 7, State.PARKED: 593}
