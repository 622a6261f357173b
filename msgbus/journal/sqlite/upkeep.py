"""Upkeep of a journal's file: compact it, back it up."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Final
from uuid import uuid4

from msgbus.errors import JournalOpenError
from msgbus.journal.sqlite.faults import translated
from msgbus.journal.sqlite.files import configure
from msgbus.journal.sqlite.questions import QuestionReader
from msgbus.runtime.file_lock import take_lock
from msgbus.runtime.private_files import permissions_of

_PARTIAL: Final = ".msgbus-partial"
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
        JournalFullError: The disk has no room for it; the error names the backup.
    """
    file = Path(target)
    _check_target(file)
    _remove_abandoned(file.parent)
    with _partial(file, permissions_of(reader.path)) as partial, translated(str(file)):
        with closing(sqlite3.connect(partial, isolation_level=None)) as copy:
            reader.connection.backup(copy)
            # One file, complete in itself.
            copy.execute("PRAGMA journal_mode = DELETE").fetchall()
        partial.rename(file)


def _check_target(file: Path) -> None:
    if file.exists():
        message = f"{file} exists: name a new file for the backup, or remove it first."
        raise JournalOpenError(message, path=str(file))
    if not file.parent.is_dir():
        message = f"The folder of the backup {file} does not exist: make {file.parent} first."
        raise JournalOpenError(message, path=str(file))


@contextmanager
def _partial(file: Path, mode: int) -> Generator[Path]:
    """Make an empty file beside `file`; its lock tells others that somebody works on it."""
    partial, opened = _locked_beside(file)
    try:
        partial.chmod(mode)
        yield partial
    finally:
        os.close(opened)
        _unlink(partial)


def _locked_beside(file: Path) -> tuple[Path, int]:
    while True:
        partial = file.with_name(f"{file.name}.{uuid4().hex}{_PARTIAL}")
        opened = os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        with suppress(OSError):  # another backup took it for abandoned, before it was locked
            take_lock(opened)
            if os.fstat(opened).st_nlink:
                return partial, opened
        os.close(opened)


def _remove_abandoned(folder: Path) -> None:
    """Remove what backups have left whose processes were killed."""
    for partial in folder.glob(f"*{_PARTIAL}"):
        with suppress(OSError):  # somebody works on it, or has just ended
            opened = os.open(partial, os.O_RDONLY)
            try:
                take_lock(opened)
                _unlink(partial)
            finally:
                os.close(opened)


def _unlink(file: Path) -> None:
    for ending in _LEFTOVERS:
        file.with_name(f"{file.name}{ending}").unlink(missing_ok=True)
