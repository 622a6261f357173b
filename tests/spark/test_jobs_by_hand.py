"""Each job against a small journal whose results were worked out by hand."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from pyspark.sql import DataFrame, SparkSession

from msgbus.pipeline import jobs
from msgbus.pipeline.jobs import metrics
from tests.spark.buckets import bucket_of, middle_of
from tests.spark.tables import (
    Row,
    at,
    collected,
    deliveries_frame,
    delivery,
    message,
    messages_frame,
)

pytestmark = pytest.mark.spark

# Two orders. The first goes through: its card is charged at the second try, and two parcels leave,
# the later of them half a minute later. The second ends as a dead letter. A third event has no
# handler; a fourth, like the first, was never seen by `charge`.
ORDER = message(1, "PlaceOrder", 0.0, session_id="s1", kind="command")
PLACED = message(2, "OrderPlaced", 1.0, ORDER)
PARCEL = message(3, "ParcelSent", 10.0, PLACED)
LATER = message(4, "ParcelSent", 40.0, PLACED)
NOTED = message(6, "Noted", 45.0, LATER)
SECOND = message(7, "OrderPlaced", 70.0, session_id="s2")
LONELY = message(9, "Unheard", 80.0)
FORGOTTEN = message(10, "OrderPlaced", 90.0)
MESSAGES = [ORDER, PLACED, PARCEL, LATER, NOTED, SECOND, LONELY, FORGOTTEN]

DELIVERIES = [
    delivery(1, ORDER, "place", run=0.5),
    delivery(2, PLACED, "charge", "failed", wait=1.0, run=2.0, error="CardError: 402 for order 1"),
    delivery(3, PLACED, "charge", attempt=2, wait=7.0, run=1.0),
    delivery(4, PLACED, "mail", wait=0.25, run=0.25),
    delivery(5, PARCEL, "track", wait=1.0, run=1.0),
    delivery(6, LATER, "track", wait=1.0, run=3.0),
    delivery(7, NOTED, "note", "failed", run=1.0, error=None),
    delivery(8, SECOND, "charge", "timed_out", wait=1.0, run=5.0, error="TimeoutError"),
    delivery(
        9,
        SECOND,
        "charge",
        "dead_lettered",
        attempt=2,
        wait=10.0,
        run=2.0,
        error="CardError: 402 for order 2",
    ),
    delivery(10, SECOND, "mail", "refused", wait=0.0, run=0.0, error="Refused: no address"),
    delivery(11, FORGOTTEN, "mail", wait=0.25, run=0.25),
]


class Frames(NamedTuple):
    messages: DataFrame
    deliveries: DataFrame


@pytest.fixture(scope="module")
def frames(spark: SparkSession) -> Frames:
    return Frames(messages_frame(spark, MESSAGES), deliveries_frame(spark, DELIVERIES))


def test_throughput(frames: Frames) -> None:
    found = collected(jobs.throughput(*frames), "minute", "name")

    def line(row: Row) -> tuple[object, ...]:
        return tuple(row.values())

    assert [line(row) for row in found] == [
        (0.0, "Noted", 1, 1, 0, 1, 0, 0, 1.0, 0.0, 0.0),
        (0.0, "OrderPlaced", 1, 3, 2, 1, 1, 0, 1 / 3, 1 / 3, 0.0),
        (0.0, "ParcelSent", 2, 2, 2, 0, 0, 0, 0.0, 0.0, 0.0),
        (0.0, "PlaceOrder", 1, 1, 1, 0, 0, 0, 0.0, 0.0, 0.0),
        (60.0, "OrderPlaced", 2, 4, 1, 2, 1, 1, 0.5, 0.25, 0.25),
        (60.0, "Unheard", 1, 0, 0, 0, 0, 0, None, None, None),
    ]
    assert list(found[0]) == [
        *("minute", "name", "published", "attempts", "succeeded", "failed", "retries"),
        *("dead_letters", "failure_rate", "retry_rate", "dead_letter_rate"),
    ]


def test_throughput_added_up_has_rates_of_the_sums(frames: Frames) -> None:
    (row,) = collected(jobs.merge_throughput(jobs.throughput(*frames)))
    assert (row["published"], row["attempts"], row["failed"]) == (8, 11, 4)
    assert row["failure_rate"] == pytest.approx(4 / 11)


def test_a_histogram_counts_what_ran_by_bucket(frames: Frames) -> None:
    found = collected(jobs.histogram(*frames, measure="run"))
    charge = {
        (row["minute"], row["bucket"]): (row["count"], row["seconds"], row["longest"])
        for row in found
        if row["handler"] == "charge"
    }
    assert charge == {
        (0.0, bucket_of(2.0)): (1, 2.0, 2.0),
        (0.0, bucket_of(1.0)): (1, 1.0, 1.0),
        (60.0, bucket_of(5.0)): (1, 5.0, 5.0),
        (60.0, bucket_of(2.0)): (1, 2.0, 2.0),
    }
    assert sum(row["count"] for row in found) == 11


@pytest.mark.parametrize(
    ("measure", "median", "longest", "mean"),
    [("run", 2.0, 5.0, 2.5), ("wait", 1.0, 10.0, 4.75), ("total", 6.0, 12.0, 7.25)],
)
def test_percentiles_of_merged_histograms(
    frames: Frames, measure: metrics.Measure, median: float, longest: float, mean: float
) -> None:
    found = collected(
        jobs.percentiles(
            jobs.histogram(*frames, measure=measure), "handler", quantiles=(0.5, 0.999)
        )
    )
    (row,) = [row for row in found if row["handler"] == "charge"]
    assert row == {
        "handler": "charge",
        "count": 4,
        "mean": pytest.approx(mean),
        "p50": pytest.approx(middle_of(bucket_of(median))),
        "p99_9": pytest.approx(middle_of(bucket_of(longest))),
        "longest": longest,
    }


def test_failures_by_cause(frames: Frames) -> None:
    found = collected(jobs.failures(*frames), "handler", "outcome")
    assert [(row["handler"], row["outcome"], row["cause"], row["count"]) for row in found] == [
        ("charge", "dead_lettered", "CardError: <n> for order <n>", 1),
        ("charge", "failed", "CardError: <n> for order <n>", 1),
        ("charge", "timed_out", "TimeoutError", 1),
        ("mail", "refused", "Refused: no address", 1),
        ("note", "failed", "(no error text)", 1),
    ]
    letter = found[0]
    assert letter["example"] == "CardError: 402 for order 2"
    assert (letter["messages"], letter["first"], letter["last"]) == (1, 82.0, 82.0)
    assert (letter["name"], letter["example_id"]) == ("OrderPlaced", "m7")


def test_retries_by_the_cause_of_the_first_failure(frames: Frames) -> None:
    assert collected(jobs.retries(*frames), "handler", "cause") == [
        {
            "name": "OrderPlaced",
            "handler": "charge",
            "cause": "CardError: <n> for order <n>",
            "messages": 1,
            "retried": 1,
            "retries": 1,
            "recovered": 1,
            "dead": 0,
            "unfinished": 0,
            "most_attempts": 2,
        },
        {
            "name": "OrderPlaced",
            "handler": "charge",
            "cause": "TimeoutError",
            "messages": 1,
            "retried": 1,
            "retries": 1,
            "recovered": 0,
            "dead": 1,
            "unfinished": 0,
            "most_attempts": 2,
        },
        {
            "name": "Noted",
            "handler": "note",
            "cause": "(no error text)",
            "messages": 1,
            "retried": 0,
            "retries": 0,
            "recovered": 0,
            "dead": 0,
            "unfinished": 1,
            "most_attempts": 1,
        },
    ]


def test_dead_letters_by_cause(frames: Frames) -> None:
    assert collected(jobs.dead_letters(*frames)) == [
        {
            "name": "OrderPlaced",
            "handler": "charge",
            "cause": "CardError: <n> for order <n>",
            "letters": 1,
            "most_attempts": 2,
            "first": 82.0,
            "last": 82.0,
            "example": "CardError: 402 for order 2",
            "example_id": "m7",
        }
    ]


def test_sessions(frames: Frames) -> None:
    first, second = collected(jobs.sessions(*frames), "session_id")
    # `note` failed and was not tried again.
    assert first == {
        "session_id": "s1",
        "outcome": "failed",
        "started": 0.0,
        "ended": 46.0,
        "duration": 46.0,
        "messages": 5,
        "events": 4,
        "commands": 1,
        "attempts": 7,
        "failed": 2,
        "dead_letters": 0,
    }
    assert (second["outcome"], second["duration"], second["dead_letters"]) == ("failed", 12.0, 1)


def test_a_session_whose_failures_were_made_good_has_recovered(spark: SparkSession) -> None:
    rows = [row for row in MESSAGES if row["name"] != "Noted"]
    tries = [row for row in DELIVERIES if row["handler"] != "note"]
    unheard = message(11, "Unheard", 0.0, session_id="s3")
    found = jobs.sessions(messages_frame(spark, [*rows, unheard]), deliveries_frame(spark, tries))
    outcomes = {row["session_id"]: row["outcome"] for row in collected(found)}
    assert outcomes == {"s1": "recovered", "s2": "failed", "s3": "ok"}


@pytest.mark.parametrize("ids", [(1, 2, 3), (2, 3, 1)], ids=["in order", "attempts written later"])
def test_a_dead_letter_may_be_a_row_of_its_own(
    spark: SparkSession, ids: tuple[int, int, int]
) -> None:
    one = message(1, "OrderPlaced", 0.0, session_id="s1")
    error = "CardError: 402"
    rows = [
        delivery(ids[0], one, "charge", "failed", run=1.0, error=error),
        delivery(ids[1], one, "charge", "failed", attempt=2, wait=2.0, run=1.0, error=error),
        delivery(ids[2], one, "charge", "dead_lettered", attempt=2, wait=3.0, error=error),
    ]
    frames = messages_frame(spark, [one]), deliveries_frame(spark, rows)
    (total,) = collected(jobs.throughput(*frames))
    assert (total["attempts"], total["failed"], total["retries"], total["dead_letters"]) == (
        2,
        2,
        1,
        1,
    )
    (end,) = collected(jobs.retries(*frames))
    assert (end["retries"], end["dead"], end["unfinished"]) == (1, 1, 0)
    letter, failed = collected(jobs.failures(*frames), "outcome")
    assert (letter["outcome"], letter["count"], letter["attempts"]) == ("dead_lettered", 1, 0)
    assert (failed["outcome"], failed["count"], failed["attempts"]) == ("failed", 2, 2)
    (slow,) = collected(jobs.slowest(*frames))
    assert (slow["seconds"], slow["outcome"], slow["attempts"]) == (3.0, "failed", 2)


def test_the_timeline_of_a_session(frames: Frames) -> None:
    found = collected(jobs.timeline(*frames, "s1"))
    assert [(row["elapsed"], row["what"], row["name"], row["handler"]) for row in found] == [
        (0.0, "published", "PlaceOrder", None),
        (0.5, "ok", "PlaceOrder", "place"),
        (1.0, "published", "OrderPlaced", None),
        (1.5, "ok", "OrderPlaced", "mail"),
        (4.0, "failed", "OrderPlaced", "charge"),
        (9.0, "ok", "OrderPlaced", "charge"),
        (10.0, "published", "ParcelSent", None),
        (12.0, "ok", "ParcelSent", "track"),
        (40.0, "published", "ParcelSent", None),
        (44.0, "ok", "ParcelSent", "track"),
        (45.0, "published", "Noted", None),
        (46.0, "failed", "Noted", "note"),
    ]


def test_chains_have_a_depth_a_width_and_a_critical_path(frames: Frames) -> None:
    found = {row["root_id"]: row for row in collected(jobs.chains(*frames[:1]))}
    assert found["m1"] == {
        "root_id": "m1",
        "root": "PlaceOrder",
        "started": 0.0,
        "duration": 45.0,
        "messages": 5,
        "depth": 3,
        "widest": 2,
        "critical_path": [
            {"message_id": "m1", "name": "PlaceOrder", "depth": 0, "after": 0.0},
            {"message_id": "m2", "name": "OrderPlaced", "depth": 1, "after": 1.0},
            {"message_id": "m4", "name": "ParcelSent", "depth": 2, "after": 40.0},
            {"message_id": "m6", "name": "Noted", "depth": 3, "after": 45.0},
        ],
    }
    assert set(found) == {"m1", "m7", "m9", "m10"}
    assert (found["m9"]["widest"], found["m9"]["depth"]) == (0, 0)


def test_a_chain_without_its_beginning_is_followed_as_far_as_it_goes(spark: SparkSession) -> None:
    rest = messages_frame(spark, [LATER, NOTED])
    (row,) = collected(jobs.chains(rest))
    assert row["root"] is None
    assert [step["message_id"] for step in row["critical_path"]] == ["m4", "m6"]


def test_effects_of_types(frames: Frames) -> None:
    assert collected(jobs.effects(frames.messages), "cause") == [
        {
            "cause": "OrderPlaced",
            "effect": "ParcelSent",
            "count": 2,
            "causes": 1,
            "most": 2,
            "seconds": 24.0,
        },
        {
            "cause": "ParcelSent",
            "effect": "Noted",
            "count": 1,
            "causes": 1,
            "most": 1,
            "seconds": 5.0,
        },
        {
            "cause": "PlaceOrder",
            "effect": "OrderPlaced",
            "count": 1,
            "causes": 1,
            "most": 1,
            "seconds": 1.0,
        },
    ]


def test_depths(frames: Frames) -> None:
    found = {(row["name"], row["depth"]): row for row in collected(jobs.depths(frames.messages))}
    assert found["OrderPlaced", 0] == {"name": "OrderPlaced", "depth": 0, "count": 2, "roots": 2}
    assert found["OrderPlaced", 1]["roots"] == 0


def test_the_slowest_come_first(frames: Frames) -> None:
    found = collected(jobs.slowest(*frames, limit=3))
    assert [
        (row["message_id"], row["handler"], row["outcome"], row["attempts"], row["seconds"])
        for row in found
    ] == [
        ("m7", "charge", "dead_lettered", 2, 12.0),
        ("m2", "charge", "ok", 2, 8.0),
        ("m4", "track", "ok", 1, 4.0),
    ]
    assert (found[0]["run"], found[0]["ended"], found[1]["session_id"]) == (7.0, 82.0, "s1")


def test_stuck_messages_and_why(frames: Frames) -> None:
    found = collected(jobs.stuck(*frames, now=at(100.0), older_than=10.0))
    assert [
        (row["message_id"], row["handler"], row["reason"], row["age"], row["attempts"])
        for row in found
    ] == [
        ("m6", "note", "unfinished", 55.0, 1),
        ("m9", None, "unhandled", 20.0, 0),
        ("m10", "charge", "undelivered", 10.0, 0),
    ]


def test_young_messages_are_not_stuck(frames: Frames) -> None:
    found = collected(jobs.stuck(*frames, now=at(100.0), older_than=30.0))
    assert [row["message_id"] for row in found] == ["m6"]


def test_a_handler_is_not_expected_to_know_what_was_before_it(spark: SparkSession) -> None:
    early = message(1, "OrderPlaced", 0.0)
    late = message(2, "OrderPlaced", 1.0)
    tries = [delivery(1, early, "old"), delivery(2, late, "old"), delivery(3, late, "new")]
    found = jobs.stuck(
        messages_frame(spark, [early, late]), deliveries_frame(spark, tries), now=at(1e6)
    )
    assert collected(found) == []
