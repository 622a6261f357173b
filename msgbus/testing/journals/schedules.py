"""The schedule: what is due, for whom, and nothing of anybody else's."""

from __future__ import annotations

from msgbus.journal import operations as op
from msgbus.journal.records import Scheduled
from msgbus.testing.conformance.journals.kit import Suite, make_record

FOREVER = float("inf")


class ScheduleTests(Suite):
    """Who asks for his own gets his own, however much of others' lies before it."""

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
