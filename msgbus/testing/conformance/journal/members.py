"""Conformance tests: members, their renewals and their end, and the cursors they open."""

from __future__ import annotations

import anyio

from msgbus.errors import ConfigurationError, StaleError
from msgbus.journal.operations import Append, Drop, Pass, Put
from msgbus.journal.records import Member, Order, Selection, State
from msgbus.testing.conformance.journal.kit import (
    EVENTS,
    SHARED,
    JournalSuite,
    cursor_of,
    end,
    expected,
    fill,
    join,
    make_record,
    make_row,
    row_of,
    take,
    until,
)


class MemberTests(JournalSuite):
    """Partitions and claims belong to a process as long as its member exists."""

    # -- join, renew, end ------------------------------------------------------------------------

    async def test_a_member_is_seen_by_all_processes(self) -> None:
        async with self.both() as (journal, other):
            first = await journal.join("boot/1/17", {"orders": "v1", "größe": ""})
            second = await other.join("boot/1/18", {})

            assert (first.process, first.serves) == ("boot/1/17", {"orders": "v1", "größe": ""})
            assert first.id < second.id
            for one in (journal, other):
                assert await one.members() == [first, second]

    async def test_ids_of_members_are_never_used_again(self) -> None:
        async with self.both() as (journal, other):
            ids: list[int] = []
            for number in range(6):
                member = await join((journal, other)[number % 2])
                ids.append(member.id)
                await end(journal, member)

            assert ids == sorted(set(ids))
            assert ids[0] > 0
            assert await other.members() == []

    async def test_a_renewal_is_seen_by_all_processes(self) -> None:
        async with self.both() as (journal, other):
            member = await join(journal)

            renewed = await journal.renew(member)

            assert renewed.renewals > member.renewals
            assert await other.members() == [renewed]
            assert (await journal.renew(renewed)).renewals > renewed.renewals

    async def test_a_renewal_writes_what_the_member_serves_now(self) -> None:
        async with self.both() as (journal, other):
            member = await join(journal, orders="v1")

            await journal.renew(member._replace(serves={"orders": "v2", "bills": "v1"}))

            (found,) = await other.members()
            assert found.serves == {"orders": "v2", "bills": "v1"}

    async def test_a_member_is_ended_once(self) -> None:
        async with self.both() as (journal, other):
            member = await join(journal)

            assert await other.end(member)
            assert not await other.end(member)
            assert not await journal.end(member)
            assert await journal.members() == []

    async def test_a_renewed_member_is_not_ended(self) -> None:
        async with self.both() as (journal, other):
            member = await join(journal)
            renewed = await journal.renew(member)

            assert not await other.end(member)
            await journal.commit([Append(make_record())], member)
            assert await other.end(renewed)

    async def test_of_many_that_end_a_member_one_does(self) -> None:
        async with self.both() as (journal, other):
            member = await join(journal)
            ended: list[bool] = []

            async def try_it(number: int) -> None:
                ended.append(await (journal, other)[number % 2].end(member))

            async with anyio.create_task_group() as tasks:
                for number in range(8):
                    tasks.start_soon(try_it, number)

            assert sorted(ended) == [False] * 7 + [True]

    async def test_a_member_that_never_was_is_refused(self) -> None:
        async with self.opened() as journal:
            nobody = Member(0, "process", {}, 0)
            await fill(journal, 1)
            await journal.open("orders", SHARED, 0)

            with expected(StaleError):
                await journal.renew(nobody)
            with expected(StaleError):
                await journal.commit([Append(make_record())], nobody)
            with expected(StaleError):
                await journal.claim(nobody, "orders", 1, 0.0, selection=SHARED)
            with expected(StaleError):
                await journal.acquire(nobody, "orders", 0, SHARED)
            assert not await journal.end(nobody)
            assert await journal.head() == 1

    async def test_renewals_go_on_by_themselves(self) -> None:
        async with self.both() as (journal, other):
            member = await journal.join("process", {}, every=0.01)

            with anyio.fail_after(10):
                while (await other.members())[0].renewals <= member.renewals + 1:
                    pass

            assert not await other.end(member)

    async def test_renewals_do_not_go_back_when_the_process_closes_its_journal(self) -> None:
        async with self.both() as (journal, other):
            early = await journal.join("process", {}, every=0.01)
            seen = early
            with anyio.fail_after(10):
                while seen.renewals <= early.renewals:
                    (seen,) = await other.members()

            await journal.close()

            assert all(one.renewals >= seen.renewals for one in await other.members())
            assert not await other.end(early)

    async def test_renewals_by_hand_and_by_themselves_never_go_back(self) -> None:
        async with self.both() as (journal, other):
            member = await journal.join("process", {}, every=0.01)
            seen = [member.renewals]
            with anyio.fail_after(10):
                while seen[-1] <= member.renewals + 3:
                    seen.append((await journal.renew(member)).renewals)
                    seen += [one.renewals for one in await other.members()]

            assert seen == sorted(seen)

    # -- on_lost ---------------------------------------------------------------------------------

    async def test_a_lost_member_is_told_once_by_a_commit_or_a_renewal(self) -> None:
        async with self.both() as (journal, other):
            lost: list[str] = []
            first = await journal.join("a", {}, on_lost=lambda: lost.append("a"))
            second = await journal.join("b", {}, on_lost=lambda: lost.append("b"))
            await journal.join("c", {}, on_lost=lambda: lost.append("c"))
            await other.join("d", {}, on_lost=lambda: lost.append("d"))
            await journal.commit([Append(make_record())], first)
            await end(other, first)
            await end(other, second)
            assert lost == []

            for _ in range(2):
                with expected(StaleError):
                    await journal.commit([Append(make_record())], first)
                await until(lambda: lost)
                with expected(StaleError):
                    await journal.renew(second)
                await until(lambda: len(lost) > 1)
            with expected(StaleError):
                await journal.renew(first)
            await journal.members()

            assert lost == ["a", "b"]
            assert len(await other.members()) == 2

    async def test_a_member_that_ends_itself_is_not_lost(self) -> None:
        async with self.opened() as journal:
            lost: list[int] = []
            member = await journal.join("a", {}, on_lost=lambda: lost.append(1))
            journal.attach([], member)

            assert await journal.end(member)
            assert not await journal.end(member)
            await fill(journal, 1)
            with expected(StaleError):
                await journal.commit([Append(make_record())], member)
            with expected(StaleError):
                await journal.renew(member)
            await journal.members()

            assert lost == []
            assert await journal.head() == 1

    # -- open ------------------------------------------------------------------------------------

    async def test_a_subscription_does_not_begin_beyond_the_head(self) -> None:
        async with self.both() as (journal, other):
            await fill(journal, 2)

            (cursor,) = await journal.open("orders", EVENTS, 9)
            await fill(journal, 1)
            (again,) = await other.open("orders", EVENTS, 9)

            assert (cursor.acked, cursor.fetched) == (2, 2)
            assert again == cursor

    async def test_a_new_subscription_begins_at_its_start(self) -> None:
        async with self.both() as (journal, other):
            await fill(journal, 3)

            cursors = await journal.open("orders", Selection(partitions=3, text="v1"), 2)

            assert [cursor.partition for cursor in cursors] == [0, 1, 2]
            assert {cursor[:1] + cursor[2:] for cursor in cursors} == {
                ("orders", 2, 2, None, cursors[0].epoch, "v1")
            }
            assert await other.cursors("orders") == cursors

    async def test_existing_cursors_are_kept(self) -> None:
        async with self.both() as (journal, other):
            await fill(journal, 3)
            member = await join(journal)
            cursor = await take(journal, member, "orders", EVENTS)
            await journal.commit([Pass(cursor, 1, 2)], member)

            (found,) = await other.open("orders", EVENTS, 3)

            assert (found.acked, found.fetched, found.owner) == (1, 2, member.id)
            assert found.epoch == cursor.epoch

    async def test_another_number_of_partitions_is_refused(self) -> None:
        async with self.both() as (journal, other):
            before = await journal.open("orders", Selection(partitions=3), 0)
            for count in (1, 2, 4):
                with expected(ConfigurationError):
                    await other.open("orders", Selection(partitions=count), 0)

            assert await journal.cursors() == before

    async def test_cursors_come_by_name_and_partition(self) -> None:
        async with self.opened() as journal:
            await journal.open("b", Selection(partitions=2), 0)
            await journal.open("a", Selection(partitions=11), 0)

            found = [(cursor.name, cursor.partition) for cursor in await journal.cursors()]

            assert found == [*(("a", n) for n in range(11)), ("b", 0), ("b", 1)]
            assert [one.partition for one in await journal.cursors("b")] == [0, 1]
            assert await journal.cursors("c") == []

    async def test_a_selection_is_kept_while_a_member_serves_it(self) -> None:
        old, new = Selection(text="v1"), Selection(text="v2")
        async with self.both() as (journal, other):
            first = await join(journal, orders="v1")
            second = await join(journal, orders="v1")
            await join(other, orders="v2", bills="v1")
            await journal.open("orders", old, 0)

            for leaving in (first, second):
                (cursor,) = await other.open("orders", new, 0)
                assert cursor.selection == "v1"
                assert (await cursor_of(journal, "orders")).selection == "v1"
                await end(other, leaving)

            (cursor,) = await other.open("orders", new, 0)
            assert cursor.selection == "v2"
            assert (await cursor_of(journal, "orders")).selection == "v2"
            (back,) = await journal.open("orders", old, 0)
            assert back.selection == "v2"

    async def test_a_selection_is_replaced_when_its_members_serve_another(self) -> None:
        async with self.both() as (journal, other):
            member = await join(journal, orders="v1")
            await journal.open("orders", Selection(text="v1"), 0)
            await journal.renew(member._replace(serves={"orders": "v2"}))

            (cursor,) = await other.open("orders", Selection(text="v3"), 0)

            assert cursor.selection == "v3"

    async def test_a_moved_cursor_keeps_the_stored_selection(self) -> None:
        async with self.both() as (journal, other):
            await fill(journal, 2)
            member = await join(journal)
            cursor = await take(journal, member, "orders", Selection(text="v1"))
            await other.open("orders", Selection(text="v2"), 0)

            await journal.commit([Pass(cursor, 1, 2)], member)

            assert (await cursor_of(other, "orders")).selection == "v2"

    # -- what an ended member owned --------------------------------------------------------------

    async def test_an_ended_member_owns_nothing(self) -> None:
        keyed = Selection(order=Order.KEY, partitions=4)
        async with self.both() as (journal, other):
            await fill(journal, 6)
            gone, alive = await join(journal), await join(other)
            for partition in range(4):
                owner = (gone, alive)[partition % 2]
                await take(journal, owner, "keyed", keyed, partition)
            await journal.open("shared", SHARED, 1)
            await journal.commit([Put(make_row("shared", 1, attempt=3, error="no stock"))])
            claims = await journal.claim(gone, "shared", 3, 0.0, selection=SHARED)
            kept = await other.claim(alive, "shared", 3, 0.0, selection=SHARED)
            assert [len(claims), len(kept)] == [3, 3]

            await end(other, gone)

            owners = [cursor.owner for cursor in await other.cursors("keyed")]
            assert owners == [None, alive.id, None, alive.id]
            for claim in claims:
                row = await row_of(other, "shared", claim.row.offset)
                assert row.state is State.WAITING
                assert (row.owner, row.attempt, row.alone) == (None, claim.row.attempt, True)
                assert row.error == claim.row.error
                assert row.due is not None
                assert row.version > claim.row.version
            for claim in kept:
                assert await other.row("shared", claim.row.offset) == claim.row

    async def test_what_an_ended_member_writes_is_refused(self) -> None:
        async with self.both() as (journal, other):
            await fill(journal, 4)
            member = await join(journal)
            cursor = await take(journal, member, "orders", EVENTS)
            await journal.open("shared", SHARED, 0)
            (claim,) = await journal.claim(member, "shared", 1, 0.0, selection=SHARED)
            await end(other, member)

            for acting in (member, None):
                with expected(StaleError):
                    await journal.commit([Pass(cursor, 1, 1)], acting)
                with expected(StaleError):
                    await journal.commit([Put(claim.row.moved(State.DONE, time=0.0))], acting)
                with expected(StaleError):
                    await journal.commit([Drop(claim.row)], acting)
            with expected(StaleError):
                await journal.acquire(member, "orders", 0, EVENTS)
            with expected(StaleError):
                await journal.claim(member, "shared", 1, 0.0, selection=SHARED)
            assert (await cursor_of(other, "orders")).acked == 0
            assert (await cursor_of(other, "shared")).acked == 1
