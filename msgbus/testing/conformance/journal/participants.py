"""Conformance tests: what rides in every commit of a process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

import anyio

from msgbus.errors import StaleError
from msgbus.journal.operations import Append, Drop, Fence, Operation, Pass, Put
from msgbus.journal.ports import Claim, Journal
from msgbus.journal.records import DELAYED, Kind, Selection, State
from msgbus.testing.conformance.journal.kit import (
    EVENTS,
    STATES,
    TIME,
    JournalSuite,
    append,
    claimed_offsets,
    cursor_of,
    end,
    expected,
    fill,
    join,
    make_command,
    make_record,
    make_row,
    numbers,
    read_all,
    row_of,
    take,
    until,
)

QUEUE = "commands:shop.Pack"
STALE = Put(make_row("orders", 1, version=7))


@final
class CommitRecorder:
    """A participant that notes how it is called, and gives each of its operations once."""

    def __init__(
        self, *operations: Operation, call: Callable[[bool], Callable[[], object]] | None = None
    ) -> None:
        self.given: list[Operation] = list(operations)
        self.answer: Callable[[Sequence[Claim], int], Sequence[Operation]] | None = None
        self.call = call
        self.asked: list[tuple[list[Claim], int]] = []
        self.kept: list[bool] = []

    def operations(self, appended: Sequence[Claim], before: int) -> Sequence[Operation]:
        assert len(self.kept) == len(self.asked), "the commit before has not ended"
        self.asked.append((list(appended), before))
        if self.answer is not None:
            return self.answer(appended, before)
        given, self.given = self.given, []
        return given

    def committed(self, kept: bool) -> Callable[[], object] | None:
        self.kept.append(kept)
        assert len(self.kept) == len(self.asked), "there is no commit to end"
        return None if self.call is None else self.call(kept)

    @property
    def offsets(self) -> list[int]:
        """Offsets of all that was appended."""
        return [offset for appended, _ in self.asked for offset in claimed_offsets(appended)]


class ParticipantTests(JournalSuite):
    """Operations of a subscription ride in the commits of others."""

    async def test_a_participant_is_asked_once_for_each_commit(self) -> None:
        async with self.opened() as journal:
            await fill(journal, 2)
            recorder = CommitRecorder()
            journal.attach([recorder], None)
            records = [make_record(2), make_record(3)]

            await append(journal, *records)
            await append(journal, make_record(4))

            assert [before for _, before in recorder.asked] == [2, 4]
            assert recorder.kept == [True, True]
            appended = [claim for claims, _ in recorder.asked for claim in claims]
            assert [claim.row.version for claim in appended] == [0, 0, 0]
            assert claimed_offsets(appended) == [3, 4, 5]
            assert [claim.record.offset for claim in appended] == [3, 4, 5]
            assert [claim.record for claim in appended[:2]] == [
                record._replace(offset=offset) for offset, record in enumerate(records, 3)
            ]

    async def test_a_commit_that_appends_nothing_is_asked_for_too(self) -> None:
        async with self.opened() as journal:
            await fill(journal, 3)
            recorder = CommitRecorder(Put(make_row("orders", 1)))
            journal.attach([recorder], None)

            await journal.commit([])

            assert (recorder.asked, recorder.kept) == ([([], 3)], [True])
            assert await journal.count("orders") == {State.WAITING: 1}

    async def test_an_enqueued_command_comes_with_its_row(self) -> None:
        async with self.opened() as journal:
            recorder = CommitRecorder()
            journal.attach([recorder], None)
            command = make_command(0)

            await journal.commit(
                [Append(command, queue=QUEUE, due=TIME, unique="a"), Append(make_record(1))]
            )

            (first, second) = recorder.asked[0][0]
            assert first == Claim(await row_of(journal, QUEUE, 1), command._replace(offset=1))
            assert first.row.version == 1
            assert (second.row.version, second.row.offset) == (0, 2)

    async def test_duplicates_and_delayed_events_are_not_appended(self) -> None:
        async with self.opened() as journal:
            record = make_record(0)
            await append(journal, record)
            recorder = CommitRecorder()
            journal.attach([recorder], None)

            await journal.commit(
                [
                    Append(record),
                    Append(make_record(1), queue=DELAYED, due=TIME),
                    Append(make_command(2), queue=QUEUE, unique="a"),
                    Append(make_command(3), queue=QUEUE, unique="a"),
                ]
            )

            assert numbers(claim.record for claim in recorder.asked[0][0]) == [2]

    async def test_an_enqueued_command_is_claimed_as_it_is_appended(self) -> None:
        async with self.both() as (journal, other):
            member = await join(journal)
            recorder = CommitRecorder()

            def answer(appended: Sequence[Claim], _before: int) -> list[Operation]:
                claimed = State.CLAIMED
                return [
                    Put(claim.row.moved(claimed, time=TIME, owner=member.id)) for claim in appended
                ]

            recorder.answer = answer
            journal.attach([recorder], member)

            await journal.commit([Append(make_command(0), queue=QUEUE)])

            row = await row_of(other, QUEUE, 1)
            assert (row.state, row.owner, row.version) == (State.CLAIMED, member.id, 2)
            await journal.commit([Drop(row)], member)

    async def test_an_event_is_fetched_as_it_is_appended(self) -> None:
        async with self.both() as (journal, other):
            await fill(journal, 2)
            member = await join(journal)
            cursor = await take(journal, member, "orders", EVENTS)
            recorder = CommitRecorder()

            def answer(appended: Sequence[Claim], before: int) -> list[Operation]:
                assert before == 2
                parked = appended[0].row._replace(subscription="orders", key="a")
                return [
                    Put(parked.moved(State.WAITING, time=TIME, due=TIME)),
                    Pass(cursor, 2, appended[-1].row.offset),
                ]

            recorder.answer = answer
            journal.attach([recorder], member)

            await append(journal, make_record(2), make_record(3))

            assert recorder.kept == [True]
            assert (await cursor_of(other, "orders")).fetched == 4
            row = await row_of(other, "orders", 3)
            assert (row.version, row.key, row.due) == (1, "a", TIME)

    async def test_a_refused_group_is_left_out_and_the_rest_is_kept(self) -> None:
        async with self.both() as (journal, other):
            await fill(journal, 3)
            recorders = [
                CommitRecorder(Put(make_row("orders", 2))),
                CommitRecorder(Put(make_row("orders", 3)), STALE),
                CommitRecorder(STALE, Put(make_row("orders", 3))),
                CommitRecorder(Put(make_row("bills", 3))),
            ]
            journal.attach(recorders, None)

            await append(journal, make_record(3))

            assert [one.kept for one in recorders] == [[True], [False], [False], [True]]
            found = await other.find(None, STATES)
            assert [(row.subscription, row.offset) for row in found] == [
                ("orders", 2),
                ("bills", 3),
            ]
            assert await other.head() == 4

    async def test_a_group_is_written_on_behalf_of_the_attached_member(self) -> None:
        async with self.both() as (journal, other):
            await fill(journal, 3)
            member, second = await join(journal), await join(journal)
            cursor = await take(journal, member, "orders", EVENTS)
            rows = [make_row("bills", n, State.CLAIMED, owner=member.id) for n in (1, 2)]
            await journal.commit([*map(Put, rows), Pass(cursor, 0, 3)], member)
            groups: list[list[Operation]] = [
                [Drop(rows[0])],
                [Put(rows[1].moved(State.WAITING, time=TIME, due=0.0))],
                [Fence("orders", 1, epoch=cursor.epoch), Put(make_row("orders", 2))],
                [Fence("bills", 3, version=1), Put(make_row("orders", 3))],
            ]
            third = make_row("bills", 3, State.CLAIMED, owner=member.id)
            await journal.commit([Put(third)])
            for attached, acting in ((second, member), (None, member), (member, second)):
                recorders = [CommitRecorder(*group) for group in groups]
                journal.attach(recorders, attached)

                await journal.commit([], acting)

                is_kept = attached is member
                assert [one.kept for one in recorders] == [[is_kept]] * 4
            found = await other.find(None, STATES)
            assert [(row.subscription, row.offset) for row in found] == [
                ("bills", 2),
                ("orders", 2),
                ("bills", 3),
                ("orders", 3),
            ]

    async def test_what_a_refused_group_appended_is_given_to_no_other(self) -> None:
        async with self.both() as (journal, other):
            await fill(journal, 1)
            refused = CommitRecorder(
                Append(make_record(8)), Append(make_command(8), queue=QUEUE, unique="a"), STALE
            )
            second = CommitRecorder(Append(make_command(2), queue=QUEUE, unique="a"))
            last = CommitRecorder()
            journal.attach([refused, second, last], None)

            assert await append(journal, make_record(1)) == [2]

            assert [one.kept for one in (refused, second, last)] == [[False], [True], [True]]
            assert (second.offsets, last.offsets) == ([2], [2, 3])
            assert numbers(await read_all(other)) == [0, 1]
            assert numbers(await read_all(other, Selection(kind=Kind.COMMAND))) == [2]
            assert await append(journal, make_record(3)) == [4]

    async def test_what_rides_with_a_refused_commit_is_kept_or_taken_back(self) -> None:
        async with self.both() as (journal, other):
            await fill(journal, 1)
            recorder = CommitRecorder(Put(make_row("orders", 1)))
            journal.attach([recorder], None)

            with expected(StaleError):
                await journal.commit([Append(make_record(1)), STALE])

            assert recorder.offsets == []
            assert len(recorder.kept) == len(recorder.asked)
            is_there = await other.row("orders", 1) is not None
            assert is_there is any(recorder.kept)
            assert await other.head() == 1

    async def test_a_commit_has_ended_when_a_participant_hands_out(self) -> None:
        async with self.both() as (journal, other):
            handed_out = anyio.Event()
            heads: list[int] = []

            async def look() -> None:
                await handed_out.wait()
                heads.append(await other.head())

            recorder = CommitRecorder(call=lambda _kept: handed_out.set)
            journal.attach([recorder], None)
            with anyio.fail_after(10):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(look)
                    await fill(journal, 1)

            assert heads == [1]

    async def test_the_calls_of_participants_come_before_the_caller_goes_on(self) -> None:
        async with self.opened() as journal:
            await fill(journal, 1)
            calls: list[tuple[str, bool]] = []

            def noting(name: str) -> Callable[[bool], Callable[[], object]]:
                return lambda kept: lambda: calls.append((name, kept))

            recorders = [
                CommitRecorder(call=noting("a")),
                CommitRecorder(STALE, call=noting("b")),
                CommitRecorder(call=noting("c")),
            ]
            journal.attach(recorders, None)

            await fill(journal, 1)

            assert calls == [("a", True), ("b", False), ("c", True)]

    async def test_commits_of_many_tasks_are_given_in_their_order(self) -> None:
        async with self.opened() as journal:
            recorder = CommitRecorder()
            journal.attach([recorder], None)

            async with anyio.create_task_group() as tasks:
                for number in range(20):
                    tasks.start_soon(append, journal, make_record(number), make_record(number))

            assert recorder.offsets == list(range(1, 41))
            assert all(recorder.kept)
            for appended, before in recorder.asked:
                offsets = claimed_offsets(appended)
                assert offsets == list(range(before + 1, before + 1 + len(offsets)))

    async def test_a_participant_rides_with_claims_too(self) -> None:
        async with self.both() as (journal, other):
            await fill(journal, 2)
            await journal.commit([Put(make_row("bills", 1))])
            member = await join(journal)
            recorder = CommitRecorder(Put(make_row("orders", 1)))
            journal.attach([recorder], member)

            await journal.claim(member, "bills", 1, TIME)

            assert recorder.kept == [True]
            assert await other.count("orders") == {State.WAITING: 1}

    # -- attach ----------------------------------------------------------------------------------

    async def test_attached_participants_replace_those_before(self) -> None:
        async with self.opened() as journal:
            first, second = CommitRecorder(), CommitRecorder()
            journal.attach([first], None)
            await fill(journal, 1)
            journal.attach([second], None)
            await fill(journal, 1)
            journal.attach([], None)
            await fill(journal, 1)

            assert (first.offsets, second.offsets) == ([1], [2])

    async def test_each_journal_object_has_its_own_participants(self) -> None:
        async with self.both() as (journal, other):
            first, second = CommitRecorder(), CommitRecorder()
            journal.attach([first], None)
            other.attach([second], None)

            await fill(journal, 2)
            await fill(other, 1)
            await fill(journal, 1)

            assert (first.offsets, second.offsets) == ([1, 2, 4], [3])
            assert [before for _, before in first.asked] == [0, 3]

    async def test_participants_of_an_ended_member_are_left_out(self) -> None:
        async with self.both() as (journal, other):
            await fill(journal, 2)
            lost: list[int] = []
            member = await journal.join("process", {}, on_lost=lambda: lost.append(1))
            recorder = CommitRecorder()
            journal.attach([recorder], member)
            await fill(journal, 1)
            await end(other, member)
            recorder.given = [Put(make_row("orders", 1))]

            assert await _append_twice(journal) == [4, 5]

            await until(lambda: lost)
            assert lost == [1]
            assert recorder.kept.count(True) == 1
            assert await other.count("orders") == {}
            assert numbers(await read_all(other))[3:] == [7, 7]

    async def test_a_new_member_is_attached_after_the_old_was_lost(self) -> None:
        async with self.both() as (journal, other):
            member = await join(journal)
            journal.attach([CommitRecorder()], member)
            await end(other, member)
            await fill(journal, 1)
            recorder = CommitRecorder()

            journal.attach([recorder], await join(journal))
            await fill(journal, 1)

            assert recorder.offsets == [2]


async def _append_twice(journal: Journal) -> list[int]:
    return [(await append(journal, make_record(7)))[0] for _ in range(2)]
