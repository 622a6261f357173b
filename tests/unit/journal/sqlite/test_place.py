"""A file that is moved, deleted, replaced or emptied under an open journal."""

from __future__ import annotations

import sqlite3
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import anyio
import pytest

from msgbus.errors import JournalError
from msgbus.journal.records import State
from msgbus.journal.sqlite import transactions
from msgbus.journal.sqlite.files import connect as plain_connect
from msgbus.journal.sqlite.journal import SqliteJournal
from msgbus.testing.conformance.journal.kit import (
    EVENTS,
    SHARED,
    TIME,
    fill,
    join,
    make_row,
    read_all,
)
from tests.unit.journal.sqlite.deeds import DEEDS, do, run_apart

GONE: Final = "moved, deleted, replaced or emptied"


@pytest.fixture(autouse=True)
def no_commit_is_too_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test does within a millisecond what nobody does."""
    monkeypatch.setattr(transactions, "FRESH", 0.0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """In a folder that nothing else is in."""
    folder = tmp_path / "data"
    folder.mkdir()
    return folder / "shop.db"


def present(path: Path) -> set[Path]:
    return set(path.parent.glob("*")) if path.parent.exists() else set()


@pytest.mark.parametrize("deed", DEEDS)
async def test_nothing_is_acknowledged_into_a_file_that_is_not_there(path: Path, deed: str) -> None:
    async with SqliteJournal(path, reserve=0) as journal, SqliteJournal(path, reserve=0) as other:
        await fill(journal, 3)
        member = await join(journal)
        await journal.open("shared", SHARED, 0)
        await do(deed, path)
        left = present(path)

        for one in (journal, other):
            with pytest.raises(JournalError, match=GONE):
                await fill(one, 1)
            with pytest.raises(JournalError, match=GONE):
                await one.transact(lambda db: db.execute("SELECT 1").fetchall())
            with pytest.raises(JournalError, match=GONE):
                await one.claim(member, "shared", 1, TIME, selection=SHARED)
        assert present(path) == left  # and none is made in its place


QUESTIONS: Final[dict[str, Callable[[SqliteJournal], Awaitable[Any]]]] = {
    "head": SqliteJournal.head,
    "read": lambda journal: journal.read(0, 9, EVENTS),
    "find_messages": SqliteJournal.find_messages,
    "row": lambda journal: journal.row("shared", 1),
    "result": lambda journal: journal.result("m"),
    "letter_groups": SqliteJournal.letter_groups,
    "members": SqliteJournal.members,
    "verify": SqliteJournal.verify,
    "changed": lambda journal: journal.changed(0, 5),
    "changed of others": lambda journal: journal.changed(0, 5, others=True),
}


@pytest.mark.parametrize("deed", DEEDS)
async def test_readers_do_not_mix_two_files(path: Path, deed: str) -> None:
    async with SqliteJournal(path, reserve=0) as journal:
        await fill(journal, 3)
        await journal.head()  # a connection is open, others are not
        since = await journal.changed(-1)
        await do(deed, path)
        left = present(path)

        for question in QUESTIONS.values():
            with pytest.raises(JournalError, match=GONE):
                await question(journal)
        with pytest.raises(JournalError, match=GONE):
            await journal.changed(since)
        with pytest.raises(JournalError):
            await journal.backup(path.with_name("backup.db"))
        assert present(path) == left


def test_a_connection_makes_no_file_in_the_place_of_one_that_was_moved(path: Path) -> None:
    """An empty one would end the log that the moved one has left, with what is in it."""
    with pytest.raises(sqlite3.OperationalError, match="unable to open"):
        plain_connect(str(path), 1.0)

    assert present(path) == set()


async def test_who_waits_for_others_is_told_as_well(path: Path) -> None:
    async with SqliteJournal(path, reserve=0) as journal:
        await fill(journal, 1)
        since = await journal.changed(-1, others=True)

        with anyio.fail_after(5):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(do, "replace_by_another", path)
                with pytest.raises(JournalError, match=GONE):
                    await journal.changed(since, others=True)


@pytest.mark.parametrize("deed", ["move", "rename_the_folder"])
async def test_it_goes_on_when_the_same_files_are_back(path: Path, deed: str) -> None:
    async with SqliteJournal(path, reserve=0) as journal:
        await fill(journal, 1)
        await do(deed, path)
        for _ in range(2):
            with pytest.raises(JournalError, match=GONE):
                await fill(journal, 1)
        if deed == "move":
            path.with_name("moved.db").rename(path)
        else:
            path.parent.with_name("renamed").rename(path.parent)

        # What was refused was not written, either.
        assert await fill(journal, 1) == [2]
        assert len(await read_all(journal)) == 2
        assert (await journal.verify()).is_sound


async def test_a_copy_is_not_the_same_file(path: Path) -> None:
    async with SqliteJournal(path, reserve=0) as journal:
        await fill(journal, 1)
        await do("replace_by_a_copy", path)

        for _ in range(2):
            with pytest.raises(JournalError, match=GONE):
                await fill(journal, 1)


@pytest.mark.parametrize("deed", ["delete_the_log", "move"])
async def test_what_was_acknowledged_is_in_the_file_that_it_had(path: Path, deed: str) -> None:
    async with SqliteJournal(path, reserve=0) as journal:
        await fill(journal, 100)
        await do(deed, path)
        with pytest.raises(JournalError, match=GONE):
            await fill(journal, 1)

    if deed == "move":  # its log is still where it was
        path.with_name("moved.db").rename(path)
    async with SqliteJournal(path, reserve=0) as journal:
        assert len(await read_all(journal)) == 100
        assert (await journal.verify()).is_sound


class Moving(sqlite3.Connection):
    """Does something between the look at the file and the commit."""

    deed: Callable[[], object] | None = None

    def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
        if sql == "COMMIT" and self.deed is not None:
            self.deed()
            self.deed = None
        return super().execute(sql, parameters)


def connect(path: str, lock_timeout: float) -> sqlite3.Connection:
    return sqlite3.connect(
        path,
        timeout=lock_timeout,
        isolation_level=None,
        check_same_thread=False,
        factory=Moving,
    )


async def test_a_commit_during_which_it_goes_is_no_success(path: Path) -> None:
    moved = path.with_name("moved.db")
    async with SqliteJournal(path, reserve=0, _connect=connect) as journal:
        await fill(journal, 1)
        connection = journal._connection  # pyright: ignore[reportPrivateUsage]
        cast("Moving", connection).deed = partial(path.rename, moved)

        with pytest.raises(JournalError, match=GONE):
            await fill(journal, 1)
        moved.rename(path)

        # It was written, and nobody knows: only a new beginning is safe.
        for _ in range(2):
            with pytest.raises(JournalError, match=GONE):
                await fill(journal, 1)
            with pytest.raises(JournalError, match=GONE):
                await journal.head()

    async with SqliteJournal(path, reserve=0) as journal:
        assert len(await read_all(journal)) == 2


async def test_a_link_that_leads_elsewhere_is_another_file(path: Path) -> None:
    link, other = path.with_name("link.db"), path.with_name("other.db")
    await anyio.to_thread.run_sync(run_apart, path)
    await anyio.to_thread.run_sync(run_apart, other)
    link.symlink_to(path)
    async with SqliteJournal(link, reserve=0) as journal:
        await fill(journal, 1)
        link.unlink()
        link.symlink_to(other)

        with pytest.raises(JournalError, match=GONE):
            await fill(journal, 1)
        with pytest.raises(JournalError, match=GONE):
            await journal.head()


async def test_the_log_beside_the_target_of_a_link_is_watched(path: Path) -> None:
    link = path.parent.parent / "link.db"
    link.symlink_to(path)
    async with SqliteJournal(link, reserve=0) as journal:
        await fill(journal, 1)
        await do("delete_the_log", path)

        with pytest.raises(JournalError, match=GONE):
            await fill(journal, 1)


async def test_another_working_folder_is_no_other_file(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(path.parent)
    async with SqliteJournal("sqlite:///shop.db", reserve=0) as journal:
        await fill(journal, 1)
        monkeypatch.chdir(path.parent.parent)

        await fill(journal, 1)
        await journal.commit([])
        assert len(await read_all(journal)) == 2
        assert await journal.find("a", [State.WAITING]) == []
        await journal.compact()
    assert not (path.parent.parent / "shop.db").exists()


async def test_without_the_check_all_is_acknowledged_into_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(*_: object, **__: object) -> None: ...

    monkeypatch.setattr(transactions.FilePlace, "check", nothing)
    async with SqliteJournal(path, reserve=0) as journal:
        await fill(journal, 1)
        await do("delete", path)
        for offset in range(2, 102):
            assert await fill(journal, 1) == [offset]

    assert path not in present(path)


async def test_a_file_may_be_compacted_and_backed_up(path: Path) -> None:
    async with SqliteJournal(path, reserve=0) as journal, SqliteJournal(path, reserve=0) as other:
        await fill(journal, 300)
        await journal.trim(before=290)
        await journal.compact()
        await other.compact()
        await journal.backup(path.with_name("backup.db"))

        assert await fill(journal, 1) == [301]
        assert await fill(other, 1) == [302]
        assert await journal.record(make_row("a", 301)) is not None
