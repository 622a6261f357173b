"""Conformance tests: enqueued commands, unique keys, delayed events."""

from __future__ import annotations

import anyio

from msgbus.errors import StaleError
from msgbus.journal.operations import Append, Drop, Operation, Put, Reply
from msgbus.journal.ports import Journal
from msgbus.journal.records import DELAYED, Kind, Pending, Record, Selection, State
from msgbus.testing.conformance.journal.kit import (
    LETTER,
    STATES,
    TIME,
    JournalSuite,
    append,
    expected,
    fill,
    join,
    make_command,
    make_record,
    make_row,
    numbers,
    read_all,
    row_of,
)

QUEUE = "commands:shop.Pack"


async def _enqueue(journal: Journal, number: int, unique: str | None = "a") -> tuple[int, bool]:
    (result,) = await journal.commit([Append(make_command(number), queue=QUEUE, unique=unique)])
    return result.offset, result.is_duplicate


async def _delay(journal: Journal, record: Record, due: float = TIME) -> Pending:
    (result,) = await journal.commit([Append(record, queue=DELAYED, due=due)])
    return await row_of(journal, DELAYED, result.offset)


class QueueTests(JournalSuite):
    """A command has a row in its queue, a delayed event has only a row."""

    # -- enqueued commands -----------------------------------------------------------------------

    async def test_an_enqueued_command_is_in_the_log_and_has_a_row(self) -> None:
        async with self.both() as (journal, other):
            await fill(journal, 1)
            command = make_command(1)

            await journal.commit([Append(command, queue=QUEUE, due=TIME, unique="a")])

            commands = await read_all(other, Selection(kind=Kind.COMMAND))
            assert commands == [command._replace(offset=2)]
            row = await row_of(other, QUEUE, 2)
            assert (row.state, row.due, row.unique) == (State.WAITING, TIME, "a")
            assert (row.attempt, row.owner, row.version, row.alone) == (0, None, 1, False)
            assert (row.partition, row.key, row.body) == (0, None, None)
            assert await other.record(row) == commands[0]

    async def test_a_command_without_a_time_is_due_at_once(self) -> None:
        async with self.opened() as journal:
            await _enqueue(journal, 0, None)

            assert len(await journal.claim(await join(journal), QUEUE, 1, 0.0)) == 1

    async def test_a_result_is_stored_as_the_row_goes(self) -> None:
        async with self.both() as (journal, other):
            command = make_command()
            await journal.commit([Append(command, queue=QUEUE)])
            member = await join(journal)
            (claim,) = await journal.claim(member, QUEUE, 1, TIME)

            reply = Reply(command.message_id, TIME, b"1")
            await journal.commit([Drop(claim.row), reply], member)
            with expected(StaleError):
                await journal.commit([Drop(claim.row), reply._replace(message_id="x")], member)

            result = await other.result(command.message_id)
            assert result is not None
            assert (result.body, await other.row(QUEUE, 1)) == (b"1", None)
            assert await other.result("x") is None

    # -- unique ----------------------------------------------------------------------------------

    async def test_a_unique_key_joins_the_command_that_has_it(self) -> None:
        async with self.both() as (journal, other):
            assert await _enqueue(journal, 0) == (1, False)
            assert await _enqueue(journal, 1) == (1, True)
            assert await _enqueue(other, 2) == (1, True)
            assert await _enqueue(other, 3, "b") == (2, False)
            assert await _enqueue(journal, 4, None) == (3, False)

            assert await journal.count(QUEUE) == {State.WAITING: 3}
            commands = await read_all(other, Selection(kind=Kind.COMMAND))
            assert numbers(commands) == [0, 3, 4]

    async def test_a_unique_key_is_held_while_its_command_is_claimed_or_retried(self) -> None:
        async with self.opened() as journal:
            await _enqueue(journal, 0)
            member = await join(journal)
            (claim,) = await journal.claim(member, QUEUE, 1, TIME)
            assert await _enqueue(journal, 1) == (1, True)
            retry = claim.row.moved(State.WAITING, time=TIME, due=TIME + 60)
            await journal.commit([Put(retry)], member)

            assert await _enqueue(journal, 2) == (1, True)

    async def test_a_unique_key_is_free_when_its_command_is_done_or_dead(self) -> None:
        async with self.both() as (journal, other):
            await _enqueue(journal, 0)
            await journal.commit([Drop(await row_of(journal, QUEUE, 1))])
            assert await _enqueue(other, 1) == (2, False)
            row = await row_of(journal, QUEUE, 2)
            await journal.commit([Put(row.moved(State.DEAD, time=TIME), LETTER)])

            results = await other.commit(
                [Append(make_command(n), queue=QUEUE, unique="a") for n in (2, 3)]
            )

            assert [tuple(one) for one in results] == [(3, False), (3, True)]
            assert await _enqueue(journal, 4) == (3, True)

    async def test_a_unique_key_is_held_again_by_a_replayed_command(self) -> None:
        async with self.opened() as journal:
            await _enqueue(journal, 0)
            dead = (await row_of(journal, QUEUE, 1)).moved(State.DEAD, time=TIME)
            await journal.commit([Put(dead, LETTER)])
            await journal.commit([Put(dead.moved(State.WAITING, time=TIME, due=0.0, attempt=0))])

            assert await _enqueue(journal, 1) == (1, True)

    async def test_a_command_is_not_replayed_while_another_has_its_unique_key(self) -> None:
        async with self.opened() as journal:
            await _enqueue(journal, 0)
            dead = (await row_of(journal, QUEUE, 1)).moved(State.DEAD, time=TIME)
            await journal.commit([Put(dead, LETTER)])
            await _enqueue(journal, 1)

            replay = Put(dead.moved(State.WAITING, time=TIME, due=0.0))
            with expected(StaleError):
                await journal.commit([replay])

            assert await journal.count(QUEUE) == {State.DEAD: 1, State.WAITING: 1}
            await journal.commit([Drop(await row_of(journal, QUEUE, 2)), replay])
            assert await journal.count(QUEUE) == {State.WAITING: 1}

    async def test_a_row_is_not_written_while_another_has_its_unique_key(self) -> None:
        async with self.opened() as journal:
            await fill(journal, 3)
            member = await join(journal)
            row = make_row(QUEUE, 1, unique="a")
            await journal.commit([Put(row)])
            for state in (State.WAITING, State.CLAIMED, State.DAMAGED):
                owner = member.id if state is State.CLAIMED else None
                with expected(StaleError):
                    await journal.commit([Put(make_row(QUEUE, 2, state, unique="a", owner=owner))])

            others = [
                make_row(QUEUE, 2, State.DEAD, unique="a"),
                make_row(QUEUE, 3, unique="b"),
                make_row("commands:other", 3, unique="a"),
            ]
            retry = row.moved(State.WAITING, time=TIME, due=TIME)
            await journal.commit([*map(Put, others), Put(retry)])
            changed = others[2].moved(State.WAITING, time=TIME, due=TIME)
            await journal.commit([Put(changed)])

            assert await journal.count() == {State.WAITING: 3, State.DEAD: 1}

    async def test_a_unique_key_belongs_to_its_queue(self) -> None:
        async with self.opened() as journal:
            await _enqueue(journal, 0)

            results = await journal.commit(
                [Append(make_command(1), queue="commands:other", unique="a")]
            )

            assert [tuple(one) for one in results] == [(2, False)]

    async def test_a_unique_key_without_a_queue_joins_nothing(self) -> None:
        async with self.opened() as journal:
            await _enqueue(journal, 0)

            results = await journal.commit([Append(make_record(n), unique="a") for n in (1, 2)])

            assert [tuple(one) for one in results] == [(2, False), (3, False)]
            assert await journal.count() == {State.WAITING: 1}

    async def test_of_many_with_one_unique_key_one_is_enqueued(self) -> None:
        async with self.both() as (journal, other):
            results: list[tuple[int, bool]] = []

            async def enqueue(one: Journal, number: int) -> None:
                results.append(await _enqueue(one, number))

            async with anyio.create_task_group() as tasks:
                for number in range(12):
                    tasks.start_soon(enqueue, (journal, other)[number % 2], number)

            assert sorted(results) == [(1, False), *[(1, True)] * 11]
            assert await other.count(QUEUE) == {State.WAITING: 1}
            assert await other.head() == 1

    # -- delayed events --------------------------------------------------------------------------

    async def test_a_delayed_event_has_a_row_and_is_not_in_the_log(self) -> None:
        async with self.both() as (journal, other):
            record = make_record(7, key="k", headers={"a": "b"}, payload=b"\x00\xff")

            row = await _delay(journal, record, TIME + 60)

            assert (await other.head(), await read_all(other)) == (0, [])
            assert row.body is not None
            assert row.body == record._replace(offset=row.body.offset)
            assert (row.state, row.due, row.version) == (State.WAITING, TIME + 60, 1)
            assert await other.row(DELAYED, row.offset) == row
            assert await other.record(row) == row.body
            assert await other.due(DELAYED, TIME) == []
            assert await other.due(DELAYED, TIME + 60) == [row]
            assert (await other.next_due(DELAYED)).time == TIME + 60

    async def test_numbers_of_delayed_events_are_never_used_again(self) -> None:
        async with self.both() as (journal, other):
            offsets: list[int] = []
            for number in range(5):
                row = await _delay((journal, other)[number % 2], make_record(number))
                offsets.append(row.offset)
                await journal.commit([Drop(row)])

            assert offsets == sorted(set(offsets))
            assert await fill(journal, 1) == [1]

    async def test_a_delayed_event_is_kept_once(self) -> None:
        async with self.both() as (journal, other):
            record = make_record(7)
            row = await _delay(journal, record)

            (again,) = await other.commit([Append(record, queue=DELAYED, due=TIME + 9)])
            both = await other.commit([Append(make_record(8), queue=DELAYED, due=TIME)] * 2)

            assert tuple(again) == (row.offset, True)
            assert [one.is_duplicate for one in both] == [False, True]
            assert (await row_of(other, DELAYED, row.offset)).due == TIME
            assert await other.count(DELAYED) == {State.WAITING: 2}

    async def test_an_event_that_was_published_is_not_delayed(self) -> None:
        async with self.opened() as journal:
            record = make_record(7)
            await append(journal, record)

            (result,) = await journal.commit([Append(record, queue=DELAYED, due=TIME)])

            assert result.is_duplicate
            assert await journal.count(DELAYED) == {}

    async def test_a_delayed_event_is_published_once(self) -> None:
        async with self.both() as (journal, other):
            await fill(journal, 2)
            row = await _delay(journal, make_record(7))
            assert row.body is not None
            publish: list[Operation] = [Append(row.body), Drop(row)]

            (result,) = await other.commit(publish)
            with expected(StaleError):
                await journal.commit(publish)

            assert tuple(result) == (3, False)
            (record,) = [one for one in await read_all(journal) if one.offset == 3]
            assert record == row.body._replace(offset=3)
            assert await journal.count(DELAYED) == {}

    async def test_a_cancelled_delayed_event_is_not_published(self) -> None:
        async with self.both() as (journal, other):
            row = await _delay(journal, make_record(7))
            assert row.body is not None
            await other.commit([Drop(row)])

            with expected(StaleError):
                await journal.commit([Append(row.body), Drop(row)])

            assert (await journal.head(), await journal.find(None, STATES)) == (0, [])

    async def test_a_cancelled_delayed_event_may_be_delayed_again(self) -> None:
        async with self.opened() as journal:
            record = make_record(7)
            row = await _delay(journal, record)
            await journal.commit([Drop(row)])

            again = await _delay(journal, record, TIME + 9)

            assert again.offset > row.offset
            assert again.due == TIME + 9
