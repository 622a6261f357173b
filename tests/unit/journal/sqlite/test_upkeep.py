from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from msgbus.errors import CursorError, JournalClosedError, JournalFullError, JournalOpenError
from msgbus.journal.operations import Append, Note, Pass, Put, Reply
from msgbus.journal.records import (
    DELAYED,
    DeliveryRecord,
    Order,
    Outcome,
    Selection,
    State,
)
from msgbus.journal.reports import Retention, TrimReport, VerifyReport
from msgbus.journal.sqlite.journal import SqliteJournal
from msgbus.runtime.clock import VirtualClock
from msgbus.runtime.file_lock import take_lock
from msgbus.testing.conformance.journal.kit import (
    EVENTS,
    LETTER,
    SHARED,
    TIME,
    append,
    cursor_of,
    fill,
    join,
    make_record,
    make_row,
    numbers,
)
from tests.unit.journal.sqlite.files import change, open_counted, sql
from tests.unit.journal.sqlite.test_verify import fill_all


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.db"


async def left(journal: SqliteJournal) -> list[int]:
    return numbers((await journal.find_messages(limit=10_000)).records)


async def pass_to(journal: SqliteJournal, name: str, offset: int) -> None:
    await journal.open(name, EVENTS, 0)
    await journal.commit([Pass(await cursor_of(journal, name), offset, offset)])


def size_of(path: Path) -> int:
    return path.stat().st_size


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o777


def names_in(folder: Path) -> list[str]:
    return sorted(one.name for one in folder.iterdir())


# -- trim ------------------------------------------------------------------------------------


