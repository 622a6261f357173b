"""How much memory a process and its children have taken at most, while it was watched."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

BEAT: Final = 0.2


def tree(root: int) -> Iterator[int]:
    """A process and all below it."""
    children: dict[int, list[int]] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has just ended
        children.setdefault(int(fields[1]), []).append(int(status.parent.name))
    waiting = [root]
    while waiting:
        one = waiting.pop()
        yield one
        waiting += children.get(one, [])


def resident(process: int) -> tuple[str, int]:
    """Its name, and the bytes that it has in memory; shared ones in parts."""
    try:
        name = Path(f"/proc/{process}/comm").read_text().strip()
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return "", 0
    found = [int(line.split()[1]) for line in lines if line.startswith("Pss:")]
    return name, found[0] * 1024 if found else 0


class Watch:
    """Looks every now and then; `peaks` are bytes of the JVM and of Python's workers."""

    def __init__(self) -> None:
        self.peaks = {"java": 0, "python": 0}
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        own = os.getpid()
        while not self._end.wait(BEAT):
            now = {"java": 0, "python": 0}
            for process in tree(own):
                name, size = resident(process)
                if process != own and size:
                    now["java" if name == "java" else "python"] += size
            for kind, size in now.items():
                self.peaks[kind] = max(self.peaks[kind], size)
