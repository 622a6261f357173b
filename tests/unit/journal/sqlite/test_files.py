from __future__ import annotations

from pathlib import Path

import pytest

from msgbus.errors import JournalClosedError
from msgbus.journal.operations import Append, Drop
from msgbus.journal.ports import Journal
from msgbus.journal.records import DELAYED, State
from msgbus.journal.sqlite.journal import SqliteJournal
from msgbus.testing.conformance.journal.kit import (
    EVENTS,
    SHARED,
    TIME,
    append,
    fill,
    join,
    make_record,
)
from tests.unit.journal.sqlite.files import sql


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.db"


async def test_it_satisfies_the_port(path: Path) -> None:
    journal: Journal = SqliteJournal(path)

    assert journal.promises.survives_power_cut
    assert repr(journal) == f"<SqliteJournal {path}>"
    await journal.close()


async def test_offsets_are_not_used_again_after_a_trim_to_nothing(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        await fill(journal, 4)
        await journal.trim(before=5)

        assert await journal.head() == 4
        assert await fill(journal, 1) == [5]


async def test_numbers_of_delayed_events_are_not_used_again(path: Path) -> None:
    numbers: list[int] = []
    for _ in range(3):
        async with SqliteJournal(path) as journal:
            (appended,) = await journal.commit([Append(make_record(), queue=DELAYED, due=TIME)])
            numbers.append(appended.offset)
            (row,) = await journal.find(DELAYED, [State.WAITING])
            await journal.commit([Drop(row)])

    assert numbers == [1, 2, 3]


async def test_a_file_keeps_its_id_and_a_backup_has_it(tmp_path: Path) -> None:
    async with SqliteJournal(tmp_path / "a.db", reserve=0) as journal:
        await journal.backup(tmp_path / "b.db")
    async with (
        SqliteJournal(tmp_path / "a.db", reserve=0) as again,
        SqliteJournal(tmp_path / "b.db", reserve=0) as backup,
    ):
        assert journal.id == again.id == backup.id


async def test_a_closed_journal_refuses_everything(path: Path) -> None:
    journal = SqliteJournal(path)
    await fill(journal, 1)
    await journal.close()
    await journal.close()

    with pytest.raises(JournalClosedError):
        await journal.commit([])
    with pytest.raises(JournalClosedError):
        await journal.head()
    with pytest.raises(JournalClosedError):
        await journal.changed(-1)


async def test_a_database_in_memory_works_on_one_connection() -> None:
    async with SqliteJournal("sqlite:///:memory:") as journal:
        member = await join(journal)
        await fill(journal, 3)
        await journal.open("shared", SHARED, 0)
        claims = await journal.claim(member, "shared", 2, TIME, selection=SHARED)

        assert len((await journal.read(0, 9, EVENTS)).records) == 3
        assert await journal.count("shared") == {State.CLAIMED: len(claims)}
        assert not journal.promises.survives_kill
        seen = await journal.changed(-1)
        await journal.head()
        assert await journal.changed(seen, 0.001) == seen


async def test_a_view_shows_the_log_with_all_ids_and_text(path: Path) -> None:
    first = make_record(0)
    async with SqliteJournal(path, reserve=0) as journal:
        await append(journal, first, make_record(1, correlation_id="c", root_id="r"))

    columns = "offset, correlation_id, root_id, payload"
    assert sql(path, f"SELECT {columns} FROM msgbus_log") == [
        (1, first.message_id, first.message_id, '{"number":0}'),
        (2, "c", "r", '{"number":1}'),
    ]
