"""What becomes of threads, locks and connections in a process that was forked."""

from __future__ import annotations

import os
import weakref
from typing import Final, Protocol


class Forkable(Protocol):
    """An object that is of no use in a forked process, or has to begin anew there."""

    def forked(self) -> None:
        """Take note, in the child, where only the thread that has forked goes on."""
        ...


_objects: Final[weakref.WeakSet[Forkable]] = weakref.WeakSet()


def tell_after_fork(one: Forkable) -> None:
    """Call `one.forked()` in every child of this process, as long as it is used."""
    _objects.add(one)


def _tell() -> None:
    for one in list(_objects):
        one.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_tell)
