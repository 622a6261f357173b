"""Failures, retries and dead letters by cause."""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as sql

from msgbus.pipeline.jobs.attempts import (
    ANSWERED,
    GIVEN_UP,
    count_of,
    happened,
    is_failed,
    is_outcome,
    is_try,
    tries,
)
from msgbus.pipeline.jobs.causes import cause_column


def failures(messages: DataFrame, deliveries: DataFrame) -> DataFrame:
    """Everything that was not `ok`, by type, handler, outcome and cause.

    Returns:
        `name`, `handler`, `outcome`, `cause`, `count` (deliveries that ended so), `tries` (those of
        them that are tries), `messages` (different ones), `first`, `last`, `example` (the text of
        the last error), `example_id` (the message it was of).
    """
    return (
        tries(messages, deliveries)
        .where(~is_outcome("ok"))
        .groupBy("name", "handler", "outcome", _cause())
        .agg(
            sql.count(sql.lit(1)).alias("count"),
            count_of(is_try()).alias("tries"),
            sql.count_distinct("message_id").alias("messages"),
            sql.min("time").alias("first"),
            sql.max("time").alias("last"),
            sql.max_by("error", happened()).alias("example"),
            sql.max_by("message_id", happened()).alias("example_id"),
        )
    )


def retries(messages: DataFrame, deliveries: DataFrame) -> DataFrame:
    """What became of messages whose first failure had this cause, per type and handler.

    One message with one handler counts once: as `recovered` if the handler answered at last, as
    `given_up` if it is a dead letter or was dropped, else as `unfinished`.

    Returns:
        `name`, `handler`, `cause`, `messages`, `retried` (tried more than once), `retries` (tries
        after the first), `recovered`, `given_up`, `unfinished`, `most_attempts`.
    """
    failed_at = sql.when(is_failed(), happened())
    pairs = (
        tries(messages, deliveries)
        .groupBy("name", "handler", "message_id")
        .agg(
            sql.min_by("error", failed_at).alias("error"),
            sql.min(failed_at).alias("failed"),
            sql.max("attempt").alias("attempts"),
            count_of(is_try() & (sql.col("attempt") > 1)).alias("retries"),
            sql.max_by("outcome", happened()).alias("end"),
        )
        .where(sql.col("failed").isNotNull())
    )
    end = sql.col("end")
    return pairs.groupBy("name", "handler", _cause()).agg(
        sql.count(sql.lit(1)).alias("messages"),
        count_of(sql.col("attempts") > 1).alias("retried"),
        sql.sum("retries").alias("retries"),
        count_of(end.isin(*ANSWERED)).alias("recovered"),
        count_of(end.isin(*GIVEN_UP)).alias("given_up"),
        count_of(~end.isin(*ANSWERED, *GIVEN_UP)).alias("unfinished"),
        sql.max("attempts").alias("most_attempts"),
    )


def dead_letters(messages: DataFrame, deliveries: DataFrame) -> DataFrame:
    """Messages that were given up as dead letters, by type, handler and cause.

    Returns:
        `name`, `handler`, `cause`, `letters`, `most_attempts`, `first`, `last`, `example`,
        `example_id`.
    """
    return (
        tries(messages, deliveries)
        .where(is_outcome("dead_lettered"))
        .groupBy("name", "handler", _cause())
        .agg(
            sql.count(sql.lit(1)).alias("letters"),
            sql.max("attempt").alias("most_attempts"),
            sql.min("time").alias("first"),
            sql.max("time").alias("last"),
            sql.max_by("error", happened()).alias("example"),
            sql.max_by("message_id", happened()).alias("example_id"),
        )
    )


def _cause() -> Column:
    return cause_column(sql.col("error")).alias("cause")
