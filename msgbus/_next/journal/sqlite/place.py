"""The place of a journal file: notices that it was moved, deleted or replaced."""

from __future__ import annotations

import os
from typing import final

from msgbus.errors import JournalError
from msgbus.journal.sqlite.files import MEMORY


@final
class FilePlace:
    """Remembers which files a path names: SQLite goes on with those it has opened."""

    def __init__(self, path: str) -> None:
        self._path = path
        paths = () if path == MEMORY else (path, f"{path}-wal")
        self._files = {one: _identity(one) for one in paths}

    def check(self) -> None:
        """Look again.

        Raises:
            JournalError: The path names no file, or another one.
        """
        for path, known in self._files.items():
            found = _identity(path)
            if found == known:
                continue
            if known is not None:
                message = (
                    f"The file {path} was moved, deleted or replaced while the journal was open: "
                    f"what was just written is not in it. Stop all processes that use the "
                    f"journal, put the file back, and open it again."
                )
                raise JournalError(message, path=self._path)
            self._files[path] = found  # the log is made by the first commit


def _identity(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)  # noqa: PTH116 (twice a commit)
    except OSError:
        return None
    return found.st_dev, found.st_ino
