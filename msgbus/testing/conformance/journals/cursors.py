"""Conformance tests: cursors, windows, attempts, commits of several operations, and leases."""

from __future__ import annotations

from typing import Any

import anyio

from msgbus.errors import (
    CursorError,
    LeaseLostError,
)
from msgbus.journal import operations as op
from msgbus.journal.records import (
    DeadLetter,
    DeliveryRecord,
    Outcome,
    Scheduled,
)
from msgbus.runtime.clock import VirtualClock
from msgbus.testing.conformance.journals.kit import (
    TIME,
    Suite,
    expected,
    make_record,
    numbers,
    read_all,
)


class CursorTests(Suite):
    """A cursor is exact, and what belongs together is written together."""

    # -- cursors ---------------------------------------------------------------------------------

    async def test_a_subscription_that_never_began_has_no_cursor(self) -> None:
        async with self.opened() as journal:
            assert await journal.cursor("receipts") is None
            assert await journal.cursors() == []

    async def test_creating_a_cursor_keeps_one_that_is_there(self) -> None:
        async with self.opened() as journal:
            acks = await journal.append([make_record(n) for n in range(3)])
            await journal.commit([op.CreateCursor("receipts", acks[1].offset)])
            await journal.commit([op.CreateCursor("receipts", acks[2].offset)])

            cursor = await journal.cursor("receipts")

            assert cursor is not None
            assert (cursor.offset, cursor.is_clean) == (acks[1].offset, True)
            assert await journal.cursors() == [cursor]

    async def test_a_cursor_moves_forward_and_never_back(self) -> None:
        async with self.opened() as journal:
            acks = await journal.append([make_record(n) for n in range(3)])
            await journal.commit([op.CreateCursor("receipts", 0)])
            for ack in (acks[1], acks[0]):
                await journal.commit([op.MoveCursor("receipts", ack.offset)])

            cursor = await journal.cursor("receipts")

            assert cursor is not None
            assert cursor.offset == acks[1].offset

    async def test_a_cursor_seeks_back_if_asked_to(self) -> None:
        async with self.opened() as journal:
            acks = await journal.append([make_record(n) for n in range(3)])
            await journal.commit([op.CreateCursor("receipts", acks[2].offset)])
            await journal.commit([op.SeekCursor("receipts", acks[0].offset)])

            cursor = await journal.cursor("receipts")

            assert cursor is not None
            assert cursor.offset == acks[0].offset

    async def test_a_cursor_that_does_not_exist_cannot_be_moved(self) -> None:
        async with self.opened() as journal:
            with expected(CursorError):
                await journal.commit([op.MoveCursor("receipts", 0)])

            assert await journal.cursor("receipts") is None

    async def test_a_cursor_cannot_pass_the_head(self) -> None:
        async with self.opened() as journal:
            (ack,) = await journal.append([make_record()])
            await journal.commit([op.CreateCursor("receipts", 0)])

            with expected(CursorError):
                await journal.commit([op.MoveCursor("receipts", ack.offset + 1)])

    async def test_a_dropped_cursor_is_forgotten(self) -> None:
        async with self.opened() as journal:
            await journal.commit([op.CreateCursor("receipts", 0)])
            await journal.commit([op.CountAttempts("receipts", [1])])
            await journal.commit([op.DropCursor("receipts")])

            assert await journal.cursor("receipts") is None
            assert await journal.attempts("receipts") == {}

    async def test_an_open_window_is_seen_until_it_is_passed_or_closed(self) -> None:
        async with self.opened() as journal:
            acks = await journal.append([make_record(n) for n in range(6)])
            offsets = [ack.offset for ack in acks]
            await journal.commit([op.CreateCursor("receipts", 0)])
            steps: list[tuple[op.Operation, bool]] = [
                (op.OpenWindow("receipts", offsets[3]), False),
                (op.MoveCursor("receipts", offsets[1]), False),
                (op.MoveCursor("receipts", offsets[3]), True),
                (op.OpenWindow("receipts", offsets[5]), False),
                (op.MoveCursor("receipts", offsets[4], close=True), True),
            ]
            for step, is_clean in steps:
                await journal.commit([step])
                cursor = await journal.cursor("receipts")

                assert cursor is not None
                assert cursor.is_clean is is_clean, step

    async def test_attempts_are_counted_until_the_cursor_passes(self) -> None:
        async with self.opened() as journal:
            acks = await journal.append([make_record(n) for n in range(3)])
            first, second, third = (ack.offset for ack in acks)
            await journal.commit([op.CreateCursor("receipts", 0)])
            await journal.commit([op.CountAttempts("receipts", [first, second, third])])
            await journal.commit([op.CountAttempts("receipts", [second])])

            assert await journal.attempts("receipts") == {first: 1, second: 2, third: 1}
            await journal.commit([op.MoveCursor("receipts", second)])
            assert await journal.attempts("receipts") == {third: 1}
            assert await journal.attempts("other") == {}

    # -- all or nothing --------------------------------------------------------------------------

    async def test_a_commit_is_all_or_nothing(self) -> None:
        record = make_record(1)
        async with self.opened() as journal:
            (ack,) = await journal.append([make_record(0)])
            await journal.commit([op.CreateCursor("receipts", 0)])

            with expected(CursorError):
                await journal.commit(
                    [
                        op.Append(record),
                        op.MoveCursor("receipts", ack.offset),
                        op.AddDeadLetter(DeadLetter("receipts", record, 1, "error", TIME)),
                        op.Mark("receipts", "id"),
                        op.Schedule(Scheduled("later", TIME, record)),
                        op.AddDelivery(DeliveryRecord("id", "h", 1, Outcome.OK, 0.0, 0.0, TIME)),
                        op.OpenTicket("ticket", TIME),
                        op.CountAttempts("receipts", [1]),
                        op.MoveCursor("no such cursor", 0),
                    ]
                )

            cursor = await journal.cursor("receipts")
            assert cursor is not None
            assert cursor.offset == 0
            assert numbers(await read_all(journal)) == [0]
            assert await journal.dead_letters() == []
            assert await journal.marked("receipts", ["id"]) == set()
            assert await journal.next_due() is None
            assert await journal.deliveries("id") == []
            assert await journal.ticket("ticket") is None
            assert await journal.attempts("receipts") == {}

    async def test_a_commit_gives_the_acks_of_its_appends_and_a_cursor_may_pass_them(self) -> None:
        async with self.opened() as journal:
            await journal.commit([op.CreateCursor("receipts", 0)])

            acks = await journal.commit(
                [op.Append(make_record(0)), op.Mark("receipts", "id"), op.Append(make_record(1))]
            )

            assert [ack.offset for ack in acks] == [
                record.offset for record in await read_all(journal)
            ]

    async def test_a_refused_commit_leaves_no_gap_for_others(self) -> None:
        refused: list[bool] = []
        async with self.opened() as journal:

            async def refuse() -> None:
                try:
                    await journal.commit([op.Append(make_record(9)), op.MoveCursor("none", 0)])
                except CursorError:
                    refused.append(True)

            async def publish(number: int) -> None:
                await journal.append([make_record(number)])

            async with anyio.create_task_group() as callers:
                for number in range(5):
                    callers.start_soon(publish, number)
                    callers.start_soon(refuse)

            assert len(refused) == 5
            assert sorted(numbers(await read_all(journal))) == list(range(5))

    async def test_something_else_than_an_operation_is_refused(self) -> None:
        nonsense: Any = "DELETE FROM orders"
        async with self.opened() as journal:
            with expected(TypeError):
                await journal.commit([nonsense])


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
