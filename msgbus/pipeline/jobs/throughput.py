"""Throughput: what was published and tried, by minute and type, and the rates of trouble."""

from __future__ import annotations

from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as sql

from msgbus.pipeline.jobs.attempts import (
    count_of,
    is_failed,
    is_outcome,
    is_try,
    minute_of,
    share,
    tries,
)

_COUNTS: Final = ("published", "tries", "succeeded", "failed", "retries", "dead_letters")


def throughput(messages: DataFrame, deliveries: DataFrame) -> DataFrame:
    """Counts and rates per minute and type of message.

    A message counts in the minute it was published in, a try in the minute it ended in. The rates
    are shares of the tries of that minute, null if there was none.

    Returns:
        `minute`, `name`, `published`, `tries`, `succeeded`, `failed`, `retries` (tries after the
        first), `dead_letters`, `failure_rate`, `retry_rate`, `dead_letter_rate`.
    """
    published = messages.groupBy(minute_of(sql.col("time")).alias("minute"), "name").agg(
        sql.count(sql.lit(1)).alias("published")
    )
    tried = (
        tries(messages, deliveries)
        .groupBy(minute_of(sql.col("time")).alias("minute"), "name")
        .agg(
            count_of(is_try()).alias("tries"),
            count_of(is_outcome("ok")).alias("succeeded"),
            count_of(is_failed()).alias("failed"),
            count_of(is_try() & (sql.col("attempt") > 1)).alias("retries"),
            count_of(is_outcome("dead_lettered")).alias("dead_letters"),
        )
    )
    both = published.unionByName(tried, allowMissingColumns=True)
    return with_rates(
        both.groupBy("minute", "name").agg(
            *(sql.coalesce(sql.sum(one), sql.lit(0)).alias(one) for one in _COUNTS)
        )
    )


def merge_throughput(throughput: DataFrame, *by: str) -> DataFrame:
    """Minutes or types of a `throughput` added up; `by` is what stays apart."""
    return with_rates(throughput.groupBy(*by).agg(*(sql.sum(one).alias(one) for one in _COUNTS)))


def with_rates(counts: DataFrame) -> DataFrame:
    """Counts with the shares of tries that failed, were retries, or were given up."""
    return counts.withColumns(
        {
            "failure_rate": share("failed", "tries"),
            "retry_rate": share("retries", "tries"),
            "dead_letter_rate": share("dead_letters", "tries"),
        }
    )
