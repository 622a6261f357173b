"""Conformance tests: claims of rows, and of messages beyond the cursor."""

from __future__ import annotations

from collections import Counter

import anyio

from msgbus.errors import StaleError
from msgbus.journal.operations import Drop, Put, Remove, Seek
from msgbus.journal.ports import Claim, Journal
from msgbus.journal.records import Kind, Member, Order, Selection, State
from msgbus.testing.conformance.journal.kit import (
    SHARED,
    TIME,
    JournalSuite,
    append,
    claimed_offsets,
    cursor_of,
    end,
    expected,
    fill,
    join,
    make_record,
    make_row,
    numbers,
    row_of,
)


class DeliveryTests(JournalSuite):
    """No row goes to two members, and no message is passed over."""

    # -- claim -----------------------------------------------------------------------------------

    async def test_rows_that_are_due_are_claimed(self) -> None:
        async with self.both() as (journal, other):
            records = [make_record(number) for number in range(3)]
            await append(journal, *records)
            row = make_row("orders", 2, key="a", partition=3, due=TIME, attempt=2, error="no stock")
            await journal.commit([Put(row)])
            member = await join(journal)

            (claim,) = await journal.claim(member, "orders", 10, TIME)

            assert claim.row == row.moved(
                State.CLAIMED, time=claim.row.time, owner=member.id, attempt=2
            )
            assert claim.record == records[1]._replace(offset=2)
            assert await other.row("orders", 2) == claim.row
            assert await other.claim(await join(other), "orders", 10, TIME) == []

    async def test_the_longest_overdue_rows_are_claimed_first(self) -> None:
        async with self.opened() as journal:
            await fill(journal, 6)
            dues = [TIME + 3, TIME + 1, TIME + 5, TIME + 1, TIME + 2, TIME + 4]
            await journal.commit(
                [Put(make_row("orders", n, due=due)) for n, due in enumerate(dues, 1)]
            )
            member = await join(journal)

            assert await journal.claim(member, "orders", 10, TIME) == []
            first = await journal.claim(member, "orders", 3, TIME + 4)
            assert claimed_offsets(first) == [2, 4, 5]
            assert claimed_offsets(await journal.claim(member, "orders", 3, TIME + 4)) == [1, 6]
            assert claimed_offsets(await journal.claim(member, "orders", 3, TIME + 5)) == [3]

    async def test_only_waiting_rows_of_the_subscription_are_claimed(self) -> None:
        async with self.opened() as journal:
            await fill(journal, 6)
            member = await join(journal)
            rows = [
                make_row("orders", 1, State.CLAIMED, key="a", owner=member.id),
                make_row("orders", 2, State.PARKED, key="a"),
                make_row("orders", 3, State.DEAD),
                make_row("orders", 4, State.DONE),
                make_row("orders", 5, State.KEPT),
                make_row("orders", 6, State.DAMAGED),
                make_row("bills", 1),
            ]
            await journal.commit([Put(row) for row in rows])

            assert await journal.claim(member, "orders", 10, TIME) == []
            assert await journal.claim(member, "nobody", 10, TIME) == []

    async def test_rows_of_some_partitions_are_claimed(self) -> None:
        async with self.opened() as journal:
            await fill(journal, 6)
            await journal.open("orders", Selection(order=Order.KEY, partitions=3), 6)
            await journal.commit([Put(make_row("orders", n, partition=n % 3)) for n in range(1, 7)])
            member = await join(journal)

            assert await journal.claim(member, "orders", 10, TIME, partitions=[]) == []
            some = await journal.claim(member, "orders", 10, TIME, partitions=[0, 2])
            assert claimed_offsets(some) == [2, 3, 5, 6]
            assert claimed_offsets(await journal.claim(member, "orders", 10, TIME)) == [1, 4]

    async def test_rows_that_run_alone_are_claimed_apart_and_counted(self) -> None:
        async with self.both() as (journal, other):
            await fill(journal, 3)
            await journal.commit(
                [
                    Put(make_row("orders", 1, alone=True, attempt=1)),
                    Put(make_row("orders", 2)),
                    Put(make_row("orders", 3, alone=True, due=TIME + 9)),
                ]
            )
            member = await join(journal)

            assert claimed_offsets(await journal.claim(member, "orders", 10, TIME)) == [2]
            (claim,) = await journal.claim(member, "orders", 10, TIME, alone=True)
            assert (claim.row.offset, claim.row.attempt) == (1, 2)
            assert (await row_of(other, "orders", 1)).attempt == 2
            assert await journal.claim(member, "orders", 10, TIME, alone=True) == []

    async def test_an_attempt_alone_stays_counted_when_its_process_ends(self) -> None:
        async with self.both() as (journal, other):
            await fill(journal, 1)
            await journal.commit([Put(make_row("orders", 1, alone=True))])
            for attempt in (1, 2, 3):
                member = await join(journal)
                (claim,) = await journal.claim(member, "orders", 1, TIME, alone=True)
                assert claim.row.attempt == attempt
                await end(other, member)

    # -- claims beyond the cursor ----------------------------------------------------------------

    async def test_new_messages_are_claimed_beyond_the_cursor(self) -> None:
        async with self.both() as (journal, other):
            await fill(journal, 5)
            await journal.open("shared", SHARED, 1)
            member = await join(journal)

            claims = await journal.claim(member, "shared", 3, TIME, selection=SHARED)

            assert claimed_offsets(claims) == [2, 3, 4]
            assert numbers(claim.record for claim in claims) == [1, 2, 3]
            for claim in claims:
                row = make_row("shared", claim.row.offset, State.CLAIMED, owner=member.id)
                assert claim.row == row._replace(time=claim.row.time, version=claim.row.version)
                assert claim.row.version >= 1
                assert await other.row("shared", claim.row.offset) == claim.row
            cursor = await cursor_of(other, "shared")
            assert (cursor.acked, cursor.fetched, cursor.owner) == (4, 4, None)
            rest = await other.claim(await join(other), "shared", 3, TIME, selection=SHARED)
            assert claimed_offsets(rest) == [5]

    async def test_unmatched_messages_are_passed(self) -> None:
        async with self.opened() as journal:
            await append(
                journal,
                *(make_record(n, name=f"name{n % 2}") for n in range(6)),
                make_record(6, name="name1", kind=Kind.CONTROL),
            )
            selection = Selection(
                names=["name1"], matches=lambda record: record.offset != 4, order=Order.NONE
            )
            await journal.open("shared", selection, 0)
            member = await join(journal)

            claims = await journal.claim(member, "shared", 10, TIME, selection=selection)

            assert numbers(claim.record for claim in claims) == [1, 5]
            assert (await cursor_of(journal, "shared")).acked == 7
            assert await journal.count("shared") == {State.CLAIMED: 2}

    async def test_a_message_behind_very_many_unmatched_ones_is_claimed(self) -> None:
        selection = Selection(names=["shop.OrderPlaced"], order=Order.NONE)
        async with self.opened() as journal:
            await fill(journal, 6_000, name="other")
            await append(journal, make_record(7))
            await journal.open("shared", selection, 0)
            member = await join(journal)
            claims: list[Claim] = []

            while (await cursor_of(journal, "shared")).acked < 6_001:
                claims += await journal.claim(member, "shared", 5, TIME, selection=selection)

            assert numbers(claim.record for claim in claims) == [7]

    async def test_a_limit_used_up_by_due_rows_passes_no_message(self) -> None:
        async with self.opened() as journal:
            await fill(journal, 6)
            await journal.open("shared", SHARED, 3)
            await journal.commit([Put(make_row("shared", offset)) for offset in (1, 2, 3)])
            member = await join(journal)

            async def claim(limit: int) -> list[int]:
                found = await journal.claim(member, "shared", limit, TIME, selection=SHARED)
                return claimed_offsets(found)

            assert await claim(2) == [1, 2]
            assert (await cursor_of(journal, "shared")).acked == 3
            assert await claim(2) == [3, 4]
            assert await claim(10) == [5, 6]

    async def test_a_claim_of_rows_alone_takes_no_new_message(self) -> None:
        async with self.opened() as journal:
            await fill(journal, 2)
            await journal.open("shared", SHARED, 1)
            await journal.commit([Put(make_row("shared", 1, alone=True))])
            member = await join(journal)

            alone = await journal.claim(member, "shared", 9, TIME, selection=SHARED, alone=True)
            others = await journal.claim(member, "shared", 9, TIME, selection=SHARED)

            assert (claimed_offsets(alone), claimed_offsets(others)) == ([1], [2])

    async def test_a_message_that_is_kept_is_not_claimed_again(self) -> None:
        async with self.opened() as journal:
            await fill(journal, 4)
            await journal.open("shared", SHARED, 0)
            member = await join(journal)
            for claim in await journal.claim(member, "shared", 2, TIME, selection=SHARED):
                await journal.commit([Put(claim.row.moved(State.KEPT, time=TIME))], member)
            await journal.commit([Seek("shared", 0)])

            claims = await journal.claim(member, "shared", 9, TIME, selection=SHARED)

            assert claimed_offsets(claims) == [3, 4]
            assert await journal.count("shared") == {State.KEPT: 2, State.CLAIMED: 2}

    async def test_a_subscription_that_was_removed_is_not_claimed(self) -> None:
        async with self.both() as (journal, other):
            await fill(journal, 1)
            member = await join(journal)
            await journal.open("shared", SHARED, 0)
            await other.commit([Remove("shared")])

            with expected(StaleError):
                await journal.claim(member, "shared", 1, TIME, selection=SHARED)

            assert await other.count() == {}

    async def test_no_row_goes_to_two_members(self) -> None:
        async with self.both() as (journal, other):
            await fill(journal, 150)
            await journal.open("shared", SHARED, 100)
            await journal.commit(
                [Put(make_row("shared", n, alone=n % 10 == 0)) for n in range(1, 101)]
            )
            claims: list[Claim] = []

            async def work(one: Journal, member: Member, alone: bool) -> None:
                while found := await one.claim(
                    member, "shared", 7, TIME, selection=SHARED, alone=alone
                ):
                    claims.extend(found)
                    assert {claim.row.owner for claim in found} == {member.id}
                    await one.commit([Drop(found[0].row)], member)

            with anyio.fail_after(30):
                async with anyio.create_task_group() as tasks:
                    for number in range(8):
                        one = (journal, other)[number % 2]
                        tasks.start_soon(work, one, await join(one), number < 2)

            assert Counter(claimed_offsets(claims)) == dict.fromkeys(range(1, 151), 1)
