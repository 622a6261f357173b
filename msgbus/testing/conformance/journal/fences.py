"""Conformance tests: the guards of a cursor, and fences."""

from __future__ import annotations

from msgbus.errors import CursorError, StaleError
from msgbus.journal.operations import Append, Drop, Fence, Operation, Pass, Put
from msgbus.journal.records import State
from msgbus.testing.conformance.journal.kit import (
    EVENTS,
    KEYED,
    SHARED,
    STATES,
    TIME,
    JournalSuite,
    cursor_of,
    end,
    expected,
    fill,
    join,
    make_record,
    make_row,
    numbers,
    read_all,
    take,
)


class FenceTests(JournalSuite):
    """Writes of a former owner are refused."""

    # -- Pass ------------------------------------------------------------------------------------

    async def test_the_owner_moves_its_cursor(self) -> None:
        async with self.both() as (journal, other):
            await fill(journal, 5)
            member = await join(journal)
            cursor = await take(journal, member, "orders", EVENTS)

            for acked, fetched in ((1, 3), (3, 5), (0, 2)):
                move = Pass(cursor, acked, fetched)
                await journal.commit([move], member)

                assert await other.cursors("orders") == [move.after]
                cursor = move.after

    async def test_a_cursor_cannot_pass_the_head(self) -> None:
        async with self.opened() as journal:
            await fill(journal, 2)
            member = await join(journal)
            cursor = await take(journal, member, "orders", EVENTS)

            for acked, fetched in ((0, 3), (3, 3)):
                with expected(CursorError):
                    await journal.commit([Pass(cursor, acked, fetched)], member)
            # One that passes what its own commit appends is not beyond it.
            await journal.commit([Append(make_record(2)), Pass(cursor, 0, 3)], member)

            assert (await cursor_of(journal, "orders")).fetched == 3

    async def test_a_cursor_is_moved_by_what_was_read_before_too(self) -> None:
        async with self.opened() as journal:
            await fill(journal, 5)
            member = await join(journal)
            cursor = await take(journal, member, "orders", EVENTS)
            await journal.commit([Pass(cursor, 1, 3)], member)

            await journal.commit([Pass(cursor, 2, 4)], member)

            assert (await cursor_of(journal, "orders")).acked == 2

    async def test_another_owner_or_epoch_is_refused(self) -> None:
        async with self.both() as (journal, other):
            await fill(journal, 5)
            first, second = await join(journal), await join(other)
            old = await take(journal, first, "orders", EVENTS)
            await end(other, first)
            cursor = await take(other, second, "orders", EVENTS)
            wrong = [
                old,
                old._replace(owner=None),
                cursor._replace(owner=first.id),
                cursor._replace(owner=None),
                cursor._replace(epoch=old.epoch),
                cursor._replace(epoch=cursor.epoch + 1),
                cursor._replace(partition=1),
                cursor._replace(name="nobody"),
            ]
            for one in wrong:
                for acting in (second, None):
                    with expected(StaleError):
                        await other.commit([Pass(one, 5, 5)], acting)

            assert await other.cursors() == [cursor]

    async def test_a_cursor_is_moved_by_commits_of_its_owner_only(self) -> None:
        async with self.both() as (journal, other):
            await fill(journal, 5)
            member, another = await join(journal), await join(other)
            cursor = await take(journal, member, "orders", EVENTS)
            for acting in (None, another):
                with expected(StaleError):
                    await other.commit([Append(make_record()), Pass(cursor, 5, 5)], acting)
                with expected(StaleError):
                    await other.commit([Pass(cursor, 0, 0, release=True)], acting)

            assert await other.cursors() == [cursor]
            assert await other.head() == 5

    async def test_a_cursor_without_an_owner_is_guarded_by_its_position(self) -> None:
        async with self.both() as (journal, other):
            await fill(journal, 5)
            (cursor,) = await journal.open("shared", SHARED, 1)
            (same,) = await other.open("shared", SHARED, 1)
            await journal.commit([Pass(cursor, 3, 3)])

            with expected(StaleError):
                await other.commit([Pass(same, 4, 4)])

            await other.commit([Pass(same._replace(acked=3), 2, 2)])
            assert (await cursor_of(journal, "shared")).acked == 2

    async def test_a_released_partition_is_free(self) -> None:
        async with self.both() as (journal, other):
            await fill(journal, 5)
            member = await join(journal)
            cursor = await take(journal, member, "orders", KEYED)
            await journal.commit([Pass(cursor, 2, 2, release=True)], member)

            assert (await cursor_of(other, "orders")).owner is None
            taken = await take(other, await join(other), "orders", KEYED)

            assert (taken.acked, taken.fetched) == (2, 2)
            with expected(StaleError):
                await journal.commit([Pass(cursor, 4, 4)], member)

    # -- Fence -----------------------------------------------------------------------------------

    async def test_done_rows_are_deleted_as_the_cursor_passes_them(self) -> None:
        async with self.both() as (journal, other):
            await fill(journal, 5)
            member = await join(journal)
            cursor = await take(journal, member, "orders", KEYED)
            rows = [make_row("orders", offset, State.DONE) for offset in (1, 2, 4)]
            others = [
                make_row("bills", 1, State.DONE),
                make_row("orders", 3, State.KEPT),
                make_row("orders", 5, State.DONE, partition=1),
            ]
            await journal.commit([*map(Put, rows + others), Pass(cursor, 1, 5)], member)
            assert await other.find("orders", [State.DONE]) == [*rows[1:], others[2]]

            await journal.commit([Pass(cursor, 5, 5)], member)

            assert await other.find(None, STATES) == others

    # -- Fence -----------------------------------------------------------------------------------

    async def test_a_claimed_delivery_is_fenced_by_its_version(self) -> None:
        async with self.both() as (journal, other):
            await fill(journal, 2)
            await journal.open("shared", SHARED, 0)
            member, second = await join(journal), await join(other)
            (claim,) = await journal.claim(member, "shared", 1, TIME, selection=SHARED)
            waiting = make_row("bills", 1)
            await journal.commit([Put(waiting)])
            fence = Fence("shared", 1, version=claim.row.version)
            await journal.commit([fence, Append(make_record(2))], member)
            refused = [
                (fence, second),
                (fence, None),
                (fence._replace(version=claim.row.version + 1), member),
                (fence._replace(offset=2), member),
                (Fence("bills", 1, version=1), member),
                (Fence("bills", 1, version=1), None),
            ]
            for one, acting in refused:
                with expected(StaleError):
                    await journal.commit([one, Append(make_record(9))], acting)
            await end(other, member)
            for acting in (member, None):
                with expected(StaleError):
                    await journal.commit([fence, Append(make_record(9))], acting)
            (again,) = await other.claim(second, "shared", 1, TIME, alone=True)
            with expected(StaleError):
                await other.commit([fence, Append(make_record(9))], second)
            own = fence._replace(version=again.row.version)
            await other.commit([own, Append(make_record(3))], second)

            assert numbers(await read_all(other)) == [0, 1, 2, 3]

    async def test_a_delivery_of_a_partition_is_fenced_by_its_epoch(self) -> None:
        async with self.both() as (journal, other):
            await fill(journal, 5)
            member, second = await join(journal), await join(other)
            cursor = await take(journal, member, "orders", EVENTS)
            await journal.commit([Put(make_row("orders", 3)), Pass(cursor, 1, 4)], member)
            own = Fence("orders", 2, epoch=cursor.epoch)
            await journal.commit([own, Append(make_record(5))], member)
            refused = [
                (own._replace(offset=1), member),
                (own._replace(offset=3), member),
                (own._replace(epoch=cursor.epoch + 1), member),
                (own._replace(epoch=cursor.epoch - 1), member),
                (own._replace(partition=1), member),
                (own._replace(subscription="nobody"), member),
                (own, second),
                (own, None),
            ]
            for fence, acting in refused:
                with expected(StaleError):
                    await journal.commit([fence, Append(make_record(6))], acting)
            await end(other, member)
            for acting in (member, second, None):
                with expected(StaleError):
                    await journal.commit([own, Append(make_record(7))], acting)
            await take(other, second, "orders", EVENTS)
            with expected(StaleError):
                await other.commit([own, Append(make_record(8))], second)

            assert numbers(await read_all(other))[5:] == [5]

    async def test_an_effect_with_its_acknowledgement_happens_once(self) -> None:
        async with self.opened() as journal:
            await fill(journal, 2)
            await journal.open("shared", SHARED, 0)
            member = await join(journal)
            cursor = await take(journal, member, "orders", EVENTS)
            await journal.commit([Pass(cursor, 0, 2)], member)
            (claim,) = await journal.claim(member, "shared", 1, TIME, selection=SHARED)
            effects: list[list[Operation]] = [
                [
                    Fence("orders", 1, epoch=cursor.epoch),
                    Put(make_row("orders", 1, State.DONE)),
                ],
                [Fence("shared", 1, version=claim.row.version), Drop(claim.row)],
            ]
            for number, effect in enumerate(effects, 2):
                await journal.commit([*effect, Append(make_record(number))], member)
                for refused in (effect, effect[:1], effect[1:]):
                    with expected(StaleError):
                        await journal.commit([*refused, Append(make_record(9))], member)

            assert numbers(await read_all(journal)) == [0, 1, 2, 3]
