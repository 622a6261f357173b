"""The folder of a lake: its sealed ranges, and how a range is sealed atomically.

    lake/
      messages/date=2026-03-01/00000000000000000001-00000000000000250000-0.parquet
      deliveries/date=.../...
      _manifest/messages-<first>-<last>.json      one for each sealed range
      _manifest/pending.json                      a range whose files are being moved in
      _staging/<run>/...                          files that are being written
      _lock                                       held while an export runs

A range is sealed in three steps: its files are finished in `_staging`; `pending.json` names them;
they are renamed into their table, and `pending.json` is renamed to the range's own name. After a
crash between two steps, the next export finishes the renames if there is a `pending.json`, and else
removes `_staging`. So a row is in the tables once, and a range is in the manifest when all its rows
are in the tables.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple, final

from msgbus.errors import LakeBusyError, LakeDamagedError
from msgbus.runtime.file_lock import take_lock
from msgbus.runtime.private_files import PRIVATE, make_folder, open_private

FORMAT: Final = 1
_WIDTH: Final = 20  # digits of the largest offset, so that names sort as numbers do


class StagedFile(NamedTuple):
    """A finished file that is not in a table yet."""

    path: str
    """Relative to the lake's folder."""
    date: str
    """The day of its rows, as in `2026-03-01`."""
    rows: int
    first: int
    """The lowest offset or id in it."""


class SealedSegment(NamedTuple):
    """A sealed range of a table, both ends included: all its rows are in the files."""

    table: str
    first: int
    last: int
    rows: int
    files: tuple[str, ...]
    """Paths relative to the lake's folder."""
    anchor: str | None = None
    """The id of the last message, to recognize the journal."""
    damaged: tuple[int, ...] = ()
    """Offsets or ids of its rows that were damaged or missing: they are in no file."""

    @property
    def name(self) -> str:
        """The name of its entry in the manifest."""
        return f"{self.table}-{self.first:0{_WIDTH}d}-{self.last:0{_WIDTH}d}.json"


@final
class Lake:
    """A folder of Parquet files with a manifest; created by the first export.

    Args:
        path: The folder.
        permissions: Those of new files.
    """

    def __init__(self, path: str | os.PathLike[str], permissions: int = PRIVATE) -> None:
        self.path = Path(path).absolute()
        self.permissions = permissions
        self._manifest = self.path / "_manifest"
        self._pending = self._manifest / "pending.json"
        self._staging = self.path / "_staging"

    def __repr__(self) -> str:
        return f"<Lake {self.path}>"

    # -- reading -------------------------------------------------------------------------------

    def segments(self, table: str) -> list[SealedSegment]:
        """The sealed ranges of a table, in order.

        Raises:
            LakeDamagedError: An entry of the manifest cannot be read.
        """
        entries = sorted(self._manifest.glob(f"{table}-*.json"))
        return [self._read(entry)[0] for entry in entries]

    def sealed(self, table: str) -> int:
        """The last sealed offset, or id of a delivery; 0 if there is none."""
        names = [entry.stem for entry in self._manifest.glob(f"{table}-*.json")]
        return int(max(names).rpartition("-")[2]) if names else 0

    def files(self, table: str) -> list[Path]:
        """The files of all sealed ranges."""
        return [self.path / file for one in self.segments(table) for file in one.files]

    # -- writing -------------------------------------------------------------------------------

    @contextmanager
    def exporting(self) -> Generator[Path]:
        """A fresh staging folder, with what a broken export left behind finished or gone.

        Raises:
            LakeBusyError: Another export is running.
        """
        for folder in (self.path, self._manifest):
            make_folder(folder, self.permissions)
        with locked(self.path / "_lock", self.permissions) as is_mine:
            if not is_mine:
                raise LakeBusyError(path=str(self.path))
            self.recover()
            folder = self._staging / uuid.uuid4().hex
            for one in (self._staging, folder):
                make_folder(one, self.permissions)
            try:
                yield folder
            finally:
                shutil.rmtree(self._staging, ignore_errors=True)

    def seal(self, segment: SealedSegment, staged: Sequence[StagedFile]) -> SealedSegment:
        """Move staged files into their table and the manifest; returns the complete segment."""
        moves = _moves(segment, staged)
        sealed = segment._replace(files=tuple(moves.values()), rows=sum(one.rows for one in staged))
        content = {"format": FORMAT, **sealed._asdict(), "moves": moves}
        _write(self._pending, content, self.permissions)
        self._finish(sealed, moves)
        return sealed

    def recover(self) -> None:
        """Finish the seal that an interrupted export had begun, and remove what it had staged."""
        if self._pending.exists():
            self._finish(*self._read(self._pending))
        # Tasks of a dead run may still write there; the next export removes that.
        shutil.rmtree(self._staging, ignore_errors=True)

    def _finish(self, segment: SealedSegment, moves: dict[str, str]) -> None:
        for source, target in moves.items():
            self._move(self.path / source, self.path / target)
        self._pending.replace(self._manifest / segment.name)
        _sync(self._manifest)

    def _move(self, source: Path, target: Path) -> None:
        if not source.exists():
            if target.exists():
                return  # done before
            raise LakeDamagedError(path=str(source), reason="it was to be sealed, and is missing")
        for folder in (target.parent.parent, target.parent):
            make_folder(folder, self.permissions)
        source.replace(target)
        _sync(target.parent)

    def _read(self, entry: Path) -> tuple[SealedSegment, dict[str, str]]:
        try:
            content: dict[str, Any] = json.loads(entry.read_text(encoding="utf-8"))
            written = content.pop("format")
            moves = content.pop("moves", {})
            content["files"] = tuple(content["files"])
            content["damaged"] = tuple(content["damaged"])
            segment = SealedSegment(**content)
        except (ValueError, TypeError, KeyError) as error:
            raise LakeDamagedError(
                path=str(entry), reason=f"it cannot be read ({error})"
            ) from error
        if written != FORMAT:
            reason = f"it has format {written}, and this msgbus knows {FORMAT}"
            raise LakeDamagedError(path=str(entry), reason=reason)
        return segment, moves


def _moves(segment: SealedSegment, staged: Sequence[StagedFile]) -> dict[str, str]:
    ordered = sorted(staged, key=lambda one: (one.date, one.first))
    span = f"{segment.first:0{_WIDTH}d}-{segment.last:0{_WIDTH}d}"
    return {
        one.path: f"{segment.table}/date={one.date}/{span}-{number}.parquet"
        for number, one in enumerate(ordered)
    }


def _write(path: Path, content: dict[str, Any], permissions: int) -> None:
    """Replace a file atomically, also if the power fails."""
    temporary = path.with_suffix(".tmp")
    temporary.unlink(missing_ok=True)
    with open_private(temporary, "x", permissions, encoding="utf-8") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    _sync(path.parent)


def _sync(folder: Path) -> None:
    """Flush the names in a folder to disk."""
    if os.name == "nt":
        return  # folders cannot be opened on Windows
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def locked(path: Path, permissions: int = PRIVATE) -> Generator[bool]:
    """Take the lock of a file without waiting; yields whether that succeeded.

    The death of the process releases it.
    """
    with open_private(path, "ab", permissions) as file:
        try:
            take_lock(file.fileno())
        except OSError:
            yield False
        else:
            yield True
