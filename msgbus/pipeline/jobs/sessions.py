"""Sessions: how long they took, what happened in them, and how they ended."""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as sql

from msgbus.pipeline.jobs.attempts import (
    ANSWERED,
    count_of,
    happened,
    is_failed,
    is_outcome,
    is_try,
    seconds_between,
    tries,
)


def sessions(messages: DataFrame, deliveries: DataFrame) -> DataFrame:
    """One row per session.

    A session begins with its first message and ends with the last message or try. Its outcome is
    `failed` if a handler has not answered one of its messages at last, `recovered` if all were
    answered but something had failed before, else `ok`. A refusal is an answer.

    Returns:
        `session_id`, `outcome`, `started`, `ended`, `duration` (seconds), `messages`, `events`,
        `commands`, `tries`, `failed`, `dead_letters`.
    """
    published = messages.groupBy("session_id").agg(
        sql.min("time").alias("started"),
        sql.max("time").alias("last_message"),
        sql.count(sql.lit(1)).alias("messages"),
        count_of(sql.col("kind") == "event").alias("events"),
        count_of(sql.col("kind") == "command").alias("commands"),
    )
    joined = published.where(sql.col("session_id").isNotNull()).join(
        _tried(messages, deliveries), "session_id", "left"
    )
    ended = sql.greatest("last_message", "last_try")
    counts = ("tries", "failed", "dead_letters")
    return joined.select(
        "session_id",
        sql.when(sql.col("unhappy") > 0, "failed")
        .when(sql.col("failed") > 0, "recovered")
        .otherwise("ok")
        .alias("outcome"),
        "started",
        ended.alias("ended"),
        seconds_between(sql.col("started"), ended).alias("duration"),
        "messages",
        "events",
        "commands",
        *(sql.coalesce(one, sql.lit(0)).alias(one) for one in counts),
    )


def timeline(messages: DataFrame, deliveries: DataFrame, session_id: str) -> DataFrame:
    """Everything that happened in one session, in order.

    Returns:
        `time`, `elapsed` (seconds since its first message), `what` (`published` or the outcome of
        a try), `name`, `handler`, `message_id`, `attempt`, `seconds` (in the handler), `error`.
    """
    mine = messages.where(sql.col("session_id") == session_id)
    published = mine.select(
        "time", sql.lit("published").alias("what"), "name", "message_id", sql.lit(0).alias("turn")
    )
    columns = ("message_id", "handler", "attempt", "outcome", "run", "time", "error")
    tried = deliveries.select(*columns).join(mine.select("message_id", "name"), "message_id")
    tried = tried.select(
        "time",
        sql.col("outcome").alias("what"),
        "name",
        "message_id",
        "handler",
        "attempt",
        sql.col("run").alias("seconds"),
        "error",
        sql.lit(1).alias("turn"),
    )
    everything = published.unionByName(tried, allowMissingColumns=True)
    start = mine.agg(sql.min("time").alias("started"))
    return (
        everything.crossJoin(sql.broadcast(start))
        .orderBy("time", "turn", "message_id", "attempt")
        .select(
            "time",
            seconds_between(sql.col("started"), sql.col("time")).alias("elapsed"),
            "what",
            "name",
            "handler",
            "message_id",
            "attempt",
            "seconds",
            "error",
        )
    )


def _tried(messages: DataFrame, deliveries: DataFrame) -> DataFrame:
    pairs = (
        tries(messages, deliveries)
        .where(sql.col("session_id").isNotNull())
        .groupBy("session_id", "message_id", "handler")
        .agg(
            sql.max("time").alias("last_try"),
            count_of(is_try()).alias("tries"),
            count_of(is_failed()).alias("failed"),
            count_of(is_outcome("dead_lettered")).alias("dead_letters"),
            sql.max_by("outcome", happened()).alias("end"),
        )
    )
    return pairs.groupBy("session_id").agg(
        sql.max("last_try").alias("last_try"),
        sql.sum("tries").alias("tries"),
        sql.sum("failed").alias("failed"),
        sql.sum("dead_letters").alias("dead_letters"),
        count_of(~sql.col("end").isin(*ANSWERED)).alias("unhappy"),
    )
