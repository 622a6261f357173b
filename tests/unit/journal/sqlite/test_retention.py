"""Retention without being asked."""

from __future__ import annotations

from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from msgbus.errors import ConfigurationError
from msgbus.journal import open_journal
from msgbus.journal.operations import Append
from msgbus.journal.reports import Retention
from msgbus.journal.sqlite.journal import SqliteJournal
from msgbus.journal.sqlite.reserve import SMALLEST
from msgbus.runtime.clock import VirtualClock
from msgbus.testing.conformance.journal.kit import (
    EVENTS,
    append,
    cursor_of,
    fill,
    join,
    make_record,
    numbers,
    take,
)
from tests.unit.journal.sqlite.files import change, open_counted


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.db"


async def left(journal: SqliteJournal) -> list[int]:
    return numbers((await journal.find_messages(limit=10_000)).records)


async def until_first_is(journal: SqliteJournal, offset: int) -> None:
    """Wait until the journal has trimmed itself."""
    with anyio.fail_after(10):
        while await journal.first() != offset:
            await anyio.lowlevel.checkpoint()


async def test_a_journal_with_retention_is_trimmed_every_thousand_messages(path: Path) -> None:
    async with SqliteJournal(f"sqlite:///{path}?max_count=300&reserve=0") as journal:
        await fill(journal, 999)
        assert await journal.first() == 1

        await fill(journal, 1)

        await until_first_is(journal, 701)
        assert len(await left(journal)) == 300


async def test_age_counts_by_the_clock_of_the_journal(path: Path) -> None:
    clock = VirtualClock()
    keep = Retention(max_age=60)
    async with SqliteJournal(path, clock=clock, retention=keep, reserve=0) as journal:
        await append(journal, *(make_record(n, time=clock.time() - 100) for n in range(500)))
        await append(journal, *(make_record(n, time=clock.time() - 10) for n in range(500)))

        await until_first_is(journal, 501)


async def test_callers_do_not_wait_for_the_whole_trim(path: Path) -> None:
    await fill_file(path, 4000)
    journal, connection = open_counted(path, retention=Retention(max_count=0))
    async with journal:
        await fill(journal, 1000)
        before = connection.commits
        await fill(journal, 1)

        assert connection.commits - before <= 4  # of the 25 that the trim takes
        await until_first_is(journal, 5001)


async def fill_file(path: Path, count: int) -> None:
    async with SqliteJournal(path, reserve=0) as journal:
        await fill(journal, count)


async def test_what_a_subscription_needs_is_kept(path: Path) -> None:
    async with SqliteJournal(path, retention=Retention(max_count=0), reserve=0) as journal:
        cursor = await take(journal, await join(journal), "orders", EVENTS)
        await fill(journal, 1000)
        await journal.commit([Append(make_record())])

        assert (await journal.trim()).held_back_by == ("orders",)
        assert await journal.first() == 1
        assert await cursor_of(journal, "orders") == cursor


async def test_a_trim_that_fails_by_itself_is_logged_and_fails_no_caller(path: Path) -> None:
    async with SqliteJournal(path, retention=Retention(max_count=0), reserve=0) as journal:
        await journal.open("orders", EVENTS, 0)
        change(path, "UPDATE msgbus_subscriptions SET acked = 7")
        await fill(journal, 1000)
        await fill(journal, 1)

        assert len(await left(journal)) == 1001


async def test_a_reserve_is_filled_when_a_journal_is_opened(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        reserve = path.with_name("journal.db-reserve")

        assert reserve.stat().st_size == 8 * 1024 * 1024
        await journal.close()
    await SqliteJournal(path, reserve=SMALLEST).close()
    assert reserve.stat().st_size == SMALLEST


async def test_a_reserve_says_what_it_is(path: Path) -> None:
    await SqliteJournal(path, reserve=SMALLEST).close()

    text = path.with_name("journal.db-reserve").read_bytes()[:400].decode()

    assert "keeps 1048576 bytes of the disk free for the msgbus journal journal.db" in text
    assert "You may delete it at any time" in text


async def test_without_a_reserve_there_is_no_file(path: Path) -> None:
    await SqliteJournal(path, reserve=0).close()

    assert not path.with_name("journal.db-reserve").exists()


@pytest.mark.parametrize("reserve", [-1, 1, 100_000, SMALLEST - 1])
def test_a_reserve_that_could_not_help_is_refused(path: Path, reserve: int) -> None:
    with pytest.raises(ConfigurationError, match=r"at least 1,048,576 bytes.* or 0 for none"):
        open_journal(f"sqlite:///{path}?reserve={reserve}")

    assert not path.exists()
