"""TokenBucket: a long-run rate with bursts."""

from __future__ import annotations

import math

import pytest

from msgbus.runtime.token_bucket import TokenBucket


def test_tokens_come_evenly_and_are_not_hoarded() -> None:
    bucket = TokenBucket(5.0, 1, now=0.0)
    assert bucket.allows(0.0)
    bucket.take(0.0)
    assert not bucket.allows(0.1)
    assert bucket.wait(0.1) == pytest.approx(0.1)
    assert bucket.allows(0.2)
    assert bucket.tokens(100.0) == 1


def test_without_a_rate_there_is_no_limit() -> None:
    bucket = TokenBucket(None, 1, now=0.0)
    for _ in range(3):
        bucket.take(0.0)
    assert bucket.allows(0.0)
    assert bucket.tokens(0.0) == math.inf
    assert bucket.wait(0.0) == 0.0


def test_a_debt_is_repaid_before_the_next_token() -> None:
    bucket = TokenBucket(2.0, 3, now=10.0)
    bucket.take(10.0, cost=5)
    assert bucket.tokens(10.0) == -2
    assert bucket.wait(10.0) == pytest.approx(1.5)
    assert bucket.wait(10.0, cost=3) == pytest.approx(2.5)
    assert bucket.allows(11.5)


def test_three_thirds_of_a_second_are_a_token() -> None:
    bucket = TokenBucket(1.0, 1, now=0.0)
    bucket.take(0.0)
    for step in (1, 2, 3):
        bucket.tokens(step * (1 / 3))
    assert bucket.allows(3 * (1 / 3))
    assert bucket.wait(3 * (1 / 3)) == 0.0


def test_a_clock_that_steps_back_takes_nothing_away() -> None:
    bucket = TokenBucket(1.0, 2, now=100.0)
    assert bucket.tokens(0.0) == 2
    bucket.take(0.0)
    assert bucket.tokens(100.0) == 1
    assert bucket.tokens(101.0) == 2
