"""Pace: how ADAPTIVE_RATE_LIMIT works out what a publisher has to wait."""

from __future__ import annotations

import pytest

from msgbus.bus.lanes.queue import Pace
from msgbus.runtime.clock import VirtualClock


def test_an_empty_queue_asks_for_no_delay() -> None:
    pace = Pace(VirtualClock())

    assert [pace.delay(0.0), pace.delay(0.79)] == [0.0, 0.0]
    assert not pace.is_slowing


async def test_a_nearly_full_queue_halves_the_rate_down_to_a_floor() -> None:
    clock = VirtualClock()
    pace = Pace(clock)
    rates: list[float | None] = []

    for _ in range(15):
        pace.delay(0.9)
        rates.append(pace.rate)
        await clock.advance(10)

    assert rates[:4] == [Pace.START, Pace.START / 2, Pace.START / 4, Pace.START / 8]
    assert rates[-1] == Pace.FLOOR


def test_publishers_at_the_same_moment_are_spread_out() -> None:
    pace = Pace(VirtualClock())

    delays = [pace.delay(0.9) for _ in range(4)]

    assert delays == pytest.approx([place / Pace.START for place in (1, 2, 3, 4)])


def test_the_rate_changes_only_after_ten_admissions_had_time() -> None:
    pace = Pace(VirtualClock())

    for _ in range(50):
        pace.delay(0.9)

    assert pace.rate == Pace.START


async def test_an_emptier_queue_speeds_up_step_by_step_until_nobody_is_slowed() -> None:
    clock = VirtualClock()
    pace = Pace(clock)
    pace.delay(0.9)
    await clock.advance(10)
    pace.delay(0.9)
    await clock.advance(10)
    assert pace.rate == Pace.START / 2

    pace.delay(0.6)
    assert pace.rate == Pace.START / 2, "between the marks nothing changes"
    steps = 0
    while pace.is_slowing:
        await clock.advance(10)
        pace.delay(0.1)
        steps += 1

    assert steps == Pace.START / 2 / Pace.STEP + 1
    assert pace.delay(0.1) == 0.0
