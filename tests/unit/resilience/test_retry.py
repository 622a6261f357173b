"""Whether, and after how long, a handler that failed is tried again."""

from __future__ import annotations

from typing import Any

import pytest
import tenacity
from pydantic import BaseModel, ValidationError

from msgbus import ConfigurationError, MissingHandlerError, Refusal
from msgbus.errors import BusStateError, WrongMessageTypeError
from msgbus.resilience import CircuitOpenError, RetryConfig
from msgbus.resilience.retry import Retry, RetryDecision, first_failure
from msgbus.runtime.clock import VirtualClock
from tests.unit.resilience.flaky import Charge, Down


def pauses(config: RetryConfig, *, chance: float = 0.5, failures: int = 20) -> list[float]:
    """The pauses after each failure, until it gives up."""
    retry = Retry(config, VirtualClock(), chance=lambda: chance)
    state = retry.begin()
    found: list[float] = []
    for attempt in range(1, failures + 1):
        decision = retry.decide(state, Down(), attempt, None)
        if decision.delay is None:
            break
        found.append(decision.delay)
    return found


def decision_on(error: Exception, **config: Any) -> RetryDecision:
    retry = Retry(RetryConfig(**config), VirtualClock())
    return retry.decide(retry.begin(), error, 1, None)


def invalid() -> ValidationError:
    class Model(BaseModel):
        number: int

    with pytest.raises(ValidationError) as found:
        Model.model_validate({"number": "x"})
    return found.value


# -- the defaults and each field -------------------------------------------------------------


def test_the_defaults() -> None:
    assert RetryConfig().model_dump() == {
        "max_retries": 3,
        "initial_delay": 0.1,
        "max_delay": 10.0,
        "exponential_base": 2.0,
        "jitter": True,
        "in_process": 5.0,
        "message_retries": None,
        "retry_on": (Exception,),
        "give_up_on": (),
        "stop": None,
        "wait": None,
        "retry": None,
        "on_retry": None,
    }


@pytest.mark.parametrize("max_retries", [0, 1, 3, 7])
def test_max_retries_are_attempts_after_the_first(max_retries: int) -> None:
    assert len(pauses(RetryConfig(max_retries=max_retries))) == max_retries


def test_each_pause_is_longer_up_to_the_bound() -> None:
    config = RetryConfig(
        max_retries=6, initial_delay=1, exponential_base=3, max_delay=50, jitter=False
    )

    assert pauses(config) == [1, 3, 9, 27, 50, 50]


@pytest.mark.parametrize(
    ("chance", "expected"),
    [(0.0, [0.5, 1, 2, 4, 5]), (0.5, [1, 2, 4, 8, 10]), (1.0, [1.5, 3, 6, 10, 10])],
)
def test_jitter_is_a_factor_from_one_half_to_one_and_a_half(
    chance: float, expected: list[float]
) -> None:
    config = RetryConfig(max_retries=5, initial_delay=1, max_delay=10)

    assert pauses(config, chance=chance) == expected


def test_jitter_is_real() -> None:
    config = RetryConfig(max_retries=200, initial_delay=1, exponential_base=1)
    retry = Retry(config, VirtualClock())
    state = retry.begin()

    found = [retry.decide(state, Down(), attempt, None).delay for attempt in range(1, 201)]

    numbers = [pause for pause in found if pause is not None]
    assert len(set(numbers)) > 190
    assert 0.5 <= min(numbers) < 0.7
    assert 1.3 < max(numbers) <= 1.5


@pytest.mark.parametrize("attempt", [2000, 10**6])
def test_the_pause_never_overflows(attempt: int) -> None:
    retry = Retry(RetryConfig(max_retries=10**9, jitter=False), VirtualClock())

    assert retry.decide(retry.begin(), Down(), attempt, None).delay == 10.0


def test_no_delay_stays_no_delay() -> None:
    retry = Retry(RetryConfig(max_retries=10**9, initial_delay=0), VirtualClock())

    assert retry.decide(retry.begin(), Down(), 5000, None).delay == 0.0


def test_only_the_named_errors_are_retried() -> None:
    assert decision_on(KeyError("k"), retry_on=(LookupError,)).delay is not None
    assert decision_on(Down(), retry_on=(LookupError,)) == RetryDecision(None, "not to be retried")
    assert decision_on(Down(), retry_on=()) == RetryDecision(None, "not to be retried")


def test_to_give_up_comes_first() -> None:
    not_retried = decision_on(KeyError("k"), retry_on=(LookupError,), give_up_on=(KeyError,))

    assert not_retried == RetryDecision(None, "not to be retried")
    assert decision_on(IndexError(), give_up_on=(KeyError,)).delay is not None


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_retries", -1), ("initial_delay", -1), ("max_delay", -1), ("exponential_base", 0.5)],
)
def test_impossible_numbers_are_refused(field: str, value: float) -> None:
    options: dict[str, Any] = {field: value}

    with pytest.raises(ValidationError, match=field):
        RetryConfig(**options)


