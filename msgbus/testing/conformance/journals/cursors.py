"""Cursors, windows and attempts, and commits of several things at once."""

from __future__ import annotations

from typing import Any

import anyio

from msgbus.errors import (
    CursorError,
)
from msgbus.journal import operations as op
from msgbus.journal.records import (
    DeadLetter,
    DeliveryRecord,
    Outcome,
    Scheduled,
)
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
