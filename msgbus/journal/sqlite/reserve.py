"""A file of ballast beside the journal, thrown off to make room on a full disk.

Removing rows needs space for the write-ahead log first. On a disk that is full to the last
byte not even retention could help, were it not for this. It must hold what the log may hold,
as that has to go into the file first.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Final, final

DEFAULT_SIZE: Final = 8 * 1024 * 1024
_BLOCK: Final = bytes(64 * 1024)


@final
class Reserve:
    """The ballast of one journal: `<file>-reserve`."""

    def __init__(self, path: str, size: int) -> None:
        self._file = Path(f"{path}-reserve")
        self._size = size

    def fill(self) -> bool:
        """Take the space, if the disk has it; an incomplete ballast is given back."""
        if self._size <= 0:
            return False
        with suppress(OSError):
            if self._file.stat().st_size == self._size:
                return True
        try:
            # Written, not just promised: a sparse file would hold no space.
            with self._file.open("wb") as stream:
                for written in range(0, self._size, len(_BLOCK)):
                    stream.write(_BLOCK[: self._size - written])
                stream.flush()
                os.fsync(stream.fileno())
        except OSError:
            self.drop()
            return False
        return True

    def drop(self) -> bool:
        """Give the space back to the disk; whether there was any."""
        try:
            self._file.unlink()
        except OSError:
            return False
        return True
