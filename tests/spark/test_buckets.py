"""Logarithmic buckets and causes: plain functions, and the same as columns."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, strategies as st
from pyspark.sql import SparkSession, functions as sql

from msgbus.pipeline.jobs.failures import MAX_LENGTH, NO_TEXT, cause_column, cause_of
from msgbus.pipeline.jobs.metrics import (
    LOWEST,
    bucket_column,
    middle_column,
)
from tests.spark.buckets import bucket_of, middle_of, percentile
from tests.spark.tables import frame_of


@pytest.mark.parametrize(
    ("seconds", "bucket"),
    [
        (1.0, 0),
        (2.0, 8),
        (1.01, 1),
        (0.99, 0),
        (0.5, -8),
        (1024.0, 80),
        (0.0, LOWEST),
        (-3, LOWEST),
    ],
)
def test_a_duration_is_in_the_bucket_whose_upper_bound_it_does_not_exceed(
    seconds: float, bucket: int
) -> None:
    assert bucket_of(seconds) == bucket


@given(st.floats(1e-6, 1e6))
def test_the_middle_of_a_bucket_is_near_all_that_is_in_it(seconds: float) -> None:
    assert abs(middle_of(bucket_of(seconds)) / seconds - 1) < 0.0453


@given(st.lists(st.floats(1e-5, 1e4), min_size=1, max_size=200), st.sampled_from([0.5, 0.95, 0.99]))
def test_a_percentile_is_the_nearest_rank_to_within_its_bucket(
    seconds: list[float], quantile: float
) -> None:
    counts: dict[int, int] = {}
    for one in seconds:
        counts[bucket_of(one)] = counts.get(bucket_of(one), 0) + 1
    exact = sorted(seconds)[max(1, math.ceil(quantile * len(seconds) - 1e-9)) - 1]
    found = percentile(counts, quantile)
    assert found is not None
    assert abs(found / exact - 1) < 0.0453


def test_nothing_has_no_percentile() -> None:
    assert percentile({}, 0.5) is None


@pytest.mark.spark
def test_columns_have_the_same_buckets(spark: SparkSession) -> None:
    dice = random.Random(7)
    durations = [2 ** (i / 8) for i in range(-180, 60)] + [0.0, -1.0]
    durations += [dice.lognormvariate(-3, 3) for _ in range(500)]
    frame = frame_of(spark, [(one,) for one in durations], "seconds double")
    bucket = bucket_column(sql.col("seconds"))
    for row in frame.select("seconds", bucket, middle_column(bucket)).collect():
        assert row[1] == bucket_of(row[0])
        assert row[2] == pytest.approx(middle_of(row[1]), rel=1e-12)


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (None, NO_TEXT),
        ("", NO_TEXT),
        ("TimeoutError", "TimeoutError"),
        ("ValueError: order 17 of 3 is late", "ValueError: order <n> of <n> is late"),
        ("KeyError: 'bob'", "KeyError: '...'"),
        ('E: no "a b" here\nsecond line', 'E: no "..." here'),
        (
            "E: 0190a1b2-0000-7000-8000-0123456789ab at 2026-03-01T12:00:00.5Z",
            "E: <id> at <time>",
        ),
        ("OSError: /var/lib/shop/a.db: no space", "OSError: <path>: no space"),
        ("E: https://shop.example/a?b=1 said 503", "E: <url> said <n>"),
        ("E: <object at 0x7f12ab>", "E: <object at <address>>"),
        ("E: costs 1,234.50   EUR", "E: costs <n> EUR"),
    ],
)
def test_a_cause_is_the_error_without_what_differs(error: str | None, cause: str) -> None:
    assert cause_of(error) == cause


def test_a_cause_is_short() -> None:
    assert len(cause_of("E: " + "long words " * 10_000)) == MAX_LENGTH


@pytest.mark.spark
def test_columns_have_the_same_causes(spark: SparkSession) -> None:
    dice = random.Random(11)
    parts = [
        "order ",
        "17",
        "1.5",
        "'x y'",
        '"',
        "'",
        "\n",
        "\t",
        " ",
        "é",
        "٣",
        "/a/b",
        "0xff",
        "$1",
    ]
    parts += [
        "\\",
        "https://a/b",
        "0190a1b2-0000-7000-8000-0123456789ab",
        "abcdef0123456789ab",
        ":",
    ]
    texts: list[str | None] = [
        "".join(dice.choices(parts, k=dice.randrange(12))) for _ in range(400)
    ]
    texts += [None, "", "x" * 5000, "\x00", "\U0001f600" * 200]
    frame = frame_of(spark, [(one,) for one in texts], "error string")
    for row in frame.select("error", cause_column(sql.col("error"))).collect():
        assert row[1] == cause_of(row[0])