async def test_without_a_limit_nothing_is_removed(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        await fill(journal, 3)

        assert await journal.trim() == TrimReport(removed=0, first=1)
        assert await left(journal) == [0, 1, 2]


async def test_a_trim_keeps_the_newest_messages(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        await fill(journal, 10)

        assert await journal.trim(Retention(max_count=3)) == TrimReport(removed=7, first=8)
        assert await left(journal) == [7, 8, 9]
        assert await journal.first() == 8


async def test_a_trim_removes_what_lies_before_an_offset(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        await fill(journal, 5)

        assert await journal.trim(before=3) == TrimReport(removed=2, first=3)
        assert await journal.trim(before=99) == TrimReport(removed=3, first=6)


async def test_a_trim_by_age_stops_at_the_first_young_message(path: Path) -> None:
    clock = VirtualClock()
    now = clock.time()
    async with SqliteJournal(path, clock=clock) as journal:
        ages = [100, 50, 5, 60, 1]  # the clock had jumped
        await append(journal, *(make_record(n, time=now - age) for n, age in enumerate(ages)))

        assert (await journal.trim(Retention(max_age=10))).removed == 2
        assert await left(journal) == [2, 3, 4]


async def test_a_trim_by_size_removes_no_more_than_it_must(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        payload = b'{"number":1,"text":"%s"}' % (b"x" * 2000)
        await fill(journal, 1000, payload=payload)
        size = 1_500_000

        report = await journal.trim(Retention(max_bytes=size))

        (pages,), (free,) = (
            sql(path, f"PRAGMA {name}")[0] for name in ("page_count", "freelist_count")
        )
        assert (pages - free) * 4096 <= size
        assert 200 <= report.removed <= 800
        assert report.first == report.removed + 1
        again = await journal.trim(Retention(max_bytes=size))
        assert again.removed == 0


async def test_many_messages_go_in_small_commits(path: Path) -> None:
    journal, connection = open_counted(path)
    async with journal:
        await fill(journal, 1000)
        before = connection.commits

        assert (await journal.trim(Retention(max_count=1))).removed == 999
        assert connection.commits - before >= 5


async def test_offsets_are_not_used_again_after_a_trim(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        await fill(journal, 5)
        assert await journal.trim(Retention(max_count=0)) == TrimReport(removed=5, first=6)
    async with SqliteJournal(path) as journal:
        assert await journal.head() == 5
        assert await fill(journal, 1) == [6]
        assert (await journal.verify()).is_sound


async def test_what_a_cursor_has_not_passed_stays(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        await fill(journal, 10)
        await pass_to(journal, "slow", 4)
        await pass_to(journal, "fast", 10)

        report = await journal.trim(Retention(max_count=2))

        assert report == TrimReport(removed=4, first=5, held_back_by=("slow",))
        assert await left(journal) == [4, 5, 6, 7, 8, 9]


async def test_the_slowest_partition_holds_a_trim_back(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        await fill(journal, 10)
        await journal.open("keyed", Selection(order=Order.KEY, partitions=2), 6)
        await journal.commit([Pass(await cursor_of(journal, "keyed", 1), 9, 9)])

        assert (await journal.trim(before=9)).removed == 6


async def test_a_size_that_cannot_be_reached_names_who_holds_it_back(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        await fill(journal, 10)
        await pass_to(journal, "slow", 4)

        report = await journal.trim(Retention(max_bytes=1))

        assert report == TrimReport(removed=4, first=5, held_back_by=("slow",))


async def test_what_is_in_flight_stays(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        await fill(journal, 5)
        await journal.open("shared", SHARED, 0)
        member = await join(journal)
        await journal.claim(member, "shared", 2, TIME, selection=SHARED)

        report = await journal.trim(Retention(max_count=0))

        assert report == TrimReport(removed=0, first=3, held_back_by=("shared",))
        assert await left(journal) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("state", [State.WAITING, State.PARKED, State.DEAD, State.DAMAGED])
async def test_what_a_row_needs_stays_until_the_row_has_gone(path: Path, state: State) -> None:
    async with SqliteJournal(path) as journal:
        await fill(journal, 5)
        await journal.commit([Put(make_row("orders", 1, key="k")), Put(make_row("orders", 3))])
        await journal.commit(
            [Put(make_row("orders", 3, state, key="k", version=2), LETTER)],
        )

        report = await journal.trim(Retention(max_count=1))

        assert report == TrimReport(removed=2, first=5, held_back_by=("orders",))
        assert await left(journal) == [0, 2, 4]
        row = await journal.row("orders", 3)
        assert row is not None
        assert await journal.record(row) is not None
        assert (await journal.verify()).problems == ()
        sql(path, "DELETE FROM msgbus_pending")
        assert (await journal.trim(Retention(max_count=1))).removed == 2
        assert await left(journal) == [4]


async def test_a_row_with_a_body_needs_no_message(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        await fill(journal, 3)
        await journal.commit([Append(make_record(9), queue=DELAYED, due=TIME)])
        await journal.commit([Put(make_row("orders", 2, State.DEAD, body=make_record(1)), LETTER)])

        assert await journal.trim(before=4) == TrimReport(removed=3, first=4)
        assert (await journal.verify()).is_sound


async def test_the_number_of_a_delayed_event_is_not_an_offset(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        await fill(journal, 3)
        await journal.commit([Append(make_record(9), queue=DELAYED, due=TIME)])
        change(path, "UPDATE msgbus_pending SET body = x'00'")
        (row,) = await journal.find(DELAYED, [State.DAMAGED])
        await journal.due(DELAYED, TIME)  # sets it aside, without its message

        assert row.offset == 1
        assert await journal.trim(before=4) == TrimReport(removed=3, first=4)


async def test_what_belongs_to_a_message_goes_with_it(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        for number in range(2):
            record = make_record(number, message_id=f"m{number}")
            delivery = DeliveryRecord(
                record.message_id, "mail", 1, Outcome.OK, 0, 0, TIME, offset=number + 1
            )
            await journal.commit(
                [
                    Append(record),
                    Reply(record.message_id, TIME, b"1"),
                    Note(delivery),
                    Note(delivery._replace(offset=None)),
                    Put(make_row("orders", number + 1, State.KEPT)),
                ]
            )

        assert (await journal.trim(before=2)).removed == 1
        assert sql(path, "SELECT message_id FROM msgbus_results") == [("m1",)]
        assert sql(path, "SELECT offset FROM msgbus_pending") == [(2,)]
        assert await journal.deliveries("m0") == []
        assert len(await journal.deliveries("m1")) == 2


async def test_a_damaged_cursor_stops_a_trim(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        await fill(journal, 3)
        await pass_to(journal, "orders", 1)
        change(path, "UPDATE msgbus_subscriptions SET acked = 3")

        with pytest.raises(CursorError):
            await journal.trim(Retention(max_count=0))
        assert await left(journal) == [0, 1, 2]


async def test_a_trim_that_fails_removes_nothing(path: Path) -> None:
    journal, connection = open_counted(path)
    async with journal:
        await fill(journal, 3)
        connection.fails_at = "DELETE FROM msgbus_messages"

        with pytest.raises(JournalFullError):
            await journal.trim(before=3)
        connection.fails_at = None
        assert await left(journal) == [0, 1, 2]
        assert await journal.first() == 1


async def test_a_journal_in_memory_can_be_trimmed_and_verified() -> None:
    async with SqliteJournal(":memory:") as journal:
        await fill(journal, 3)
        await journal.compact()

        assert (await journal.trim(before=3)).removed == 2
        assert await journal.verify() == VerifyReport(messages=1)


# -- compact ---------------------------------------------------------------------------------


async def test_a_compact_makes_the_file_smaller_and_keeps_what_is_in_it(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        await fill(journal, 500, payload=b'{"number":1,"text":"%s"}' % (b"x" * 2000))
        await journal.trim(Retention(max_count=5))
        before = size_of(path)
        await journal.compact()

        assert size_of(path) < before / 4
        assert size_of(Path(f"{path}-wal")) == 0
        assert len(await left(journal)) == 5
        assert await fill(journal, 1) == [501]
        assert (await journal.verify()).is_sound


async def test_a_closed_journal_is_not_compacted(path: Path) -> None:
    journal = SqliteJournal(path)
    await journal.close()

    with pytest.raises(JournalClosedError):
        await journal.compact()


# -- backup ----------------------------------------------------------------------------------


async def test_a_backup_is_a_journal_of_its_own(path: Path, tmp_path: Path) -> None:
    target = tmp_path / "backup.db"
    async with SqliteJournal(path, reserve=0) as journal:
        await fill_all(journal)
        await journal.backup(target)
        await fill(journal, 1)

    assert names_in(tmp_path) == ["backup.db", "journal.db"]
    async with SqliteJournal(target, reserve=0) as copy:
        assert await copy.verify() == VerifyReport(messages=7)
        assert await copy.head() == 7


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such permissions")
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664])
async def test_a_backup_has_the_permissions_of_the_journal(
    path: Path, tmp_path: Path, mode: int
) -> None:
    target = tmp_path / "backup.db"
    async with SqliteJournal(path, reserve=0) as journal:
        os.chmod(path, mode)  # noqa: PTH101
        await journal.backup(str(target))

    assert mode_of(target) == mode


async def test_a_journal_in_memory_can_be_backed_up(tmp_path: Path) -> None:
    target = tmp_path / "backup.db"
    async with SqliteJournal(":memory:") as journal:
        await fill(journal, 3)
        await journal.backup(target)

    assert mode_of(target) == 0o600
    async with SqliteJournal(target, reserve=0) as copy:
        assert await left(copy) == [0, 1, 2]


async def test_a_backup_replaces_no_file(path: Path, tmp_path: Path) -> None:
    target = tmp_path / "backup.db"
    target.write_text("mine")
    async with SqliteJournal(path, reserve=0) as journal:
        with pytest.raises(JournalOpenError, match="exists"):
            await journal.backup(target)
        with pytest.raises(JournalOpenError, match="exists"):
            await journal.backup(path)

    assert target.read_text() == "mine"


async def test_a_backup_needs_a_folder(path: Path, tmp_path: Path) -> None:
    async with SqliteJournal(path, reserve=0) as journal:
        with pytest.raises(JournalOpenError, match="does not exist"):
            await journal.backup(tmp_path / "nowhere" / "backup.db")


async def test_a_backup_that_fails_leaves_nothing_behind(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(file: Path, target: Path) -> Path:
        message = f"no room for {file} as {target}"
        raise OSError(message)

    async with SqliteJournal(path, reserve=0) as journal:
        await fill(journal, 3)
        monkeypatch.setattr(Path, "rename", fail)
        with pytest.raises(OSError, match="no room"):
            await journal.backup(tmp_path / "backup.db")

    assert names_in(tmp_path) == ["journal.db"]


async def test_what_a_killed_backup_left_behind_is_removed(path: Path, tmp_path: Path) -> None:
    left = [f"old.db.1.msgbus-partial{ending}" for ending in ("", "-journal", "-wal", "-shm")]
    for name in (*left, "film.partial"):
        (tmp_path / name).write_text("half of it")
    async with SqliteJournal(path, reserve=0) as journal:
        await journal.backup(tmp_path / "backup.db")

    assert names_in(tmp_path) == ["backup.db", "film.partial", "journal.db"]
    with closing(sqlite3.connect(tmp_path / "backup.db")) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("delete",)


async def test_a_backup_leaves_what_another_one_works_on(path: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.db.1.msgbus-partial"
    async with SqliteJournal(path, reserve=0) as journal:
        with other.open("wb") as file:
            take_lock(file.fileno())
            await journal.backup(tmp_path / "backup.db")

            assert other.exists()
        await journal.backup(tmp_path / "another.db")

    assert names_in(tmp_path) == ["another.db", "backup.db", "journal.db"]
