"""Backups and compactions that are killed leave nothing behind the next one."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from time import monotonic

import pytest

from msgbus.journal import SqliteJournal
from msgbus.testing.conformance.journal.kit import append, make_record, read_all

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(120),
    pytest.mark.asyncio_only("one is enough"),
]

ROOT = Path(__file__).resolve().parents[3]

SCRIPT = """
import asyncio, itertools, sys
from msgbus.journal import SqliteJournal

async def main(path, what):
    async with SqliteJournal(path, reserve=0) as journal:
        print("ready", flush=True)
        for number in itertools.count():
            if what == "backup":
                await journal.backup(f"{path}.copy{number}")
            else:
                await journal.compact()

asyncio.run(main(*sys.argv[1:]))
"""


def kill_during(what: str, path: Path, is_time: Callable[[], bool]) -> None:
    """Kill a process that makes backups, or compacts, when a condition holds."""
    command = [sys.executable, "-c", SCRIPT, str(path), what]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        end = monotonic() + 30
        while not is_time():
            assert monotonic() < end, "it has not begun"
        process.kill()
        assert process.wait() == -signal.SIGKILL


def partial_files(folder: Path) -> list[Path]:
    return list(folder.glob("*partial*"))


def remove_copies(folder: Path) -> None:
    for copy in folder.glob("journal.db.copy*"):
        copy.unlink()


def names(folder: Path) -> list[str]:
    return [one.name for one in folder.iterdir()]


async def fill(path: Path) -> None:
    async with SqliteJournal(path, reserve=0) as journal:
        for _ in range(10):
            await append(journal, *(make_record(payload=bytes(2_000)) for _ in range(500)))


async def test_a_killed_backup_leaves_nothing_behind_the_next(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    await fill(path)
    left = 0
    for number in range(5):
        kill_during("backup", path, lambda: bool(partial_files(tmp_path)))
        left += len(partial_files(tmp_path))
        async with SqliteJournal(path, reserve=0) as journal:
            await journal.backup(tmp_path / f"backup{number}.db")

        assert not partial_files(tmp_path)
        remove_copies(tmp_path)
    assert left, "no backup was cut off"

    async with SqliteJournal(tmp_path / "backup4.db", reserve=0) as copy:
        assert (await copy.verify()).is_sound


async def test_a_killed_compaction_loses_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    await fill(path)
    async with SqliteJournal(path, reserve=0) as journal:
        before = await read_all(journal)
    log = path.with_name("journal.db-wal")
    for _ in range(5):
        kill_during("compact", path, lambda: log.exists() and log.stat().st_size > 2_000_000)

        async with SqliteJournal(path, reserve=0) as journal:
            assert await read_all(journal) == before
            assert (await journal.verify()).is_sound
            await journal.compact()
        assert names(tmp_path) == ["journal.db"]
