"""Processes that seal ranges in a lake, and kill themselves in the middle if told to.

    python -m tests.spark.sealing

reads lines with a lake's folder and a number: of the change to the disk before which to die, 0 to
live. For each it forks a process, and prints the code that it ended with. Without Spark: what is
sealed are files that pyarrow has written.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

from msgbus.pipeline.lake.folder import Lake, SealedSegment, StagedFile

pa: Any = import_module("pyarrow")
pq: Any = import_module("pyarrow.parquet")

ROWS = 40
SEGMENT = 10


def die_before(step: int) -> Callable[[], None]:
    """A function that kills this process when it is called for the `step`th time."""
    left = step

    def count() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    return count


def watch(owner: Any, name: str, count: Callable[[], None]) -> None:
    """Have `count` called before each call of a function."""
    inner = getattr(owner, name)

    def watched(*arguments: Any, **named: Any) -> Any:
        count()
        return inner(*arguments, **named)

    setattr(owner, name, watched)


def stage(staging: Path, lake: Lake, first: int, last: int) -> list[StagedFile]:
    """Two files, as if the range were of two days."""
    found: list[StagedFile] = []
    for half, day in ((0, "2026-03-01"), (1, "2026-03-02")):
        offsets = [offset for offset in range(first, last + 1) if offset % 2 == half]
        path = staging / f"{first}-{half}.parquet"
        time = datetime(2026, 3, 1, tzinfo=UTC) + timedelta(days=half)
        pq.write_table(pa.table({"offset": offsets, "time": [time] * len(offsets)}), path)
        relative = path.relative_to(lake.path).as_posix()
        found.append(StagedFile(relative, day, len(offsets), offsets[0]))
    return found


def seal_all(path: str, step: int) -> None:
    """Seal everything that is missing."""
    count = die_before(step)
    for owner, name in ((os, "fsync"), (Path, "rename"), (Path, "replace"), (Path, "mkdir")):
        watch(owner, name, count)
    lake = Lake(path)
    with lake.exporting() as staging:
        for first in range(lake.sealed("messages") + 1, ROWS + 1, SEGMENT):
            last = first + SEGMENT - 1
            staged = stage(staging, lake, first, last)
            lake.seal(SealedSegment("messages", first, last, 0, ()), staged)
            count()


def main() -> None:
    """Do as the lines say, each in a process of its own."""
    for line in sys.stdin:
        path, _, step = line.rpartition(" ")
        child = os.fork()
        if child == 0:
            seal_all(path, int(step))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
