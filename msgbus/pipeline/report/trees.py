"""The chain of causes that a report shows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as sql

from msgbus.pipeline import jobs
from msgbus.pipeline.jobs.attempts import happened, seconds_between
from msgbus.pipeline.report.data import Tree, TreeNode

MOST: Final = 40
"""Messages that fit the picture."""

_WORST: Final = ("dead_lettered", "dropped", "failed", "timed_out", "cancelled", "refused", "ok")

Rows = Callable[[DataFrame], list[dict[str, Any]]]


def collect_tree(messages: DataFrame, deliveries: DataFrame, rows_of: Rows) -> Tree | None:
    """The longest chain of those that fit; if none does, the beginning of the longest."""
    sizes = (
        messages.groupBy("root_id")
        .agg(
            sql.count(sql.lit(1)).alias("messages"),
            seconds_between(sql.min("time"), sql.max("time")).alias("duration"),
        )
        .where(sql.col("messages") > 1)
        .orderBy((sql.col("messages") > MOST).asc(), sql.desc("duration"), "root_id")
        .limit(1)
    )
    chosen = rows_of(sizes)
    if not chosen:
        return None
    root_id: str = chosen[0]["root_id"]
    mine = messages.where(sql.col("root_id") == root_id)
    (chain,) = rows_of(jobs.chains(mine))
    critical = {step["message_id"] for step in chain["critical_path"]}
    nodes = [
        _node(row, chain, critical)
        for row in rows_of(_ends(mine, deliveries).orderBy("offset").limit(MOST))
    ]
    return Tree(
        root_id, nodes, chain["messages"], chain["depth"], chain["widest"], chain["duration"]
    )


def _ends(mine: DataFrame, deliveries: DataFrame) -> DataFrame:
    """Messages with the end of their last try, and how their handlers ended."""
    last = (
        deliveries.join(mine.select("message_id"), "message_id")
        .groupBy("message_id", "handler")
        .agg(sql.max_by("outcome", happened()).alias("outcome"), sql.max("time").alias("ended"))
        .groupBy("message_id")
        .agg(sql.collect_set("outcome").alias("outcomes"), sql.max("ended").alias("ended"))
    )
    columns = ("message_id", "causation_id", "name", "depth", "offset", "time")
    return mine.select(*columns).join(last, "message_id", "left")


def _node(row: Mapping[str, Any], chain: Mapping[str, Any], critical: set[str]) -> TreeNode:
    started = chain["started"]
    start = (row["time"] - started).total_seconds()
    end = start if row["ended"] is None else (row["ended"] - started).total_seconds()
    outcomes: list[str] = row["outcomes"] or []
    return TreeNode(
        row["message_id"],
        row["causation_id"],
        row["name"],
        row["depth"],
        start,
        max(start, end),
        min(outcomes, key=_WORST.index, default=None),
        row["message_id"] in critical,
    )
