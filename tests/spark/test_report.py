"""A report's values, brought from Spark, and the file that is made of them."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import anyio
import pytest
from pyspark.sql import SparkSession

from examples.shop import durable
from examples.shop.__main__ import write_report
from examples.shop.messages import make_orders
from msgbus import pipeline
from msgbus.pipeline.report import collect, render
from tests.spark.kit import append, mixed_records
from tests.spark.tables import START, at, deliveries_frame, messages_frame, random_journal


@pytest.mark.timeout(600)
def test_a_report_has_what_happened(spark: SparkSession) -> None:
    messages, deliveries = random_journal(2, 300, seconds=3600.0)
    data = collect(
        messages_frame(spark, messages),
        deliveries_frame(spark, deliveries),
        source="shop.db",
        now=at(4000.0),
    )
    attempts = [one for one in deliveries if one["outcome"] != "dead_lettered" or one["run"] > 0]
    times = [one["time"] for one in (*messages, *deliveries)]
    assert (data.first, data.last) == (min(times), max(times))
    assert data.totals.messages == 300
    assert data.totals.types == len({one["name"] for one in messages})
    assert data.totals.attempts == len(attempts)
    assert data.totals.dead_letters == sum(one["outcome"] == "dead_lettered" for one in deliveries)
    assert data.latency is not None
    assert data.latency.attempts == len(attempts)
    assert data.latency.longest == pytest.approx(max(one["wait"] + one["run"] for one in attempts))

    assert data.step == timedelta(minutes=1)
    assert data.periods[0].start == START
    assert all(
        b.start - a.start == data.step for a, b in zip(data.periods, data.periods[1:], strict=False)
    )
    assert sum(sum(one.published.values()) for one in data.periods) == 300
    assert sum(one.latency.attempts for one in data.periods if one.latency) == len(attempts)

    handlers = {one.handler for one in data.handlers}
    assert handlers == {one["handler"] for one in deliveries}
    assert sum(one.attempts for one in data.failures) + sum(
        one["outcome"] == "ok" for one in deliveries
    ) == len(attempts)
    assert [one.attempts for one in data.failures] == sorted(
        (one.attempts for one in data.failures), reverse=True
    )
    assert sum(data.sessions.outcomes.values()) == len(
        {one["session_id"] for one in messages if one["session_id"]}
    )
    longest = [one.duration for one in data.sessions.longest]
    assert longest == sorted(longest, reverse=True)
    assert data.tree is not None
    mine = [one for one in messages if one["root_id"] == data.tree.root_id]
    assert {node.message_id for node in data.tree.nodes} == {one["message_id"] for one in mine}
    assert data.tree.depth == max(one["depth"] for one in mine)
    assert any(node.is_critical for node in data.tree.nodes)
    assert len(data.slowest) == 20
    assert data.stuck
    assert "shop.db" in render(data)


def test_the_demo_ends_with_a_report_of_its_own_journal(
    spark: SparkSession, tmp_path: Path
) -> None:
    durable.clear(tmp_path)
    act = durable.Durable(make_orders(60, seed=5), tmp_path)
    anyio.run(durable.run, act)

    write_report(tmp_path, is_wanted=True)

    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert len(act.handlers) == 2
    assert all(handler in page for handler in act.handlers)
    assert spark.range(1).count() == 1  # it took the session that was there


def test_a_journal_makes_a_file(spark: SparkSession, tmp_path: Path) -> None:
    append(tmp_path / "shop.db", [])
    pipe = pipeline.open(f"sqlite:///{tmp_path}/shop.db", spark)
    path = pipe.report(tmp_path / "out" / "report.html")
    assert "no messages and no deliveries" in path.read_text(encoding="utf-8")

    records = mixed_records(20)
    append(tmp_path / "shop.db", records)
    assert pipe.report(tmp_path / "out" / "report.html", since=11) == path
    page = path.read_text(encoding="utf-8")
    assert "<b>10</b>" in page  # messages
    assert "No handler has run." in page
    assert sorted(one.name for one in path.parent.iterdir()) == ["report.html"]
