"""Failures, retries and dead letters by cause; slow and stuck messages."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Final

from pyspark.sql import Column, DataFrame, functions as sql

from msgbus.pipeline.jobs.attempts import (
    ANSWERED,
    DEAD,
    happened,
    is_attempt,
    is_failed,
    is_outcome,
    named_deliveries,
    seconds_between,
)


def failures(messages: DataFrame, deliveries: DataFrame) -> DataFrame:
    """Everything that was not `ok`, by type, handler, outcome and cause.

    Returns:
        `name`, `handler`, `outcome`, `cause`, `count` (deliveries), `attempts` (those of them that
        are attempts), `messages` (distinct ones), `first`, `last`, `example` (the text of the last
        error), `example_id` (its message).
    """
    return (
        named_deliveries(messages, deliveries)
        .where(~is_outcome("ok"))
        .groupBy("name", "handler", "outcome", _cause())
        .agg(
            sql.count(sql.lit(1)).alias("count"),
            sql.count_if(is_attempt()).alias("attempts"),
            sql.count_distinct("message_id").alias("messages"),
            sql.min("time").alias("first"),
            sql.max("time").alias("last"),
            sql.max_by("error", happened()).alias("example"),
            sql.max_by("message_id", happened()).alias("example_id"),
        )
    )


def retries(messages: DataFrame, deliveries: DataFrame) -> DataFrame:
    """The end of messages that failed, by type, handler and cause of the first failure.

    A message counts once per handler: as `recovered` if the handler answered at last, as
    `dead` if it was dead-lettered or dropped, else as `unfinished`.

    Returns:
        `name`, `handler`, `cause`, `messages`, `retried` (with more than one attempt), `retries`
        (attempts after the first), `recovered`, `dead`, `unfinished`, `most_attempts`.
    """
    failed_at = sql.when(is_failed(), happened())
    pairs = (
        named_deliveries(messages, deliveries)
        .groupBy("name", "handler", "message_id")
        .agg(
            sql.min_by("error", failed_at).alias("error"),
            sql.min(failed_at).alias("failed"),
            sql.max("attempt").alias("attempts"),
            sql.count_if(is_attempt() & (sql.col("attempt") > 1)).alias("retries"),
            sql.max_by("outcome", happened()).alias("end"),
        )
        .where(sql.col("failed").isNotNull())
    )
    end = sql.col("end")
    return pairs.groupBy("name", "handler", _cause()).agg(
        sql.count(sql.lit(1)).alias("messages"),
        sql.count_if(sql.col("attempts") > 1).alias("retried"),
        sql.sum("retries").alias("retries"),
        sql.count_if(end.isin(*ANSWERED)).alias("recovered"),
        sql.count_if(end.isin(*DEAD)).alias("dead"),
        sql.count_if(~end.isin(*ANSWERED, *DEAD)).alias("unfinished"),
        sql.max("attempts").alias("most_attempts"),
    )


def dead_letters(messages: DataFrame, deliveries: DataFrame) -> DataFrame:
    """Dead letters by type, handler and cause.

    Returns:
        `name`, `handler`, `cause`, `letters`, `most_attempts`, `first`, `last`, `example`,
        `example_id`.
    """
    return (
        named_deliveries(messages, deliveries)
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


NO_TEXT: Final = "(no error text)"
MAX_LENGTH: Final = 160
_EXAMINED: Final = 1000

# In this order. Only what Java and Python read alike: no \w, \d, \s or \b. `$` is never in a
# replacement, which Java would expand.
RULES: Final = (
    (r"[a-z]+://[^ '\"<>]+", "<url>"),
    (r"[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}", "<id>"),
    (r"[0-9]{4}-[0-9]{2}-[0-9]{2}([T ][0-9:.]+(Z|[+-][0-9]{2}:?[0-9]{2})?)?", "<time>"),
    (r"0x[0-9a-fA-F]+", "<address>"),
    (r"'[^']*'", "'...'"),
    (r"\"[^\"]*\"", '"..."'),
    (r"(/[0-9A-Za-z_.-]+){2,}/?", "<path>"),
    (r"[0-9a-fA-F]{16,}", "<id>"),
    (r"[0-9]+([.,][0-9]+)*", "<n>"),
    (r"[ \t\r]+", " "),
)
"""Pattern and replacement for what differs between errors of one cause."""

_COMPILED: Final = [(re.compile(pattern), replacement) for pattern, replacement in RULES]


def cause_of(error: str | None) -> str:
    """The cause of an error: the first line of its text, with ids, numbers and quotes masked."""
    if error is None:
        return NO_TEXT
    text = error.split("\n", 1)[0][:_EXAMINED]
    for pattern, replacement in _COMPILED:
        text = pattern.sub(replacement, text)
    return text.strip(" ")[:MAX_LENGTH] or NO_TEXT


def cause_column(error: Column) -> Column:
    """`cause_of` as a column, without Python workers."""
    text = sql.substring(sql.substring_index(error, "\n", 1), 1, _EXAMINED)
    for pattern, replacement in RULES:
        text = sql.regexp_replace(text, pattern, replacement)
    text = sql.substring(sql.trim(text), 1, MAX_LENGTH)
    return sql.coalesce(sql.nullif(text, sql.lit("")), sql.lit(NO_TEXT))


_WAITS: Final = """
concat(
    coalesce(transform(
        filter(attempted, one -> NOT one.ended),
        one -> struct(
            one.handler AS handler, 'unfinished' AS reason, one.attempts AS attempts,
            one.last_error AS last_error)
    ), array()),
    coalesce(transform(
        filter(expected, one -> one.since <= `offset`
            AND NOT coalesce(exists(attempted, other -> other.handler = one.handler), false)),
        one -> struct(
            one.handler AS handler, 'undelivered' AS reason, 0 AS attempts,
            CAST(NULL AS STRING) AS last_error)
    ), array()),
    CASE WHEN attempted IS NULL AND expected IS NULL THEN array(struct(
        CAST(NULL AS STRING) AS handler, 'unhandled' AS reason, 0 AS attempts,
        CAST(NULL AS STRING) AS last_error)
    ) ELSE array() END
)
"""
"""The handlers that a message waits for, from those that attempted it and those expected to.

