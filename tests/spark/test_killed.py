"""An export and a stream whose processes are killed: another one completes their work."""

from __future__ import annotations

import json
import sys
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from msgbus import pipeline
from msgbus.pipeline.cli import main
from msgbus.pipeline.lake import Lake, read_lake
from tests.counts import EXPORT_KILLS, STREAM_KILLS
from tests.evidence import Evidence
from tests.spark.kit import (
    append,
    faults,
    mixed_records,
    numbers,
    offsets_of,
    records_in,
    with_journal,
)
from tests.spark.processes import Running
from tests.spark.programs.shop import write_orders

polars: Any = import_module("polars")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_an_export_that_is_killed_again_and_again_completes(
    spark: SparkSession, tmp_path: Path, evidence: Evidence
) -> None:
    path, kills = tmp_path / "shop.db", EXPORT_KILLS
    rows = 60 * kills
    append(path, mixed_records(rows))
    lake = Lake(tmp_path / "lake")
    command = [sys.executable, "-m", "tests.spark.exporting", str(path), str(lake.path)]

    def visible() -> list[int]:
        """What a reader sees that knows nothing of the manifest."""
        files = sorted(lake.path.glob("messages/*/*.parquet"))
        found: list[int] = polars.read_parquet(files)["offset"].to_list()
        return found

    for number in range(kills):
        with Running(command, tmp_path / str(number)) as exporting:
            for _ in range(1 + number % 3):
                exporting.wait_for("^sealed")
            exporting.kill()
        sealed = lake.sealed("messages")
        assert 0 < sealed < rows
        assert faults(range(1, sealed + 1), visible())["lost"] == 0
        assert set(Counter(visible()).values()) == {1}
    pipeline.open(f"sqlite:///{path}", spark).export(lake.path)

    assert sorted(visible()) == numbers(1, rows)
    assert offsets_of(read_lake(spark, lake.path)) == numbers(1, rows)
    evidence(
        "an export killed again and again",
        kills=kills,
        rows=rows,
        **faults(numbers(1, rows), visible()),
    )


def test_a_stream_whose_driver_is_killed_goes_on_with_no_row_lost_or_doubled(
    spark: SparkSession,
    tmp_path: Path,
    evidence: Evidence,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    journal, out, kills = tmp_path / "shop.db", tmp_path / "out", STREAM_KILLS
    out.mkdir()
    size = 200 * (kills + 2)
    write_orders(journal, size)
    ordered = {
        one.offset: one.json()["customer"]
        for one in records_in(journal)
        if one.name == "cluster.Ordered"
    }
    arguments = ["stream", str(journal), "tests.spark.programs.batches:count_orders"]
    arguments += ["--checkpoint", str(tmp_path / "state"), "--once", "--max-rows", "200"]
    command = [sys.executable, "-m", "msgbus.pipeline", *arguments, "--master", "local[2]"]
    command += ["--conf", "spark.sql.shuffle.partitions=1"]

    for batch in range(1, kills + 1):
        cwd = tmp_path / str(batch)
        with Running(command, cwd, FOLDER=str(out), HANG_IN=str(batch)) as driver:
            driver.wait_for(f"^wrote batch {batch}$")
            driver.kill()
    monkeypatch.setenv("FOLDER", str(out))
    assert main(arguments) == 0

    # The batch that was interrupted came again; those before it did not.
    printed = capsys.readouterr().out
    assert f"wrote batch {kills - 1}\n" not in printed
    assert f"wrote batch {kills}\n" in printed
    batches = [json.loads((out / f"{one}.json").read_text()) for one in range(kills + 2)]
    given = [(offset, customer) for batch in batches for offset, customer in batch["rows"]]
    assert sorted(given) == sorted(ordered.items())
    written = [one.json() for one in records_in(journal) if one.name == "cluster.Counted"]
    counted: Counter[str] = Counter()
    for one in written:
        counted[one["customer"]] += one["orders"]
    assert counted == Counter(ordered.values())
    customers = [len({customer for _, customer in batch["rows"]}) for batch in batches]
    assert len(written) == sum(customers)
    (cursor,) = with_journal(journal, lambda opened: opened.cursors("pipeline.count_orders"))
    # What the runs before had written back was there when the last one began.
    assert cursor.acked == size + sum(customers[:kills])
    evidence(
        "a stream whose driver is killed",
        kills=kills,
        rows=len(ordered),
        **faults(ordered.items(), given),
    )
