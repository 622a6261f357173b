"""Disk space kept for the moment when there is none left: a file beside the journal.

What a commit adds to the journal lies in the write-ahead log first, and goes from there into the
file, which needs space a second time. Until then the log cannot be used anew, and on a disk that
is full not even a trim could be written. So no commit may add more than the reserve, or the disk,
can hold.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Final, final

from msgbus.errors import ConfigurationError, JournalFullError
from msgbus.runtime.private_files import open_private
from msgbus.telemetry.logging import log

DEFAULT_SIZE: Final = 8 * 1024 * 1024
SMALLEST: Final = 1024 * 1024
"""Bytes of the smallest reserve: a trim needs about a tenth of it for its log."""

LOG_PAGES: Final = 1000
"""Pages of the write-ahead log after which it is moved into the file, as SQLite has it."""

_BLOCK: Final = bytes(64 * 1024)
_SPARE: Final = 512 * 1024
"""Bytes that a commit may need in the log beside what it adds."""

_TEXT: Final = (
    "This file keeps {size} bytes of the disk free for the msgbus journal {name}.\n"
    "The journal deletes it when the disk is full, to be able to remove old messages, and makes\n"
    "it again when there is room. It holds no data. You may delete it at any time; to have none,\n"
    "open the journal with reserve=0.\n"
)


@final
class Reserve:
    """The reserve of one journal: `<file>-reserve`.

    Args:
        path: The journal.
        size: Bytes; 0 for none.

    Raises:
        ConfigurationError: It is too small to be of use.
    """

    def __init__(self, path: str, size: int) -> None:
        if size < 0 or 0 < size < SMALLEST:
            message = (
                f"reserve is {size}; it must be at least {SMALLEST:,} bytes, so that a full disk "
                f"leaves room for a trim, or 0 for none."
            )
            raise ConfigurationError(message)
        self._path = path
        self._file = Path(f"{path}-reserve")
        self.size = size
        self.held = 0
        """Bytes on the disk, as far as this process knows."""
        self._was_dropped = False

    def log_pages(self, page_size: int) -> int:
        """Return the pages of the write-ahead log after which it is moved into the file.

        A log of half the reserve leaves the other half to the commit that makes it so long.
        """
        return min(LOG_PAGES, self.size // page_size // 2) if self.size else LOG_PAGES

    def fill(self) -> bool:
        """Take the space, if the disk has it; an incomplete reserve is given back."""
        if not self.size or self.find() == self.size:
            return self.held > 0
        try:
            # Not the last that is left: the next commit would have none.
            if shutil.disk_usage(self._file.parent).free < self.size + SMALLEST:
                return False
            self._write()
        except OSError:
            self._unlink()
            return False
        self.held = self.size
        if self._was_dropped:
            log.info("journal_reserve_filled", journal=self._path, bytes=self.size)
        return True

    def _write(self) -> None:
        text = _TEXT.format(size=self.size, name=Path(self._path).name).encode()
        # Written, not just promised: a sparse file would hold no space.
        with open_private(self._file, "wb") as stream:
            stream.write(text)
            for written in range(len(text), self.size, len(_BLOCK)):
                stream.write(_BLOCK[: self.size - written])
            stream.flush()
            os.fsync(stream.fileno())

    def find(self) -> int:
        """Return the bytes that are on the disk now; another process may have dropped them."""
        self.held = 0
        with suppress(OSError):
            self.held = self._file.stat().st_size if self.size else 0
        return self.held

    def drop(self) -> bool:
        """Give the space back to the disk; whether there was any."""
        if not self.size or not self._unlink():
            return False
        self._was_dropped = True
        log.warning("journal_reserve_dropped", journal=self._path, bytes=self.size)
        return True

    def _unlink(self) -> bool:
        self.held = 0
        try:
            self._file.unlink()
        except OSError:
            return False
        return True

    def require_room(self, size: int, added: int) -> None:
        """Raise unless the disk can hold the file beside its log.

        Args:
            size: Bytes of the file once it has all of the log, with a commit that is about to end.
            added: Bytes that the commit adds to the log, beside changes of what is there.

        Raises:
            JournalFullError: It cannot.
        """
        missing = size - Path(self._path).stat().st_size
        if missing <= self.find():
            return
        free = shutil.disk_usage(self._file.parent).free + self.held
        if free < missing + max(added, 0) + _SPARE:
            message = (
                f"No space is left for what the log of the journal {self._path} would hold. "
                f"Nothing that was acknowledged is lost. Free space, trim the journal with "
                f"`await journal.trim(...)`, or end reads that take long, such as backups, and "
                f"try again."
            )
            raise JournalFullError(message, path=self._path)
