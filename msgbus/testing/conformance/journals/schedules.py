"""Conformance tests: the schedule, dead letters, markers and tickets."""

from __future__ import annotations

import anyio

from msgbus.errors import (
    JournalConflictError,
)
from msgbus.journal import operations as op
from msgbus.journal.records import (
    DeadLetter,
    Scheduled,
    TicketState,
)
from msgbus.testing.conformance.journals.kit import (
    TIME,
    Suite,
    expected,
    make_record,
    numbers,
    read_all,
)

FOREVER = float("inf")


class ScheduleTests(Suite):
    """A subscription gets its own entries only, however many others come first."""

    async def test_the_schedule_of_one_subscription_is_nobody_elses(self) -> None:
        record = make_record(1)
        entries = {
            who: Scheduled(f"{who}/1", 10.0 + place, record, who, 2)
            for place, who in enumerate((None, "ship", "bill", ""))
        }
        async with self.opened() as journal:
            await journal.commit([op.Schedule(entry) for entry in entries.values()])

            for who, entry in entries.items():
                assert await journal.due(FOREVER, subscription=who) == [entry]
                assert await journal.next_due(subscription=who) == entry.due
                assert await journal.count_scheduled(subscription=who) == 1
            assert await journal.due(FOREVER) == [entries[None]]
            assert await journal.next_due() == 10.0
            assert await journal.due(FOREVER, subscription="nobody") == []
            assert await journal.next_due(subscription="nobody") is None
            assert await journal.count_scheduled(subscription="nobody") == 0

    async def test_only_messages_of_the_names_asked_for_are_due(self) -> None:
        placed = Scheduled("a", 30.0, make_record(1, name="shop.Placed"))
        paid = Scheduled("b", 20.0, make_record(2, name="shop.Paid"))
        sent = Scheduled("c", 10.0, make_record(3, name="shop.Sent"))
        ours = Scheduled("d", 5.0, make_record(4, name="shop.Paid"), "ship")
        names = {"shop.Paid", "shop.Placed"}
        async with self.opened() as journal:
            await journal.commit([op.Schedule(entry) for entry in (placed, paid, sent, ours)])

            assert await journal.due(FOREVER, names=names) == [paid, placed]
            assert await journal.due(25.0, names=names) == [paid]
            assert await journal.due(FOREVER, 1, names=names) == [paid]
            assert await journal.next_due(names=names) == 20.0
            assert await journal.next_due(names=["shop.Placed"]) == 30.0
            assert await journal.count_scheduled(names=names) == 2
            assert await journal.due(FOREVER, names=[]) == []
            assert await journal.next_due(names=[]) is None
            assert await journal.due(FOREVER, subscription="ship", names=names) == [ours]
            assert await journal.due(FOREVER, subscription="ship", names=["shop.Sent"]) == []

    async def test_others_work_does_not_use_up_the_limit(self) -> None:
        record = make_record(1)
        others = [Scheduled(f"bill/{place}", 1.0, record, "bill") for place in range(20)]
        mine = Scheduled("ship/1", 9.0, record, "ship")
        async with self.opened() as journal:
            await journal.commit([op.Schedule(entry) for entry in (*others, mine)])

            assert await journal.due(9.0, 5, subscription="ship") == [mine]

    async def test_those_due_at_the_same_time_come_in_the_order_they_were_scheduled(self) -> None:
        entries = [Scheduled(name, 10.0, make_record(1), "ship") for name in ("z", "a", "m")]
        async with self.opened() as journal:
            for entry in entries:
                await journal.commit([op.Schedule(entry)])

            assert await journal.due(10.0, subscription="ship") == entries

    async def test_entries_are_found_by_their_ids_whoever_they_are_for(self) -> None:
        entries = [
            Scheduled(f"id-{place}", 10.0, make_record(place), "ship" if place % 2 else None)
            for place in range(600)
        ]
        async with self.opened() as journal:
            await journal.commit([op.Schedule(entry) for entry in entries])

            found = await journal.scheduled([*(entry.id for entry in entries), "no such id"])

            assert sorted(found) == sorted(entries)
            assert await journal.scheduled([]) == []
            assert await journal.scheduled(["id-7"]) == [entries[7]]


