"""Metrics by minute and type: throughput, and latency as logarithmic histograms.

Counts and histograms can be added up, across minutes, handlers and machines.
"""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

from pyspark.sql import Column, DataFrame, Window, functions as sql

from msgbus.pipeline.jobs.attempts import (
    is_attempt,
    is_failed,
    is_outcome,
    minute_of,
    named_deliveries,
    share,
)

Measure: TypeAlias = Literal["run", "wait", "total"]
"""Seconds in the handler; from publish to the attempt; from publish to the end of the attempt."""

QUANTILES: Final = (0.5, 0.95, 0.99)

# Bucket `i` holds the seconds in (2^((i-1)/8), 2^(i/8)]. Each is 9 % wider than the one before, so
# its middle is at most 4.5 % from any value in it.
PER_DOUBLING: Final = 8
LOWEST: Final = -160
"""2^-20 s, about a microsecond; shorter and negative durations are counted here."""

# A value on a bound is in the bucket below it, however the logarithm is rounded.
_SLACK: Final = 1e-9
_SMALLEST: Final = 2.0 ** (LOWEST / PER_DOUBLING)


def histogram(messages: DataFrame, deliveries: DataFrame, measure: Measure = "total") -> DataFrame:
    """Durations of attempts, as counts per logarithmic bucket.

    Rows of the same bucket can be added up at any time, with `merge_histogram` or by any engine.

    Returns:
        `minute`, `name`, `handler`, `bucket`, `count`, `seconds` (their exact sum), `longest`.
    """
    seconds = _seconds(measure)
    return (
        named_deliveries(messages, deliveries)
        .where(is_attempt())
        .select(minute_of(sql.col("time")).alias("minute"), "name", "handler", seconds)
        .groupBy("minute", "name", "handler", bucket_column(sql.col("seconds")).alias("bucket"))
        .agg(
            sql.count(sql.lit(1)).alias("count"),
            sql.sum("seconds").alias("seconds"),
            sql.max("seconds").alias("longest"),
        )
    )


def merge_histogram(histogram: DataFrame, *by: str) -> DataFrame:
    """Add up a histogram by fewer columns, such as "handler"."""
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
    # A constant, as Spark warns of windows without a partition; a histogram is small.
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


def bucket_column(seconds: Column) -> Column:
    """The bucket of a duration in seconds."""
    logarithm = sql.log2(sql.greatest(seconds, sql.lit(_SMALLEST))) * PER_DOUBLING
    bucket = sql.ceil(logarithm - sql.lit(_SLACK)).cast("int")
    return sql.greatest(sql.lit(LOWEST), bucket)


def middle_column(bucket: Column) -> Column:
    """The geometric middle of a bucket, in seconds."""
    return sql.pow(sql.lit(2.0), (bucket - sql.lit(0.5)) / sql.lit(float(PER_DOUBLING)))


_COUNTS: Final = ("published", "attempts", "succeeded", "failed", "retries", "dead_letters")


def throughput(messages: DataFrame, deliveries: DataFrame) -> DataFrame:
    """Counts and rates per minute and type of message.

    A message counts in the minute of its publish, an attempt in the minute of its end. The rates
    are shares of the attempts of that minute, null if there was none.

    Returns:
        `minute`, `name`, `published`, `attempts`, `succeeded`, `failed`, `retries`
        (attempts after the first), `dead_letters`, `failure_rate`, `retry_rate`,
        `dead_letter_rate`.
    """
    published = messages.groupBy(minute_of(sql.col("time")).alias("minute"), "name").agg(
        sql.count(sql.lit(1)).alias("published")
    )
    attempted = (
        named_deliveries(messages, deliveries)
        .groupBy(minute_of(sql.col("time")).alias("minute"), "name")
        .agg(
            sql.count_if(is_attempt()).alias("attempts"),
            sql.count_if(is_outcome("ok")).alias("succeeded"),
            sql.count_if(is_failed()).alias("failed"),
            sql.count_if(is_attempt() & (sql.col("attempt") > 1)).alias("retries"),
            sql.count_if(is_outcome("dead_lettered")).alias("dead_letters"),
        )
    )
    both = published.unionByName(attempted, allowMissingColumns=True)
    return with_rates(
        both.groupBy("minute", "name").agg(
            *(sql.coalesce(sql.sum(one), sql.lit(0)).alias(one) for one in _COUNTS)
        )
    )


def merge_throughput(throughput: DataFrame, *by: str) -> DataFrame:
    """Add up a `throughput` by fewer columns, such as "name"."""
    return with_rates(throughput.groupBy(*by).agg(*(sql.sum(one).alias(one) for one in _COUNTS)))


def with_rates(counts: DataFrame) -> DataFrame:
    """Counts with the shares of attempts that failed, were retries, or were dead-lettered."""
    return counts.withColumns(
        {
            "failure_rate": share("failed", "attempts"),
            "retry_rate": share("retries", "attempts"),
            "dead_letter_rate": share("dead_letters", "attempts"),
        }
    )
