"""Spark elsewhere than in this process: a cluster that loses a worker, a submitted file, and a
server. The result is the same as here."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from msgbus.journal import Record, SqliteJournal
from msgbus.pipeline import fold
from tests.counts import CLUSTER_KILLS
from tests.evidence import Evidence
from tests.spark.kit import faults, records_in, with_journal
from tests.spark.processes import Cluster, cluster, python, spark_class
from tests.spark.programs.shop import Balances, write_orders

PROGRAMS = Path(__file__).parent / "programs"
COUNT = 4000

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cluster") / "shop.db"
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


@pytest.fixture
def standalone(tmp_path: Path) -> Iterator[Cluster]:
    with cluster(tmp_path) as made:
        yield made


def expected(records: list[Record], balances: list[dict[str, Any]]) -> dict[str, Any]:
    ordered = [one.json()["cents"] for one in records if one.name == "cluster.Ordered"]
    refunded = [one.json()["cents"] for one in records if one.name == "cluster.Refunded"]
    return {
        "by_name": Counter(record.name for record in records),
        "from_the_third_on": COUNT - 2,
        "cents": sum(ordered),
        "rows": balances,
        "report": "<!DOCTYPE html>",
        "exported": COUNT,
        "with_lake": COUNT,
        "streamed": COUNT,
        "copied": 10,
        "thanked": sum(refunded),
    }


@pytest.mark.parametrize("_", CLUSTER_KILLS)
def test_a_worker_that_is_killed_in_the_middle_of_a_replay_changes_nothing(
    standalone: Cluster,
    journal: Path,
    balances: list[dict[str, Any]],
    tmp_path: Path,
    evidence: Evidence,
    _: int,
) -> None:
    program = PROGRAMS / "on_cluster.py"
    with standalone.submit(program, journal, tmp_path, cwd=tmp_path / "driver") as driver:
        # The shuffle is done, so the worker takes its files with it when it dies.
        driver.wait_for("^folding$")
        standalone.workers[0].kill()
        (tmp_path / "go").touch()

        assert driver.end() == 0, driver.text

    assert "Lost executor" in driver.text
    found = json.loads((tmp_path / "rows.json").read_text())
    assert found == balances
    customers = [[row["customer"] for row in rows] for rows in (balances, found)]
    evidence(
        "a replay on a cluster that loses a worker", kills=1, rows=len(found), **faults(*customers)
    )


@pytest.mark.stress("spark", only=True)
def test_a_file_runs_by_spark_submit(
    standalone: Cluster,
    journal: Path,
    records: list[Record],
    balances: list[dict[str, Any]],
    tmp_path: Path,
) -> None:
    program, out = PROGRAMS / "anywhere.py", tmp_path / "found.json"

    with standalone.submit(program, journal, out, cwd=tmp_path / "driver") as driver:
        assert driver.end() == 0, driver.text

    assert json.loads(out.read_text()) == expected(records, balances)


@pytest.mark.stress("spark", only=True)
def test_the_same_file_runs_through_spark_connect(
    journal: Path, records: list[Record], balances: list[dict[str, Any]], tmp_path: Path
) -> None:
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

        with python(program, journal, out, cwd=tmp_path / "client", **remote) as client:
            assert client.end() == 0, client.text

    assert json.loads(out.read_text()) == expected(records, balances)