def test_made_up_fields_are_refused_and_configs_frozen() -> None:
    options: dict[str, Any] = {"retries": 3}
    with pytest.raises(ConfigurationError, match=r"'retries'\. Did you mean 'max_retries'"):
        RetryConfig(**options)
    with pytest.raises(ValidationError, match="frozen"):
        setattr(RetryConfig(), "jitter", False)  # noqa: B010 (types forbid the plain way)


# -- what is never tried again ---------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        Refusal("no"),
        ConfigurationError("wrong"),
        MissingHandlerError(Charge),
        WrongMessageTypeError("no command"),
        BusStateError("not now"),
        invalid(),
    ],
)
def test_permanent_errors_are_not_retried(error: Exception) -> None:
    assert decision_on(error) == RetryDecision(None, "permanent error")
    assert decision_on(error, retry=tenacity.retry_always) == RetryDecision(None, "permanent error")


def test_an_open_circuit_is_not_retried() -> None:
    error = CircuitOpenError("payments", retry_after=1)

    assert decision_on(error) == RetryDecision(None, "circuit open")


def test_it_says_why_it_gives_up() -> None:
    assert decision_on(Down(), max_retries=0) == RetryDecision(None, "retries exhausted")


# -- the deadline ----------------------------------------------------------------------------


@pytest.mark.parametrize(("left", "retries"), [(1.01, True), (1.0, False), (0.5, False)])
def test_a_delay_that_outlasts_the_deadline_is_not_begun(left: float, *, retries: bool) -> None:
    clock = VirtualClock()
    retry = Retry(RetryConfig(initial_delay=1, jitter=False), clock)

    decision = retry.decide(retry.begin(), Down(), 1, clock.now() + left)

    assert (decision == RetryDecision(1.0)) is retries
    assert retries or decision == RetryDecision(None, "no time left for a retry")


# -- strategies of tenacity ------------------------------------------------------------------


def test_a_stop_strategy_replaces_max_retries() -> None:
    config = RetryConfig(max_retries=1, stop=tenacity.stop_after_attempt(5))

    assert len(pauses(config)) == 4


def test_a_wait_strategy_replaces_the_delays() -> None:
    config = RetryConfig(max_retries=4, wait=tenacity.wait_incrementing(start=2, increment=3))

    assert pauses(config) == [2, 5, 8, 11]


def test_a_negative_wait_is_none() -> None:
    config = RetryConfig(max_retries=2, wait=lambda state: -1)

    assert pauses(config) == [0.0, 0.0]


def test_a_retry_strategy_sees_the_error() -> None:
    strategy = tenacity.retry_if_exception_message(match="again")

    assert decision_on(Down("again, please"), retry=strategy).delay is not None
    assert decision_on(Down("never"), retry=strategy) == RetryDecision(None, "not to be retried")


async def test_stop_after_delay_counts_from_the_first_failure() -> None:
    clock = VirtualClock()
    config = RetryConfig(stop=tenacity.stop_after_delay(60), wait=tenacity.wait_fixed(25))
    retry = Retry(config, clock)
    state = retry.begin()
    retries = 1

    while (pause := retry.decide(state, Down(), retries, None).delay) is not None:
        await clock.advance(pause)
        retries += 1

    assert retries == 4
    assert state.idle_for == 75


def test_stop_before_delay_sees_the_coming_pause() -> None:
    clock = VirtualClock()
    config = RetryConfig(stop=tenacity.stop_before_delay(60), wait=tenacity.wait_fixed(61))
    retry = Retry(config, clock)

    assert retry.decide(retry.begin(), Down(), 1, None) == RetryDecision(None, "retries exhausted")


def test_strategies_see_the_number_of_the_attempt() -> None:
    seen: list[tuple[int, BaseException | None]] = []

    def wait(state: tenacity.RetryCallState) -> float:
        assert state.outcome is not None
        seen.append((state.attempt_number, state.outcome.exception()))
        return 0.0

    retry = Retry(RetryConfig(wait=wait), VirtualClock())
    state, error = retry.begin(), Down()
    retry.decide(state, error, 1, None)
    retry.decide(state, error, 2, None)

    assert seen == [(1, error), (2, error)]


def test_trouble_begins_now() -> None:
    clock = VirtualClock(start=86_400.0)

    failures = first_failure(clock)

    assert failures.first_attempt == failures.last_attempt
    assert failures.first_attempt.isoformat() == "1970-01-02T00:00:00+00:00"
    assert failures.reason == ""
