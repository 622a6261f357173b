"""Who replays a dead letter, and whether they are still there.

A claim names its owner: the machine, the process and one queue in it. It is void once the
process is gone, or if its own queue no longer works on the letter. A process on another
machine cannot be looked at; its claims run out after `LEASE` seconds.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final, final
from uuid import uuid4

LEASE: Final = 300.0
"""Seconds for which a claim holds whose owner cannot be looked at."""

_in_flight: Final[set[tuple[str, str]]] = set()
"""(owner, letter id) of every replay that is under way in this process."""


@final
@dataclass(frozen=True, slots=True)
class Claim:
    """One queue's claim to one letter."""

    letter_id: str
    owner: str
    at: float
    """When it was made, in seconds since the epoch."""

    def is_void(self, now: float) -> bool:
        """Whether its owner is gone, so that another may claim the letter."""
        machine, _, rest = self.owner.partition("|")
        pid, _, rest = rest.partition("|")
        started, _, _ = rest.partition("|")
        if machine != _machine():
            return now - self.at >= LEASE
        if (pid, started) == (str(os.getpid()), _started(os.getpid())):
            return (self.owner, self.letter_id) not in _in_flight
        then = _started(int(pid)) if pid.isdecimal() else None
        if then == "" or started == "":
            # It runs, but nobody can say whether it is still the same process.
            return now - self.at >= LEASE
        return then != started


def new_owner() -> str:
    """A name for one queue of this process, unlike any other."""
    return "|".join([_machine(), str(os.getpid()), _started(os.getpid()) or "", uuid4().hex])


def begin(owner: str, letter_id: str) -> None:
    """The owner works on this letter from now on."""
    _in_flight.add((owner, letter_id))


def end(owner: str, letter_id: str) -> None:
    """The owner is done with this letter, in whatever way."""
    _in_flight.discard((owner, letter_id))


@cache
def _machine() -> str:
    """The space in which a process id means one process."""
    parts = [platform.node()]
    for file in ("/proc/sys/kernel/random/boot_id",):
        try:
            parts.append(Path(file).read_text(encoding="ascii").strip())
        except OSError:
            parts.append("")
    try:
        # Containers may share a name, but have process ids of their own.
        parts.append(str(Path("/proc/self/ns/pid").readlink()))
    except OSError:
        parts.append("")
    return "/".join(parts).replace("|", "_")


def _started(pid: int) -> str | None:
    """When a process began; `None` if there is none, empty if that cannot be known."""
    stat = Path(f"/proc/{pid}/stat")
    if Path("/proc/self/stat").exists():
        try:
            # The name, in brackets, may have spaces and brackets of its own.
            after = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:
            return None
        # A zombie runs no more: it only waits for its parent to look.
        return None if after[0] in {"Z", "X"} else after[19]
    return "" if _exists(pid) else None


def _exists(pid: int) -> bool:
    if os.name == "nt":
        return True  # a signal would end it there
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
