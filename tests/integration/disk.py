"""A small disk that can be full: a real one where that may be mounted."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from msgbus.journal import SqliteJournal


class Disk:
    """A folder on a disk of its own.

    Where no disk may be mounted it is an ordinary folder, and the file of a journal is bounded
    by SQLite's own limit of pages, which fails with the same error at the same place.
    """

    def __init__(self, folder: Path, size: int, *, is_real: bool) -> None:
        self.folder = folder
        self.size = size
        self.is_real = is_real
        self._journals: list[SqliteJournal] = []

    def bound(self, journal: SqliteJournal) -> SqliteJournal:
        """Let the journal fail beyond half the disk, if there is none."""
        self._journals.append(journal)
        if not self.is_real:
            self._limit_pages(self.size // 2 // 4096)
        return journal

    def _limit_pages(self, pages: int) -> None:
        for journal in self._journals:
            connection = journal._connection  # pyright: ignore[reportPrivateUsage]
            with suppress(Exception):  # closed
                connection.execute(f"PRAGMA max_page_count = {pages}").fetchall()

    def fill(self) -> None:
        """Take all the space that is left, as another program would."""
        if not self.is_real:
            self._limit_pages(1)
            return
        with suppress(OSError), (self.folder / "other").open("ab", buffering=0) as stream:
            while stream.write(bytes(64 * 1024)):
                pass

    def free(self) -> None:
        """Give that back."""
        (self.folder / "other").unlink(missing_ok=True)
        if not self.is_real:
            self._limit_pages(2**30)


@contextmanager
def small_disk(folder: Path, size: int) -> Generator[Disk]:
    """Mount a disk of so many bytes."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    is_real = os.geteuid() == 0 and subprocess.run(command, check=False).returncode == 0
    try:
        yield Disk(folder, size, is_real=is_real)
    finally:
        if is_real:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)
