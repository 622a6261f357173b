"""Logarithmic buckets in plain Python, to compare Spark's columns with."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from msgbus.pipeline.jobs.metrics import LOWEST, PER_DOUBLING

_SLACK: Final = 1e-9


def bucket_of(seconds: float) -> int:
    """The bucket of a duration."""
    smallest = 2.0 ** (LOWEST / PER_DOUBLING)
    logarithm = math.log2(max(seconds, smallest)) * PER_DOUBLING
    return max(LOWEST, math.ceil(logarithm - _SLACK))


def middle_of(bucket: int) -> float:
    """The geometric middle of a bucket, in seconds."""
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
