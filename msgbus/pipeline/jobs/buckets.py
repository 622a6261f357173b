"""Logarithmic buckets: durations as counts that can be added up.

Bucket `i` holds the seconds in (2^((i-1)/8), 2^(i/8)]. Each is 9 % wider than the one before, so
the middle of a bucket is never more than 4.5 % from any value in it. Counts of the same bucket
may be added across minutes, handlers and machines: percentiles of the sum stay as good.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from pyspark.sql import Column
from pyspark.sql import functions as sql

PER_DOUBLING: Final = 8
LOWEST: Final = -160
"""2^-20 s, about a microsecond; shorter times, and clocks that went back, are counted here."""

# A value on a bound is in the bucket below it, whoever computes the logarithm.
_SLACK: Final = 1e-9
_SMALLEST: Final = 2.0 ** (LOWEST / PER_DOUBLING)


def bucket_of(seconds: float) -> int:
    """The bucket of a duration."""
    logarithm = math.log2(max(seconds, _SMALLEST)) * PER_DOUBLING
    return max(LOWEST, math.ceil(logarithm - _SLACK))


def middle_of(bucket: int) -> float:
    """The duration that stands for a bucket, in seconds: the geometric middle of its bounds."""
    return float(2.0 ** ((bucket - 0.5) / PER_DOUBLING))


def percentile(counts: Mapping[int, int], quantile: float) -> float | None:
    """The duration that this share of all durations does not exceed, by nearest rank."""
    rank = max(1, math.ceil(quantile * sum(counts.values()) - _SLACK))
    seen = 0
    for bucket in sorted(counts):
        seen += counts[bucket]
        if seen >= rank:
            return middle_of(bucket)
    return None


def bucket_column(seconds: Column) -> Column:
    """`bucket_of` for a column."""
    logarithm = sql.log2(sql.greatest(seconds, sql.lit(_SMALLEST))) * PER_DOUBLING
    bucket = sql.ceil(logarithm - sql.lit(_SLACK)).cast("int")
    return sql.greatest(sql.lit(LOWEST), bucket)


def middle_column(bucket: Column) -> Column:
    """`middle_of` for a column."""
    return sql.pow(sql.lit(2.0), (bucket - sql.lit(0.5)) / sql.lit(float(PER_DOUBLING)))
