"""What a circuit breaker remembers: the last calls, or the last seconds."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from msgbus import ConfigurationError
from msgbus.resilience import CircuitBreakerConfig
from msgbus.resilience.window import LastCalls, LastSeconds, make_window
from tests.unit.resilience.flaky import CLOSED, OPEN, Circuit

# -- the last calls --------------------------------------------------------------------------


def test_failures_among_the_last_calls_open_it_in_whatever_order() -> None:
    # A success does not wipe the window: that would make every window a row.
    circuit = Circuit(failure_threshold=3, window_calls=5)

    circuit.fail()
    circuit.succeed()
    circuit.fail()
    circuit.succeed()
    assert circuit.breaker.failures == 2
    assert circuit.state is CLOSED
    circuit.fail()

    assert circuit.state is OPEN
    assert circuit.changes[0].reason == "3 failures, the last one: Down"


def test_what_has_left_the_window_no_longer_counts() -> None:
    circuit = Circuit(failure_threshold=3, window_calls=5)

    for _ in range(20):
        circuit.fail()
        circuit.succeed(2)
        assert circuit.breaker.failures <= 2

    assert circuit.state is CLOSED


def test_the_rate_counts_once_there_are_enough_calls() -> None:
    circuit = Circuit(failure_rate=0.5, minimum_calls=4, window_calls=10)

    circuit.fail(3)
    assert circuit.state is CLOSED
    circuit.fail()

    assert circuit.state is OPEN
    assert circuit.changes[0].reason == "4 of 4 calls failed, the last one: Down"


def test_the_success_that_makes_the_volume_may_open_it() -> None:
    circuit = Circuit(failure_rate=0.5, minimum_calls=4, window_calls=10)

    circuit.fail(3)
    circuit.succeed()

    assert circuit.state is OPEN
    assert circuit.changes[0].reason == "3 of 4 calls failed"


@pytest.mark.parametrize(("failures", "opens"), [(4, False), (5, True)])
def test_the_rate_is_a_share_of_the_calls(failures: int, *, opens: bool) -> None:
    circuit = Circuit(failure_rate=0.5, minimum_calls=10, window_calls=10)

    circuit.succeed(10 - failures)
    circuit.fail(failures)

    assert (circuit.state is OPEN) is opens


def test_a_rate_alone_looks_at_the_last_hundred_calls() -> None:
    circuit = Circuit(failure_rate=1.0)

    circuit.succeed(1000)
    circuit.fail(99)
    assert circuit.state is CLOSED
    circuit.fail()

    assert circuit.state is OPEN


# -- the last seconds ------------------------------------------------------------------------


async def test_failures_within_the_last_seconds_open_it() -> None:
    circuit = Circuit(failure_threshold=3, window=10)

    circuit.fail()
    await circuit.clock.advance(4)
    circuit.succeed(50)
    circuit.fail()
    await circuit.clock.advance(4)
    circuit.fail()

    assert circuit.state is OPEN


async def test_old_failures_no_longer_count() -> None:
    circuit = Circuit(failure_threshold=3, window=10)

    for _ in range(20):
        circuit.fail()
        await circuit.clock.advance(5)

    assert circuit.state is CLOSED
    assert circuit.breaker.failures == 1


async def test_failures_grow_old_without_a_call() -> None:
    circuit = Circuit(failure_threshold=3, window=10)
    circuit.fail(2)
    assert circuit.breaker.failures == 2

    await circuit.clock.advance(10)

    assert circuit.breaker.failures == 0


async def test_a_rate_over_time_has_its_minimum_too() -> None:
    circuit = Circuit(failure_rate=0.5, minimum_calls=4, window=10)

    circuit.fail(3)
    await circuit.clock.advance(11)
    circuit.fail(3)
    assert circuit.state is CLOSED
    circuit.fail()

    assert circuit.state is OPEN


async def test_a_window_of_time_stays_small() -> None:
    window = LastSeconds(10)

    for number in range(10_000):
        window.add(number / 100, failed=number % 2 == 0)

    assert len(window._slices) <= LastSeconds.SLICES  # pyright: ignore[reportPrivateUsage]
    assert window.calls == 1000
    assert window.failures == 500


# -- the windows themselves ------------------------------------------------------------------


@pytest.mark.parametrize("window", [LastCalls(3), LastSeconds(3)])
def test_a_cleared_window_is_as_new(window: LastCalls | LastSeconds) -> None:
    window.add(1.0, failed=True)
    window.add(1.0, failed=True)
    assert (window.calls, window.failures) == (2, 2)

    window.clear()
    assert (window.calls, window.failures) == (0, 0)
    window.add(1.0, failed=True)

    assert (window.calls, window.failures) == (1, 1)


def test_the_config_chooses_the_window() -> None:
    assert make_window(CircuitBreakerConfig()) is None
    assert isinstance(make_window(CircuitBreakerConfig(window=5)), LastSeconds)
    assert isinstance(make_window(CircuitBreakerConfig(window_calls=5)), LastCalls)
    wide = make_window(CircuitBreakerConfig(failure_rate=0.5, minimum_calls=150))
    assert isinstance(wide, LastCalls)
    for _ in range(1000):
        wide.add(0.0, failed=False)
    assert wide.calls == 150


# -- configurations that cannot work ---------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"window": 5, "window_calls": 5}, "not both"),
        ({"recovery_time": 500}, "max_recovery_time=300 is less than recovery_time=500; raise it"),
        ({"window_calls": 4}, "never holds failure_threshold=5, so the circuit would never open"),
        ({"window_calls": 9, "failure_rate": 0.5}, "never holds minimum_calls=10"),
        ({"failure_threshold": 0}, "failure_threshold"),
        ({"half_open_max": 0}, "half_open_max"),
        ({"recovery_time": 0}, "recovery_time"),
        ({"recovery_growth": 0.5}, "recovery_growth"),
        ({"failure_rate": 0}, "failure_rate"),
        ({"failure_rate": 1.5}, "failure_rate"),
        ({"jitter": 1}, "jitter"),
        ({"slow_call": 0}, "slow_call"),
        ({"permit_timeout": 0}, "permit_timeout"),
    ],
)
def test_a_circuit_that_could_not_work_is_refused(config: dict[str, Any], text: str) -> None:
    with pytest.raises(ValidationError, match=text):
        CircuitBreakerConfig(**config)


def test_an_option_that_a_circuit_does_not_have_is_refused() -> None:
    options: dict[str, Any] = {"made_up": 1}
    with pytest.raises(ConfigurationError, match="CircuitBreakerConfig has no option 'made_up'"):
        CircuitBreakerConfig(**options)


def test_the_least_window_that_can_open_is_taken() -> None:
    assert CircuitBreakerConfig(window_calls=5).window_calls == 5
    assert CircuitBreakerConfig(window_calls=10, failure_rate=1).window_calls == 10
    assert CircuitBreakerConfig(recovery_time=300).recovery_time == 300


def test_a_config_is_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        setattr(CircuitBreakerConfig(), "jitter", 0.5)  # noqa: B010 (types forbid the plain way)
