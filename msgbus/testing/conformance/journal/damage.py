"""Conformance tests of engines whose messages can be lost or damaged: the others go on."""

from __future__ import annotations

from abc import abstractmethod

from msgbus.journal.operations import Pass, Put
from msgbus.journal.ports import Journal
from msgbus.journal.records import State
from msgbus.testing.conformance.journal.kit import (
    EVENTS,
    KEYED,
    SHARED,
    TIME,
    JournalSuite,
    claimed_offsets,
    cursor_of,
    end,
    fill,
    fill_keys,
    join,
    make_row,
    numbers,
    row_of,
    take,
)


class ErasedConformance(JournalSuite):
    """A message that is no longer in the log stops nothing."""

    @abstractmethod
    async def erase(self, journal: Journal, offset: int) -> None:
        """Delete a message from the log, but not the last one, as retention does."""

    async def test_reading_goes_on_behind_an_absent_message(self) -> None:
        async with self.opened() as journal:
            await fill(journal, 5)
            for offset in (2, 4):
                await self.erase(journal, offset)

            scan = await journal.read(0, 9, EVENTS)

            assert numbers(scan.records) == [0, 2, 4]
            assert len(scan.records) == 3
            assert await journal.head() == 5
            assert await fill(journal, 1) == [6]

    async def test_a_partition_is_acquired_though_messages_are_absent(self) -> None:
        async with self.both() as (journal, other):
            await fill_keys(journal, ["a", "a", "b", "a"])
            member = await join(journal)
            cursor = await take(journal, member, "orders", KEYED)
            await journal.commit([Pass(cursor, 0, 4)], member)
            for offset in (1, 3):
                await self.erase(journal, offset)
            await end(other, member)

            taken = await take(other, await join(other), "orders", KEYED)

            assert taken.acked == 4
            assert (await row_of(other, "orders", 2)).state is State.WAITING
            assert (await row_of(other, "orders", 4)).state is State.PARKED

    async def test_messages_behind_an_absent_one_are_claimed(self) -> None:
        async with self.opened() as journal:
            await fill(journal, 4)
            await journal.open("shared", SHARED, 0)
            await self.erase(journal, 2)

            claims = await journal.claim(await join(journal), "shared", 9, TIME, selection=SHARED)

            assert claimed_offsets(claims) == [1, 3, 4]
            assert (await cursor_of(journal, "shared")).acked == 4


class DamageConformance(JournalSuite):
    """A damaged message stops nothing but itself."""

    @abstractmethod
    async def damage(self, journal: Journal, offset: int) -> None:
        """Change the payload of a stored message, as a fault of the disk would."""

    async def test_a_damaged_message_is_read_as_its_offset(self) -> None:
        async with self.opened() as journal:
            await fill(journal, 3)
            await self.damage(journal, 2)

            scan = await journal.read(0, 9, EVENTS)

            assert numbers(scan.records) == [0, 2]
            assert scan.records[1] == 2
            assert scan.upto == 3

    async def test_a_partition_is_acquired_though_messages_are_damaged(self) -> None:
        async with self.both() as (journal, other):
            await fill_keys(journal, ["a", "b", "a"])
            member = await join(journal)
            cursor = await take(journal, member, "orders", KEYED)
            await journal.commit([Pass(cursor, 0, 3)], member)
            await self.damage(journal, 2)
            await end(other, member)

            taken = await take(other, await join(other), "orders", KEYED)

            assert taken.acked == 3
            assert (await row_of(other, "orders", 1)).state is State.WAITING
            assert (await row_of(other, "orders", 3)).state is State.PARKED

    async def test_messages_behind_a_damaged_one_are_claimed(self) -> None:
        async with self.opened() as journal:
            await fill(journal, 3)
            await journal.open("shared", SHARED, 0)
            await self.damage(journal, 2)

            claims = await journal.claim(await join(journal), "shared", 9, TIME, selection=SHARED)

            assert claimed_offsets(claims) == [1, 3]

    async def test_rows_beside_one_with_a_damaged_message_are_claimed(self) -> None:
        async with self.opened() as journal:
            await fill(journal, 3)
            await journal.commit([Put(make_row("orders", offset)) for offset in (1, 2, 3)])
            await self.damage(journal, 1)

            claims = await journal.claim(await join(journal), "orders", 9, TIME)

            assert claimed_offsets(claims) == [2, 3]
            assert (await row_of(journal, "orders", 1)).state is not State.CLAIMED

    async def test_the_message_of_a_row_that_is_damaged_is_not_given(self) -> None:
        async with self.opened() as journal:
            await fill(journal, 2)
            row = make_row("orders", 1, State.DEAD)
            await journal.commit([Put(row)])
            await self.damage(journal, 1)

            assert await journal.record(row) is None
