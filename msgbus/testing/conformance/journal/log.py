"""Conformance tests: reading by selection, the head, waiting for changes, closing."""

from __future__ import annotations

import anyio
from uuid_utils import uuid7

from msgbus.errors import JournalClosedError, MsgBusError
from msgbus.journal.operations import Append
from msgbus.journal.ports import Journal
from msgbus.journal.records import Kind, Order, Record, Selection, slot_of
from msgbus.runtime.arguments import missing_members
from msgbus.testing.conformance.journal.kit import (
    EVENTS,
    TIME,
    JournalSuite,
    append,
    expected,
    fill,
    fill_keys,
    make_command,
    make_record,
    numbers,
    read_all,
)


class LogTests(JournalSuite):
    """Messages come back as they were, in order, once."""

    async def test_it_has_all_that_a_journal_has(self) -> None:
        async with self.opened() as journal:
            assert missing_members(journal, Journal) == []

    async def test_it_has_an_id_that_no_other_journal_has(self) -> None:
        async with self.both() as (journal, beside), self.opened() as other:
            assert journal.id
            assert journal.id == beside.id != other.id

    async def test_it_says_what_a_commit_promises(self) -> None:
        async with self.opened() as journal:
            assert journal.promises.failover >= 0
            assert journal.promises.is_ordered

    async def test_a_record_is_read_as_it_was_appended(self) -> None:
        record = make_record(
            5,
            name="shop.Zoë",
            version=3,
            topic="shop.größe.✓",
            key="customer\x007",
            correlation_id=str(uuid7()),
            causation_id=str(uuid7()),
            root_id=str(uuid7()),
            depth=4,
            session_id="session",
            headers={"tenant": "a", "trace": '"quoted" \n'},
            payload=bytes(range(256)),
            from_system=True,
            time=1234.56789,
        )
        async with self.both() as (journal, other):
            (offset,) = await append(journal, record)

            for one in (journal, other):
                scan = await one.read(0, 10, EVENTS)
                assert list(scan.records) == [record._replace(offset=offset)]

    # -- read ------------------------------------------------------------------------------------

    async def test_an_empty_log_has_nothing_to_read(self) -> None:
        async with self.opened() as journal:
            scan = await journal.read(0, 10, EVENTS)

            assert (list(scan.records), scan.upto, await journal.head()) == ([], 0, 0)

    async def test_reading_beyond_the_head_gives_nothing_and_loses_nothing(self) -> None:
        async with self.opened() as journal:
            await fill(journal, 1)
            scan = await journal.read(1, 10, EVENTS)
            await append(journal, make_record(1))

            assert list(scan.records) == []
            assert numbers((await journal.read(scan.upto, 10, EVENTS)).records) == [1]

    async def test_pages_give_every_message_once(self) -> None:
        async with self.opened() as journal:
            await fill(journal, 50)

            for limit in (1, 7, 50, 1_000):
                assert numbers(await read_all(journal, limit=limit)) == list(range(50))

    async def test_a_page_ends_with_its_last_result_when_the_limit_is_reached(self) -> None:
        async with self.opened() as journal:
            offsets = await fill(journal, 5)

            scan = await journal.read(0, 2, EVENTS)

            assert numbers(scan.records) == [0, 1]
            assert scan.upto == offsets[1]
            assert numbers((await journal.read(offsets[2], 9, EVENTS)).records) == [3, 4]
            assert numbers((await journal.read(offsets[4], 9, EVENTS)).records) == []

    async def test_unmatched_messages_are_looked_at_and_left_out(self) -> None:
        async with self.opened() as journal:
            await append(journal, *(make_record(n, name=f"name{n % 3}") for n in range(20)))
            selection = Selection(names=["name0"])

            scan = await journal.read(0, 100, selection)

            assert numbers(scan.records) == [0, 3, 6, 9, 12, 15, 18]
            assert scan.upto == await journal.head()
            assert numbers(await read_all(journal, selection, limit=1)) == numbers(scan.records)
            assert await read_all(journal, Selection(names=[])) == []

    async def test_a_message_behind_very_many_unmatched_ones_is_found(self) -> None:
        async with self.opened() as journal:
            await fill(journal, 6_000, name="other")
            await append(journal, make_record(7))

            found = await read_all(journal, Selection(names={"shop.OrderPlaced"}))

            assert numbers(found) == [7]

    async def test_nothing_at_or_below_upto_appears_later(self) -> None:
        async with self.both() as (journal, other):
            seen: list[int] = []
            selection = Selection(names={"wanted"})

            async def publish(writer: Journal, first: int) -> None:
                for number in range(first, first + 20):
                    name = "wanted" if number % 3 else "other"
                    await append(writer, make_record(number, name=name))

            async def follow() -> None:
                after = 0
                while len(seen) < 26:
                    scan = await other.read(after, 3, selection)
                    assert scan.upto >= after
                    after = scan.upto
                    seen.extend(numbers(scan.records))

            with anyio.fail_after(30):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(publish, journal, 0)
                    tasks.start_soon(publish, other, 20)
                    tasks.start_soon(follow)

            assert sorted(seen) == [number for number in range(40) if number % 3]

    async def test_names_that_grow_are_seen_by_the_next_read(self) -> None:
        async with self.opened() as journal:
            await append(journal, *(make_record(n, name=f"name{n}") for n in range(3)))
            names = {"name0"}
            selection = Selection(names=names)
            before = numbers(await read_all(journal, selection))
            names.add("name2")

            assert (before, numbers(await read_all(journal, selection))) == ([0], [0, 2])

    async def test_a_predicate_is_asked_for_what_the_names_let_through(self) -> None:
        async with self.opened() as journal:
            await append(journal, *(make_record(n, name=f"name{n % 2}") for n in range(8)))
            asked: list[int] = []

            def matches(record: Record) -> bool:
                asked.append(record.offset)
                return record.time > TIME + 3

            found = await read_all(journal, Selection(names=["name0"], matches=matches))

            assert numbers(found) == [4, 6]
            assert asked == [1, 3, 5, 7]

    async def test_events_commands_and_control_records_are_apart(self) -> None:
        async with self.opened() as journal:
            await append(
                journal,
                make_record(0),
                make_command(1),
                make_record(2, kind=Kind.CONTROL),
                make_record(3),
            )

            found = {kind: numbers(await read_all(journal, Selection(kind=kind))) for kind in Kind}

            assert found == {Kind.EVENT: [0, 3], Kind.COMMAND: [1], Kind.CONTROL: [2]}

    async def test_partitions_share_the_messages(self) -> None:
        async with self.opened() as journal:
            await fill_keys(journal, [f"key{n % 5}" if n % 4 else None for n in range(40)])
            selection = Selection(order=Order.KEY, partitions=4)

            parts = [await read_all(journal, selection, [n], limit=3) for n in range(4)]

            for partition, records in enumerate(parts):
                assert all(slot_of(record) % 4 == partition for record in records)
                assert [one.offset for one in records] == sorted(one.offset for one in records)
            assert sorted(number for part in parts for number in numbers(part)) == list(range(40))
            both = numbers(await read_all(journal, selection, [0, 2]))
            assert both == sorted(numbers(parts[0]) + numbers(parts[2]))
            assert await read_all(journal, selection, []) == []

    async def test_an_own_key_function_chooses_the_partition(self) -> None:
        async with self.opened() as journal:
            await fill_keys(journal, [f"key{n}" for n in range(30)])
            selection = Selection(
                order=Order.KEY,
                partitions=3,
                key=lambda record: str(record.json()["number"] % 5),
            )

            parts = [await read_all(journal, selection, [n], limit=4) for n in range(3)]

            for partition, records in enumerate(parts):
                assert all(selection.partition(record) == partition for record in records)
            assert sorted(number for part in parts for number in numbers(part)) == list(range(30))
            groups = [{number % 5 for number in numbers(part)} for part in parts]
            assert sum(len(group) for group in groups) == 5

    # -- head and changed ------------------------------------------------------------------------

    async def test_the_first_question_for_changes_is_answered_at_once(self) -> None:
        async with self.opened() as journal:
            with anyio.fail_after(10):
                assert await journal.changed(-1) >= 0

    async def test_a_wait_for_changes_ends_in_time(self) -> None:
        async with self.opened() as journal:
            since = await journal.changed(-1)
            with anyio.fail_after(10):
                assert await journal.changed(since, 0.0) >= since

    async def test_a_commit_of_any_process_is_a_change(self) -> None:
        async with self.both() as (journal, other):
            for writer in (journal, other):
                since = await journal.changed(-1)
                head = await journal.head()
                with anyio.fail_after(10):
                    async with anyio.create_task_group() as tasks:
                        tasks.start_soon(append, writer, make_record())
                        version = since
                        while await journal.head() == head:
                            version = await journal.changed(version)
                assert await journal.changed(since) >= since

    async def test_a_change_between_question_and_wait_is_not_missed(self) -> None:
        async with self.both() as (journal, other):
            since = await journal.changed(-1)
            await fill(other, 1)

            with anyio.fail_after(10):
                version = since
                while version == since:
                    version = await journal.changed(since)
            assert version > since

    # -- closing ---------------------------------------------------------------------------------

    async def test_it_is_closed_by_its_with_block(self) -> None:
        async with self.make() as journal:
            await fill(journal, 1)
        with expected(JournalClosedError):
            await fill(journal, 1)
        with expected(JournalClosedError):
            await journal.head()

    # -- offsets ---------------------------------------------------------------------------------

    async def test_the_first_offset_is_that_of_the_oldest_message(self) -> None:
        async with self.opened() as journal:
            assert await journal.first() == 1
            await fill(journal, 2)

            assert await journal.first() == 1

    async def test_the_offset_of_a_time_is_the_first_at_or_behind_it(self) -> None:
        async with self.opened() as journal:
            assert await journal.offset_at(TIME) == 1
            await fill(journal, 3)

            assert await journal.offset_at(0) == 1
            assert await journal.offset_at(TIME + 1) == 2
            assert await journal.offset_at(TIME + 1.5) == 3
            assert await journal.offset_at(TIME + 2.5) == 4

    async def test_a_message_is_found_by_its_id(self) -> None:
        async with self.opened() as journal:
            record = make_record(7, headers={"a": "b"}, key="k")
            await append(journal, record)

            assert await journal.message(record.message_id) == record._replace(offset=1)
            assert await journal.message("unknown") is None

    # -- the end ---------------------------------------------------------------------------------

    async def test_it_is_closed_by_its_with_block_after_an_error(self) -> None:
        journal = self.make()
        with expected(ZeroDivisionError):
            async with journal:
                raise ZeroDivisionError
        with expected(JournalClosedError):
            await journal.read(0, 1, EVENTS)
        await journal.close()

    async def test_closing_one_leaves_the_others_open(self) -> None:
        async with self.both() as (journal, other):
            await fill(journal, 2)
            await journal.close()

            assert numbers(await read_all(other)) == [0, 1]
            assert await fill(other, 1) == [3]

    async def test_what_was_begun_before_closing_is_written_or_refused(self) -> None:
        async with self.both() as (journal, other):
            records = [make_record(number) for number in range(20)]
            written: list[int] = []

            async def publish(record: Record) -> None:
                try:
                    await journal.commit([Append(record)])
                except MsgBusError:
                    return
                written.extend(numbers([record]))

            async with anyio.create_task_group() as tasks:
                for record in records:
                    tasks.start_soon(publish, record)
                tasks.start_soon(journal.close)

            assert set(written) <= set(numbers(await read_all(other)))
