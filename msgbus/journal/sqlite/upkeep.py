"""Upkeep of a journal's file: compact it, back it up."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Final

from msgbus.errors import JournalOpenError
from msgbus.journal.sqlite.faults import translated
from msgbus.journal.sqlite.files import MEMORY, configure
from msgbus.journal.sqlite.questions import QuestionReader

_LEFTOVERS: Final = ("", "-journal", "-wal", "-shm")


def compact(path: str, connect: Callable[[], sqlite3.Connection]) -> None:
    """Return free pages, and the write-ahead log, to the file system."""
    # On a connection of its own: VACUUM is not possible inside a transaction.
    with translated(path), closing(connect()) as connection:
        configure(connection)
        connection.execute("VACUUM")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()


def backup(reader: QuestionReader, target: str | os.PathLike[str]) -> None:
    """Copy one consistent state of the journal to a new file, while others write.

    The file gets the permissions of the journal, and its name once it is complete.

    Raises:
        JournalOpenError: The file exists, or its folder does not.
    """
    file = Path(target)
    _check_target(file)
    partial = file.with_name(f"{file.name}.partial")
    try:
        _unlink(partial)
        _make_like(partial, reader.path)
        with closing(sqlite3.connect(partial, isolation_level=None)) as copy:
            reader.connection.backup(copy)
            # One file, complete in itself.
            copy.execute("PRAGMA journal_mode = DELETE").fetchall()
        partial.rename(file)
    finally:
        _unlink(partial)


def _check_target(file: Path) -> None:
    if file.exists():
        message = f"{file} exists: name a new file for the backup, or remove it first."
        raise JournalOpenError(message, path=str(file))
    if not file.parent.is_dir():
        message = f"The folder of the backup {file} does not exist: make {file.parent} first."
        raise JournalOpenError(message, path=str(file))


def _make_like(file: Path, journal: str) -> None:
    """Make an empty file that no one else may read who may not read the journal."""
    mode = 0o600 if journal == MEMORY else Path(journal).stat().st_mode & 0o777
    os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    file.chmod(mode)


def _unlink(file: Path) -> None:
    for ending in _LEFTOVERS:
        file.with_name(f"{file.name}{ending}").unlink(missing_ok=True)
