"""The commands of `python -m msgbus.pipeline`, with Spark."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from msgbus.pipeline.cli import faults, main
from tests.spark.kit import offsets_of, records_in
from tests.spark.processes import Running
from tests.spark.programs.shop import write_orders

COUNT = 300
BALANCES = "tests.spark.programs.shop:Balances"


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cli") / "shop.db"
    write_orders(path, COUNT)
    return path


def said(capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    """What a command prints as data, having done its work."""
    assert main([*map(str, arguments), "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    if arguments[0] == "stream":
        return [json.loads(line) for line in lines]
    return json.loads("\n".join(lines))


def test_the_doctor_tries_everything_and_leaves_a_session_that_was_there(
    spark: SparkSession, journal: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = said(capsys, "doctor", journal)

    assert [one["what"] for one in found["findings"]] == [
        "python",
        "packages",
        "java",
        "reader",
        "journal",
        "session",
        "job",
        "workers",
        "reading",
    ]
    assert all(one["ok"] for one in found["findings"])
    assert found["findings"][-1]["text"].endswith(f"up to offset {COUNT}")
    assert spark.range(3).count() == 3


def test_a_session_of_another_thread_is_not_stopped_either(
    spark: SparkSession, journal: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["export", str(journal), str(tmp_path / "lake"), "--json"]

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(main, arguments).result() == 0

    assert json.loads(capsys.readouterr().out)["messages"] == COUNT
    assert spark.range(3).count() == 3


def test_a_replay_is_printed_or_written(
    spark: SparkSession, journal: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "balances"

    everything = said(capsys, "replay", journal, BALANCES, "--limit", "0")
    written = said(capsys, "replay", journal, BALANCES, "--key", "customer", "--out", out)
    assert main(["replay", str(journal), BALANCES, "--limit", "2"]) == 0
    text = capsys.readouterr().out

    customers = {one.json()["customer"] for one in records_in(journal)}
    assert {row["customer"] for row in everything["rows"]} == customers
    assert not everything["is_cut"]
    assert written == {"rows": len(customers), "out": str(out)}
    assert spark.read.parquet(str(out)).count() == len(customers)
    assert text.splitlines()[0].split() == ["customer", "cents", "trail"]
    assert len(text.splitlines()) == 5
    assert "There are more rows" in text


def test_an_export_says_what_it_has_added(
    spark: SparkSession, journal: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lake = tmp_path / "lake"

    first = said(capsys, "export", journal, lake)
    assert main(["export", str(journal), str(lake)]) == 0
    text = capsys.readouterr().out

    assert (first["messages"], first["sealed"]) == (COUNT, COUNT)
    assert text.startswith("0 messages and 0 deliveries were added")


def test_a_report_is_written(
    spark: SparkSession, journal: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.html"

    found = said(capsys, "report", journal, "--out", path, "--until", "200")

    assert found == {"report": str(path)}
    assert path.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


def test_a_stream_into_a_table_goes_on_and_doubles_nothing(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal, table = tmp_path / "shop.db", tmp_path / "table"
    write_orders(journal, 50)
    arguments = ("stream", journal, "--to", table, "--checkpoint", tmp_path / "state", "--once")

    first = said(capsys, *arguments, "--max-rows", "20")
    write_orders(journal, 7)
    second = said(capsys, *arguments)

    assert [(one["rows"], one["offset"]) for one in first] == [(20, 20), (20, 40), (10, 50)]
    assert [(one["rows"], one["offset"]) for one in second] == [(7, 57)]
    assert offsets_of(spark.read.parquet(str(table))) == list(range(1, 58))


@pytest.mark.timeout(600)
def test_a_worker_without_msgbus_is_told_from_a_broken_job(tmp_path: Path) -> None:
    # A Python that has everything but msgbus.
    hidden = tmp_path / "hidden" / "msgbus"
    hidden.mkdir(parents=True)
    (hidden / "__init__.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'msgbus'\", name='msgbus')\n"
    )
    worker = tmp_path / "python"
    worker.write_text(
        f'#!/bin/sh\nPYTHONPATH="{hidden.parent}:$PYTHONPATH" exec {sys.executable} "$@"\n'
    )
    worker.chmod(0o755)
    command = [sys.executable, "-m", "msgbus.pipeline", "doctor", "--master", "local[1]"]

    with Running(command, tmp_path / "cwd", PYSPARK_PYTHON=str(worker)) as running:
        code = running.end()

    assert code == faults.WORKER, running.text
    assert "A worker cannot import msgbus" in running.text
    assert "ok    job" in running.text
