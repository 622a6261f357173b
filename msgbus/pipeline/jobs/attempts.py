"""Deliveries as attempts: the type of their message, and what their outcome means.

A row of `deliveries` is one attempt of one handler with one message. `dead_lettered` and `dropped`
are decisions after the last attempt: a row with a run time is that attempt too, else the attempt is
the row before it.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column, DataFrame, functions as sql

ANSWERED: Final = ("ok", "refused")
"""The handler has answered; a refusal is an answer."""

DEAD: Final = ("dead_lettered", "dropped")
"""Dead-lettered or dropped: there is no further attempt."""

FAILED: Final = ("failed", "timed_out")
"""The handler was called and did not answer."""

MESSAGE_COLUMNS: Final = (
    *("offset", "message_id", "name", "kind", "time"),
    *("causation_id", "root_id", "depth", "session_id"),
)
"""The columns of messages that jobs need: never the payloads, which are most of a journal."""

_MINUTE: Final = 60_000_000


def named_deliveries(messages: DataFrame, deliveries: DataFrame) -> DataFrame:
    """Deliveries with `name` and `session_id` of their message; null if that is missing.

    A result of this function is returned as it is. To run several jobs, compute it once:
    `deliveries = named_deliveries(messages, deliveries).persist()`.
    """
    if "name" in deliveries.columns:
        return deliveries
    facts = messages.select("message_id", "name", "session_id")
    return deliveries.join(facts, "message_id", "left")


def minute_of(time: Column) -> Column:
    """The start of the minute, whatever the time zone of the session."""
    micros = sql.unix_micros(time)
    return sql.timestamp_micros(micros - sql.pmod(micros, sql.lit(_MINUTE)))


def seconds_between(start: Column, end: Column) -> Column:
    """Seconds with fractions between two timestamps."""
    return (sql.unix_micros(end) - sql.unix_micros(start)) / sql.lit(1e6)


def happened() -> Column:
    """Sort key of deliveries, in the order in which they ended.

    Not their ids: a journal may write an attempt after the decision that followed it.
    """
    is_decision = sql.col("outcome").isin(*DEAD)
    return sql.struct("time", is_decision, "id")


def is_attempt() -> Column:
    """Whether a row is an attempt, not only the decision after it."""
    return ~sql.col("outcome").isin(*DEAD) | (sql.col("run") > 0)


def is_failed() -> Column:
    """Whether a row is a failed attempt."""
    outcome = sql.col("outcome")
    return outcome.isin(*FAILED) | (outcome.isin(*DEAD) & (sql.col("run") > 0))


def is_outcome(outcome: str) -> Column:
    """Whether a row has this outcome."""
    return sql.col("outcome") == sql.lit(outcome)


def share(part: str, whole: str) -> Column:
    """One column divided by another; null if that is 0."""
    return sql.try_divide(sql.col(part).cast("double"), sql.col(whole).cast("double"))
