"""Conformance tests: a subscription is put elsewhere in the log, or removed."""

from __future__ import annotations

from msgbus.errors import StaleError
from msgbus.journal.operations import Append, Drop, Fence, Pass, Put, Remove, Reply, Seek
from msgbus.journal.ports import Claim
from msgbus.journal.records import Order, Selection, State
from msgbus.testing.conformance.journal.kit import (
    EVENTS,
    LETTER,
    SHARED,
    STATES,
    TIME,
    JournalSuite,
    claimed_offsets,
    cursor_of,
    expected,
    fill,
    join,
    make_record,
    make_row,
    read_all,
    row_of,
    take,
)


class SeekTests(JournalSuite):
    """After `Seek` and `Remove`, nothing of before gets through."""

    async def test_all_cursors_are_put_to_the_offset(self) -> None:
        selection = Selection(order=Order.KEY, partitions=3, text="v1")
        async with self.both() as (journal, other):
            await fill(journal, 6)
            member = await join(journal)
            cursor = await take(journal, member, "orders", selection, 1)
            await journal.commit([Pass(cursor, 2, 5)], member)
            await journal.open("bills", EVENTS, 4)
            for offset, found_at in ((1, 1), (9, 6), (6, 6), (0, 0)):
                before = await other.cursors("orders")

                await other.commit([Seek("orders", offset)])

                found = await journal.cursors("orders")
                assert [one[1:5] for one in found] == [
                    (n, found_at, found_at, None) for n in range(3)
                ]
                assert {one.selection for one in found} == {"v1"}
                assert all(new.epoch > old.epoch for new, old in zip(found, before, strict=True))
            assert (await cursor_of(other, "bills")).acked == 4

    async def test_rows_beyond_the_offset_are_deleted_apart_from_kept_ones(self) -> None:
        async with self.opened() as journal:
            await fill(journal, 8)
            await journal.open("orders", SHARED, 8)
            member = await join(journal)
            rows = [
                make_row("orders", 1, State.DEAD),
                make_row("orders", 2, key="a"),
                make_row("orders", 3, State.KEPT),
                make_row("orders", 4, State.KEPT),
                make_row("orders", 5, State.DEAD),
                make_row("orders", 6, State.DONE),
                make_row("orders", 7, State.PARKED, key="a"),
                make_row("orders", 8, State.CLAIMED, owner=member.id),
            ]
            letters = {1: LETTER, 5: LETTER}
            await journal.commit([Put(row, letters.get(row.offset)) for row in rows])
            await journal.commit([Put(make_row("bills", 8))])

            await journal.commit([Seek("orders", 3)])

            assert await journal.find("orders", STATES) == rows[:4]
            assert await journal.letter(rows[0]) == LETTER
            assert await journal.letter(rows[4]) is None
            assert await journal.count("bills") == {State.WAITING: 1}

    async def test_a_seek_forward_deletes_the_done_rows_that_it_passes(self) -> None:
        selection = Selection(order=Order.KEY, partitions=2)
        async with self.both() as (journal, other):
            await fill(journal, 6)
            await journal.open("orders", selection, 0)
            rows = [
                make_row("orders", 1, State.DONE),
                make_row("orders", 2, State.DEAD, partition=1),
                make_row("orders", 3, State.DONE, partition=1),
                make_row("orders", 4, State.KEPT),
                make_row("orders", 5, State.DONE),
                make_row("bills", 1, State.DONE),
            ]
            await journal.commit([Put(row) for row in rows])

            await other.commit([Seek("orders", 4)])

            assert await journal.find("orders", STATES) == [rows[1], rows[3]]
            assert await journal.find("bills", STATES) == [rows[5]]

    async def test_a_former_owner_is_refused_after_a_seek(self) -> None:
        async with self.both() as (journal, other):
            await fill(journal, 5)
            member = await join(journal)
            cursor = await take(journal, member, "orders", EVENTS)
            await journal.commit([Pass(cursor, 1, 3)], member)

            await other.commit([Seek("orders", 0)])

            with expected(StaleError):
                await journal.commit([Pass(cursor, 3, 3)], member)
            with expected(StaleError):
                fence = Fence("orders", 2, epoch=cursor.epoch)
                await journal.commit([fence, Append(make_record())], member)
            again = await journal.acquire(member, "orders", 0, EVENTS)
            assert again is not None
            assert (again.acked, again.fetched) == (0, 0)
            assert again.epoch > cursor.epoch
            with expected(StaleError):
                await journal.commit([Pass(cursor, 3, 3)], member)
            assert await journal.count("orders") == {}

    async def test_a_former_claim_is_refused_when_another_has_claimed_it_anew(self) -> None:
        async with self.both() as (journal, other):
            await fill(journal, 2)
            await journal.open("shared", SHARED, 0)
            member = await join(journal)
            (old,) = await journal.claim(member, "shared", 1, TIME, selection=SHARED)
            await other.commit([Seek("shared", 0)])
            for change in (Drop(old.row), Put(old.row.moved(State.DONE, time=TIME))):
                with expected(StaleError):
                    await journal.commit([change], member)
            (new,) = await other.claim(await join(other), "shared", 1, TIME, selection=SHARED)

            with expected(StaleError):
                fence = Fence("shared", 1, version=old.row.version)
                await journal.commit([fence, Append(make_record())], member)
            with expected(StaleError):
                await journal.commit([Drop(old.row)], member)
            with expected(StaleError):
                await journal.commit([Put(old.row.moved(State.DONE, time=TIME))], member)

            assert await other.row("shared", 1) == new.row

    async def test_a_former_claim_is_refused_when_its_row_was_made_anew(self) -> None:
        async with self.both() as (journal, other):
            await fill(journal, 2)
            claims: list[Claim] = []
            members = [await join(journal), await join(other)]
            for one, member in zip((journal, other), members, strict=True):
                cursor = await take(one, member, "orders", EVENTS)
                await one.commit([Put(make_row("orders", 1, key="")), Pass(cursor, 1, 1)], member)
                claims += await one.claim(member, "orders", 1, TIME, partitions=[0])
                if one is journal:
                    await other.commit([Seek("orders", 0)])

            with expected(StaleError):
                await journal.commit([Drop(claims[0].row)], members[0])
            with expected(StaleError):
                retry = claims[0].row.moved(State.WAITING, time=TIME, due=TIME, attempt=1)
                await journal.commit([Put(retry)], members[0])

            assert await other.row("orders", 1) == claims[1].row

    async def test_messages_are_claimed_again_after_a_seek(self) -> None:
        async with self.opened() as journal:
            await fill(journal, 4)
            await journal.open("shared", SHARED, 0)
            member = await join(journal)
            for claim in await journal.claim(member, "shared", 9, TIME, selection=SHARED):
                await journal.commit([Drop(claim.row)], member)

            await journal.commit([Seek("shared", 2)])

            again = await journal.claim(member, "shared", 9, TIME, selection=SHARED)
            assert claimed_offsets(again) == [3, 4]

    async def test_a_subscription_that_does_not_exist_is_not_made_by_a_seek(self) -> None:
        async with self.opened() as journal:
            await journal.commit([Seek("orders", 0)])

            assert await journal.cursors() == []

    # -- Remove ----------------------------------------------------------------------------------

    async def test_a_removed_subscription_leaves_nothing(self) -> None:
        async with self.both() as (journal, other):
            await fill(journal, 3)
            member = await join(journal)
            cursor = await take(journal, member, "orders", Selection(partitions=2))
            await journal.open("bills", EVENTS, 1)
            dead = make_row("orders", 1, State.DEAD)
            await journal.commit(
                [
                    Put(dead, LETTER),
                    Put(make_row("orders", 2, State.DONE)),
                    Put(make_row("bills", 1, State.DEAD), LETTER),
                    Reply("id", TIME, b"{}"),
                ]
            )

            await other.commit([Remove("orders")])

            assert [one.name for one in await journal.cursors()] == ["bills"]
            assert [row.subscription for row in await journal.find(None, STATES)] == ["bills"]
            assert await journal.letter(dead) is None
            assert await journal.letter(await row_of(journal, "bills", 1)) == LETTER
            assert len(await read_all(journal)) == 3
            assert await journal.result("id") is not None
            with expected(StaleError):
                await journal.commit([Pass(cursor, 1, 1)], member)
            with expected(StaleError):
                await journal.commit([Drop(dead)], member)

    async def test_a_removed_subscription_has_nothing_to_claim_in_any_form(self) -> None:
        async with self.both() as (journal, other):
            await fill(journal, 3)
            member = await join(journal)
            await journal.open("shared", SHARED, 0)
            await other.commit([Remove("shared")])

            for alone in (False, True):
                with expected(StaleError):
                    await journal.claim(member, "shared", 1, TIME, selection=SHARED, alone=alone)
                with expected(StaleError):
                    await journal.claim(member, "shared", 1, TIME, partitions=[0], alone=alone)
                # A queue exists by its rows only.
                assert await journal.claim(member, "queue", 1, TIME, alone=alone) == []

    async def test_a_removed_subscription_may_be_made_anew(self) -> None:
        async with self.opened() as journal:
            await fill(journal, 3)
            await journal.open("orders", Selection(partitions=2), 0)
            await journal.commit([Remove("orders")])

            (cursor,) = await journal.open("orders", Selection(text="v2"), 2)

            assert (cursor.acked, cursor.fetched, cursor.selection) == (2, 2, "v2")
            assert await journal.acquire(await join(journal), "orders", 0, EVENTS) is not None

    async def test_removing_what_is_not_there_changes_nothing(self) -> None:
        async with self.opened() as journal:
            await journal.commit([Remove("orders"), Append(make_record())])

            assert await journal.head() == 1
