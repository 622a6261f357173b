"""Who may read what a journal makes: its files, backups, exports of letters."""

from __future__ import annotations

import io
import os
import sqlite3
import stat
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any, cast

import anyio
import pytest

from msgbus.journal.sqlite.journal import SqliteJournal
from msgbus.resilience import DeadLetterQueue, MemoryDeadLetterStore, SqliteDeadLetterStore
from msgbus.resilience.dead_letters.journal_store import JournalDeadLetterStore
from msgbus.runtime.private_files import make_folder, open_private, permissions_of
from msgbus.testing.conformance.dead_letters import letter
from msgbus.testing.conformance.journal.kit import fill

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="it has no such permissions")


@pytest.fixture(params=[0o022, 0o000, 0o077, 0o027], ids="umask {:03o}".format, autouse=True)
def umask(request: pytest.FixtureRequest) -> Generator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "shop.db"


def mode_of(path: Path) -> str:
    return f"{stat.S_IMODE(path.stat().st_mode):o}"


def modes(folder: Path) -> dict[str, str]:
    return {file.name: mode_of(file) for file in folder.iterdir()}


async def test_a_new_journal_and_all_that_is_beside_it_is_its_owners(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        await fill(journal, 3)
        await journal.compact()
        await journal.backup(path.with_name("backup.db"))
        found = modes(path.parent)

    assert found == dict.fromkeys(
        ("shop.db", "shop.db-wal", "shop.db-shm", "shop.db-reserve", "backup.db"), "600"
    )


async def test_it_is_so_before_sqlite_opens_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, str] = {}

    def watched(name: Any, *arguments: Any, **options: Any) -> sqlite3.Connection:
        file = Path(str(name).removeprefix("file://").partition("?")[0])
        found.setdefault(file.name, mode_of(file))
        return cast("sqlite3.Connection", plain_connect(name, *arguments, **options))

    plain_connect: Any = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", watched)
    async with SqliteJournal(path, reserve=0) as journal:
        await journal.backup(path.with_name("backup.db"))

    assert set(found.values()) == {"600"}
    assert {name.split(".")[0] for name in found} == {"shop", "backup"}


async def test_a_file_that_is_there_keeps_what_its_owner_has_set(path: Path) -> None:
    await SqliteJournal(path).close()
    await anyio.Path(path).chmod(0o640)
    async with SqliteJournal(path) as journal:
        await fill(journal, 3)
        await journal.compact()
        found = modes(path.parent)
        await journal.backup(path.with_name("backup.db"))

    assert found == {
        "shop.db": "640",
        "shop.db-wal": "640",
        "shop.db-shm": "640",
        "shop.db-reserve": "600",
    }
    assert mode_of(path.with_name("backup.db")) == "640"


async def test_what_a_link_leads_to_is_its_owners(path: Path) -> None:
    link = path.with_name("link.db")
    link.symlink_to(path)
    async with SqliteJournal(link, reserve=0) as journal:
        await fill(journal, 1)
        assert mode_of(path) == "600"


@pytest.mark.parametrize("permissions", ["600", "640"])
@pytest.mark.parametrize("kind", ["sqlite", "journal", "memory"])
async def test_letters_are_exported_for_those_who_may_read_them(
    path: Path, kind: str, permissions: str
) -> None:
    journal = SqliteJournal(path, reserve=0)
    store: Any = MemoryDeadLetterStore()
    if kind != "memory":
        is_apart = kind == "sqlite"
        store = SqliteDeadLetterStore(path) if is_apart else JournalDeadLetterStore(journal)
    async with journal, DeadLetterQueue(store) as queue:
        queue.store.add(letter(1))
        await queue.store.flush()
        await anyio.Path(path).chmod(int(permissions, 8))
        export = path.with_name("letters.jsonl")
        assert await queue.export(export) == 1
        assert mode_of(export) == ("600" if kind == "memory" else permissions)
        assert await queue.export(io.StringIO()) == 1

        await anyio.Path(export).chmod(0o604)
        await queue.export(export)
        assert mode_of(export) == "604"
        assert await anyio.Path(export).read_text() != ""


def test_a_file_that_is_made_is_private_before_it_is_anything_else(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    os_open = os.open

    def spy(name: Any, flags: int, mode: int = 0o777, **options: Any) -> int:
        asked.append(mode)
        return os_open(name, flags, mode, **options)

    monkeypatch.setattr(os, "open", spy)
    with open_private(path, "w", 0o664) as file:
        file.write("a")

    assert asked == [0o600]
    assert mode_of(path) == "664"
    with open_private(path, "w") as file:
        file.write("b")
    assert (mode_of(path), path.read_text()) == ("664", "b")
    with pytest.raises(FileExistsError):
        open_private(path, "x")


def test_a_folder_may_be_entered_by_those_who_may_read_in_it(tmp_path: Path) -> None:
    made = {
        permissions: tmp_path / "a" / f"{permissions:o}" for permissions in (0o600, 0o640, 0o664)
    }
    for permissions, folder in made.items():
        make_folder(folder, permissions)
        make_folder(folder, 0o666)

    assert [mode_of(folder) for folder in made.values()] == ["700", "750", "775"]
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        make_folder(tmp_path / "file")


def test_permissions_are_those_of_the_first_file_that_is_there(tmp_path: Path) -> None:
    for name, mode in (("a", 0o640), ("b", 0o755)):
        (tmp_path / name).touch()
        (tmp_path / name).chmod(mode)

    assert permissions_of(None, tmp_path / "none", tmp_path / "a", tmp_path / "b") == 0o640
    assert permissions_of(tmp_path / "b") == 0o644
    assert permissions_of(tmp_path / "none") == permissions_of() == 0o600