class LetterTests(Suite):
    """Dead letters, markers, scheduled messages and tickets are kept until removed."""

    # -- dead letters, markers, schedule, tickets ------------------------------------------------

    async def test_dead_letters_are_kept_whole_and_in_order(self) -> None:
        record = make_record(1, key="k", headers={"a": "b"}, payload=b"\xff\x00")
        async with self.opened() as journal:
            (ack,) = await journal.append([record])
            record = record._replace(offset=ack.offset)
            await journal.commit(
                [
                    op.AddDeadLetter(DeadLetter("ship", record, 3, "ValueError: no", TIME)),
                    op.AddDeadLetter(DeadLetter("bill", make_record(2), 1, None, TIME)),
                ]
            )

            first, second = await journal.dead_letters()

            assert first == DeadLetter("ship", record, 3, "ValueError: no", TIME, first.id)
            assert await journal.dead_letters("bill") == [second]
            assert await journal.dead_letters(after=first.id) == [second]
            assert await journal.dead_letters(limit=1) == [first]
            await journal.commit([op.DropDeadLetter(first.id)])
            assert await journal.dead_letters() == [second]

    async def test_a_message_is_one_dead_letter_of_a_subscription(self) -> None:
        record = make_record(1)
        async with self.opened() as journal:
            for attempts in (3, 6):
                letter = DeadLetter("ship", record, attempts, f"no {attempts}", TIME + attempts)
                await journal.commit([op.AddDeadLetter(letter)])

            (letter,) = await journal.dead_letters()

            assert (letter.attempts, letter.error) == (3 + 6, "no 6")
            assert (letter.first_time, letter.time) == (TIME + 3, TIME + 6)

    async def test_dead_letters_know_scope_handler_and_target(self) -> None:
        record = make_record(1)
        given = [
            DeadLetter("ship", record, 1, "no", TIME, target="shop.Placed"),
            DeadLetter("ship", record, 1, "no", TIME, target="topic:shop.**"),
            DeadLetter("queue", record, 1, "no", TIME, handler="charge", scope="s"),
        ]
        async with self.opened() as journal:
            await journal.commit([op.AddDeadLetter(letter) for letter in given])

            found = await journal.dead_letters()

            assert [letter._replace(id=0) for letter in found] == given
            assert await journal.dead_letters("queue") == found[2:]

    async def test_marks_belong_to_one_subscription(self) -> None:
        async with self.opened() as journal:
            await journal.commit([op.Mark("ship", "1"), op.Mark("ship", "2"), op.Mark("bill", "3")])
            await journal.commit([op.Mark("ship", "1")])

            assert await journal.marked("ship", ["1", "2", "3", "4"]) == {"1", "2"}
            assert await journal.marked("ship", []) == set()

    async def test_a_mark_that_may_be_set_once_refuses_the_second_transaction(self) -> None:
        async with self.opened() as journal:
            await journal.commit([op.Mark("ship", "1", once=True)])

            with expected(JournalConflictError):
                await journal.commit([op.Append(make_record(0)), op.Mark("ship", "1", once=True)])

            assert await read_all(journal) == []

    async def test_scheduled_messages_come_in_the_order_they_are_due(self) -> None:
        entries = [
            Scheduled("late", 30.0, make_record(3)),
            Scheduled("early", 10.0, make_record(1), None, 4),
            Scheduled("middle", 20.0, make_record(2)),
        ]
        async with self.opened() as journal:
            assert await journal.next_due() is None
            await journal.commit([op.Schedule(entry) for entry in entries])

            assert await journal.next_due() == 10.0
            assert await journal.due(9.9) == []
            assert await journal.due(20.0) == [entries[1], entries[2]]
            assert await journal.due(99.0, limit=1) == [entries[1]]

    async def test_a_scheduled_message_is_replaced_or_cancelled_by_its_id(self) -> None:
        record = make_record(1)
        async with self.opened() as journal:
            await journal.commit([op.Schedule(Scheduled("a", 10.0, record))])
            await journal.commit([op.Schedule(Scheduled("a", 50.0, record))])
            assert await journal.next_due() == 50.0

            await journal.commit([op.Unschedule("a"), op.Unschedule("never there")])

            assert await journal.next_due() is None

    async def test_a_due_message_is_sent_once_however_many_see_it(self) -> None:
        record = make_record(1)
        sent: list[int] = []
        async with self.opened() as journal:
            await journal.commit([op.Schedule(Scheduled("a", 10.0, record))])

            async def send() -> None:
                for entry in await journal.due(10.0):
                    try:
                        await journal.commit(
                            [op.Unschedule(entry.id, required=True), op.Append(make_record(1))]
                        )
                    except JournalConflictError:
                        continue
                    sent.append(1)

            async with anyio.create_task_group() as senders:
                for _ in range(5):
                    senders.start_soon(send)

            assert sent == [1]
            assert numbers(await read_all(journal)) == [1]

    async def test_the_first_result_of_a_ticket_stays(self) -> None:
        async with self.opened() as journal:
            await journal.commit([op.OpenTicket("id", 1.0)])
            ticket = await journal.ticket("id")
            assert ticket is not None
            assert ticket.state is TicketState.PENDING
            await journal.commit([op.CloseTicket("id", 2.0, result=b"42")])
            await journal.commit([op.CloseTicket("id", 3.0, error="too late")])
            await journal.commit([op.OpenTicket("id", 4.0)])

            ticket = await journal.ticket("id")

            assert ticket is not None
            assert ticket == ("id", TicketState.DONE, b"42", None, 2.0)
            assert await journal.ticket("unknown") is None
            await journal.commit([op.OpenTicket("other", 5.0)])
            rows = await journal.tickets(["unknown", "id", "other"])
            assert sorted(row.message_id for row in rows) == ["id", "other"]
            assert await journal.tickets([]) == []

    async def test_a_ticket_keeps_an_error(self) -> None:
        async with self.opened() as journal:
            await journal.commit([op.OpenTicket("id", 1.0), op.CloseTicket("id", 2.0, error="no")])

            assert await journal.ticket("id") == ("id", TicketState.FAILED, None, "no", 2.0)
