"""Progress on a terminal, from what Spark says of its tasks."""

from __future__ import annotations

import contextlib
import io
import threading
from collections.abc import Callable
from typing import Any

import pytest
from pyspark.sql import SparkSession

from msgbus.pipeline.session import Tasks, line_of, showing_progress, tasks_of, tracker_of

# Three tasks that nobody waits for the end of.
LONG = """
SELECT sum(a.id * b.id % 7) FROM range(0, 1000000, 1, 3) a CROSS JOIN range(0, 1000000, 1, 1) b
"""


class Terminal(io.StringIO):
    """Remembers what was written, and lets others wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = threading.Event()
        self.wanted: Callable[[str], bool] = bool

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        written = super().write(text)
        if self.wanted(self.getvalue()):
            self.seen.set()
        return written


class Disconnected:
    """A session through Spark Connect, as far as this is concerned."""

    @property
    def sparkContext(self) -> Any:  # noqa: N802 (Spark's name)
        raise RuntimeError("not supported with Spark Connect")


@pytest.mark.parametrize(
    ("tasks", "line"),
    [
        (Tasks(0, 0), "export ..."),
        (Tasks(0, 4), "export [------------------------------] 0 of 4 tasks"),
        (Tasks(2, 4), "export [###############---------------] 2 of 4 tasks"),
        (Tasks(4, 4), "export [##############################] 4 of 4 tasks"),
    ],
)
def test_a_line_shows_tasks_done_of_total(tasks: Tasks, line: str) -> None:
    assert line_of("export", tasks) == line


def test_nothing_is_shown_where_nobody_looks(spark: SparkSession) -> None:
    out = io.StringIO()
    with showing_progress(spark, "export", out):
        assert not [one for one in threading.enumerate() if one.name == "msgbus-progress"]
    assert out.getvalue() == ""


def test_nothing_is_shown_through_connect() -> None:
    out = Terminal()
    remote: Any = Disconnected()
    with showing_progress(remote, "export", out):
        pass
    assert out.getvalue() == ""


def test_tasks_are_shown_while_spark_works_and_gone_afterwards(spark: SparkSession) -> None:
    out = Terminal()
    out.wanted = lambda text: " of 3 tasks" in text

    def work() -> None:
        with contextlib.suppress(Exception):  # it is broken off
            spark.sql(LONG).collect()

    with showing_progress(spark, "export", out):
        busy = threading.Thread(target=work)
        busy.start()
        out.seen.wait(120)
        spark.sparkContext.cancelAllJobs()
        busy.join()
    assert out.seen.is_set()
    assert out.getvalue().endswith("\r")
    assert out.getvalue().split("\r")[-2].strip() == ""
    assert not [one for one in threading.enumerate() if one.name == "msgbus-progress"]


def test_no_stages_are_no_tasks(spark: SparkSession) -> None:
    assert tasks_of(tracker_of(spark)) == Tasks(0, 0)
