"""Locks of files between processes; the end of a process releases them."""

from __future__ import annotations

import sys

if sys.platform == "win32":
    import msvcrt

    def take_lock(file: int) -> None:
        """Lock an open file, without waiting.

        Raises:
            OSError: Another process has it.
        """
        msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
else:
    import fcntl

    def take_lock(file: int) -> None:
        """Lock an open file, without waiting.

        Raises:
            OSError: Another process has it.
        """
        # Not a lock of SQLite, which knows only the other kind.
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
