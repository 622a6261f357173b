"""A disk that remembers what was written and what was synced, so that power can be cut later.

SQLite writes through a virtual file system (VFS) that notes every write, truncation and sync.
From the notes, `images` makes what a disk might hold after a power cut at any moment: all that
was synced, and of the rest nothing, or any of its sectors.
"""

# pyright: reportUnknownMemberType=false
# apsw types its buffers by a name that older Pythons do not have.

from __future__ import annotations

import random
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import apsw

SECTOR = 512


@dataclass(frozen=True, slots=True)
class Note:
    """One thing that happened, in order."""

    what: str
    """`write`, `truncate`, `sync`, `delete`; or `ack`, by whoever was acknowledged."""
    file: str = ""
    offset: int = 0
    data: bytes = b""
    ack: object = None


@dataclass
class Disk:
    """One file: what is safe, and what is not yet."""

    safe: bytearray = field(default_factory=bytearray)
    pending: list[Note] = field(default_factory=list[Note])

    def sync(self) -> None:
        for note in self.pending:
            apply(self.safe, note)
        self.pending.clear()


def apply(content: bytearray, note: Note) -> None:
    if note.what == "truncate":
        del content[note.offset :]
        return
    missing = note.offset - len(content)
    if missing > 0:
        content += bytes(missing)
    content[note.offset : note.offset + len(note.data)] = note.data


def torn(content: bytearray, note: Note, chance: random.Random) -> None:
    """Some sectors of a write reach the disk, some do not."""
    if note.what == "truncate":
        if chance.random() < 0.5:
            apply(content, note)
        return
    for start in range(0, len(note.data), SECTOR):
        if chance.random() < 0.5:
            part = note.data[start : start + SECTOR]
            apply(content, Note("write", note.file, note.offset + start, part))


class Recorder:
    """Keeps the notes of one run."""

    def __init__(self, name: str, *, synchronous: str = "FULL") -> None:
        self.notes: list[Note] = []
        self.name = name
        self.synchronous = synchronous
        self._vfs = RecordingVFS(self)

    def ack(self, what: object) -> None:
        self.notes.append(Note("ack", ack=what))

    def connect(self, path: str, lock_timeout: float) -> sqlite3.Connection:
        """For `SqliteJournal`: has the methods of a connection that it writes with."""
        del lock_timeout
        return cast("sqlite3.Connection", RecordingConnection(path, self))

    def images(self, cuts: int, seed: int, *, tear: bool) -> Iterator[tuple[dict[str, bytes], int]]:
        """Files after power cuts at random moments, and how many notes came before."""
        chance = random.Random(seed)
        moments = sorted(chance.choices(range(len(self.notes)), k=cuts))
        disks: dict[str, Disk] = {}
        for index, note in enumerate(self.notes):
            while moments and moments[0] == index:
                moments.pop(0)
                yield {name: cut(disk, chance, tear) for name, disk in disks.items()}, index
            if note.what in {"write", "truncate"}:
                disks.setdefault(note.file, Disk()).pending.append(note)
            elif note.what == "sync":
                disks.setdefault(note.file, Disk()).sync()
            elif note.what == "delete":
                disks.pop(note.file, None)


def cut(disk: Disk, chance: random.Random, tear: bool) -> bytes:
    content = bytearray(disk.safe)
    if tear:
        for note in disk.pending:
            torn(content, note, chance)
    return bytes(content)


class RecordingVFS(apsw.VFS):
    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        super().__init__(recorder.name, base="")

    def xOpen(self, name: Any, flags: list[int]) -> RecordingFile:  # noqa: N802
        return RecordingFile(self._recorder, name, flags)

    def xDelete(self, filename: str, syncdir: bool) -> None:  # noqa: N802
        self._recorder.notes.append(Note("delete", Path(filename).name))
        super().xDelete(filename, syncdir)


class RecordingFile(apsw.VFSFile):
    def __init__(self, recorder: Recorder, name: Any, flags: list[int]) -> None:
        self._notes = recorder.notes
        path = name.filename() if isinstance(name, apsw.URIFilename) else str(name)
        self._name = Path(path).name
        super().__init__("", name, flags)

    def xWrite(self, data: bytes, offset: int) -> None:  # noqa: N802
        self._notes.append(Note("write", self._name, offset, bytes(data)))
        super().xWrite(data, offset)

    def xTruncate(self, newsize: int) -> None:  # noqa: N802
        self._notes.append(Note("truncate", self._name, newsize))
        super().xTruncate(newsize)

    def xSync(self, flags: int) -> None:  # noqa: N802
        super().xSync(flags)
        self._notes.append(Note("sync", self._name))


class RecordingConnection:
    """A connection of apsw with the methods of sqlite3 that a journal writes with.

    Exclusive, as a VFS in Python has no shared memory for the log's index.
    """

    row_factory = None
    text_factory = str

    def __init__(self, path: str, recorder: Recorder) -> None:
        self._inner = apsw.Connection(path, vfs=recorder.name)
        self._synchronous = recorder.synchronous
        self._inner.execute("PRAGMA locking_mode = EXCLUSIVE").fetchall()

    @property
    def in_transaction(self) -> bool:
        return self._inner.in_transaction

    def execute(self, statement: str, values: Any = ()) -> RecordingCursor:
        if statement == "PRAGMA synchronous = FULL":
            statement = f"PRAGMA synchronous = {self._synchronous}"
        before = self._inner.total_changes()
        return RecordingCursor(self._inner.execute(statement, values), self._inner, before)

    def executemany(self, statement: str, values: Any) -> RecordingCursor:
        before = self._inner.total_changes()
        return RecordingCursor(self._inner.executemany(statement, values), self._inner, before)

    def close(self) -> None:
        self._inner.close()


class RecordingCursor:
    """A cursor of apsw that knows how many rows it has changed."""

    def __init__(self, inner: Any, connection: apsw.Connection, before: int) -> None:
        self._inner = inner
        self.rowcount = connection.total_changes() - before
        self.lastrowid = connection.last_insert_rowid()

    def fetchone(self) -> Any:
        return self._inner.fetchone()

    def fetchall(self) -> list[Any]:
        found: list[Any] = self._inner.fetchall()
        return found

    def __iter__(self) -> Iterator[Any]:
        return iter(self._inner)
