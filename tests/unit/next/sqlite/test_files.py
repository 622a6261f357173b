from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from msgbus._next.conformance.kit import (
    EVENTS,
    LETTER,
    SHARED,
    TIME,
    fill,
    join,
    make_command,
    make_record,
    make_row,
    snapshot,
    take,
)
from msgbus._next.journal.operations import Append, Drop, Pass, Put, Reply, Save
from msgbus._next.journal.ports import Journal
from msgbus._next.journal.records import DELAYED, Instance, State
from msgbus._next.journal.sqlite.journal import SqliteJournal
from msgbus.errors import (
    JournalClosedError,
    JournalError,
    JournalOpenError,
    JournalVersionError,
    NotAJournalError,
)
from msgbus.journal.sqlite.journal import SqliteJournal as OldJournal
from tests.unit.next.sqlite.files import change, sql


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.db"


async def test_it_satisfies_the_port(path: Path) -> None:
    journal: Journal = SqliteJournal(path)

    assert journal.promises.survives_power_cut
    assert repr(journal) == f"<SqliteJournal {path}>"
    await journal.close()


async def test_everything_is_there_after_a_reopening(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        member = await journal.join("process", {"orders": "v1"})
        await fill(journal, 3, key="größe", headers={"a": "b"}, causation_id="c", depth=2)
        cursor = await take(journal, member, "orders", EVENTS)
        await journal.commit(
            [
                Append(make_command(3), queue="commands:shop.Pack", due=TIME, unique="u"),
                Append(make_record(4, session_id="s", from_system=True), queue=DELAYED, due=TIME),
                Put(make_row("orders", 1, State.DEAD, key="k"), LETTER),
                Reply("id", TIME, b"{}"),
                Save(Instance("timer", "a", b"state", TIME, 1)),
                Pass(cursor, 1, 2),
            ]
        )
        before = await snapshot(journal)

    async with SqliteJournal(path) as journal:
        assert await snapshot(journal) == before
        assert await journal.result("id") is not None
        assert await fill(journal, 1) == [5]


async def test_offsets_are_not_used_again_after_a_trim_to_nothing(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        await fill(journal, 4)
        sql(path, "DELETE FROM msgbus_messages")
        change(path, "UPDATE msgbus_meta SET value = '4' WHERE key = 'trimmed'")

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


async def test_each_file_has_an_id_of_its_own(tmp_path: Path) -> None:
    ids: set[str] = set()
    for name in ("a.db", "b.db"):
        await SqliteJournal(tmp_path / name).close()
        query = "SELECT value FROM msgbus_meta WHERE key = 'journal_id'"
        ids.add(sql(tmp_path / name, query)[0][0])

    assert len(ids) == 2


async def test_a_file_of_the_old_journal_is_refused(path: Path) -> None:
    old = OldJournal(path, reserve=0)
    await old.close()

    with pytest.raises(JournalVersionError, match="has schema version 3") as caught:
        SqliteJournal(path)

    assert "\n" not in str(caught.value)


async def test_the_old_journal_refuses_a_new_file(path: Path) -> None:
    async with SqliteJournal(path):
        pass

    with pytest.raises(JournalVersionError):
        OldJournal(path, reserve=0)


async def test_a_database_of_others_is_refused_unless_it_is_adopted(path: Path) -> None:
    sql(path, "CREATE TABLE orders (id INTEGER)")

    with pytest.raises(NotAJournalError, match="orders"):
        SqliteJournal(path)

    async with SqliteJournal(f"sqlite:///{path}?adopt=true&lock_timeout=5") as journal:
        assert await fill(journal, 1) == [1]


def test_a_missing_folder_and_an_unknown_option_are_refused(tmp_path: Path) -> None:
    with pytest.raises(JournalOpenError, match="does not exist"):
        SqliteJournal(tmp_path / "no" / "journal.db")
    for option in ("colour=red", "adopt=maybe", "lock_timeout=x"):
        with pytest.raises(JournalOpenError, match="makes no sense"):
            SqliteJournal(f"sqlite:///{tmp_path}/journal.db?{option}")


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


def take_away(path: Path, deed: str) -> None:
    if deed == "move":
        path.rename(path.with_name("moved.db"))
    elif deed == "delete the log":
        path.with_name(f"{path.name}-wal").unlink()
    else:
        path.unlink()
    if deed == "replace":
        with closing(sqlite3.connect(path)) as another:
            another.execute("CREATE TABLE other (id)")


@pytest.mark.parametrize("deed", ["move", "delete", "replace", "delete the log"])
async def test_a_file_that_is_gone_fails_the_next_commit(path: Path, deed: str) -> None:
    journal = SqliteJournal(path)
    await fill(journal, 1)
    take_away(path, deed)

    with pytest.raises(JournalError, match="moved, deleted or replaced"):
        await fill(journal, 1)

    await journal.close()


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


class Reversed:
    """A codec that is easy to check."""

    def encode(self, payload: bytes) -> bytes:
        return payload[::-1]

    def decode(self, stored: bytes) -> bytes:
        return stored[::-1]


async def test_a_codec_sees_every_payload(path: Path) -> None:
    async with SqliteJournal(path, codec=Reversed()) as journal:
        await journal.commit(
            [
                Append(make_record(payload=b"abc")),
                Append(make_record(payload=b"def"), queue=DELAYED, due=TIME),
                Reply("id", TIME, b"ghi"),
                Save(Instance("timer", "a", b"jkl", TIME, 1)),
            ]
        )
        scan = await journal.read(0, 1, EVENTS)
        (row,) = await journal.due(DELAYED, TIME)
        result = await journal.result("id")
        instance = await journal.instance("timer", "a")

        assert [one.payload for one in scan.records if not isinstance(one, int)] == [b"abc"]
        assert row.body is not None
        assert row.body.payload == b"def"
        assert result is not None
        assert result.body == b"ghi"
        assert instance is not None
        assert instance.state == b"jkl"
    assert sql(path, "SELECT payload FROM msgbus_messages") == [(b"cba",)]
    assert sql(path, "SELECT body FROM msgbus_results") == [(b"ihg",)]
    assert sql(path, "SELECT body FROM msgbus_pending")[0][0].endswith(b"fed")
