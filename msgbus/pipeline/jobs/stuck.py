"""Messages that took long, and messages that went nowhere."""

from __future__ import annotations

from datetime import datetime
from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as sql

from msgbus.pipeline.jobs.attempts import (
    ANSWERED,
    GIVEN_UP,
    happened,
    is_outcome,
    is_try,
    seconds_between,
    tries,
)

_WAITS: Final = """
concat(
    coalesce(transform(
        filter(tried, one -> NOT one.ended),
        one -> struct(
            one.handler AS handler, 'unfinished' AS reason, one.attempts AS attempts,
            one.last_error AS last_error)
    ), array()),
    coalesce(transform(
        filter(expected, one -> one.since <= `offset`
            AND NOT coalesce(exists(tried, other -> other.handler = one.handler), false)),
        one -> struct(
            one.handler AS handler, 'undelivered' AS reason, 0 AS attempts,
            CAST(NULL AS STRING) AS last_error)
    ), array()),
    CASE WHEN tried IS NULL AND expected IS NULL THEN array(struct(
        CAST(NULL AS STRING) AS handler, 'unhandled' AS reason, 0 AS attempts,
        CAST(NULL AS STRING) AS last_error)
    ) ELSE array() END
)
"""
"""For whom a message waits, out of who has tried it, and who is expected to.

One expression and not three joins: a journal is read anew for each of those.
"""


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
            sql.max_by("outcome", happened()).alias("outcome"),
            sql.max("attempt").alias("attempts"),
            sql.max_by(sql.col("wait") + sql.col("run"), happened()).alias("seconds"),
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
        old.join(_tried(deliveries), "message_id", "left")
        .join(sql.broadcast(_expected(messages, deliveries)), "name", "left")
        .withColumn("waits", sql.explode(sql.expr(_WAITS)))
        .select(
            "message_id",
            "offset",
            "name",
            "waits.handler",
            "waits.reason",
            seconds_between(sql.col("time"), at).alias("age"),
            "waits.attempts",
            "time",
            "waits.last_error",
        )
        .orderBy("offset", "handler")
    )


def _tried(deliveries: DataFrame) -> DataFrame:
    """For each message, who has tried it, and how far that has come."""
    states = deliveries.groupBy("message_id", "handler").agg(
        sql.max("attempt").alias("attempts"),
        sql.max(sql.col("outcome").isin(*ANSWERED, *GIVEN_UP)).alias("ended"),
        sql.max_by("error", happened()).alias("last_error"),
    )
    one = sql.struct("handler", "attempts", "ended", "last_error")
    return states.groupBy("message_id").agg(sql.collect_list(one).alias("tried"))


def _expected(messages: DataFrame, deliveries: DataFrame) -> DataFrame:
    """For each type, who has handled it, and since which offset."""
    places = messages.select("message_id", "name", sql.col("offset").alias("place"))
    handlers = (
        deliveries.where(is_outcome("ok"))
        .select("message_id", "handler")
        .join(places, "message_id")
        .groupBy("name", "handler")
        .agg(sql.min("place").alias("since"))
    )
    return handlers.groupBy("name").agg(
        sql.collect_list(sql.struct("handler", "since")).alias("expected")
    )
