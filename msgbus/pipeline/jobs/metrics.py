"""Latency: logarithmic histograms that may be added up, and percentiles from them."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as sql

from msgbus.pipeline.jobs.attempts import is_try, minute_of, tries
from msgbus.pipeline.jobs.buckets import bucket_column, middle_column

Measure: TypeAlias = Literal["run", "wait", "total"]
"""Seconds in the handler; between publish and try; from publish to the end of the try."""

QUANTILES: Final = (0.5, 0.95, 0.99)


def histogram(messages: DataFrame, deliveries: DataFrame, measure: Measure = "total") -> DataFrame:
    """Durations of tries, as counts per bucket.

    Store it as it is: rows of the same bucket may be added up at any time, with
    `merge_histogram`, and by any engine that can sum. The bounds of a bucket are in
    `msgbus.pipeline.jobs.buckets`.

    Returns:
        `minute`, `name`, `handler`, `bucket`, `count`, `seconds` (their exact sum), `longest`.
    """
    seconds = _seconds(measure)
    return (
        tries(messages, deliveries)
        .where(is_try())
        .select(minute_of(sql.col("time")).alias("minute"), "name", "handler", seconds)
        .groupBy("minute", "name", "handler", bucket_column(sql.col("seconds")).alias("bucket"))
        .agg(
            sql.count(sql.lit(1)).alias("count"),
            sql.sum("seconds").alias("seconds"),
            sql.max("seconds").alias("longest"),
        )
    )


def merge_histogram(histogram: DataFrame, *by: str) -> DataFrame:
    """A histogram with fewer keys: `by` is what stays apart, e.g. "handler"."""
    return histogram.groupBy(*by, "bucket").agg(
        sql.sum("count").alias("count"),
        sql.sum("seconds").alias("seconds"),
        sql.max("longest").alias("longest"),
    )


def percentiles(
    histogram: DataFrame, *by: str, quantiles: tuple[float, ...] = QUANTILES
) -> DataFrame:
    """Percentiles per group, by nearest rank, each at most 4.5 % off; `mean` and `longest` exact.

    Returns:
        The columns `by`, `count`, `mean`, one column per quantile (`p50`, `p95`, `p99`; 0.999
        is `p99_9`), `longest`.
    """
    # A histogram is small: all of it may be one group, of which Spark would warn.
    whole = Window.partitionBy(*(by or (sql.lit(0),)))
    rows = whole.orderBy("bucket")
    ranked = merge_histogram(histogram, *by).select(
        *by,
        "bucket",
        "count",
        "seconds",
        "longest",
        sql.sum("count").over(rows).alias("seen"),
        sql.sum("count").over(whole).alias("all"),
    )
    return ranked.groupBy(*by).agg(
        sql.sum("count").alias("count"),
        (sql.sum("seconds") / sql.sum("count")).alias("mean"),
        *(_percentile(one) for one in quantiles),
        sql.max("longest").alias("longest"),
    )


def column_of(quantile: float) -> str:
    """The column of a quantile: `p50` for 0.5."""
    return f"p{round(quantile * 100, 6):g}".replace(".", "_")


def _percentile(quantile: float) -> Column:
    rank = sql.greatest(sql.lit(1), sql.ceil(sql.lit(quantile) * sql.col("all") - sql.lit(1e-9)))
    reached = sql.when(sql.col("seen") >= rank, sql.col("bucket"))
    return middle_column(sql.min(reached)).alias(column_of(quantile))


def _seconds(measure: Measure) -> Column:
    columns = {
        "run": sql.col("run"),
        "wait": sql.col("wait"),
        "total": sql.col("wait") + sql.col("run"),
    }
    return columns[measure].alias("seconds")
