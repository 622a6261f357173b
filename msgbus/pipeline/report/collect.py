"""From frames to the values of a report: a handful of jobs, and only small results brought here."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as sql
from pyspark.sql.types import TimestampType

from msgbus.pipeline import jobs
from msgbus.pipeline.report import data as values
from msgbus.pipeline.report.scales import step_for
from msgbus.pipeline.report.trees import collect_tree

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
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
    """Run the jobs of a report and bring their results here."""
    made = now or datetime.now(UTC)
    messages = messages.select(*jobs.MESSAGE_COLUMNS).persist()
    deliveries = jobs.tries(messages, deliveries).persist()
    try:
        first, last = _span(messages, deliveries)
        if first is None or last is None:
            return values.ReportData(source=source, made=made)
        return _collect(messages, deliveries, source, made, (first, last), stuck_after)
    finally:
        messages.unpersist()
        deliveries.unpersist()


def rows_of(frame: DataFrame) -> list[dict[str, Any]]:
    """Rows as dicts, times in UTC: Spark would give them in the machine's zone, unmarked."""
    times = [one.name for one in frame.schema.fields if isinstance(one.dataType, TimestampType)]
    if times:  # through Connect, none at all is an error
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
        tries=sum(one.tries for one in periods),
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
        for name in ("tries", "failed", "retries", "dead_letters"):
            counts[row["period"]][name] += row[name]
    lately = rows_of(jobs.percentiles(total.withColumn("period", period), "period"))
    latency = _percentiles(lately, "period")
    found: list[values.Period] = []
    at = start(span[0])
    while at <= span[1]:
        zero = dict.fromkeys(("tries", "failed", "retries", "dead_letters"), 0)
        found.append(
            values.Period(at, by_type[at], **{**zero, **counts[at]}, latency=latency.get((at,)))
        )
        at += step
    return found


def _period(step: timedelta) -> tuple[Any, Column]:
    """The beginning of a period: of a time, and of a minute in a frame."""
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
    found.sort(key=lambda one: (-one.tries, one.cause, one.handler))
    return found[:_CAUSES], max(0, len(found) - _CAUSES)


def _failure(
    key: tuple[Any, ...], rows: list[dict[str, Any]], end: Mapping[str, Any] | None
) -> values.Failure:
    newest = max(rows, key=lambda row: row["last"])
    if end is None:  # nothing of it failed: refused or cancelled
        told = sum(row["messages"] for row in rows)
        refused = sum(row["messages"] for row in rows if row["outcome"] == "refused")
        end = {"messages": told, "recovered": 0, "given_up": 0, "unfinished": told - refused}
    cause, handler, name = key
    return values.Failure(
        cause=cause,
        handler=handler,
        name=name,
        outcomes={row["outcome"]: row["count"] for row in rows},
        tries=sum(row["tries"] for row in rows),
        messages=end["messages"],
        recovered=end["recovered"],
        given_up=end["given_up"],
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
