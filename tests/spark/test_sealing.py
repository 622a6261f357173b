"""Ranges of a lake are sealed at a stroke, whenever the process dies. No Spark in here."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Generator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from msgbus.errors import LakeBusyError, LakeDamagedError
from msgbus.pipeline.lake import Lake, SealedSegment
from tests.evidence import Evidence
from tests.spark.kit import faults
from tests.spark.sealing import ROWS, SEGMENT, stage

ROOT = Path(__file__).resolve().parents[2]

pq: Any = import_module("pyarrow.parquet")


def offsets_in(files: list[Path]) -> Counter[int]:
    """How often each offset is in these files."""
    found: Counter[int] = Counter()
    for file in files:
        found.update(pq.ParquetFile(file).read()["offset"].to_pylist())
    return found


def visible(lake: Lake) -> Counter[int]:
    """What a reader sees that knows nothing of the manifest."""
    return offsets_in(sorted(lake.path.glob("messages/*/*.parquet")))


Seal = Callable[[Path, int], int]


@pytest.fixture
def seal_all() -> Generator[Seal]:
    """Seal everything in a process of its own, which dies before the step given; gives its code."""
    command = [sys.executable, "-m", "tests.spark.sealing"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT) as process:
        orders, answers = process.stdin, process.stdout
        assert orders is not None
        assert answers is not None

        def order(path: Path, step: int) -> int:
            print(path, step, file=orders, flush=True)
            return int(answers.readline())

        yield order
        orders.close()


def seal(lake: Lake, first: int, last: int) -> None:
    with lake.exporting() as staging:
        lake.seal(SealedSegment("messages", first, last, 0, ()), stage(staging, lake, first, last))


@pytest.mark.slow
def test_a_death_at_any_step_loses_nothing_and_doubles_nothing(
    seal_all: Seal, tmp_path: Path, evidence: Evidence
) -> None:
    lake = Lake(tmp_path / "lake")
    deaths = 0
    # More steps each time: a run that died early is followed by one that may come to the end.
    for step in range(1, 100):
        code = seal_all(lake.path, step)
        if code == 0:
            break
        assert code == -signal.SIGKILL
        deaths += 1
        # Half a range may be visible to one who asks no manifest; half a file or a row twice never.
        assert set(visible(lake).values()) <= {1}
        sealed = offsets_in(lake.files("messages"))
        assert sealed == Counter(range(1, lake.sealed("messages") + 1))
    assert deaths > 10
    assert visible(lake) == Counter(range(1, ROWS + 1))
    assert not (lake.path / "_staging").exists()
    found = faults(range(1, ROWS + 1), visible(lake).elements())
    evidence("ranges of a lake sealed by processes that die", deaths=deaths, rows=ROWS, **found)


@pytest.mark.slow
def test_every_single_step_may_be_the_last(seal_all: Seal, tmp_path: Path) -> None:
    # One run until the first range is sealed has so many steps; die before each of them once.
    for step in range(1, 19):
        lake = Lake(tmp_path / str(step))
        assert seal_all(lake.path, step) == -signal.SIGKILL
        assert set(visible(lake).values()) <= {1}
        assert lake.sealed("messages") in {0, SEGMENT, 2 * SEGMENT}
        with lake.exporting():
            pass
        # What had been begun is whole now; what had not is gone.
        assert visible(lake) == Counter(range(1, lake.sealed("messages") + 1))


def test_a_range_is_sealed_with_its_files(tmp_path: Path) -> None:
    lake = Lake(tmp_path / "lake")
    assert (lake.sealed("messages"), lake.segments("messages")) == (0, [])
    seal(lake, 1, 10)
    seal(lake, 11, 20)
    first, second = lake.segments("messages")
    assert (first.first, first.last, first.rows) == (1, 10, 10)
    assert second.files == (
        "messages/date=2026-03-01/00000000000000000011-00000000000000000020-0.parquet",
        "messages/date=2026-03-02/00000000000000000011-00000000000000000020-1.parquet",
    )
    assert lake.sealed("messages") == 20
    assert lake.sealed("deliveries") == 0


def test_only_one_export_runs_at_a_time(tmp_path: Path) -> None:
    lake = Lake(tmp_path / "lake")
    other = Lake(lake.path)
    with lake.exporting(), pytest.raises(LakeBusyError, match="is running"), other.exporting():
        pass
    with lake.exporting() as staging:
        assert staging.is_dir()
    assert not staging.exists()


def test_a_lake_is_not_made_by_looking_at_it(tmp_path: Path) -> None:
    assert Lake(tmp_path / "lake").sealed("messages") == 0
    assert not (tmp_path / "lake").exists()


@pytest.mark.parametrize(
    "content", ["{", "[]", json.dumps({"format": 2, "files": []}), json.dumps({"format": 1})]
)
def test_a_manifest_that_cannot_be_read_is_an_error(tmp_path: Path, content: str) -> None:
    lake = Lake(tmp_path / "lake")
    seal(lake, 1, 10)
    (entry,) = (lake.path / "_manifest").glob("*.json")
    entry.write_text(content)
    with pytest.raises(LakeDamagedError) as caught:
        lake.segments("messages")
    assert caught.value.path == str(entry)


def test_a_manifest_of_the_future_is_an_error(tmp_path: Path) -> None:
    lake = Lake(tmp_path / "lake")
    seal(lake, 1, 10)
    (entry,) = (lake.path / "_manifest").glob("*.json")
    entry.write_text(entry.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(LakeDamagedError, match="format 2"):
        lake.segments("messages")


def test_a_file_that_was_to_be_sealed_and_is_gone_is_an_error(tmp_path: Path) -> None:
    lake = Lake(tmp_path / "lake")
    with lake.exporting() as staging:
        staged = stage(staging, lake, 1, 10)
        (lake.path / staged[1].path).unlink()
        with pytest.raises(LakeDamagedError, match="is missing"):
            lake.seal(SealedSegment("messages", 1, 10, 0, ()), staged)
    assert lake.sealed("messages") == 0
