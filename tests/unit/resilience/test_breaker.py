"""A circuit breaker alone: when it opens, what it refuses, what it counts."""

from __future__ import annotations

import math
import pickle

import pytest

from msgbus import Refusal
from msgbus.resilience import (
    MESSAGE_ERRORS,
    CircuitBreaker,
    CircuitBreakerConfig,
    CircuitChange,
    CircuitOpenError,
)
from msgbus.runtime.clock import SystemClock, VirtualClock
from tests.fakes import logged
from tests.unit.resilience.flaky import CLOSED, HALF_OPEN, OPEN, Circuit, Down


class OutOfStock(Refusal):
    pass


# -- closed and open -------------------------------------------------------------------------


def test_the_defaults() -> None:
    config = CircuitBreakerConfig()
    breaker = CircuitBreaker()

    assert config.model_dump() == {
        "failure_threshold": 5,
        "window": None,
        "window_calls": None,
        "failure_rate": None,
        "minimum_calls": 10,
        "recovery_time": 30.0,
        "recovery_growth": 2.0,
        "max_recovery_time": 300.0,
        "half_open_max": 1,
        "permit_timeout": 60.0,
        "jitter": 0.1,
        "slow_call": None,
        "ignore": MESSAGE_ERRORS,
    }
    assert breaker.config == config
    assert breaker.name == "circuit"
    assert isinstance(breaker.clock, SystemClock)
    assert breaker.state is CLOSED
    assert breaker.is_closed
    assert breaker.failures == 0
    assert not breaker.records_all
    assert CircuitBreaker(CircuitBreakerConfig(window=5)).records_all
    assert breaker.retry_after == 0.0
    assert repr(breaker) == "<CircuitBreaker circuit closed>"


def test_failures_in_a_row_open_it() -> None:
    circuit = Circuit(failure_threshold=3)

    circuit.fail(2)
    assert circuit.state is CLOSED
    assert circuit.breaker.failures == 2
    circuit.fail()

    assert circuit.state is OPEN
    assert not circuit.breaker.is_closed
    assert repr(circuit.breaker) == "<CircuitBreaker payments open>"


def test_a_success_begins_the_row_anew() -> None:
    circuit = Circuit(failure_threshold=3)

    for _ in range(5):
        circuit.fail(2)
        circuit.succeed()
        assert circuit.breaker.failures == 0

    assert circuit.state is CLOSED


def test_an_open_circuit_refuses_and_says_until_when() -> None:
    circuit = Circuit(failure_threshold=1, recovery_time=30)
    circuit.fail()

    with pytest.raises(
        CircuitOpenError, match=r"The circuit 'payments' is open for 30 s more"
    ) as e:
        circuit.breaker.acquire()

    assert e.value.retry_after == 30.0
    assert e.value.circuit == "payments"
    assert circuit.breaker.retry_after == 30.0
    copy = pickle.loads(pickle.dumps(e.value))
    assert (str(copy), copy.retry_after, copy.circuit) == (str(e.value), 30.0, "payments")


async def test_the_time_left_goes_down() -> None:
    circuit = Circuit(failure_threshold=1, recovery_time=30)
    circuit.fail()

    await circuit.clock.advance(29)
    assert circuit.breaker.retry_after == 1.0
    assert circuit.refuses()
    await circuit.clock.advance(1)

    assert circuit.state is HALF_OPEN
    assert circuit.breaker.retry_after == 0.0
    assert repr(circuit.breaker) == "<CircuitBreaker payments half_open>"


async def test_it_lets_a_probe_through_however_late_it_comes() -> None:
    circuit = Circuit(failure_threshold=1, recovery_time=30)
    circuit.fail()

    await circuit.clock.advance(1000)

    assert circuit.state is HALF_OPEN
    assert circuit.breaker.retry_after == 0.0
    circuit.succeed()
    assert circuit.state is CLOSED


# -- open time -------------------------------------------------------------------------------


async def test_the_open_time_grows_with_every_failed_probe_up_to_its_bound() -> None:
    circuit = Circuit(
        failure_threshold=1, recovery_time=10, recovery_growth=3, max_recovery_time=200
    )
    times: list[float] = []

    circuit.fail()
    for _ in range(5):
        times.append(circuit.breaker.retry_after)
        await circuit.clock.advance(circuit.breaker.retry_after)
        circuit.fail()

    assert times == [10, 30, 90, 200, 200]


async def test_the_open_time_begins_anew_once_it_has_closed() -> None:
    circuit = Circuit(failure_threshold=1, recovery_time=10)
    circuit.fail()
    await circuit.clock.advance(10)
    circuit.fail()
    assert circuit.breaker.retry_after == 20
    await circuit.clock.advance(20)
    circuit.succeed()
    assert circuit.state is CLOSED

    circuit.fail()

    assert circuit.breaker.retry_after == 10


@pytest.mark.parametrize("growth", [2.0, 1e300])
async def test_an_endless_outage_does_not_overflow(growth: float) -> None:
    circuit = Circuit(failure_threshold=1, recovery_time=1, recovery_growth=growth)
    circuit.fail()
    assert circuit.breaker.retry_after == 1

    for _ in range(1100):
        await circuit.clock.advance(300)
        circuit.fail()

    assert circuit.breaker.retry_after == 300


