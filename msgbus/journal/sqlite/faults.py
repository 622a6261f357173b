"""SQLite's errors as ours: what happened, to which file, and what to do about it."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from msgbus.errors import (
    JournalClosedError,
    JournalCorruptError,
    JournalError,
    JournalFullError,
    JournalLockedError,
    JournalOpenError,
    JournalReadOnlyError,
    NotAJournalError,
)

_PRIMARY: Final = 0xFF
_INDEX_BLOCK: Final = 64 * 1024
_NOT_TEXT: Final = "Could not decode to UTF-8"


@contextmanager
def translated(path: str) -> Generator[None]:
    """Raise SQLite's errors as ours."""
    try:
        yield
    except sqlite3.Error as error:
        raise translate(error, path) from error
    except MemoryError as error:
        # As one of the journal, which those who wait for it can deal with.
        raise JournalError(f"The journal {path} failed: out of memory.", path=path) from error
    except UnicodeDecodeError as error:
        # SQLite's complaint quotes the damage, and Python cannot read the complaint.
        kind, text = _KNOWN[sqlite3.SQLITE_CORRUPT]
        raise kind(text.format(path=path, error=error.reason), path=path) from error


def translate(error: sqlite3.Error, path: str) -> JournalError:
    """The error of ours that says the same, for an error that the file itself causes."""
    code = getattr(error, "sqlite_errorcode", None)
    primary = None if code is None else code & _PRIMARY
    if is_undecodable(error):
        primary = sqlite3.SQLITE_CORRUPT
    if primary == sqlite3.SQLITE_IOERR and _has_no_space(path):
        # The log's index could not grow, which SQLite calls an error of the disk.
        primary = sqlite3.SQLITE_FULL
    if primary is None:
        text = str(error)
        if "closed database" in text:
            return closed(path)
        return JournalError(f"The journal {path} failed: {text}", path=path)
    make = _KNOWN.get(primary)
    if make is None:
        message = f"The journal {path} failed: {error} ({getattr(error, 'sqlite_errorname', '?')})."
        return JournalError(message, path=path)
    kind, text = make
    return kind(text.format(path=path, error=error), path=path)


def is_full(error: BaseException, path: str) -> bool:
    """Tell whether the disk is full."""
    failure = translate(error, path) if isinstance(error, sqlite3.Error) else error
    return isinstance(failure, JournalFullError)


def _has_no_space(path: str) -> bool:
    """Tell whether the disk is full, or so nearly that the log's index cannot grow by a block."""
    try:
        return shutil.disk_usage(Path(path).parent).free < _INDEX_BLOCK
    except OSError:
        return False


def closed(path: str) -> JournalClosedError:
    """The error for use after the end."""
    return JournalClosedError(f"The journal {path} is closed. Open it again.", path=path)


def forked(path: str) -> JournalClosedError:
    """The error for use in a process that was forked."""
    message = (
        f"The journal {path} was opened before this process was forked, and cannot be used here: "
        f"its threads and locks are the parent's. Open it after the fork, and only then, or start "
        f"processes by 'spawn'."
    )
    return JournalClosedError(message, path=path)


def is_undecodable(error: sqlite3.Error) -> bool:
    """Whether text in the file is no text: damage that SQLite itself does not see."""
    return _NOT_TEXT in str(error)


def is_the_file(error: sqlite3.Error) -> bool:
    """Whether the file is the trouble, rather than the statement."""
    code = getattr(error, "sqlite_errorcode", None)
    return (code is not None and code & _PRIMARY in _KNOWN) or is_undecodable(error)


_KNOWN: Final[dict[int, tuple[type[JournalError], str]]] = {
    sqlite3.SQLITE_FULL: (
        JournalFullError,
        "No space is left for the journal {path}. Nothing that was acknowledged is lost. Free "
        "space, or trim the journal with `await journal.trim(...)`, and try again.",
    ),
    sqlite3.SQLITE_BUSY: (
        JournalLockedError,
        "The journal {path} is locked by another process. Let it finish, or raise lock_timeout.",
    ),
    sqlite3.SQLITE_LOCKED: (
        JournalLockedError,
        "A table of the journal {path} is locked by another connection. Let it finish.",
    ),
    sqlite3.SQLITE_READONLY: (
        JournalReadOnlyError,
        "The journal {path} cannot be written: the file, or the folder it is in, is read-only. "
        "Give this user the right to write both.",
    ),
    sqlite3.SQLITE_PERM: (
        JournalReadOnlyError,
        "The journal {path} cannot be opened by this user. Give it the right to read and write.",
    ),
    sqlite3.SQLITE_CANTOPEN: (
        JournalOpenError,
        "The journal {path} cannot be opened: {error}. Is the folder there, and may this user "
        "write to it?",
    ),
    sqlite3.SQLITE_NOTADB: (
        NotAJournalError,
        "{path} is not a journal, and not a SQLite database at all. Choose another path.",
    ),
    sqlite3.SQLITE_CORRUPT: (
        JournalCorruptError,
        "The journal {path} is damaged ({error}). Restore a backup; journal.verify() says more.",
    ),
    sqlite3.SQLITE_IOERR: (
        JournalError,
        "The disk failed under the journal {path}: {error}.",
    ),
}
