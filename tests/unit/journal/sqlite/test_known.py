"""What a connection remembers of the file: read again once it may have changed."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from msgbus.errors import ForbiddenStatementError, MemberEndedError, StaleError
from msgbus.journal.operations import Append, Drop, Note, Pass, Put
from msgbus.journal.records import DeliveryRecord, Outcome, Selection, State
from msgbus.journal.reports import Retention
from msgbus.journal.sqlite.journal import SqliteJournal
from msgbus.testing.conformance.journal.kit import TIME, append, fill, join, make_record, make_row


@asynccontextmanager
async def pair(tmp_path: Path) -> AsyncGenerator[tuple[SqliteJournal, SqliteJournal]]:
    """Two journals on one file, as two processes have them."""
    path = tmp_path / "journal.db"
    async with SqliteJournal(path) as one, SqliteJournal(path) as other:
        yield one, other


async def found(journal: SqliteJournal, name: str) -> list[int | None]:
    page = await journal.find_messages(name=name)
    return [record.offset for record in page.records if not isinstance(record, int)]


async def test_offsets_go_on_behind_those_of_another_process(
    tmp_path: Path,
) -> None:
    async with pair(tmp_path) as both:
        one, other = both
        for turn in range(3):
            assert await append(one, make_record(10 * turn)) == [2 * turn + 1]
            assert await append(other, make_record(10 * turn + 1)) == [2 * turn + 2]


async def test_offsets_go_on_behind_what_another_process_has_trimmed(
    tmp_path: Path,
) -> None:
    async with pair(tmp_path) as both:
        one, other = both
        await fill(one, 5)
        await other.trim(Retention(max_count=0))
        assert await append(one, make_record(6)) == [6]


@pytest.mark.parametrize("trimmed_by", [0, 1])
async def test_a_message_is_found_by_name_after_all_before_it_were_trimmed(
    tmp_path: Path, trimmed_by: int
) -> None:
    async with pair(tmp_path) as both:
        one = both[0]
        await append(one, make_record(1, name="shop.Paid"))
        await both[trimmed_by].trim(Retention(max_count=0))
        await append(one, make_record(2, name="shop.Paid"))
        assert await found(one, "shop.Paid") == [2]


async def test_a_message_is_found_by_name_after_the_first_of_its_name_was_refused(
    tmp_path: Path,
) -> None:
    async with pair(tmp_path) as both:
        one = both[0]
        with pytest.raises(StaleError):
            await one.commit([Append(make_record(1, name="shop.Paid")), Drop(make_row("one", 99))])
        await append(one, make_record(2, name="shop.Paid"))
        assert await found(one, "shop.Paid") == [1]


async def test_a_message_is_found_by_name_after_a_whole_commit_has_failed(
    tmp_path: Path,
) -> None:
    async with pair(tmp_path) as both:
        one = both[0]

        def end_transaction(connection: object) -> None:
            connection.execute("COMMIT")  # type: ignore[attr-defined]

        with pytest.raises(ForbiddenStatementError):
            await one.transact(end_transaction, [Append(make_record(1, name="shop.Paid"))])
        await append(one, make_record(2, name="shop.Paid"))
        assert await found(one, "shop.Paid") == [1]


async def test_a_member_that_another_process_has_ended_is_refused(
    tmp_path: Path,
) -> None:
    async with pair(tmp_path) as both:
        one, other = both
        member = await join(one)
        note = DeliveryRecord("id", "handler", 1, Outcome.OK, 0.0, 0.0, TIME, None, None)
        await one.commit([Note(note)], member)
        assert await other.end(member)
        with pytest.raises(MemberEndedError):
            await one.commit([Note(note)], member)


@pytest.mark.parametrize("done_by", [0, 1])
async def test_a_done_row_goes_when_the_cursor_passes_it_whoever_wrote_it(
    tmp_path: Path, done_by: int
) -> None:
    async with pair(tmp_path) as both:
        one, selection = both[0], Selection()
        await fill(one, 3)
        member = await join(one)
        await one.open("one", selection, 0)
        cursor = await one.acquire(member, "one", 0, selection)
        assert cursor is not None
        first = Pass(cursor, 1, 3)
        await one.commit([first], member)  # now it knows that there are none
        await both[done_by].commit([Put(make_row("one", 2, state=State.DONE))])
        await one.commit([Pass(first.after, 3, 3)], member)
        assert await one.row("one", 2) is None


async def test_a_done_row_goes_when_the_commit_that_deleted_it_before_has_failed(
    tmp_path: Path,
) -> None:
    async with pair(tmp_path) as both:
        one, selection = both[0], Selection()
        await fill(one, 3)
        member = await join(one)
        await one.open("one", selection, 0)
        cursor = await one.acquire(member, "one", 0, selection)
        assert cursor is not None
        await one.commit([Pass(cursor, 0, 3), Put(make_row("one", 1, state=State.DONE))], member)
        moved = Pass(cursor, 1, 3)
        with pytest.raises(StaleError):
            await one.commit([moved, Drop(make_row("one", 99))], member)
        await one.commit([moved], member)
        assert await one.row("one", 1) is None
