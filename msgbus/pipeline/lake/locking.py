"""A lock between processes that its holder's death releases."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

if sys.platform == "win32":
    import msvcrt

    def _take(file: IO[bytes]) -> None:
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
else:
    import fcntl

    def _take(file: IO[bytes]) -> None:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextmanager
def locked(path: Path) -> Generator[bool]:
    """Hold the lock of a file, which is made; gives whether it could be had at once."""
    with path.open("ab") as file:
        try:
            _take(file)
        except OSError:
            yield False
        else:
            yield True
