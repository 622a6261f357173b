"""Where a journal lives: URLs, connections and the checks before the first one."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeAlias
from urllib.parse import parse_qsl, unquote, urlsplit

from msgbus.errors import JournalOpenError, JournalReadOnlyError
from msgbus.journal.sqlite.faults import forked, translated
from msgbus.runtime.forks import tell_after_fork
from msgbus.runtime.private_files import open_private

MEMORY: Final = ":memory:"
SCHEME: Final = "sqlite://"
PAGE_SIZE: Final = 4096
LOG_LIMIT: Final = 8 * 1024 * 1024
"""Bytes of the write-ahead log that are kept once it is in the file."""

Connect: TypeAlias = Callable[[str, float], sqlite3.Connection]
"""Opens a connection to a path, waiting so many seconds for locks."""


def parse_url(url: str) -> tuple[str, dict[str, str]]:
    """Path and options of `sqlite:///relative.db`, `sqlite:////absolute.db`, `sqlite:///:memory:`.

    What is no URL is a path.

    Raises:
        JournalOpenError: It names a host, or no file.
    """
    if not url.startswith("sqlite:"):
        return url, {}
    parts = urlsplit(url)
    path = unquote(parts.path).removeprefix("/")
    if parts.netloc or not path:
        message = (
            f"{url!r} names no file. Write sqlite:///shop.db for a file in the working folder, "
            f"sqlite:////var/lib/shop.db for an absolute path, or sqlite:///:memory:."
        )
        raise JournalOpenError(message)
    return path, dict(parse_qsl(parts.query))


_inherited: Final[set[tuple[int, int]]] = set()
"""Files that were open when this process was forked.

SQLite keeps what it knows of locks by file and not by connection: a new connection would believe
that it has those of the parent.
"""


def _identity(path: str) -> tuple[int, int] | None:
    try:
        status = Path(path).stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


class FileConnection(sqlite3.Connection):
    """A connection that is not used in a forked process."""

    path = ""
    """The file."""

    def forked(self) -> None:
        """Keep it open for ever: to close it here could damage what the parent has open."""
        import ctypes  # only here: it takes a while

        try:
            _ = self.in_transaction
        except sqlite3.ProgrammingError:
            return  # it was closed before
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))
        identity = _identity(self.path)
        if identity is not None:
            _inherited.add(identity)


def connect(path: str, lock_timeout: float) -> sqlite3.Connection:
    """A plain connection to a file that is there; only one thread uses it at a time.

    Raises:
        JournalClosedError: It was open when this process was forked.
    """
    if _inherited and _identity(path) in _inherited:
        raise forked(path)
    is_file = path != MEMORY
    connection = sqlite3.connect(
        # An empty file in the place of one that was moved would end its log, with what is in it.
        f"{Path(path).absolute().as_uri()}?mode=rw" if is_file else path,
        uri=is_file,
        timeout=lock_timeout,
        isolation_level=None,
        check_same_thread=False,
        factory=FileConnection,
        cached_statements=256,
    )
    connection.path = path
    tell_after_fork(connection)
    return connection


def check_place(path: str) -> None:
    """Look for what SQLite would only call "unable to open database file".

    Raises:
        JournalOpenError: The folder is missing, or the path is a folder.
        JournalReadOnlyError: The file or its folder cannot be written.
    """
    file = Path(path)
    folder = file.parent
    if not folder.is_dir():
        message = f"The folder of the journal {path} does not exist: make {folder} first."
        raise JournalOpenError(message, path=path)
    if file.is_dir():
        message = f"{path} is a folder. Name a file in it, such as {file / 'journal.db'}."
        raise JournalOpenError(message, path=path)
    # The folder as well: the write-ahead log is a second file beside the first.
    for target in (file, folder):
        if target.exists() and not os.access(target, os.W_OK):
            message = (
                f"The journal {path} cannot be written: {target} is read-only for this user. "
                f"Give it the right to write both the file and its folder."
            )
            raise JournalReadOnlyError(message, path=path)


def make_file(path: str) -> None:
    """Make the file of a new journal, which only its owner may read; one that is there stays.

    SQLite gives the files beside it the same permissions.

    Raises:
        JournalOpenError: It cannot be made.
    """
    target = os.path.realpath(path)  # what a link leads to
    # One that is there is not opened: to close it would release the locks of this process on it.
    if os.path.lexists(target):
        return
    try:
        open_private(target, "xb").close()
    except FileExistsError:
        pass  # another process was faster
    except OSError as error:
        message = f"The journal {path} cannot be made: {error.strerror}."
        raise JournalOpenError(message, path=path) from error


def configure(connection: sqlite3.Connection) -> None:
    """Settings of a connection that writes."""
    # FULL, not NORMAL: in WAL mode, NORMAL does not sync at commit, and a power cut loses
    # what was acknowledged.
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA fullfsync = ON")
    # What one large commit has made of the log is not kept for ever.
    connection.execute(f"PRAGMA journal_size_limit = {LOG_LIMIT}").fetchall()
    # Pages that become free are not overwritten: a trim would need a disk that is not full.
    connection.execute("PRAGMA secure_delete = FAST").fetchall()
    connection.execute("PRAGMA trusted_schema = OFF")
    # As is the default; otherwise a table of the user's could forbid the removal of messages.
    connection.execute("PRAGMA foreign_keys = OFF")


def open_reader(path: str, lock_timeout: float, connect: Connect = connect) -> sqlite3.Connection:
    """A connection that only reads."""
    with translated(path):
        connection = connect(path, lock_timeout)
        try:
            connection.execute("PRAGMA query_only = ON")
        except BaseException:
            connection.close()
            raise
    return connection
