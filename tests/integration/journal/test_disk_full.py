"""A full disk: a clean error, nothing lost, and work goes on once there is space."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Generator
from pathlib import Path

import anyio
import pytest

from msgbus.errors import JournalFullError
from msgbus.journal import Record, Retention, SqliteJournal
from msgbus.journal.operations import Pass
from msgbus.testing.conformance.journal.kit import (
    EVENTS,
    append,
    cursor_of,
    join,
    make_record,
    read_all,
    take,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

DISK = 16 * 1024 * 1024
RESERVE = 6 * 1024 * 1024


def mounted(folder: Path) -> bool:
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(folder)]
    return os.geteuid() == 0 and subprocess.run(command, check=False).returncode == 0


@pytest.fixture
def disk(tmp_path: Path) -> Generator[Path]:
    """A disk of sixteen megabytes: a real one where that may be mounted.

    Elsewhere it is an ordinary folder, and `fill` bounds the file by SQLite's own limit of
    pages, which fails with the same error at the same place.
    """
    folder = tmp_path / "disk"
    folder.mkdir()
    is_real = mounted(folder)
    (tmp_path / "is_real").write_text(str(is_real))
    yield folder
    if is_real:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def limit_pages(journal: SqliteJournal, disk: Path, pages: int) -> None:
    if (disk.parent / "is_real").read_text() == "False":
        connection = journal._connection  # pyright: ignore[reportPrivateUsage]
        connection.execute(f"PRAGMA max_page_count = {pages}").fetchall()


async def fill(journal: SqliteJournal) -> list[Record]:
    """Append until the disk is full; gives what was acknowledged."""
    acked: list[Record] = []
    while True:
        records = [make_record(len(acked) + n, payload=bytes(1_000)) for n in range(20)]
        try:
            offsets = await append(journal, *records)
        except JournalFullError:
            return acked
        acked += [
            record._replace(offset=offset) for record, offset in zip(records, offsets, strict=True)
        ]
        assert len(acked) < 20_000


async def test_a_full_disk_is_a_clean_error_and_loses_nothing(disk: Path) -> None:
    journal = SqliteJournal(disk / "journal.db", reserve=RESERVE)
    limit_pages(journal, disk, 2_000)
    acked = await fill(journal)

    assert len(acked) > 500
    assert await read_all(journal) == acked
    with pytest.raises(JournalFullError, match="Nothing that was acknowledged is lost"):
        await append(journal, make_record(payload=bytes(20_000_000)))
    await journal.close()

    async with SqliteJournal(disk / "journal.db", reserve=0) as again:
        assert await read_all(again) == acked
        assert (await again.verify()).is_sound


async def test_retention_frees_space_on_a_full_disk_and_work_goes_on(disk: Path) -> None:
    async with SqliteJournal(disk / "journal.db", reserve=RESERVE) as journal:
        limit_pages(journal, disk, 2_000)
        acked = await fill(journal)

        report = await journal.trim(Retention(max_count=200))
        (offset,) = await append(journal, make_record())

        assert report.removed == len(acked) - 200
        assert offset == len(acked) + 1
        assert len(await read_all(journal)) == 201
        assert (await journal.verify()).is_sound


async def test_a_journal_with_retention_makes_room_by_itself(disk: Path) -> None:
    keep = Retention(max_count=200)
    async with SqliteJournal(disk / "j.db", reserve=RESERVE, retention=keep) as journal:
        limit_pages(journal, disk, 2_000)
        member = await join(journal)
        await take(journal, member, "orders", EVENTS)
        for turn in range(1, 21):
            # Less than what makes retention look by itself, more than the disk holds in all.
            await append(journal, *(make_record(payload=bytes(1_000)) for _ in range(900)))
            cursor = await cursor_of(journal, "orders")
            await journal.commit([Pass(cursor, turn * 900, turn * 900)], member)

        assert await journal.head() == 18_000
        assert (await journal.verify()).is_sound


async def test_one_write_that_is_too_big_does_not_fail_the_others(disk: Path) -> None:
    refused: list[int] = []
    async with SqliteJournal(disk / "journal.db", reserve=0) as journal:
        limit_pages(journal, disk, 2_000)

        async def publish(number: int, size: int) -> None:
            try:
                await append(journal, make_record(number, payload=bytes(size)))
            except JournalFullError:
                refused.append(number)

        async with anyio.create_task_group() as callers:
            for number in range(20):
                callers.start_soon(publish, number, 30_000_000 if number == 7 else 100)

        assert refused == [7]
        assert len(await read_all(journal)) == 19
