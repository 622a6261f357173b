"""Sessions, and chains of causes and effects.

The journal stores the root and the depth of every message, so a chain is one group: nothing joins
in a loop. A task holds one chain in memory.
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame, functions as sql

from msgbus.pipeline.jobs.attempts import (
    ANSWERED,
    happened,
    is_attempt,
    is_failed,
    is_outcome,
    named_deliveries,
    seconds_between,
)


def sessions(messages: DataFrame, deliveries: DataFrame) -> DataFrame:
    """One row per session.

    A session begins with its first message and ends with its last message or attempt. Its outcome
    is `failed` if a handler has not answered one of its messages at last, `recovered` if all were
    answered after a failure, else `ok`. A refusal is an answer.

    Returns:
        `session_id`, `outcome`, `started`, `ended`, `duration` (seconds), `messages`, `events`,
        `commands`, `attempts`, `failed`, `dead_letters`.
    """
    published = messages.groupBy("session_id").agg(
        sql.min("time").alias("started"),
        sql.max("time").alias("last_message"),
        sql.count(sql.lit(1)).alias("messages"),
        sql.count_if(sql.col("kind") == "event").alias("events"),
        sql.count_if(sql.col("kind") == "command").alias("commands"),
    )
    joined = published.where(sql.col("session_id").isNotNull()).join(
        _attempted(messages, deliveries), "session_id", "left"
    )
    ended = sql.greatest("last_message", "last_attempt")
    counts = ("attempts", "failed", "dead_letters")
    return joined.select(
        "session_id",
        sql.when(sql.col("unanswered") > 0, "failed")
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
        an attempt), `name`, `handler`, `message_id`, `attempt`, `seconds` (in the handler),
        `error`.
    """
    mine = messages.where(sql.col("session_id") == session_id)
    published = mine.select(
        "time", sql.lit("published").alias("what"), "name", "message_id", sql.lit(0).alias("step")
    )
    columns = ("message_id", "handler", "attempt", "outcome", "run", "time", "error")
    attempted = deliveries.select(*columns).join(mine.select("message_id", "name"), "message_id")
    attempted = attempted.select(
        "time",
        sql.col("outcome").alias("what"),
        "name",
        "message_id",
        "handler",
        "attempt",
        sql.col("run").alias("seconds"),
        "error",
        sql.lit(1).alias("step"),
    )
    everything = published.unionByName(attempted, allowMissingColumns=True)
    start = mine.agg(sql.min("time").alias("started"))
    return (
        everything.crossJoin(sql.broadcast(start))
        .orderBy("time", "step", "message_id", "attempt")
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


def _attempted(messages: DataFrame, deliveries: DataFrame) -> DataFrame:
    pairs = (
        named_deliveries(messages, deliveries)
        .where(sql.col("session_id").isNotNull())
        .groupBy("session_id", "message_id", "handler")
        .agg(
            sql.max("time").alias("last_attempt"),
            sql.count_if(is_attempt()).alias("attempts"),
            sql.count_if(is_failed()).alias("failed"),
            sql.count_if(is_outcome("dead_lettered")).alias("dead_letters"),
            sql.max_by("outcome", happened()).alias("end"),
        )
    )
    return pairs.groupBy("session_id").agg(
        sql.max("last_attempt").alias("last_attempt"),
        sql.sum("attempts").alias("attempts"),
        sql.sum("failed").alias("failed"),
        sql.sum("dead_letters").alias("dead_letters"),
        sql.count_if(~sql.col("end").isin(*ANSWERED)).alias("unanswered"),
    )


def chains(messages: DataFrame) -> DataFrame:
    """One row per root, with everything that it caused, directly or not.

    The critical path leads from the root to the message that was published last (of several, the
    one with the highest offset).

    Returns:
        `root_id`, `root` (its type; null if it is missing), `started`, `duration`
        (seconds until its last message), `messages`, `depth` (of the deepest), `widest` (most
        direct effects of one message), `critical_path`: from the root down, an array of
        `message_id`, `name`, `depth`, `after` (seconds since the start).
    """
    effects = messages.groupBy("root_id", "causation_id").agg(
        sql.count(sql.lit(1)).alias("effects")
    )
    widest = (
        effects.where(sql.col("causation_id").isNotNull())
        .groupBy("root_id")
        .agg(sql.max("effects").alias("widest"))
    )
    link = sql.struct("depth", "offset", "message_id", "causation_id", "name", "time")
    grouped = messages.groupBy("root_id").agg(
        sql.max(sql.when(sql.col("message_id") == sql.col("root_id"), sql.col("name"))).alias(
            "root"
        ),
        sql.min("time").alias("started"),
        sql.max("time").alias("last"),
        sql.count(sql.lit(1)).alias("messages"),
        sql.max("depth").alias("depth"),
        sql.max_by("message_id", sql.struct("time", "offset")).alias("end"),
        sql.sort_array(sql.collect_list(link), asc=False).alias("links"),
    )
    return grouped.join(widest, "root_id", "left").select(
        "root_id",
        "root",
        "started",
        seconds_between(sql.col("started"), sql.col("last")).alias("duration"),
        "messages",
        "depth",
        sql.coalesce("widest", sql.lit(0)).alias("widest"),
        _critical_path().alias("critical_path"),
    )


def effects(messages: DataFrame) -> DataFrame:
    """How many messages of each type one message of a type causes directly.

    Returns:
        `cause`, `effect` (types), `count` (of effects), `causes` (messages of the cause's type
        that had such an effect), `most` (such effects of one message), `seconds` (mean time from
        cause to effect).
    """
    causes = messages.select(
        sql.col("message_id").alias("causation_id"),
        sql.col("name").alias("cause"),
        sql.col("time").alias("caused"),
    )
    caused = messages.where(sql.col("causation_id").isNotNull()).select(
        "causation_id", sql.col("name").alias("effect"), "time"
    )
    per_message = (
        caused.join(causes, "causation_id")
        .groupBy("causation_id", "cause", "effect")
        .agg(
            sql.count(sql.lit(1)).alias("effects"),
            sql.sum(seconds_between(sql.col("caused"), sql.col("time"))).alias("seconds"),
        )
    )
    return per_message.groupBy("cause", "effect").agg(
        sql.sum("effects").alias("count"),
        sql.count(sql.lit(1)).alias("causes"),
        sql.max("effects").alias("most"),
        (sql.sum("seconds") / sql.sum("effects")).alias("seconds"),
    )


def depths(messages: DataFrame) -> DataFrame:
    """How many messages have how many causes above them: `name`, `depth`, `count`, `roots`."""
    return messages.groupBy("name", "depth").agg(
        sql.count(sql.lit(1)).alias("count"),
        sql.count_if(sql.col("message_id") == sql.col("root_id")).alias("roots"),
    )


def _critical_path() -> Column:
    # `links` is sorted from the deepest up, so one pass from the last message meets all its causes.
    def climb(state: Column, link: Column) -> Column:
        step = sql.struct(
            link["message_id"].alias("message_id"),
            link["name"].alias("name"),
            link["depth"].alias("depth"),
            seconds_between(sql.col("started"), link["time"]).alias("after"),
        )
        found = sql.struct(
            link["causation_id"].alias("wanted"),
            sql.concat(sql.array(step), state["path"]).alias("path"),
        )
        return sql.when(link["message_id"] == state["wanted"], found).otherwise(state)

    nothing = sql.from_json(
        sql.lit("[]"), "array<struct<message_id:string,name:string,depth:int,after:double>>"
    )
    begin = sql.struct(sql.col("end").alias("wanted"), nothing.alias("path"))
    return sql.aggregate("links", begin, climb, lambda state: state["path"])
