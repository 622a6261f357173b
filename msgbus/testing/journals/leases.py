"""Leases and the fence around what their holders write."""

from __future__ import annotations

import anyio

from msgbus.errors import (
    LeaseLostError,
)
from msgbus.journal import operations as op
from msgbus.runtime.clock import VirtualClock
from msgbus.testing.conformance.journals.kit import Suite, expected, make_record, numbers, read_all


class LeaseTests(Suite):
    """One holder at a time."""

    # -- leases ----------------------------------------------------------------------------------

    async def test_a_free_lease_is_taken_and_asking_again_changes_nothing(self) -> None:
        async with self.opened() as journal:
            assert await journal.lease("receipts") is None

            lease = await journal.acquire("receipts", "a")

            assert lease.holder == "a"
            assert await journal.acquire("receipts", "a") == lease
            assert await journal.lease("receipts") == lease

    async def test_a_lease_that_another_holds_is_not_taken(self) -> None:
        async with self.opened() as journal:
            lease = await journal.acquire("receipts", "a")

            assert await journal.acquire("receipts", "b") == lease

    async def test_a_released_lease_goes_to_the_next_with_a_higher_epoch(self) -> None:
        async with self.opened() as journal:
            first = await journal.acquire("receipts", "a")
            await journal.release(first)
            second = await journal.acquire("receipts", "b")

            assert second.holder == "b"
            assert second.epoch > first.epoch
            await journal.release(first)
            assert await journal.lease("receipts") == second

    async def test_a_lease_is_taken_over_only_if_it_was_not_renewed(self) -> None:
        async with self.opened() as journal:
            seen = await journal.acquire("receipts", "a")
            renewed = await journal.renew(seen)

            assert renewed.renewals > seen.renewals
            assert (await journal.acquire("receipts", "b", seen=seen)).holder == "a"
            taken = await journal.acquire("receipts", "b", seen=renewed)
            assert taken.holder == "b"
            assert taken.epoch > seen.epoch

    async def test_an_old_holder_cannot_renew(self) -> None:
        async with self.opened() as journal:
            old = await journal.acquire("receipts", "a")
            await journal.acquire("receipts", "b", seen=old)

            with expected(LeaseLostError):
                await journal.renew(old)

    async def test_what_an_old_holder_writes_is_refused(self) -> None:
        async with self.opened() as journal:
            (ack,) = await journal.append([make_record(0)])
            old = await journal.acquire("receipts", "a")
            await journal.commit([op.CreateCursor("receipts", 0, old.epoch)])
            new = await journal.acquire("receipts", "b", seen=old)

            stale: list[op.Operation] = [
                op.MoveCursor("receipts", ack.offset, old.epoch),
                op.MoveCursor("receipts", ack.offset),
                op.SeekCursor("receipts", ack.offset, old.epoch),
                op.OpenWindow("receipts", ack.offset, old.epoch),
                op.CountAttempts("receipts", [ack.offset], old.epoch),
                op.DropCursor("receipts", old.epoch),
                op.Fence("receipts", old.epoch),
            ]
            for operation in stale:
                with expected(LeaseLostError):
                    await journal.commit([op.Append(make_record(1)), operation])

            cursor = await journal.cursor("receipts")
            assert cursor is not None
            assert (cursor.offset, cursor.is_clean) == (0, True)
            assert numbers(await read_all(journal)) == [0]
            await journal.commit([op.MoveCursor("receipts", ack.offset, new.epoch)])

    async def test_a_released_lease_protects_nothing(self) -> None:
        async with self.opened() as journal:
            lease = await journal.acquire("receipts", "a")
            await journal.commit([op.CreateCursor("receipts", 0, lease.epoch)])
            await journal.release(lease)

            with expected(LeaseLostError):
                await journal.commit([op.MoveCursor("receipts", 0, lease.epoch)])
            await journal.commit([op.MoveCursor("receipts", 0)])

    async def test_a_kept_lease_renews_itself(self) -> None:
        clock = VirtualClock()
        async with self.opened(clock) as journal:
            lease = await journal.acquire("receipts", "a")
            await journal.keep(lease, 0.01)

            renewals = 0
            while renewals < 4:
                # Journals with a thread of their own renew by the system's clock.
                await clock.advance(0.01)
                now = await journal.lease("receipts")
                assert now is not None
                renewals = now.renewals
            await journal.release(lease)

    async def test_the_holder_of_a_kept_lease_is_told_when_it_is_lost(self) -> None:
        clock = VirtualClock()
        lost = anyio.Event()
        async with self.opened(clock) as journal:
            lease = await journal.acquire("receipts", "a")
            await journal.keep(lease, 0.01, on_lost=lost.set)
            taken = lease
            while taken.holder == "a":
                seen = await journal.lease("receipts")
                taken = await journal.acquire("receipts", "b", seen=seen)
            while not lost.is_set():
                await clock.advance(0.01)
                await journal.head()

            assert (await journal.lease("receipts")) == taken
