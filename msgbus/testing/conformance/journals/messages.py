"""Conformance tests: appending, reading, waiting, closing, and queries."""

from __future__ import annotations

from typing import Any

import anyio
import anyio.lowlevel
from uuid_utils import uuid7

from msgbus.errors import (
    JournalClosedError,
    MsgBusError,
)
from msgbus.journal import operations as op
from msgbus.journal.port import Journal
from msgbus.journal.records import (
    DeliveryRecord,
    Kind,
    Outcome,
    Page,
    Record,
)
from msgbus.runtime.arguments import missing_members
from msgbus.runtime.clock import VirtualClock
from msgbus.testing.conformance.journals.kit import (
    TIME,
    Suite,
    expected,
    make_record,
    numbers,
    read_all,
)


class MessageTests(Suite):
    """Messages come back as they were, in order, once."""

    # -- append and read -------------------------------------------------------------------------

    async def test_it_has_all_that_a_journal_has(self) -> None:
        async with self.opened() as journal:
            assert missing_members(journal, Journal) == []

    async def test_it_is_closed_by_its_with_block(self) -> None:
        async with self.make(VirtualClock()) as journal:
            await journal.append([make_record(0)])

            assert numbers(await read_all(journal)) == [0]
        with expected(JournalClosedError):
            await journal.append([make_record(1)])

    async def test_it_is_closed_by_its_with_block_after_an_error(self) -> None:
        journal = self.make(VirtualClock())
        with expected(ZeroDivisionError):
            async with journal:
                raise ZeroDivisionError
        with expected(JournalClosedError):
            await journal.head()

    async def test_offsets_grow_and_acks_carry_the_level(self) -> None:
        async with self.opened() as journal:
            acks = await journal.append([make_record(n) for n in range(3)])
            acks += await journal.append([make_record(3)])

            offsets = [ack.offset for ack in acks]
            assert offsets == sorted(set(offsets))
            assert all(ack.level == journal.level and not ack.duplicate for ack in acks)

    async def test_a_record_is_read_as_it_was_appended(self) -> None:
        record = make_record(
            5,
            name="shop.Zoë",
            version=3,
            topic="shop.größe.✓",
            key="customer\x007",
            kind=Kind.COMMAND,
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
        async with self.opened() as journal:
            (ack,) = await journal.append([record])

            (found,) = await journal.read(0)

            assert found == record._replace(offset=ack.offset)

    async def test_reading_begins_at_the_offset_given(self) -> None:
        async with self.opened() as journal:
            acks = await journal.append([make_record(n) for n in range(5)])

            assert numbers(await journal.read(acks[2].offset)) == [2, 3, 4]
            assert numbers(await journal.read(acks[2].offset + 1)) == [3, 4]

    async def test_pages_give_everything_once(self) -> None:
        async with self.opened() as journal:
            await journal.append([make_record(n) for n in range(50)])

            assert numbers(await read_all(journal)) == list(range(50))

    async def test_an_empty_journal_has_nothing_to_read(self) -> None:
        async with self.opened() as journal:
            page = await journal.read(0)

            assert (list(page), await journal.head()) == ([], 0)
            assert await journal.first() > await journal.head()

    async def test_reading_beyond_the_head_gives_nothing_and_loses_nothing(self) -> None:
        async with self.opened() as journal:
            (ack,) = await journal.append([make_record(0)])
            page = await journal.read(ack.offset + 1)
            await journal.append([make_record(1)])

            assert list(page) == []
            assert numbers(await journal.read(page.next)) == [1]

    async def test_reading_by_topic_goes_on_behind_all_that_was_looked_at(self) -> None:
        async with self.opened() as journal:
            acks = await journal.append(
                [make_record(n, topic="even" if n % 2 == 0 else "odd") for n in range(9)]
            )

            page = await journal.read(0, 100, "odd")

            assert numbers(page) == [1, 3, 5, 7]
            assert page.next > acks[-1].offset
            assert numbers(await read_all(journal, topic="even")) == [0, 2, 4, 6, 8]

    async def test_reading_by_name(self) -> None:
        async with self.opened() as journal:
            await journal.append([make_record(n, name=f"name{n % 3}") for n in range(9)])

            found = await read_all(journal, names=["name0", "name2"])

            assert numbers(found) == [0, 2, 3, 5, 6, 8]
            assert await read_all(journal, names=[]) == []

    async def test_a_message_id_is_kept_once(self) -> None:
        async with self.opened() as journal:
            first, again, other = make_record(0), make_record(1), make_record(2)
            (ack,) = await journal.append([first])

            acks = await journal.append([again._replace(message_id=first.message_id), other, other])

            assert acks[0].offset == ack.offset
            assert [one.duplicate for one in acks] == [True, False, True]
            assert acks[1].offset == acks[2].offset
            assert numbers(await read_all(journal)) == [0, 2]

    async def test_appending_nothing_is_fine(self) -> None:
        async with self.opened() as journal:
            assert await journal.append([]) == []
            assert await journal.commit([]) == []

    async def test_appends_at_once_all_arrive_and_each_caller_keeps_its_order(self) -> None:
        async with self.opened() as journal:

            async def publish(caller: int) -> None:
                for number in range(20):
                    await journal.append([make_record(number, key=str(caller))])

            async with anyio.create_task_group() as callers:
                for caller in range(10):
                    callers.start_soon(publish, caller)

            found = await read_all(journal)
            assert len(found) == 200
            for caller in range(10):
                own = [record for record in found if record.key == str(caller)]
                assert numbers(own) == list(range(20))

    async def test_a_bad_append_fails_alone_and_leaves_nothing(self) -> None:
        bad = make_record(99, topic="\ud800 is not Unicode")
        failed: list[Exception] = []
        async with self.opened() as journal:

            async def publish(records: list[Record]) -> None:
                try:
                    await journal.append(records)
                except MsgBusError as error:
                    failed.append(error)

            async with anyio.create_task_group() as callers:
                for number in range(10):
                    callers.start_soon(publish, [make_record(number)])
                callers.start_soon(publish, [make_record(98), bad])

            assert len(failed) == 1
            assert sorted(numbers(await read_all(journal))) == list(range(10))

    async def test_a_cancelled_append_leaves_the_journal_usable(self) -> None:
        async with self.opened() as journal:
            with anyio.CancelScope() as scope:
                scope.cancel()
                await journal.append([make_record(0)])
            await journal.append([make_record(1)])

            assert numbers(await read_all(journal)) in ([1], [0, 1])

    # -- positions and news ----------------------------------------------------------------------

    async def test_head_and_first_frame_what_is_there(self) -> None:
        async with self.opened() as journal:
            acks = await journal.append([make_record(n) for n in range(4)])

            assert await journal.first() == acks[0].offset
            assert await journal.head() == acks[-1].offset

    async def test_a_time_gives_the_first_offset_not_before_it(self) -> None:
        async with self.opened() as journal:
            # The clock went back by an hour in between.
            times = [10.0, 20.0, 20.0 - 3600, 30.0]
            acks = await journal.append([make_record(time=time) for time in times])

            assert await journal.offset_at(0 - 3600) == acks[0].offset
            assert await journal.offset_at(15.0) == acks[1].offset
            assert await journal.offset_at(25.0) == acks[3].offset
            assert await journal.offset_at(31.0) > acks[3].offset

    async def test_waiting_ends_at_once_if_there_is_more(self) -> None:
        async with self.opened() as journal:
            (ack,) = await journal.append([make_record()])

            assert await journal.wait(0) == ack.offset

    async def test_waiting_ends_with_the_next_append(self) -> None:
        heads: list[int] = []
        async with self.opened() as journal:
            (first,) = await journal.append([make_record()])

            async def wait() -> None:
                heads.append(await journal.wait(first.offset))

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(wait)
                await anyio.lowlevel.checkpoint()
                assert heads == []
                await journal.append([make_record()])

            assert heads == [await journal.head()]
            assert heads[0] > first.offset

    async def test_waiting_ends_when_time_runs_out(self) -> None:
        clock = VirtualClock()
        heads: list[int] = []
        async with self.opened(clock) as journal:

            async def wait() -> None:
                heads.append(await journal.wait(0, timeout=5.0))

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(wait)
                await clock.advance(4.9)
                assert heads == []
                await clock.advance(0.2)

            assert heads == [0]

    async def test_any_commit_is_a_change(self) -> None:
        seen: list[int] = []
        async with self.opened() as journal:
            version = await journal.changed(-1)

            async def wait() -> None:
                seen.append(await journal.changed(version))

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(wait)
                await anyio.lowlevel.checkpoint()
                await journal.commit([op.OpenTicket("ticket", TIME)])

            assert seen[0] > version

    # -- the end ---------------------------------------------------------------------------------

    async def test_a_closed_journal_says_so(self) -> None:
        async with self.opened() as journal:
            await journal.append([make_record()])
            await journal.close()
            await journal.close()

            with expected(JournalClosedError):
                await journal.append([make_record()])
            with expected(JournalClosedError):
                await journal.read(0)

    async def test_closing_waits_for_what_was_begun(self) -> None:
        acks: list[int] = []
        async with self.opened() as journal:

            async def publish(number: int) -> None:
                acks.extend(ack.offset for ack in await journal.append([make_record(number)]))

            async with anyio.create_task_group() as callers:
                for number in range(20):
                    callers.start_soon(publish, number)
                await anyio.lowlevel.checkpoint()
                while len(acks) == 0:
                    await anyio.lowlevel.checkpoint()

            await journal.close()
            assert len(acks) == 20


class QuestionTests(Suite):
    """Messages are found by id, by flow and by every field."""

    # -- queries ---------------------------------------------------------------------------------

    async def test_a_message_is_found_by_its_id(self) -> None:
        async with self.opened() as journal:
            record = make_record(1)
            (ack,) = await journal.append([record])

            assert await journal.message(record.message_id) == record._replace(offset=ack.offset)
            assert await journal.message("unknown") is None

    async def test_a_flow_is_a_tree_of_cause_and_effect(self) -> None:
        root = make_record(0)

        def effect(number: int, cause: Record) -> Record:
            return make_record(
                number,
                correlation_id=root.message_id,
                causation_id=cause.message_id,
                root_id=root.message_id,
                depth=cause.depth + 1,
            )

        left, right = effect(1, root), effect(2, root)
        leaf = effect(3, left)
        async with self.opened() as journal:
            await journal.append([root, make_record(9), left, right, leaf])

            (tree,) = await journal.flow(root.message_id)

            assert numbers([tree.record]) == [0]
            assert [numbers([child.record]) for child in tree.children] == [[1], [2]]
            assert numbers(child.record for child in tree.children[0].children) == [3]
            assert await journal.flow("unknown") == ()

    async def test_what_has_lost_its_cause_is_a_root_of_its_own(self) -> None:
        async with self.opened() as journal:
            await journal.append(
                [make_record(n, correlation_id="flow", causation_id=f"lost{n}") for n in range(2)]
            )

            trees = await journal.flow("flow")

            assert numbers(tree.record for tree in trees) == [0, 1]

    async def test_messages_are_found_by_every_field(self) -> None:
        async with self.opened() as journal:
            await journal.append([make_record(n) for n in range(3)])
            await journal.append(
                [
                    make_record(
                        7, topic="t", name="n", key="k", kind=Kind.COMMAND, session_id="s",
                        correlation_id="c", time=5.0,
                    )
                ]
            )  # fmt: skip

            questions: list[dict[str, Any]] = [
                {"topic": "t"}, {"name": "n"}, {"key": "k"}, {"kind": Kind.COMMAND},
                {"session_id": "s"}, {"correlation_id": "c"}, {"until": 6.0},
                {"topic": "t", "since": 5.0, "until": 5.1},
            ]  # fmt: skip
            for question in questions:
                assert numbers(await journal.find(**question)) == [7], question
            assert list(await journal.find(topic="t", name="other")) == []

    async def test_findings_come_page_by_page_in_both_directions(self) -> None:
        async with self.opened() as journal:
            await journal.append([make_record(n, topic=f"t{n % 2}") for n in range(20)])

            async def collect(**options: Any) -> list[int]:
                found: list[int] = []
                page: Page | None = None
                while page is None or (page and page.next):
                    start = 0 if page is None else page.next
                    page = await journal.find(topic="t1", limit=3, start=start, **options)
                    found += numbers(page)
                return found

            assert await collect() == list(range(1, 20, 2))
            assert await collect(newest_first=True) == list(range(19, 0, -2))

    async def test_deliveries_are_kept_in_order(self) -> None:
        first = DeliveryRecord("m", "ship", 1, Outcome.FAILED, 0.5, 0.25, TIME, "ValueError: no", 3)
        second = DeliveryRecord("m", "ship", 2, Outcome.OK, 1.5, 0.125, TIME + 1)
        other = DeliveryRecord("other", "ship", 1, Outcome.REFUSED, 0.0, 0.0, TIME)
        async with self.opened() as journal:
            await journal.commit([op.AddDelivery(one) for one in (first, other, second)])

            assert await journal.deliveries("m") == [first, second]
            assert await journal.deliveries("unknown") == []
