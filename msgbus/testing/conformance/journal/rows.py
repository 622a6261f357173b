"""Conformance tests: pending rows, their guards, and what can be asked about them."""

from __future__ import annotations

import anyio

from msgbus.errors import StaleError
from msgbus.journal.operations import Append, Drop, Operation, Pass, Put, Reply, Save
from msgbus.journal.ports import Due, Journal
from msgbus.journal.records import Instance, Pending, Result, State
from msgbus.testing.conformance.journal.kit import (
    EVENTS,
    KEYED,
    LETTER,
    STATES,
    TIME,
    JournalSuite,
    append,
    end,
    expected,
    fill,
    join,
    make_record,
    make_row,
    row_of,
    take,
)


class RowTests(JournalSuite):
    """Every change of a row, and of an instance, is guarded by its version."""

    # -- Put and Drop ----------------------------------------------------------------------------

    async def test_a_row_is_read_as_it_was_written(self) -> None:
        async with self.both() as (journal, other):
            await fill(journal, 8)
            member = await join(journal)
            rows = [
                make_row("größe", 3, partition=7, key="k\x00✓", due=1234.56789, attempt=4),
                make_row(
                    "orders",
                    1,
                    State.CLAIMED,
                    key="",
                    owner=member.id,
                    alone=True,
                    error="no\nstock",
                ),
                make_row("orders", 2, State.PARKED, key="", time=0.25),
                make_row("orders", 4, State.DEAD, unique="u✓"),
                make_row("orders", 5, State.DONE),
                make_row("orders", 7, State.KEPT, partition=3),
                make_row("orders", 6, State.DAMAGED),
                make_row("orders", 9, body=make_record(9, headers={"a": "b"}, key="k")),
            ]

            await journal.commit([Put(row) for row in rows])

            for row in rows:
                assert await other.row(row.subscription, row.offset) == row
            assert await journal.row("orders", 3) is None
            assert await journal.row("nobody", 1) is None

    async def test_a_row_is_changed_from_the_version_before_only(self) -> None:
        async with self.both() as (journal, other):
            await fill(journal, 1)
            first = make_row("orders", 1)
            second = first.moved(State.WAITING, time=TIME, due=TIME)
            third = second.moved(State.DEAD, time=TIME)
            with expected(StaleError):
                await journal.commit([Put(second)])
            await journal.commit([Put(first)])
            for row in (first, third):
                with expected(StaleError):
                    await other.commit([Put(row)])
            await other.commit([Put(second)])
            for row in (first, second):
                with expected(StaleError):
                    await journal.commit([Put(row)])

            assert await journal.row("orders", 1) == second

    async def test_a_row_is_dropped_at_its_version_only(self) -> None:
        async with self.both() as (journal, other):
            await fill(journal, 1)
            row = make_row("orders", 1)
            moved = row.moved(State.WAITING, time=TIME, due=TIME)
            await journal.commit([Put(row)])
            await journal.commit([Put(moved)])
            for version in (1, 3):
                with expected(StaleError):
                    await other.commit([Drop(moved._replace(version=version))])
            await other.commit([Drop(moved)])
            with expected(StaleError):
                await journal.commit([Drop(moved)])

            assert await journal.row("orders", 1) is None

    async def test_a_claimed_row_is_changed_or_dropped_by_its_owner_only(self) -> None:
        async with self.both() as (journal, other):
            await fill(journal, 2)
            await journal.commit([Put(make_row("orders", offset)) for offset in (1, 2)])
            member, second = await join(journal), await join(other)
            claims = await journal.claim(member, "orders", 2, TIME)
            first, last = (claim.row for claim in claims)
            retry = first.moved(State.WAITING, time=TIME, due=TIME)
            changes: list[Operation] = [
                Put(retry),
                Put(first.moved(State.CLAIMED, time=TIME, owner=second.id)),
                Put(first.moved(State.DEAD, time=TIME), LETTER),
                Drop(first),
            ]
            for change in changes:
                for acting in (second, None):
                    with expected(StaleError):
                        await other.commit([change], acting)
            assert await other.find("orders", STATES) == [first, last]
            assert await other.letter(first) is None

            await journal.commit([Put(retry), Drop(last)], member)

            await other.commit([Put(retry.moved(State.DEAD, time=TIME))])
            assert await journal.count() == {State.DEAD: 1}

    async def test_a_dropped_row_is_done_until_the_cursor_passes_it(self) -> None:
        async with self.both() as (journal, other):
            await fill(journal, 4)
            member = await join(journal)
            cursor = await take(journal, member, "orders", KEYED)
            rows = [
                make_row("orders", 1, State.DEAD, key="b"),
                make_row("orders", 2, key="a", unique="u", alone=True),
                make_row("orders", 3, State.PARKED, key="a"),
                make_row("orders", 4, partition=1, key="b"),
            ]
            bills = make_row("bills", 2)
            await journal.commit(
                [*(Put(row, LETTER) for row in (*rows, bills)), Pass(cursor, 1, 4)], member
            )
            (claim,) = await journal.claim(member, "orders", 1, TIME, alone=True)

            await journal.commit(
                [Drop(rows[0]), Drop(claim.row), Drop(rows[3]), Drop(bills)], member
            )

            done, promoted = await other.find(None, STATES)
            assert done == claim.row.moved(State.DONE, time=done.time, key=None, unique=None)
            assert await other.letter(done) is None
            assert (promoted.offset, promoted.state) == (3, State.WAITING)
            with expected(StaleError):
                await journal.commit([Drop(claim.row)], member)
            await journal.commit([Pass(cursor, 2, 4)], member)
            assert await other.find(None, STATES) == [promoted]

    async def test_a_discarded_message_is_not_in_doubt_for_the_next_owner(self) -> None:
        async with self.both() as (journal, other):
            await fill(journal, 3)
            member = await join(journal)
            cursor = await take(journal, member, "orders", EVENTS)
            dead = make_row("orders", 2, State.DEAD)
            await journal.commit([Put(dead, LETTER), Pass(cursor, 0, 2)], member)
            await other.commit([Drop(dead)])
            assert (await row_of(other, "orders", 2)).state is State.DONE
            await end(other, member)

            await take(other, await join(other), "orders", EVENTS)

            assert [row.offset for row in await other.find("orders", STATES)] == [1]

    async def test_of_many_changes_of_one_version_one_is_written(self) -> None:
        async with self.both() as (journal, other):
            await fill(journal, 1)
            row = make_row("orders", 1)
            await journal.commit([Put(row)])
            written: list[int] = []

            async def change(one: Journal, number: int) -> None:
                moved = row.moved(State.WAITING, time=TIME, due=TIME + number)
                try:
                    await one.commit([Put(moved)])
                except StaleError:
                    return
                written.append(number)

            async with anyio.create_task_group() as tasks:
                for number in range(16):
                    tasks.start_soon(change, (journal, other)[number % 2], number)

            found = await row_of(journal, "orders", 1)
            assert [found.due] == [TIME + number for number in written]

    # -- find, count, record ---------------------------------------------------------------------

    async def test_rows_are_found(self) -> None:
        async with self.opened() as journal:
            await fill(journal, 12)
            rows = [
                make_row(
                    ("orders", "bills")[n % 4 == 0],
                    n,
                    (State.WAITING, State.DEAD)[n % 3 == 0],
                    key=("a", "b")[n % 2],
                )
                for n in range(1, 13)
            ]
            await journal.commit([Put(row) for row in reversed(rows)])

            async def offsets(
                name: str | None,
                *states: State,
                key: str | None = None,
                after: Pending | None = None,
                limit: int = 100,
            ) -> list[int]:
                found = await journal.find(name, states, key=key, after=after, limit=limit)
                assert all(row in rows for row in found)
                return [row.offset for row in found]

            assert await offsets("orders", *STATES) == [1, 2, 3, 5, 6, 7, 9, 10, 11]
            assert await offsets("orders", State.DEAD) == [3, 6, 9]
            assert await offsets("orders", State.DEAD, State.WAITING, key="a") == [2, 6, 10]
            assert await offsets("orders", State.WAITING, after=rows[4]) == [7, 10, 11]
            assert await offsets("orders", *STATES, after=rows[1], limit=2) == [3, 5]
            assert await offsets(None, *STATES) == list(range(1, 13))
            assert await offsets(None, State.DEAD, key="b") == [3, 9]
            assert await offsets("orders") == []
            assert await offsets("nobody", *STATES) == []

    async def test_pages_of_rows_of_all_subscriptions_leave_none_out(self) -> None:
        async with self.opened() as journal:
            await fill(journal, 4)
            rows = [make_row(name, n) for n in range(1, 5) for name in ("a", "b", "c")]
            await journal.commit([Put(row) for row in reversed(rows)])
            for limit in (1, 2, 5):
                found: list[Pending] = []
                while page := await journal.find(
                    None, STATES, after=found[-1] if found else None, limit=limit
                ):
                    found += page

                assert found == rows
            await journal.commit([Drop(rows[3])])
            assert await journal.find(None, STATES, after=rows[3]) == rows[4:]

    async def test_a_hundred_rows_are_found_unless_told_otherwise(self) -> None:
        async with self.opened() as journal:
            await fill(journal, 130)
            await journal.commit([Put(make_row("orders", n)) for n in range(1, 131)])

            assert len(await journal.find("orders", STATES)) == 100
            assert len(await journal.find("orders", STATES, limit=1_000)) == 130
            assert len(await journal.due("orders", TIME)) == 100

    async def test_rows_are_counted_by_state(self) -> None:
        async with self.opened() as journal:
            await fill(journal, 6)
            states = [State.WAITING, State.WAITING, State.DEAD, State.DONE]
            rows = [make_row("orders", n, state) for n, state in enumerate(states, 1)]
            await journal.commit([*map(Put, rows), Put(make_row("bills", 1))])

            assert await journal.count() == {State.WAITING: 3, State.DEAD: 1, State.DONE: 1}
            assert await journal.count("orders") == {
                State.WAITING: 2,
                State.DEAD: 1,
                State.DONE: 1,
            }
            assert await journal.count("nobody") == {}

    async def test_the_message_of_a_row_is_in_the_log_or_in_its_body(self) -> None:
        async with self.opened() as journal:
            record, body = make_record(1), make_record(2)
            await append(journal, record)
            rows = [make_row("orders", 1), make_row("orders", 2, body=body)]
            await journal.commit([Put(row) for row in rows])

            assert await journal.record(rows[0]) == record._replace(offset=1)
            assert await journal.record(rows[1]) == body
            assert await journal.record(make_row("orders", 9)) is None

    # -- blocked_keys, next_due, due -------------------------------------------------------------

    async def test_keys_are_blocked_by_rows_that_have_them(self) -> None:
        async with self.opened() as journal:
            await fill(journal, 9)
            member = await join(journal)
            rows = [
                make_row("orders", 1, key="waiting"),
                make_row("orders", 2, State.CLAIMED, key="claimed", owner=member.id),
                make_row("orders", 3, State.PARKED, key="claimed"),
                make_row("orders", 4, State.DEAD, key="dead"),
                make_row("orders", 5, State.DAMAGED, key=""),
                make_row("orders", 6),
                make_row("orders", 7, State.DEAD),
                make_row("orders", 8, partition=1, key="elsewhere"),
                make_row("bills", 9, key="other"),
            ]
            await journal.commit([Put(row) for row in rows])

            assert await journal.blocked_keys("orders", 0) == {"waiting", "claimed", "dead", ""}
            assert await journal.blocked_keys("orders", 1) == {"elsewhere"}
            assert await journal.blocked_keys("orders", 2) == set()
            await journal.commit(
                [Drop(rows[1]), Put(rows[3].moved(State.DEAD, time=TIME, key=None))], member
            )
            assert await journal.blocked_keys("orders", 0) == {"waiting", "claimed", ""}

    async def test_the_rows_of_a_key_are_counted(self) -> None:
        async with self.opened() as journal:
            await fill(journal, 6)
            rows = [
                make_row("orders", 2, State.DEAD, key="a"),
                make_row("orders", 3, State.PARKED, key="a"),
                make_row("orders", 4, key="b"),
                make_row("orders", 5, partition=1, key="a"),
                make_row("bills", 1, key="a"),
            ]
            await journal.commit([Put(row) for row in rows])

            assert await journal.key_rows("orders", 0, "a") == (2, 2)
            assert await journal.key_rows("orders", 1, "a") == (5, 1)
            assert await journal.key_rows("orders", 1, "b") == (None, 0)
            await journal.commit([Drop(rows[0])])
            assert await journal.key_rows("orders", 0, "a") == (3, 1)

    async def test_the_next_due_time_is_the_earliest_of_the_waiting_rows(self) -> None:
        async with self.opened() as journal:
            await fill(journal, 5)
            assert await journal.next_due("orders") == Due(None, has_suspects=False)
            rows = [
                make_row("orders", 1, partition=1, due=TIME + 5),
                make_row("orders", 2, partition=2, due=TIME + 3, alone=True),
                make_row("orders", 3, State.DEAD, key="a", alone=True),
                make_row("orders", 4, State.PARKED, key="a", alone=True),
                make_row("bills", 1, due=TIME),
            ]
            await journal.commit([Put(row) for row in rows])

            assert await journal.next_due("orders") == Due(TIME + 3, has_suspects=True)
            assert await journal.next_due("orders", [1]) == Due(TIME + 5, has_suspects=False)
            assert await journal.next_due("orders", [0, 1, 2]) == Due(TIME + 3, has_suspects=True)
            assert await journal.next_due("orders", [0]) == Due(None, has_suspects=False)
            assert await journal.next_due("orders", []) == Due(None, has_suspects=False)

    async def test_a_claimed_row_is_not_due(self) -> None:
        async with self.opened() as journal:
            await fill(journal, 1)
            await journal.commit([Put(make_row("orders", 1, alone=True))])
            member = await join(journal)
            await journal.claim(member, "orders", 1, TIME, alone=True)

            assert await journal.next_due("orders") == Due(None, has_suspects=False)
            assert await journal.due("orders", TIME) == []

    async def test_due_rows_are_listed_and_not_claimed(self) -> None:
        async with self.opened() as journal:
            await fill(journal, 5)
            dues = [TIME + 3, TIME + 1, TIME + 5, TIME + 1]
            rows = [
                make_row("orders", n, due=due, alone=n == 2, partition=n)
                for n, due in enumerate(dues, 1)
            ]
            await journal.commit([*map(Put, rows), Put(make_row("bills", 5))])

            for _ in range(2):
                assert await journal.due("orders", TIME + 3) == [rows[1], rows[3], rows[0]]
            assert await journal.due("orders", TIME + 3, 1) == [rows[1]]
            assert await journal.due("orders", TIME) == []

    # -- results ---------------------------------------------------------------------------------

    async def test_the_first_reply_stays(self) -> None:
        async with self.both() as (journal, other):
            assert await journal.result("id") is None
            await journal.commit([Reply("id", TIME, b'{"n":1}')])
            await other.commit([Reply("id", TIME + 1, None, "late"), Append(make_record())])
            await journal.commit([Reply("failed", TIME, error="no stock"), Reply("none", TIME)])

            for one in (journal, other):
                assert await one.result("id") == Result("id", b'{"n":1}', None, TIME)
                assert await one.result("failed") == Result("failed", None, "no stock", TIME)
                assert await one.result("none") == Result("none", None, None, TIME)
                found = await one.results(["id", "none", "absent"])
                assert sorted(result.message_id for result in found) == ["id", "none"]
            assert await other.head() == 1

    # -- instances -------------------------------------------------------------------------------

    async def test_an_instance_is_saved_from_the_version_before_only(self) -> None:
        async with self.both() as (journal, other):
            first = Instance("billing", "7", b"\x00{}", TIME, 1)
            second = first._replace(state=b"", wake=None, version=2)
            assert await journal.instance("billing", "7") is None
            with expected(StaleError):
                await journal.commit([Save(second)])
            await journal.commit([Save(first)])
            assert await other.instance("billing", "7") == first
            with expected(StaleError):
                await other.commit([Save(first._replace(state=b"other"))])
            await other.commit([Save(second)])
            with expected(StaleError):
                await journal.commit([Save(second)])

            assert await journal.instance("billing", "7") == second
            assert await journal.instance("billing", "8") is None
            assert await journal.instance("packing", "7") is None

    async def test_due_instances_come_the_longest_overdue_first(self) -> None:
        async with self.opened() as journal:
            wakes = [TIME + 2, None, TIME + 1, TIME + 4]
            instances = [Instance("billing", f"{n}", b"", wake, 1) for n, wake in enumerate(wakes)]
            await journal.commit([*map(Save, instances)])

            assert await journal.due_instances(TIME) == []
            assert await journal.due_instances(TIME + 2) == [instances[2], instances[0]]
            assert await journal.due_instances(TIME + 9, 2) == [instances[2], instances[0]]
            await journal.commit([Save(instances[2]._replace(wake=None, version=2))])
            assert await journal.due_instances(TIME + 2) == [instances[0]]

    async def test_an_instance_is_saved_with_the_rest_of_its_commit(self) -> None:
        async with self.opened() as journal:
            await fill(journal, 1)
            row = make_row("billing", 1, State.DEAD)
            await journal.commit([Put(row, LETTER)])
            save = Save(Instance("billing", "7", b"{}", None, 1))

            await journal.commit([Drop(row), Append(make_record(1)), save])
            with expected(StaleError):
                await journal.commit([Append(make_record(2)), save])

            assert await journal.head() == 2
