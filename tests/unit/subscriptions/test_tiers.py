"""A retry policy of a resilient bus becomes the tiers of a subscription, or nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tenacity

from msgbus import BusClosedError, CircuitOpenError, ConfigurationError, Refusal
from msgbus.resilience import RetryAttempt, RetryConfig
from msgbus.resilience.retry import Retry
from msgbus.runtime.clock import VirtualClock
from msgbus.subscriptions import tiers_of

CHANCES = (0.0, 0.25, 0.5, 1.0)


class LateError(ConnectionError):
    pass


def ignore(attempt: RetryAttempt) -> None:
    del attempt


def pauses(config: RetryConfig, chance: float) -> list[float]:
    """What a bus waits, try by try, until it gives up."""
    retry = Retry(config, VirtualClock(), chance=lambda: chance)
    state = retry.begin()
    found: list[float] = []
    while (pause := retry.decide(state, ValueError(), len(found) + 1, None).delay) is not None:
        found.append(pause)
    return found


@pytest.mark.parametrize("chance", CHANCES)
@pytest.mark.parametrize(
    "config",
    [
        RetryConfig(),
        RetryConfig(max_retries=0),
        RetryConfig(max_retries=7, initial_delay=2, exponential_base=3, max_delay=20),
        RetryConfig(jitter=False, initial_delay=0.5),
        RetryConfig(initial_delay=0),
    ],
    ids=["default", "never", "long", "steady", "at once"],
)
def test_pauses_and_tries_are_those_of_the_bus(config: RetryConfig, chance: float) -> None:
    tiers = tiers_of(config)

    assert tiers is not None
    expected = pauses(config, chance)
    assert tiers.max_attempts == len(expected) + 1
    found = [tiers.delay(attempt, chance) for attempt in range(1, tiers.max_attempts)]
    assert found == pytest.approx(expected)


def test_the_same_errors_are_tried_again() -> None:
    tiers = tiers_of(RetryConfig(retry_on=(OSError,), give_up_on=(LateError,)))

    assert tiers is not None
    errors: list[Exception] = [TimeoutError(), LateError(), ValueError(), Refusal("no")]
    assert [tiers.allows(error) for error in errors] == [True, False, False, False]


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (Refusal("sold out"), False),
        (ConfigurationError("no handler"), False),
        (CircuitOpenError("payments", retry_after=1.0), True),
        (BusClosedError("stopping"), True),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_passes_is_waited_for_and_what_stays_is_not(error: Exception, again: bool) -> None:
    tiers = tiers_of(RetryConfig())

    assert tiers is not None
    assert tiers.allows(error) is again


@pytest.mark.parametrize(
    "make",
    [
        lambda: RetryConfig(stop=tenacity.stop_after_delay(60)),
        lambda: RetryConfig(wait=tenacity.wait_random(1, 5)),
        lambda: RetryConfig(retry=tenacity.retry_if_exception_type(OSError)),
        lambda: RetryConfig(on_retry=ignore),
    ],
    ids=["stop", "wait", "retry", "on_retry"],
)
def test_what_no_number_can_say_is_not_said(make: Callable[[], RetryConfig]) -> None:
    assert tiers_of(make()) is None
