"""Deliveries as tries: with the type of their message, and what their outcome means.

A row of `deliveries` is one try of one handler with one message. `dead_lettered` and `dropped` say
what was decided after the last try: if such a row has a run time, it is that try as well, else the
try is a row of its own before it. All jobs read the outcomes alike, by this module.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as sql

ANSWERED: Final = ("ok", "refused")
"""The handler has answered; a refusal is an answer, and nothing broke."""

GIVEN_UP: Final = ("dead_lettered", "dropped")
"""Nobody will try again."""

FAILED: Final = ("failed", "timed_out")
"""The handler was called and did not answer."""

MESSAGE_COLUMNS: Final = (
    *("offset", "message_id", "name", "kind", "time"),
    *("causation_id", "root_id", "depth", "session_id"),
)
"""What all jobs together need of messages: never the payloads, which are most of a journal."""

_MINUTE: Final = 60_000_000


def tries(messages: DataFrame, deliveries: DataFrame) -> DataFrame:
    """Deliveries with `name` and `session_id` of their message; both null if it is not there.

    What has been through here is taken as it is. To run several jobs, do it once and keep it:
    `deliveries = tries(messages, deliveries).persist()`.
    """
    if "name" in deliveries.columns:
        return deliveries
    facts = messages.select("message_id", "name", "session_id")
    return deliveries.join(facts, "message_id", "left")


def minute_of(time: Column) -> Column:
    """The beginning of the minute, whatever the time zone of the session."""
    micros = sql.unix_micros(time)
    return sql.timestamp_micros(micros - sql.pmod(micros, sql.lit(_MINUTE)))


def seconds_between(start: Column, end: Column) -> Column:
    """Seconds with fractions between two timestamps."""
    return (sql.unix_micros(end) - sql.unix_micros(start)) / sql.lit(1e6)


def happened() -> Column:
    """Deliveries in the order in which they ended.

    Not by their ids: a journal writes what was tried a moment later than what was decided after it.
    """
    is_decision = sql.col("outcome").isin(*GIVEN_UP)
    return sql.struct("time", is_decision, "id")


def is_try() -> Column:
    """Whether a row is a try, not only what was decided after it."""
    return ~sql.col("outcome").isin(*GIVEN_UP) | (sql.col("run") > 0)


def is_failed() -> Column:
    """Whether a row is a try that failed."""
    outcome = sql.col("outcome")
    return outcome.isin(*FAILED) | (outcome.isin(*GIVEN_UP) & (sql.col("run") > 0))


def is_outcome(outcome: str) -> Column:
    """Whether a try ended so."""
    return sql.col("outcome") == sql.lit(outcome)


def count_of(condition: Column) -> Column:
    """How many rows of a group fulfil a condition."""
    return sql.count_if(condition)


def share(part: str, whole: str) -> Column:
    """One column divided by another; null if there is nothing to divide by."""
    return sql.try_divide(sql.col(part).cast("double"), sql.col(whole).cast("double"))
