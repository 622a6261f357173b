"""Who may read what the pipeline makes of a journal."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from msgbus import pipeline
from msgbus.pipeline.lake import SealedSegment, export
from msgbus.pipeline.runs import into_table
from msgbus.pipeline.source.writer import stage
from tests.spark.kit import append, mixed_records

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="it has no such permissions")


@pytest.fixture(autouse=True)
def umask() -> Generator[None]:
    """Whatever is made without care is everybody's."""
    before = os.umask(0)
    yield
    os.umask(before)


def modes(folder: Path) -> tuple[set[str], set[str]]:
    """Those of the folders and of the files below a folder, itself included."""
    found = [folder, *folder.rglob("*")]
    sets = [
        {f"{stat.S_IMODE(one.stat().st_mode):o}" for one in found if one.is_dir() == is_folder}
        for is_folder in (True, False)
    ]
    return sets[0], sets[1]


@pytest.mark.parametrize(("journal", "folder"), [("600", "700"), ("640", "750")])
def test_all_that_is_made_of_a_journal_is_for_its_readers_only(
    tmp_path: Path, spark: SparkSession, journal: str, folder: str
) -> None:
    path = tmp_path / "shop.db"
    append(path, mixed_records(20))
    path.chmod(int(journal, 8))
    pipe = pipeline.open(str(path), spark)
    staged: list[tuple[set[str], set[str]]] = []

    def look(_: SealedSegment) -> None:
        staged.append(modes(tmp_path / "lake"))

    export(pipe, tmp_path / "lake", on_sealed=look)
    pipe.report(tmp_path / "report.html")
    table, checkpoint = tmp_path / "table", tmp_path / "checkpoint"
    into_table(
        pipe,
        str(table),
        checkpoint=str(checkpoint),
        once=True,
        every=None,
        max_rows=None,
        start="earliest",
    ).await_end(60)

    assert modes(tmp_path / "lake") == ({folder}, {journal})
    assert staged[0] == ({folder}, {journal})
    assert modes(tmp_path / "report.html") == (set(), {journal})
    # Spark makes the files in these: nobody else comes that far.
    assert [f"{stat.S_IMODE(one.stat().st_mode):o}" for one in (table, checkpoint)] == [folder] * 2
    assert len(list(table.glob("*.parquet"))) > 0
    staging = stage(str(tmp_path / "staging" / "one"), iter([batch()]), int(journal, 8))
    assert modes(tmp_path / "staging") == ({folder}, {journal})
    assert staging.rows == 1


def batch() -> Any:
    arrow: Any = pytest.importorskip("pyarrow")
    return arrow.RecordBatch.from_pydict({"name": ["shop.OrderPaid"]})


def test_what_was_there_keeps_its_permissions(tmp_path: Path, spark: SparkSession) -> None:
    append(tmp_path / "shop.db", mixed_records(2))
    pipe = pipeline.open(str(tmp_path / "shop.db"), spark)
    lake, report = tmp_path / "lake", tmp_path / "report.html"
    lake.mkdir(0o755)
    report.touch(0o644)

    pipe.export(lake)
    pipe.report(report)

    assert f"{stat.S_IMODE(lake.stat().st_mode):o}" == "755"
    assert f"{stat.S_IMODE(report.stat().st_mode):o}" == "644"
