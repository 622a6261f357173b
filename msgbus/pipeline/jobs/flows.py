"""Causation: what one message set in motion, how deep and wide, and the longest way through it.

The journal stores the root and the depth of every message, so a chain is one group: nothing here
joins in a loop. A chain is held in the memory of one task, which is enough for a million messages
of one root.
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as sql

from msgbus.pipeline.jobs.attempts import count_of, seconds_between


def chains(messages: DataFrame) -> DataFrame:
    """One row per root: everything that it caused, directly or not.

    The critical path leads from the root to the message that was published last (of several, the
    one with the highest offset): to be done sooner, a chain must be quicker along it.

    Returns:
        `root_id`, `root` (its type; null if the root itself is not there), `started`, `duration`
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
        count_of(sql.col("message_id") == sql.col("root_id")).alias("roots"),
    )


def _critical_path() -> Column:
    # `links` is sorted from the deepest up, and a cause is always above its effect: one pass from
    # the last message meets all its causes in order.
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