@pytest.mark.parametrize(("chance", "seconds"), [(0.0, 100.0), (0.5, 90.0), (1.0, 80.0)])
def test_jitter_shortens_the_open_time(chance: float, seconds: float) -> None:
    circuit = Circuit(chance=chance, failure_threshold=1, recovery_time=100, jitter=0.2)

    circuit.fail()

    assert circuit.breaker.retry_after == pytest.approx(seconds)


def test_circuits_that_open_together_do_not_all_come_back_together() -> None:
    clock = VirtualClock()
    config = CircuitBreakerConfig(failure_threshold=1, recovery_time=100, jitter=0.2)
    breakers = [CircuitBreaker(config, clock=clock) for _ in range(50)]

    for breaker in breakers:
        breaker.acquire().failure()

    times = {breaker.retry_after for breaker in breakers}
    assert len(times) > 40
    assert min(times) >= 80
    assert max(times) <= 100


# -- what counts -----------------------------------------------------------------------------


@pytest.mark.parametrize("error", [KeyError("k"), IndexError(), OutOfStock("none left")])
def test_ignored_errors_and_refusals_are_answers_and_end_a_run(error: Exception) -> None:
    circuit = Circuit(failure_threshold=2, ignore=(LookupError,))
    circuit.fail()

    circuit.breaker.acquire().failure(error)
    assert circuit.breaker.failures == 0
    circuit.fail()
    assert circuit.state is CLOSED
    circuit.fail()

    assert circuit.state is OPEN


def test_a_failure_without_an_error_counts() -> None:
    circuit = Circuit(failure_threshold=1)

    circuit.breaker.acquire().failure()

    assert circuit.state is OPEN
    assert circuit.changes[0].reason == "1 failures"


def test_a_permit_counts_once() -> None:
    circuit = Circuit(failure_threshold=2)
    permit = circuit.breaker.acquire()
    assert permit.breaker is circuit.breaker

    permit.failure(Down())
    permit.failure(Down())
    permit.success()
    permit.release()

    assert permit.breaker is None
    assert circuit.breaker.failures == 1


async def test_a_slow_success_is_a_failure() -> None:
    circuit = Circuit(failure_threshold=2, slow_call=1.0)
    assert circuit.breaker.records_all

    for seconds in (1.0, 0.999, 1.0, 5.0):
        assert circuit.state is CLOSED
        permit = circuit.breaker.acquire()
        await circuit.clock.advance(seconds)
        permit.success()

    assert circuit.state is OPEN
    assert circuit.changes[0].reason == "2 failures, the last one: a call took 5 s"


def test_a_release_counts_neither_way() -> None:
    circuit = Circuit(failure_threshold=2)
    circuit.fail()

    for _ in range(10):
        circuit.breaker.acquire().release()

    assert circuit.breaker.failures == 1


# -- by hand ---------------------------------------------------------------------------------


async def test_forced_open_stays_open_until_reset() -> None:
    circuit = Circuit(recovery_time=1)

    circuit.breaker.force_open()
    await circuit.clock.advance(1_000_000)

    assert circuit.state is OPEN
    assert circuit.breaker.retry_after == math.inf
    with pytest.raises(CircuitOpenError, match="open until it is reset"):
        circuit.breaker.acquire()
    circuit.breaker.reset()
    assert circuit.state is CLOSED
    assert circuit.breaker.is_closed
    assert not circuit.refuses()
    assert [change.reason for change in circuit.changes] == ["forced open", "reset"]
    assert [change.retry_after for change in circuit.changes] == [math.inf, 0.0]


async def test_reset_forgets_failures_and_the_grown_open_time() -> None:
    circuit = Circuit(failure_threshold=2, recovery_time=10)
    circuit.fail()
    circuit.breaker.reset()
    assert circuit.breaker.failures == 0
    assert circuit.changes == []
    circuit.fail(2)
    await circuit.clock.advance(10)
    circuit.fail()
    assert circuit.breaker.retry_after == 20

    circuit.breaker.reset()
    circuit.fail(2)

    assert circuit.breaker.retry_after == 10


# -- on_change -------------------------------------------------------------------------------


async def test_every_change_is_told_with_its_reason() -> None:
    circuit = Circuit(failure_threshold=2, recovery_time=10)

    circuit.fail(2)
    await circuit.clock.advance(10)
    circuit.fail()
    await circuit.clock.advance(20)
    circuit.succeed()

    assert circuit.changes == [
        CircuitChange("payments", CLOSED, OPEN, "2 failures, the last one: Down", 10.0),
        CircuitChange("payments", OPEN, HALF_OPEN, "recovery time is over", 0.0),
        CircuitChange("payments", HALF_OPEN, OPEN, "a probe failed: Down", 20.0),
        CircuitChange("payments", OPEN, HALF_OPEN, "recovery time is over", 0.0),
        CircuitChange("payments", HALF_OPEN, CLOSED, "probes succeeded", 0.0),
    ]


async def test_a_probe_that_fails_without_an_error_is_reported_too() -> None:
    circuit = Circuit(failure_threshold=1)
    await circuit.half_open()

    circuit.breaker.acquire().failure()

    assert circuit.changes[-1].reason == "a probe failed"


def test_a_broken_hook_breaks_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def hook(change: CircuitChange) -> None:
        raise ValueError(change.name)

    config = CircuitBreakerConfig(failure_threshold=1)
    breaker = CircuitBreaker(config, name="payments", on_change=hook)

    breaker.acquire().failure()

    assert breaker.state is OPEN
    (entry,) = logged(caplog, "circuit_hook_failed")
    assert (entry["circuit"], entry["error"]) == ("payments", "ValueError: payments")
