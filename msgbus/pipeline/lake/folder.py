"""A lake's folder: which ranges are sealed, and how one is sealed at a stroke.

    lake/
      messages/date=2026-03-01/00000000000000000001-00000000000000250000-0.parquet
      deliveries/date=.../...
      _manifest/messages-<first>-<last>.json      one for each sealed range
      _manifest/pending.json                      a range whose files are being moved in
      _staging/<run>/...                          files that are being written
      _lock                                       held while an export runs

A range is sealed in three steps: its files are finished in `_staging`; `pending.json` names them;
they are renamed into their table, and `pending.json` is renamed to the range's own name. Whatever
happens between two steps, the next export sees from `pending.json` what is left to do: with it, it
finishes the renames, which may be repeated; without it, it throws `_staging` away. So a row is in
the tables once, and a range is in the manifest when all its rows are in the tables.
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
from msgbus.pipeline.lake.locking import locked

FORMAT: Final = 1
_WIDTH: Final = 20  # digits of the largest offset, so that names sort as numbers do


class Staged(NamedTuple):
    """A finished file that no table has yet."""

    path: str
    """Where it is, from the lake's folder."""
    date: str
    """The day of its rows, as in `2026-03-01`."""
    rows: int
    first: int
    """The lowest offset or id in it."""


class Segment(NamedTuple):
    """A sealed range of a table: both ends count, and every row of it is in the files."""

    table: str
    first: int
    last: int
    rows: int
    files: tuple[str, ...]
    """Their paths, from the lake's folder."""
    anchor: str | None = None
    """The id of the last message: by it, another journal is told from this one."""

    @property
    def name(self) -> str:
        """What its entry in the manifest is called."""
        return f"{self.table}-{self.first:0{_WIDTH}d}-{self.last:0{_WIDTH}d}.json"


@final
class Lake:
    """A folder of Parquet files, and the manifest that says what they hold.

    Making one touches nothing: the folder is made by the first export.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        self._manifest = self.path / "_manifest"
        self._pending = self._manifest / "pending.json"
        self._staging = self.path / "_staging"

    def __repr__(self) -> str:
        return f"<Lake {self.path}>"

    # -- reading -------------------------------------------------------------------------------

    def segments(self, table: str) -> list[Segment]:
        """The sealed ranges of a table, in order.

        Raises:
            LakeDamagedError: An entry of the manifest cannot be read.
        """
        entries = sorted(self._manifest.glob(f"{table}-*.json"))
        return [self._read(entry)[0] for entry in entries]

    def sealed(self, table: str) -> int:
        """The last offset, or delivery's id, that is sealed; 0 if none is."""
        # Names are enough: they sort as their ranges do.
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
        self._manifest.mkdir(parents=True, exist_ok=True)
        with locked(self.path / "_lock") as is_mine:
            if not is_mine:
                raise LakeBusyError(path=str(self.path))
            self.recover()
            folder = self._staging / uuid.uuid4().hex
            folder.mkdir(parents=True)
            try:
                yield folder
            finally:
                shutil.rmtree(self._staging, ignore_errors=True)

    def seal(self, segment: Segment, staged: Sequence[Staged]) -> Segment:
        """Put finished files into their table, and say so; gives the segment with their names."""
        moves = _moves(segment, staged)
        sealed = segment._replace(files=tuple(moves.values()), rows=sum(one.rows for one in staged))
        content = {"format": FORMAT, **sealed._asdict(), "moves": moves}
        _write(self._pending, content)
        self._finish(sealed, moves)
        return sealed

    def recover(self) -> None:
        """Finish what a broken export had begun to seal, and drop what it had not."""
        if self._pending.exists():
            self._finish(*self._read(self._pending))
        # Tasks of a dead run may still write there; what they add is dropped by the next one.
        shutil.rmtree(self._staging, ignore_errors=True)

    def _finish(self, segment: Segment, moves: dict[str, str]) -> None:
        for source, target in moves.items():
            self._move(self.path / source, self.path / target)
        self._pending.replace(self._manifest / segment.name)
        _sync(self._manifest)

    def _move(self, source: Path, target: Path) -> None:
        if not source.exists():
            if target.exists():
                return  # done before
            raise LakeDamagedError(path=str(source), reason="it is to be sealed, and is not there")
        target.parent.mkdir(parents=True, exist_ok=True)
        source.replace(target)
        _sync(target.parent)

    def _read(self, entry: Path) -> tuple[Segment, dict[str, str]]:
        try:
            content: dict[str, Any] = json.loads(entry.read_text(encoding="utf-8"))
            written = content.pop("format")
            moves = content.pop("moves", {})
            content["files"] = tuple(content["files"])
            segment = Segment(**content)
        except (ValueError, TypeError, KeyError) as error:
            raise LakeDamagedError(
                path=str(entry), reason=f"it cannot be read ({error})"
            ) from error
        if written != FORMAT:
            reason = f"it has format {written}, and this msgbus knows {FORMAT}"
            raise LakeDamagedError(path=str(entry), reason=reason)
        return segment, moves


def _moves(segment: Segment, staged: Sequence[Staged]) -> dict[str, str]:
    ordered = sorted(staged, key=lambda one: (one.date, one.first))
    span = f"{segment.first:0{_WIDTH}d}-{segment.last:0{_WIDTH}d}"
    return {
        one.path: f"{segment.table}/date={one.date}/{span}-{number}.parquet"
        for number, one in enumerate(ordered)
    }


def _write(path: Path, content: dict[str, Any]) -> None:
    """All of it, or what was there before: also if the power fails."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    _sync(path.parent)


def _sync(folder: Path) -> None:
    """Have the disk keep the names in a folder."""
    if os.name == "nt":
        return  # folders cannot be opened there
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