One expression instead of three joins, each of which would read the journal again.
"""


def slowest(messages: DataFrame, deliveries: DataFrame, limit: int = 20) -> DataFrame:
    """The messages that took longest from publish to the end of a handler's last attempt.

    Returns:
        `message_id`, `name`, `handler`, `session_id`, `outcome` (of the last attempt), `attempts`,
        `seconds` (publish to end), `run` (in the handler, all attempts), `ended`; the longest
        first.
    """
    return (
        named_deliveries(messages, deliveries)
        .where(is_attempt())
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
    """Messages published `older_than` seconds before `now` or earlier, and not handled yet.

    The reason is one of three:

    - `unfinished`: a handler attempted it, but it is neither answered nor dead-lettered.
    - `undelivered`: a handler has not attempted it, but has handled an earlier message of the type.
    - `unhandled`: no handler has attempted it, or ever handled its type; `handler` is null.

    This needs a journal that records all deliveries, not failures alone.

    Returns:
        `message_id`, `offset`, `name`, `handler`, `reason`, `age` (seconds), `attempts`, `time` (of
        publish), `last_error`; the oldest first.
    """
    cutoff = sql.timestamp_micros(sql.lit(round((now.timestamp() - older_than) * 1e6)))
    at = sql.timestamp_micros(sql.lit(round(now.timestamp() * 1e6)))
    old = messages.where(sql.col("time") <= cutoff).select("message_id", "offset", "name", "time")
    return (
        old.join(_attempted(deliveries), "message_id", "left")
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


def _attempted(deliveries: DataFrame) -> DataFrame:
    """For each message, the handlers that attempted it, and whether they have ended."""
    states = deliveries.groupBy("message_id", "handler").agg(
        sql.max("attempt").alias("attempts"),
        sql.max(sql.col("outcome").isin(*ANSWERED, *DEAD)).alias("ended"),
        sql.max_by("error", happened()).alias("last_error"),
    )
    one = sql.struct("handler", "attempts", "ended", "last_error")
    return states.groupBy("message_id").agg(sql.collect_list(one).alias("attempted"))


def _expected(messages: DataFrame, deliveries: DataFrame) -> DataFrame:
    """For each type, the handlers that have handled it, and since which offset."""
    offsets = messages.select("message_id", "name", "offset")
    handlers = (
        deliveries.where(is_outcome("ok"))
        .select("message_id", "handler")
        .join(offsets, "message_id")
        .groupBy("name", "handler")
        .agg(sql.min("offset").alias("since"))
    )
    return handlers.groupBy("name").agg(
        sql.collect_list(sql.struct("handler", "since")).alias("expected")
    )
