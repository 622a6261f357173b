"""Run the jobs of a report, collect their results, and write the report."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import Column, DataFrame, functions as sql
from pyspark.sql.types import TimestampType

from msgbus.pipeline import jobs
from msgbus.pipeline.jobs.attempts import happened, seconds_between
from msgbus.pipeline.report import data as values
from msgbus.pipeline.report.charts import step_for
from msgbus.pipeline.report.data import Tree, TreeNode
from msgbus.pipeline.report.page import render
from msgbus.runtime.private_files import open_private, permissions_of

if TYPE_CHECKING:
    from msgbus.pipeline.pipeline import Pipeline
    from msgbus.pipeline.source.selection import Bound


_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_COUNTS: Final = ("attempts", "failed", "retries", "dead_letters")
_CAUSES: Final = 25
_SESSIONS: Final = 15
_SLOWEST: Final = 20
_EFFECTS: Final = 25
_STUCK: Final = 30


def collect(
    messages: DataFrame,
    deliveries: DataFrame,
    *,
    source: str,
    now: datetime | None = None,
    stuck_after: float = 300.0,
) -> values.ReportData:
    """Run the jobs of a report and collect their results."""
    made = now or datetime.now(UTC)
    # A record that is damaged has nothing but its offset.
    messages = messages.select(*jobs.MESSAGE_COLUMNS).where("message_id is not null").persist()
    deliveries = deliveries.where("message_id is not null")
    deliveries = jobs.named_deliveries(messages, deliveries).persist()
    try:
        first, last = _span(messages, deliveries)
        if first is None or last is None:
            return values.ReportData(source=source, made=made)
        return _collect(messages, deliveries, source, made, (first, last), stuck_after)
    finally:
        messages.unpersist()
        deliveries.unpersist()


def rows_of(frame: DataFrame) -> list[dict[str, Any]]:
    """Rows as dicts with times in UTC; Spark's own are naive, in the machine's zone."""
    times = [one.name for one in frame.schema.fields if isinstance(one.dataType, TimestampType)]
    if times:  # Spark Connect refuses an empty dict
        frame = frame.withColumns({name: sql.unix_micros(name) for name in times})
    rows = [row.asDict(recursive=True) for row in frame.collect()]
    for row in rows:
        for name in times:
            row[name] = _time(row[name])
    return rows


def _collect(
    messages: DataFrame,
    deliveries: DataFrame,
    source: str,
    made: datetime,
    span: tuple[datetime, datetime],
    stuck_after: float,
) -> values.ReportData:
    step = step_for(span[1] - span[0])
    total = jobs.histogram(messages, deliveries, "total").persist()
    try:
        periods = _periods(messages, deliveries, total, span, step)
        overall = _percentiles(rows_of(jobs.percentiles(total)))
    finally:
        total.unpersist()
    causes, left_out = _failures(messages, deliveries)
    return values.ReportData(
        source=source,
        made=made,
        first=span[0],
        last=span[1],
        step=step,
        totals=_totals(messages, periods),
        latency=overall.get(()),
        periods=periods,
        handlers=_handlers(messages, deliveries),
        failures=causes,
        failures_left_out=left_out,
        sessions=_sessions(messages, deliveries),
        tree=collect_tree(messages, deliveries, rows_of),
        effects=_effects(messages),
        slowest=_slowest(messages, deliveries),
        stuck=_stuck(messages, deliveries, made, stuck_after),
        stuck_after=stuck_after,
    )


def _span(messages: DataFrame, deliveries: DataFrame) -> tuple[datetime | None, datetime | None]:
    both = messages.select("time").unionAll(deliveries.select("time"))
    (row,) = rows_of(both.agg(sql.min("time").alias("first"), sql.max("time").alias("last")))
    return row["first"], row["last"]


def _totals(messages: DataFrame, periods: list[values.Period]) -> values.Totals:
    (row,) = rows_of(
        messages.agg(
            sql.count(sql.lit(1)).alias("messages"),
            sql.count_if(sql.col("kind") == "event").alias("events"),
            sql.count_if(sql.col("kind") == "command").alias("commands"),
            sql.count_distinct("name").alias("types"),
        )
    )
    return values.Totals(
        **row,
        attempts=sum(one.attempts for one in periods),
        failed=sum(one.failed for one in periods),
        retries=sum(one.retries for one in periods),
        dead_letters=sum(one.dead_letters for one in periods),
    )


def _periods(
    messages: DataFrame,
    deliveries: DataFrame,
    total: DataFrame,
    span: tuple[datetime, datetime],
    step: timedelta,
) -> list[values.Period]:
    start, period = _period(step)
    minutes = jobs.throughput(messages, deliveries).withColumn("period", period)
    by_type: dict[datetime, dict[str, int]] = defaultdict(dict)
    counts: dict[datetime, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for row in rows_of(jobs.merge_throughput(minutes, "period", "name")):
        if row["published"]:
            by_type[row["period"]][row["name"]] = row["published"]
        for name in _COUNTS:
            counts[row["period"]][name] += row[name]
    lately = rows_of(jobs.percentiles(total.withColumn("period", period), "period"))
    latency = _percentiles(lately, "period")
    found: list[values.Period] = []
    at = start(span[0])
    while at <= span[1]:
        zero = dict.fromkeys(_COUNTS, 0)
        found.append(
            values.Period(at, by_type[at], **{**zero, **counts[at]}, latency=latency.get((at,)))
        )
        at += step
    return found


def _period(step: timedelta) -> tuple[Any, Column]:
    """The start of a period, as a function of a time and as a column."""
    length = step // timedelta(microseconds=1)
    micros = sql.unix_micros("minute")
    column = sql.timestamp_micros(micros - sql.pmod(micros, sql.lit(length)))

    def start(time: datetime) -> datetime:
        return time - (time - _EPOCH) % step

    return start, column


def _percentiles(
    rows: Iterable[Mapping[str, Any]], *by: str
) -> dict[tuple[Any, ...], values.Percentiles]:
    names = ("count", "mean", "p50", "p95", "p99", "longest")
    return {
        tuple(row[key] for key in by): values.Percentiles(*(row[name] for name in names))
        for row in rows
        if row["count"]
    }


def _handlers(messages: DataFrame, deliveries: DataFrame) -> list[values.HandlerLatency]:
    by = ("handler", "name")
    run, wait = (
        _percentiles(
            rows_of(jobs.percentiles(jobs.histogram(messages, deliveries, measure), *by)), *by
        )
        for measure in ("run", "wait")
    )
    found = [
        values.HandlerLatency(handler, name, run[handler, name], wait[handler, name])
        for handler, name in run
    ]
    return sorted(found, key=lambda one: -one.run.p95)


def _failures(messages: DataFrame, deliveries: DataFrame) -> tuple[list[values.Failure], int]:
    by = ("cause", "handler", "name")
    grouped: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for row in rows_of(jobs.failures(messages, deliveries)):
        grouped[tuple(row[key] for key in by)].append(row)
    ends = {
        tuple(row[key] for key in by): row for row in rows_of(jobs.retries(messages, deliveries))
    }
    found = [_failure(key, rows, ends.get(key)) for key, rows in grouped.items()]
    found.sort(key=lambda one: (-one.attempts, one.cause, one.handler))
    return found[:_CAUSES], max(0, len(found) - _CAUSES)


def _failure(
    key: tuple[Any, ...], rows: list[dict[str, Any]], end: Mapping[str, Any] | None
) -> values.Failure:
    newest = max(rows, key=lambda row: row["last"])
    if end is None:  # nothing of it failed: refused or cancelled
        messages = sum(row["messages"] for row in rows)
        refused = sum(row["messages"] for row in rows if row["outcome"] == "refused")
        end = {
            "messages": messages,
            "recovered": 0,
            "dead": 0,
            "unfinished": messages - refused,
        }
    cause, handler, name = key
    return values.Failure(
        cause=cause,
        handler=handler,
        name=name,
        outcomes={row["outcome"]: row["count"] for row in rows},
        attempts=sum(row["attempts"] for row in rows),
        messages=end["messages"],
        recovered=end["recovered"],
        dead=end["dead"],
        unfinished=end["unfinished"],
        first=min(row["first"] for row in rows),
        last=newest["last"],
        example=newest["example"],
        example_id=newest["example_id"],
    )


def _sessions(messages: DataFrame, deliveries: DataFrame) -> values.Sessions:
    every = jobs.sessions(messages, deliveries).persist()
    try:
        ends = rows_of(every.groupBy("outcome").agg(sql.count(sql.lit(1)).alias("sessions")))
        longest = every.orderBy(sql.desc("duration"), "session_id").limit(_SESSIONS)
        names = values.SessionLine._fields
        shown = [values.SessionLine(*(row[name] for name in names)) for row in rows_of(longest)]
        (middle,) = rows_of(every.agg(sql.median("duration").alias("median")))
    finally:
        every.unpersist()
    outcomes = {row["outcome"]: row["sessions"] for row in ends}
    return values.Sessions(outcomes, shown, middle["median"])


def _effects(messages: DataFrame) -> list[values.Effect]:
    top = jobs.effects(messages).orderBy(sql.desc("count"), "cause", "effect").limit(_EFFECTS)
    names = ("cause", "effect", "count", "most", "seconds")
    return [values.Effect(*(row[name] for name in names)) for row in rows_of(top)]


def _slowest(messages: DataFrame, deliveries: DataFrame) -> list[values.Slow]:
    names = values.Slow._fields
    rows = rows_of(jobs.slowest(messages, deliveries, _SLOWEST))
    return [values.Slow(*(row[name] for name in names)) for row in rows]


def _stuck(
    messages: DataFrame, deliveries: DataFrame, now: datetime, older_than: float
) -> list[values.Stuck]:
    grouped = (
        jobs.stuck(messages, deliveries, now, older_than)
        .groupBy("name", "handler", "reason")
        .agg(
            sql.count(sql.lit(1)).alias("count"),
            sql.min_by("message_id", "offset").alias("oldest_id"),
            sql.max("age").alias("age"),
        )
        .orderBy(sql.col("reason") == "unhandled", sql.desc("count"), "name", "handler")
        .limit(_STUCK)
    )
    names = ("name", "handler", "reason", "count", "oldest_id", "age")
    return [values.Stuck(*(row[name] for name in names)) for row in rows_of(grouped)]


def _time(micros: int | None) -> datetime | None:
    return None if micros is None else _EPOCH + timedelta(microseconds=micros)


MOST: Final = 40
"""Messages that a tree shows at most."""

_WORST: Final = ("dead_lettered", "dropped", "failed", "timed_out", "cancelled", "refused", "ok")

Rows = Callable[[DataFrame], list[dict[str, Any]]]


def collect_tree(messages: DataFrame, deliveries: DataFrame, rows_of: Rows) -> Tree | None:
    """The longest chain with at most `MOST` messages, else the start of the longest."""
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
    """Messages with the end of their last attempt, and the outcomes of their handlers."""
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


def write_report(
    pipe: Pipeline,
    path: str | os.PathLike[str],
    *,
    since: Bound | None = None,
    until: Bound | None = None,
    stuck_after: float = 300.0,
    now: datetime | None = None,
) -> Path:
    """Write the report of a pipeline's messages between two bounds; see `Pipeline.report`."""
    messages = pipe.messages(since=since, until=until, columns=jobs.MESSAGE_COLUMNS)
    deliveries = pipe.deliveries()
    if since is not None or until is not None:
        # Deliveries of these messages, at any time.
        mine = messages.select("message_id")
        deliveries = deliveries.join(mine, "message_id", "left_semi").select(*deliveries.columns)
    data = collect(messages, deliveries, source=pipe.path, now=now, stuck_after=stuck_after)
    target = Path(path).absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.tmp")
    temporary.unlink(missing_ok=True)
    permissions = permissions_of(target, pipe.path)
    with open_private(temporary, "x", permissions, encoding="utf-8") as file:
        file.write(render(data))
    temporary.replace(target)
    return target
