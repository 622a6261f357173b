"""Opening a journal: URLs, bad files with clear errors, files of other versions."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager
from pathlib import Path

import anyio
import pytest

from msgbus import JournalError
from msgbus.errors import (
    JournalLockedError,
    JournalOpenError,
    JournalVersionError,
    NotAJournalError,
)
from msgbus.journal import MemoryJournal, Retention, SqliteJournal, open_journal
from msgbus.journal.sqlite.files import connect
from msgbus.journal.sqlite.schema import VERSION
from msgbus.testing.conformance.journal.kit import append, fill, make_record, read_all
from msgbus.testing.conformance.journal.tables import statement
from tests.fakes import Connections


def plain(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(path, isolation_level=None)


def names(folder: Path) -> list[str]:
    return [file.name for file in folder.iterdir()]


async def write_one(path: Path) -> None:
    async with SqliteJournal(path, reserve=0) as journal:
        await append(journal, make_record(1))


# -- URLs ----------------------------------------------------------------------------------


async def test_a_url_names_a_file_relative_to_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    journal = open_journal("sqlite:///shop%20one.db")
    await append(journal, make_record(1))
    await journal.close()

    assert journal.promises.level == "fsync"
    assert (tmp_path / "shop one.db").exists()


async def test_a_url_with_four_slashes_names_an_absolute_path(tmp_path: Path) -> None:
    journal = open_journal(f"sqlite:///{tmp_path}/shop.db")
    await journal.close()

    assert (tmp_path / "shop.db").exists()


@pytest.mark.parametrize("url", ["sqlite:///:memory:", "memory:", "memory://"])
async def test_a_journal_in_memory_promises_no_more_than_that(url: str) -> None:
    journal = open_journal(url)
    await append(journal, make_record(1))
    await journal.close()

    assert journal.promises.level == "memory"
    assert isinstance(journal, MemoryJournal | SqliteJournal)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("nats-typo://x", "no journal that msgbus knows"),
        ("shop.db", r"Write sqlite:///shop\.db"),
        ("sqlite://shop.db", "names no file"),
        ("sqlite:///", "names no file"),
        ("sqlite:///:memory:?colour=red", "colour"),
        ("sqlite:///:memory:?max_age=old", "old"),
        ("sqlite:///:memory:?adopt=perhaps", "perhaps"),
    ],
)
def test_a_url_that_makes_no_sense_is_refused(url: str, says: str) -> None:
    with pytest.raises(JournalOpenError, match=says):
        open_journal(url)


async def test_options_of_a_url_are_those_of_the_constructor(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/shop.db?reserve=1048577&max_count=2&lock_timeout=1.5&adopt=false"
    async with SqliteJournal(url) as journal:
        await fill(journal, 5)
        report = await journal.trim()

    assert report.removed == 3
    assert (tmp_path / "shop.db-reserve").stat().st_size == 1_048_577


# -- bad files -----------------------------------------------------------------------------


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(JournalOpenError, match=r"make .*nowhere first") as caught:
        SqliteJournal(tmp_path / "nowhere" / "shop.db")

    assert caught.value.path == str(tmp_path / "nowhere" / "shop.db")


def test_a_folder_is_no_journal(tmp_path: Path) -> None:
    with pytest.raises(JournalOpenError, match=r"is a folder.*journal\.db"):
        SqliteJournal(tmp_path)


def test_a_text_file_is_no_journal_and_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("Dear diary, today I will be long enough to be a database. " * 100)
    before = file.read_bytes()

    with pytest.raises(NotAJournalError, match="not a SQLite database"):
        SqliteJournal(file)

    assert file.read_bytes() == before
    assert list(tmp_path.iterdir()) == [file]


async def test_a_database_of_another_program_is_left_alone_unless_adopted(tmp_path: Path) -> None:
    file = tmp_path / "shop.db"
    with closing(plain(file)) as connection:
        connection.execute("PRAGMA user_version = 7")
        connection.execute("CREATE TABLE orders (number INTEGER)")
    before = file.read_bytes()

    with pytest.raises(NotAJournalError, match=r"orders.*adopt=True"):
        SqliteJournal(file)
    assert file.read_bytes() == before

    async with SqliteJournal(f"sqlite:///{file}?adopt=true", reserve=0) as journal:
        await journal.transact(statement("INSERT INTO orders VALUES (1)"))
    await write_one(file)
    with closing(plain(file)) as connection:
        assert connection.execute("SELECT number FROM orders").fetchall() == [(1,)]
        assert connection.execute("PRAGMA user_version").fetchone() == (7,)


READ_ONLY = """
import os, sys
from msgbus.errors import JournalReadOnlyError
from msgbus.journal import SqliteJournal
if os.getuid() == 0:
    os.setuid(65534)  # to root nothing is read-only
