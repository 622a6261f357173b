"""Messages that took long, and messages that went nowhere."""

from __future__ import annotations

from datetime import datetime

from pyspark.sql import DataFrame
from pyspark.sql import functions as sql

from msgbus.pipeline.jobs.tries import (
    ANSWERED,
    GIVEN_UP,
    is_outcome,
    is_try,
    seconds_between,
    tries,
)


def slowest(messages: DataFrame, deliveries: DataFrame, limit: int = 20) -> DataFrame:
    """The messages that took longest from publish to the end of a handler's last try.

    Returns:
        `message_id`, `name`, `handler`, `session_id`, `outcome` (of the last try), `attempts`,
        `seconds` (publish to end), `run` (of them in the handler, all tries), `ended`; the longest
        first.
    """
    return (
        tries(messages, deliveries)
        .where(is_try())
        .groupBy("message_id", "name", "handler", "session_id")
        .agg(
            sql.max_by("outcome", "id").alias("outcome"),
            sql.max("attempt").alias("attempts"),
            sql.max_by(sql.col("wait") + sql.col("run"), "id").alias("seconds"),
            sql.sum("run").alias("run"),
            sql.max("time").alias("ended"),
        )
        .orderBy(sql.desc("seconds"), "message_id", "handler")
        .limit(limit)
    )


def stuck(
    messages: DataFrame, deliveries: DataFrame, now: datetime, older_than: float = 300.0
) -> DataFrame:
    """Messages published `older_than` seconds before `now` or earlier that still wait for somebody.

    The reason is one of three:

    - `unfinished`: a handler tried it, but has neither answered nor given up.
    - `undelivered`: a handler never tried it, although it has handled an earlier message of the
      same type.
    - `unhandled`: nobody ever tried it, and no handler has ever handled its type; `handler` is
      null.

    This needs a journal that records all deliveries, not failures alone.

    Returns:
        `message_id`, `offset`, `name`, `handler`, `reason`, `age` (seconds), `attempts`, `time` (of
        publish), `last_error`; the oldest first.
    """
    cutoff = sql.timestamp_micros(sql.lit(round((now.timestamp() - older_than) * 1e6)))
    at = sql.timestamp_micros(sql.lit(round(now.timestamp() * 1e6)))
    old = messages.where(sql.col("time") <= cutoff).select("message_id", "offset", "name", "time")
    return (
        _unfinished(deliveries, old)
        .unionByName(_undelivered(messages, deliveries, old), allowMissingColumns=True)
        .unionByName(_unhandled(messages, deliveries, old), allowMissingColumns=True)
        .select(
            "message_id",
            "offset",
            "name",
            "handler",
            "reason",
            seconds_between(sql.col("time"), at).alias("age"),
            sql.coalesce("attempts", sql.lit(0)).alias("attempts"),
            "time",
            "last_error",
        )
        .orderBy("offset", "handler")
    )


def _handlers(messages: DataFrame, deliveries: DataFrame) -> DataFrame:
    places = messages.select("message_id", "name", sql.col("offset").alias("place"))
    return (
        deliveries.where(is_outcome("ok"))
        .select("message_id", "handler")
        .join(places, "message_id")
        .groupBy("name", "handler")
        .agg(sql.min("place").alias("since"))
    )


def _unfinished(deliveries: DataFrame, old: DataFrame) -> DataFrame:
    states = deliveries.groupBy("message_id", "handler").agg(
        sql.max("attempt").alias("attempts"),
        sql.max(sql.col("outcome").isin(*ANSWERED, *GIVEN_UP)).alias("ended"),
        sql.max_by("error", "id").alias("last_error"),
    )
    return (
        old.join(states, "message_id")
        .where(~sql.col("ended"))
        .drop("ended")
        .withColumn("reason", sql.lit("unfinished"))
    )


def _undelivered(messages: DataFrame, deliveries: DataFrame, old: DataFrame) -> DataFrame:
    return (
        old.join(sql.broadcast(_handlers(messages, deliveries)), "name")
        .where(sql.col("offset") >= sql.col("since"))
        .drop("since")
        .join(deliveries.select("message_id", "handler"), ["message_id", "handler"], "left_anti")
        .withColumn("reason", sql.lit("undelivered"))
    )


def _unhandled(messages: DataFrame, deliveries: DataFrame, old: DataFrame) -> DataFrame:
    known = _handlers(messages, deliveries).select("name").distinct()
    return (
        old.join(sql.broadcast(known), "name", "left_anti")
        .join(deliveries.select("message_id"), "message_id", "left_anti")
        .withColumn("reason", sql.lit("unhandled"))
    )
