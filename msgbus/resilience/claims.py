"""Who replays a dead letter, and whether they are still there.

A claim names its owner: the machine, the process and one replay in it. It is void once the
process is gone, or if that replay has ended without saying how. A process on another
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

_in_flight: Final[set[str]] = set()
"""The owners of all replays that are under way in this process."""


@final
@dataclass(frozen=True, slots=True)
class Claim:
    """The claim of one replay to one letter."""

    letter_id: str
    owner: str
    at: float
    """When it was made, in seconds since the epoch."""

    def is_void(self, now: float) -> bool:
        """Whether its owner is gone, so that another may claim the letter."""
        process, _, _ = self.owner.rpartition("|")
        machine, _, rest = process.partition("|")
        pid, _, started = rest.partition("|")
        if machine != _machine():
            return now - self.at >= LEASE
        if process == _process(os.getpid()):
            return self.owner not in _in_flight
        then = _started(int(pid)) if pid.isdecimal() else None
        if then == "" or started == "":
            # It runs, but nobody can say whether it is still the same process.
            return now - self.at >= LEASE
        return then != started


def new_owner() -> str:
    """A name for one replay of this process, unlike any other."""
    return f"{_process(os.getpid())}|{uuid4().hex}"


def begin(claim: Claim) -> None:
    """The replay that claims a letter is under way."""
    _in_flight.add(claim.owner)


def end(claim: Claim) -> None:
    """It has ended, in whatever way."""
    _in_flight.discard(claim.owner)


@cache
def _process(pid: int) -> str:
    """This process; a child that was forked has another id."""
    return "|".join([_machine(), str(pid), _started(pid) or ""])


@cache
def _machine() -> str:
    """The space in which a process id means one process."""
    parts = [platform.node()]
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        parts.append(boot.strip())
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
