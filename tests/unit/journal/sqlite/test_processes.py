"""Two journal objects on one file, as two processes have it."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from msgbus.errors import JournalClosedError, MemberEndedError, StaleError
from msgbus.journal.operations import Append, Drop, Pass
from msgbus.journal.records import Member, State
from msgbus.journal.sqlite.journal import SqliteJournal
from msgbus.testing.conformance.journal.kit import (
    EVENTS,
    KEYED,
    SHARED,
    TIME,
    claimed_offsets,
    end,
    fill,
    fill_keys,
    join,
    make_record,
    row_of,
    take,
    until,
)
from tests.unit.journal.sqlite.files import open_counted, sql


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.db"


@asynccontextmanager
async def two(path: Path) -> AsyncGenerator[tuple[SqliteJournal, SqliteJournal]]:
    async with SqliteJournal(path) as first, SqliteJournal(path) as second:
        yield first, second


async def test_claims_of_two_processes_are_disjoint(path: Path) -> None:
    async with two(path) as journals:
        await fill(journals[0], 200)
        await journals[0].open("shared", SHARED, 0)
        claimed: list[list[int]] = [[], []]

        async def work(number: int) -> None:
            journal = journals[number]
            member = await join(journal)
            while claims := await journal.claim(member, "shared", 7, TIME, selection=SHARED):
                claimed[number] += claimed_offsets(claims)
                await journal.commit([Drop(claim.row) for claim in claims], member)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(work, 0)
            tasks.start_soon(work, 1)

        assert sorted(claimed[0] + claimed[1]) == list(range(1, 201))
        assert await journals[1].count() == {}


async def test_offsets_of_two_processes_are_one_sequence(path: Path) -> None:
    async with two(path) as journals:
        offsets: list[int] = []

        async def publish(number: int) -> None:
            for _ in range(30):
                offsets.extend(await fill(journals[number], 3))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(publish, 0)
            tasks.start_soon(publish, 1)

        assert sorted(offsets) == list(range(1, 181))


async def test_an_ended_member_is_refused_and_its_rows_run_alone(path: Path) -> None:
    async with two(path) as (journal, other):
        await fill(journal, 2)
        await journal.open("shared", SHARED, 0)
        member = await join(journal)
        claims = await journal.claim(member, "shared", 9, TIME, selection=SHARED)
        await end(other, member)

        with pytest.raises(MemberEndedError):
            await journal.commit([Append(make_record())], member)
        with pytest.raises(StaleError):
            await journal.commit([Drop(claim.row) for claim in claims])

        successor = await join(other)
        assert await other.claim(successor, "shared", 9, TIME) == []
        again = await other.claim(successor, "shared", 1, TIME, alone=True)
        assert [(claim.row.offset, claim.row.attempt) for claim in again] == [(1, 1)]


async def test_what_was_in_flight_gets_rows_for_the_next_owner(path: Path) -> None:
    async with two(path) as (journal, other):
        await fill_keys(journal, ["a", "b", "a", None, "c"])
        member = await join(journal)
        cursor = await take(journal, member, "orders", KEYED)
        await journal.commit([Pass(cursor, 1, 4)], member)
        await end(other, member)

        taken = await take(other, await join(other), "orders", KEYED)

        assert (taken.acked, taken.fetched, taken.epoch) == (4, 4, cursor.epoch + 1)
        rows = await other.find("orders", list(State))
        assert [(row.offset, row.key, row.state.value) for row in rows] == [
            (2, "b", "waiting"),
            (3, "a", "waiting"),
            (4, None, "waiting"),
        ]
        assert all(row.alone for row in rows)
        with pytest.raises(StaleError):
            await journal.commit([Pass(cursor, 4, 4)])


async def test_a_commit_of_another_process_is_a_change(path: Path) -> None:
    async with two(path) as (journal, other):
        seen = await journal.changed(-1)
        while (again := await journal.changed(seen, 0.001)) != seen:
            seen = again

        await fill(other, 1)

        with anyio.fail_after(10):
            assert await journal.changed(seen) > seen
        assert await journal.head() == 1


async def test_closing_ends_the_wait_for_a_change(path: Path) -> None:
    journal = SqliteJournal(path)
    ended: list[bool] = []
    waiting = anyio.Event()

    async def wait() -> None:
        seen = await journal.changed(-1)
        waiting.set()
        try:
            while True:
                seen = await journal.changed(seen)
        except JournalClosedError:
            ended.append(True)

    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            await waiting.wait()
            await journal.close()

    assert ended == [True]


# -- renewals --------------------------------------------------------------------------------


def renewals(path: Path) -> int:
    return int(sql(path, "SELECT renewals FROM msgbus_members")[0][0])


async def test_renewals_go_on_while_the_event_loop_is_blocked(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        await journal.join("process", {}, every=0.01)
        limit = time.monotonic() + 10

        # No await in here: the event loop stands still.
        while renewals(path) < 3:
            assert time.monotonic() < limit


async def test_a_member_without_renewals_of_its_own_is_not_renewed(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        member = await journal.join("process", {})
        await fill(journal, 1)
        await journal.commit([Append(make_record())], member)

        assert renewals(path) == 0
        assert (await journal.renew(member)).renewals == 1


async def test_no_renewal_is_written_with_every_commit(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        await journal.join("process", {}, every=3600)
        for _ in range(5):
            await fill(journal, 1)

        assert renewals(path) == 0


async def test_a_renewal_finds_that_the_member_was_ended(path: Path) -> None:
    async with two(path) as (journal, other):
        lost: list[int] = []
        member = await journal.join("process", {}, every=0.01, on_lost=lambda: lost.append(1))
        is_ended = False
        with anyio.fail_after(10):
            while not is_ended:
                found: list[Member] = await other.members()
                is_ended = await other.end(found[0])

        await until(lambda: lost)
        with pytest.raises(MemberEndedError):
            await journal.renew(member)

        assert lost == [1]


async def test_a_renewal_that_fails_is_logged_and_tried_again(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal, connection = open_counted(path)
    async with journal:
        await journal.join("process", {}, every=0.01)
        connection.fails_at = "COMMIT"
        await until(lambda: "member_renewal_failed" in caplog.text)
        connection.fails_at = None
        before = renewals(path)

        await until(lambda: renewals(path) > before)


async def test_closing_ends_renewals_and_leaves_the_member(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        await journal.join("process", {}, every=0.01)

    before = renewals(path)
    async with SqliteJournal(path) as journal:
        await fill(journal, 3)
        assert [member.renewals for member in await journal.members()] == [before]


async def test_a_partition_has_one_owner(path: Path) -> None:
    async with two(path) as (journal, other):
        await take(journal, await join(journal), "orders", EVENTS)

        assert await other.acquire(await join(other), "orders", 0, EVENTS) is None


async def test_rows_tell_what_the_file_has(path: Path) -> None:
    async with two(path) as (journal, other):
        await fill(journal, 1)
        await journal.open("shared", SHARED, 0)
        (claim,) = await journal.claim(await join(journal), "shared", 1, TIME, selection=SHARED)

        assert await row_of(other, "shared", 1) == claim.row
