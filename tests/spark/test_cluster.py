"""Spark elsewhere than in this process: a cluster that loses a worker, a server, a submitted
file, and a stream whose driver is killed. The result is the same as here."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from msgbus.journal import Record, SqliteJournal
from msgbus.pipeline import fold
from tests.counts import SPARK_CONNECT_PARTS, SPARK_SUBMIT_PARTS
from tests.evidence import Evidence
from tests.spark.kit import records_in, with_journal
from tests.spark.processes import SPARK_HOME, Cluster, Running, cluster, python, spark_class
from tests.spark.programs.shop import Balances, write_orders

PROGRAMS = Path(__file__).parent / "programs"
COUNT = 4000

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cluster")


@pytest.fixture(scope="module")
def journal(folder: Path) -> Path:
    path = folder / "shop.db"
    write_orders(path, COUNT)
    return path


@pytest.fixture(scope="module")
def records(journal: Path) -> list[Record]:
    return records_in(journal)


@pytest.fixture(scope="module")
def balances(journal: Path) -> list[dict[str, Any]]:
    """What the plain fold gives."""

    async def folded(opened: SqliteJournal) -> list[dict[str, Any]]:
        return [row.model_dump() for row in await fold(opened, Balances)]

    return with_journal(journal, folded)


@pytest.fixture(scope="module")
def standalone(folder: Path) -> Iterator[Cluster]:
    with cluster(folder) as made:
        yield made


@pytest.fixture(scope="module")
def expected(records: list[Record], balances: list[dict[str, Any]]) -> dict[str, Any]:
    """What each part of `anywhere.py` gives."""
    ordered = [one.json()["cents"] for one in records if one.name == "cluster.Ordered"]
    refunded = [one.json()["cents"] for one in records if one.name == "cluster.Refunded"]
    return {
        "by_name": Counter(record.name for record in records),
        "from_the_third_on": COUNT - 2,
        "cents": sum(ordered),
        "replayed": balances,
        "report": "<!DOCTYPE html>",
        "streamed": COUNT,
        "copied": 10,
        "thanked": sum(refunded),
        "exported": [COUNT, COUNT],
    }


def check(out: Path, expected: dict[str, Any], parts: Sequence[str]) -> None:
    assert json.loads(out.read_text()) == {name: expected[name] for name in parts}


def test_a_worker_that_is_killed_in_the_middle_of_a_replay_changes_nothing(
    standalone: Cluster,
    journal: Path,
    balances: list[dict[str, Any]],
    tmp_path: Path,
    evidence: Evidence,
) -> None:
    program = PROGRAMS / "on_cluster.py"
    with python(program, journal, standalone.url, tmp_path, cwd=tmp_path / "driver") as driver:
        # The shuffle is done, so the worker takes its files with it when it dies.
        driver.wait_for("^folding$")
        standalone.workers[0].kill()
        (tmp_path / "go").touch()

        assert driver.end() == 0, driver.text

    assert "Lost executor" in driver.text
    assert json.loads((tmp_path / "rows.json").read_text()) == balances
    evidence("replay on a cluster that loses a worker", kills=1, messages=COUNT, lost=0, doubled=0)


def test_a_file_runs_by_spark_submit(
    standalone: Cluster,
    journal: Path,
    expected: dict[str, Any],
    tmp_path: Path,
    evidence: Evidence,
) -> None:
    parts = SPARK_SUBMIT_PARTS or list(expected)
    settings = {
        "spark.driver.host": "127.0.0.1",
        "spark.executor.memory": "512m",
        "spark.ui.enabled": "false",
    }
    conf = [part for item in settings.items() for part in ("--conf", "=".join(item))]
    submit = str(SPARK_HOME / "bin" / "spark-submit")
    program = [str(PROGRAMS / "anywhere.py"), str(journal), str(tmp_path / "found.json"), *parts]
    command = [submit, "--master", standalone.url, *conf, *program]

    with Running(command, tmp_path / "driver", SPARK_HOME=str(SPARK_HOME)) as driver:
        assert driver.end() == 0, driver.text

    check(tmp_path / "found.json", expected, parts)
    evidence("everything by spark-submit, on a cluster", jobs=len(parts), messages=COUNT, lost=0)


def test_the_same_file_runs_through_spark_connect(
    journal: Path, expected: dict[str, Any], tmp_path: Path, evidence: Evidence
) -> None:
    parts = SPARK_CONNECT_PARTS or list(expected)
    server_class = "org.apache.spark.sql.connect.service.SparkConnectServer"
    settings = {
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": "0",
        "spark.ui.enabled": "false",
        "spark.sql.shuffle.partitions": "2",
    }
    conf = [part for item in settings.items() for part in ("--conf", "=".join(item))]
    submit = ("org.apache.spark.deploy.SparkSubmit", "--master", "local[2]")
    arguments = (*submit, "--class", server_class, *conf, "spark-internal")
    with spark_class(*arguments, cwd=tmp_path / "server") as server:
        port = server.wait_for(r"Spark Connect server started at: \S*?:(\d+)")[1]
        program, out = PROGRAMS / "anywhere.py", tmp_path / "found.json"
        remote = {"SPARK_REMOTE": f"sc://127.0.0.1:{port}"}

        with python(program, journal, out, *parts, cwd=tmp_path / "client", **remote) as client:
            assert client.end() == 0, client.text

    check(out, expected, parts)
    evidence("everything through Spark Connect", jobs=len(parts), messages=COUNT, lost=0)


@pytest.mark.stress("spark", only=True)  # test_handlers and test_cli show it without a kill
def test_a_stream_whose_driver_is_killed_goes_on_with_no_row_lost_or_doubled(
    tmp_path: Path, evidence: Evidence
) -> None:
    journal, out = tmp_path / "shop.db", tmp_path / "out"
    out.mkdir()
    write_orders(journal, 600)
    ordered = {
        one.offset: one.json()["customer"]
        for one in records_in(journal)
        if one.name == "cluster.Ordered"
    }
    command = [sys.executable, "-m", "msgbus.pipeline", "stream", str(journal)]
    command += [
        "tests.spark.programs.batches:count_orders",
        "--checkpoint",
        str(tmp_path / "state"),
    ]
    command += ["--once", "--max-rows", "200", "--json", "--master", "local[2]"]
    command += ["--conf", "spark.sql.shuffle.partitions=1"]
    with Running(command, tmp_path / "first", FOLDER=str(out), HANG_IN="1") as first:
        first.wait_for("^wrote batch 1$")
        first.kill()

    with Running(command, tmp_path / "second", FOLDER=str(out)) as second:
        assert second.end() == 0, second.text

    batches = [json.loads((out / f"{number}.json").read_text()) for number in range(3)]
    given = [tuple(row) for batch in batches for row in batch["rows"]]
    assert sorted(given) == sorted(ordered.items())
    # The batch that was interrupted came again; those before it did not.
    assert "wrote batch 0" not in second.text
    assert "wrote batch 1" in second.text
    written = [one.json() for one in records_in(journal) if one.name == "cluster.Counted"]
    counted: Counter[str] = Counter()
    for one in written:
        counted[one["customer"]] += one["orders"]
    assert counted == Counter(ordered.values())
    customers = [len({row[1] for row in batch["rows"]}) for batch in batches]
    assert len(written) == sum(customers)
    cursor = with_journal(journal, lambda opened: opened.cursor("pipeline.count_orders"))
    assert cursor is not None
    # What the first run had written back was there when the second one began.
    assert cursor.offset == 600 + customers[0]
    evidence("a stream whose driver is killed", kills=1, messages=len(ordered), lost=0, doubled=0)
