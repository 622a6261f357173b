"""Files and folders that only those may read who may read what they are made from."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO, Any, Final

PRIVATE: Final = 0o600


def permissions_of(*files: str | os.PathLike[str] | None) -> int:
    """Return the permissions of the first of these files that is there; else the owner's alone."""
    for file in files:
        if file is not None and os.path.isfile(file):  # noqa: PTH113 (a text, as a rule)
            return os.stat(file).st_mode & 0o666 | PRIVATE  # noqa: PTH116 (as above)
    return PRIVATE


def open_private(
    path: str | os.PathLike[str], mode: str, permissions: int = PRIVATE, **options: Any
) -> IO[Any]:
    """Open a file as `open` does; if that makes it, with these permissions, whatever the umask.

    At no moment may others read it. A file that is there keeps its own.
    """

    def opener(name: str, flags: int) -> int:
        try:
            made = os.open(name, flags | os.O_EXCL, PRIVATE)
        except FileExistsError:
            if flags & os.O_EXCL:
                raise
            return os.open(name, flags)
        os.chmod(name, permissions)  # noqa: PTH101 (as it is called by `open`)
        return made

    return open(path, mode, opener=opener, **options)


def make_folder(path: Path, permissions: int = PRIVATE) -> None:
    """Make a folder, and those above it, whose files those may read who have these permissions.

    A folder that is there keeps its own.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.mkdir(0o700)
    except FileExistsError:
        if not path.is_dir():
            raise
    else:
        path.chmod(0o700 | permissions | (permissions & 0o444) >> 2)