try:
    SqliteJournal(sys.argv[1], reserve=0)
except JournalReadOnlyError as error:
    assert isinstance(error, PermissionError)
    print(error)
"""


def open_as_nobody(file: Path, target: str) -> str:
    """What a process says that may read everything, and write all but the target."""
    file.chmod(0o444 if target == "file" else 0o666)
    file.parent.chmod(0o777 if target == "file" else 0o555)
    try:
        command = [sys.executable, "-c", READ_ONLY, str(file)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    finally:
        file.parent.chmod(0o755)


@contextmanager
def open_folder() -> Generator[Path]:
    """A folder that all users may look into."""
    # Not in tmp_path: pytest keeps the folders above it from all other users, and another
    # pytest on this machine does so again at any moment.
    with tempfile.TemporaryDirectory() as base:
        Path(base).chmod(0o755)
        folder = Path(base) / "data"
        folder.mkdir()
        yield folder


@pytest.mark.parametrize("target", ["file", "folder"])
async def test_what_cannot_be_written_is_named(target: str) -> None:
    with open_folder() as folder:
        file = folder / "shop.db"
        await write_one(file)
        said = open_as_nobody(file, target)

    named = file if target == "file" else folder
    assert f"{named} is read-only for this user" in said


async def test_a_locked_file_is_waited_for_and_then_named(tmp_path: Path) -> None:
    file = tmp_path / "shop.db"
    await write_one(file)
    async with SqliteJournal(file, lock_timeout=0.05, reserve=0) as journal:
        with closing(plain(file)) as other:
            other.execute("BEGIN IMMEDIATE")

            with pytest.raises(JournalLockedError, match="locked by another process") as caught:
                await append(journal, make_record(2))
            assert len(await read_all(journal)) == 1
            other.execute("ROLLBACK")

        await append(journal, make_record(3))
        assert len(await read_all(journal)) == 2
    assert isinstance(caught.value, TimeoutError)


async def test_a_file_that_is_locked_at_opening_is_named_if_it_must_be_made(tmp_path: Path) -> None:
    empty, made = tmp_path / "empty.db", tmp_path / "made.db"
    await write_one(made)
    for file in (empty, made):
        with closing(plain(file)) as other:
            other.execute("BEGIN IMMEDIATE")

            if file == empty:
                with pytest.raises(JournalLockedError, match=r"empty\.db is locked"):
                    SqliteJournal(file, lock_timeout=0.05)
            else:  # nothing to write, so nothing to wait for
                await SqliteJournal(file, lock_timeout=0.05, reserve=0).close()


# -- versions ------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [None, 0, VERSION - 1, VERSION + 1, 99])
async def test_a_file_of_another_version_is_refused_and_left_alone(
    tmp_path: Path, version: int | None
) -> None:
    file = tmp_path / "shop.db"
    await write_one(file)
    set_version(file, version)
    before = file.read_bytes()

    with pytest.raises(JournalVersionError) as caught:
        SqliteJournal(file)

    found = version or 0
    assert str(caught.value) == (
        f"The journal {file} has schema version {found}, and this msgbus reads version {VERSION} "
        f"only. Open it with the msgbus that wrote it, or choose another path."
    )
    assert (caught.value.found, caught.value.supported) == (found, VERSION)
    assert file.read_bytes() == before
    assert names(tmp_path) == ["shop.db"]


async def test_a_journal_of_another_version_among_tables_of_yours_is_refused(
    tmp_path: Path,
) -> None:
    file = tmp_path / "shop.db"
    async with SqliteJournal(file, reserve=0) as journal:
        await journal.transact(statement("CREATE TABLE orders (number)"))
    set_version(file, 1)

    with pytest.raises(
        JournalVersionError, match=f"has schema version 1, .*version {VERSION} only"
    ):
        SqliteJournal(file, adopt=True)


def set_version(file: Path, version: int | None) -> None:
    """Make it a file that another msgbus wrote; without a version, none that any did."""
    with closing(plain(file)) as connection:
        connection.execute("DELETE FROM msgbus_meta WHERE key = 'schema_version'")
        if version is not None:
            connection.execute(
                "INSERT INTO msgbus_meta VALUES ('schema_version', ?, 0)", (version,)
            )
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()


def test_many_may_open_a_new_file_at_once(tmp_path: Path) -> None:
    code = "import sys; from msgbus.journal import SqliteJournal; SqliteJournal(sys.argv[1])"
    command = [sys.executable, "-W", "ignore::ResourceWarning", "-c", code]
    openers = [subprocess.Popen([*command, str(tmp_path / "shop.db")]) for _ in range(4)]

    assert [opener.wait() for opener in openers] == [0, 0, 0, 0]
    anyio.run(write_one, tmp_path / "shop.db")


def test_every_journal_error_says_which_file(tmp_path: Path) -> None:
    with pytest.raises(JournalError) as caught:
        SqliteJournal(tmp_path)

    assert caught.value.path == str(tmp_path)
    assert Retention() == Retention(max_age=None)


# -- what was opened is closed -------------------------------------------------------------


async def test_a_journal_that_is_closed_leaves_no_connection_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connections = Connections(monkeypatch)
    async with open_journal(f"sqlite:///{tmp_path}/shop.db") as journal:
        await append(journal, make_record(1))
        assert len(await read_all(journal)) == 1
        assert len(connections.open) == 3  # that of the writer, a reader, and one that watches

    assert connections.open == []


def no_second_connection(number: int, connection: sqlite3.Connection) -> None:
    if number == 2:
        connection.close()
        raise sqlite3.OperationalError("too many open files")


def no_pragma_on_the_second(number: int, connection: sqlite3.Connection) -> None:
    if number == 2:
        connection.set_authorizer(refuse(sqlite3.SQLITE_PRAGMA, "query_only"))


def no_head(number: int, connection: sqlite3.Connection) -> None:
    connection.set_authorizer(refuse(sqlite3.SQLITE_READ, "msgbus_messages"))


def refuse(action: int, what: str) -> Callable[..., int]:
    def answer(asked: int, about: str | None, *_: object) -> int:
        is_it = (asked, about) == (action, what)
        return sqlite3.SQLITE_DENY if is_it else sqlite3.SQLITE_OK

    return answer


@pytest.mark.parametrize("fault", [no_second_connection, no_pragma_on_the_second, no_head])
async def test_a_journal_that_fails_half_way_through_its_opening_leaves_nothing_open(
    tmp_path: Path,
    fault: Callable[[int, sqlite3.Connection], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tmp_path / "shop.db"
    await write_one(file)
    connections = Connections(monkeypatch)

    def connect_badly(path: str, lock_timeout: float) -> sqlite3.Connection:
        connection = connect(path, lock_timeout)
        fault(len(connections.made), connection)
        return connection

    with pytest.raises(JournalError, match=r"The journal .*shop\.db failed: "):
        SqliteJournal(file, reserve=0, _connect=connect_badly)

    assert (len(connections.made), connections.open) == (2, [])
