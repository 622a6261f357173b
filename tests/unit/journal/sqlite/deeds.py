"""What may happen to the files of a journal that is open."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final

import anyio.to_thread

from msgbus.journal.sqlite.journal import SqliteJournal
from msgbus.testing.conformance.journal.kit import fill


def move(path: Path) -> None:
    path.rename(path.with_name("moved.db"))


def delete(path: Path) -> None:
    path.unlink()


def replace_by_another(path: Path) -> None:
    other = path.with_name("other.db")
    run_apart(other)
    other.replace(path)


def replace_by_a_copy(path: Path) -> None:
    copy = path.with_name("copy.db")
    shutil.copy(path, copy)
    copy.replace(path)


def delete_the_log(path: Path) -> None:
    path.with_name(f"{path.name}-wal").unlink()


def delete_the_index_of_the_log(path: Path) -> None:
    path.with_name(f"{path.name}-shm").unlink()


def rename_the_folder(path: Path) -> None:
    path.parent.rename(path.parent.with_name("renamed"))


def delete_the_folder(path: Path) -> None:
    shutil.rmtree(path.parent)


def empty(path: Path) -> None:
    os.truncate(path, 0)


DEEDS: Final[dict[str, Callable[[Path], None]]] = {
    deed.__name__: deed
    for deed in (
        move,
        delete,
        replace_by_another,
        replace_by_a_copy,
        delete_the_log,
        delete_the_index_of_the_log,
        rename_the_folder,
        delete_the_folder,
        empty,
    )
}


def run_apart(path: Path) -> None:
    """Make another journal with a message, in an event loop of its own."""

    async def make() -> None:
        async with SqliteJournal(path, reserve=0) as journal:
            await fill(journal, 1)

    anyio.run(make)


async def do(deed: str, path: Path) -> None:
    """Do it, on another thread."""
    await anyio.to_thread.run_sync(DEEDS[deed], path)
