"""How far Spark is, on a terminal: tasks done of those that are known."""

from __future__ import annotations

import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EVERY: Final = 0.25
_WIDTH: Final = 30


class Tasks(NamedTuple):
    """Tasks of the stages that run now."""

    done: int
    total: int


@contextmanager
def showing_progress(
    spark: SparkSession, label: str, stream: IO[str] | None = None
) -> Generator[None]:
    """Show on one line how far Spark is, while the block runs; the line is gone afterwards.

    Nothing is shown where nobody looks (the stream is no terminal), nor through Spark Connect,
    which does not tell.
    """
    out = sys.stderr if stream is None else stream
    tracker = tracker_of(spark) if out.isatty() else None
    if tracker is None:
        yield
        return
    done = threading.Event()
    thread = threading.Thread(
        target=_show, args=(tracker, label, out, done), name="msgbus-progress", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def tracker_of(spark: SparkSession) -> Any:
    """What knows of the tasks of a session; `None` through Spark Connect."""
    try:
        return spark.sparkContext.statusTracker()
    except Exception:  # Connect says so with errors of its own, and progress is never worth one
        return None


def tasks_of(tracker: Any) -> Tasks:
    """The tasks of all stages that run now."""
    done = total = 0
    for stage_id in tracker.getActiveStageIds():
        stage = tracker.getStageInfo(stage_id)
        if stage is not None:
            done += stage.numCompletedTasks
            total += stage.numTasks
    return Tasks(done, total)


def line_of(label: str, tasks: Tasks) -> str:
    """What is shown: `export [######--------] 12 of 40 tasks`."""
    if not tasks.total:
        return f"{label} ..."
    filled = _WIDTH * tasks.done // tasks.total
    bar = "#" * filled + "-" * (_WIDTH - filled)
    return f"{label} [{bar}] {tasks.done} of {tasks.total} tasks"


def _show(tracker: Any, label: str, out: IO[str], done: threading.Event) -> None:
    shown = 0
    while not done.wait(EVERY):
        try:
            line = line_of(label, tasks_of(tracker))
        except Exception:  # the session was stopped under us
            break
        out.write("\r" + line.ljust(shown))
        out.flush()
        shown = len(line)
    out.write("\r" + " " * shown + "\r")
    out.flush()
