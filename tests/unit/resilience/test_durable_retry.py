"""`RetryConfig` for durable handlers: one formula, kept in the journal beyond a few seconds."""

from __future__ import annotations

import ssl
from collections.abc import Callable

import pytest
import tenacity

from msgbus import BusClosedError, CircuitOpenError, ConfigurationError, Refusal, Unhandleable
from msgbus.errors import StoredMessageError
from msgbus.resilience import RetryConfig
from msgbus.resilience.config import DURABLE_RETRY, require_storable
from msgbus.resilience.retry import Retry
from msgbus.runtime.clock import VirtualClock

CHANCES = (0.0, 0.25, 0.5, 1.0)


class LateError(ConnectionError):
    pass


def delays_in_process(
    config: RetryConfig, chance: float, error: Exception | None = None
) -> list[float]:
    """Return the delays of a bus in memory until it retries no more."""
    retry = Retry(config, VirtualClock(), chance=lambda: chance)
    state = retry.begin()
    found: list[float] = []
    error = error or KeyError()
    while (delay := retry.decide(state, error, len(found) + 1, None).delay) is not None:
        found.append(delay)
    return found


def retries_kept(config: RetryConfig, error: BaseException | None) -> int:
    """Return how many retries a durable subscription makes."""
    attempt = 1
    while config.pause(attempt, error) is not None:
        attempt += 1
    return attempt - 1


@pytest.mark.parametrize("chance", CHANCES)
@pytest.mark.parametrize(
    "config",
    [
        RetryConfig(),
        RetryConfig(max_retries=0),
        RetryConfig(max_retries=7, initial_delay=2, exponential_base=3, max_delay=20),
        RetryConfig(jitter=False, initial_delay=0.5),
        RetryConfig(initial_delay=0),
        RetryConfig(message_retries=1),
    ],
    ids=["default", "never", "long", "steady", "at once", "message"],
)
def test_retries_are_the_same_in_memory_and_in_the_journal(
    config: RetryConfig, chance: float
) -> None:
    expected = delays_in_process(config, chance)

    assert retries_kept(config, KeyError()) == len(expected)
    found = [config.delay(attempt, chance) for attempt in range(1, len(expected) + 1)]
    assert found == pytest.approx(expected)


def test_delays_grow_to_a_bound() -> None:
    retry = RetryConfig(initial_delay=1.0, exponential_base=3.0, max_delay=20.0)
    assert [retry.delay(attempt) for attempt in (1, 2, 3, 4, 10_000)] == [1, 3, 9, 20, 20]
    assert RetryConfig(initial_delay=0.0).delay(10_000) == 0.0


def test_jitter_is_half_a_delay_to_either_side_and_stays_below_the_bound() -> None:
    retry = RetryConfig(initial_delay=1.0, exponential_base=3.0, max_delay=20.0)
    assert [retry.delay(1, chance) for chance in (0.0, 0.25, 1.0)] == [0.5, 0.75, 1.5]
    assert [retry.delay(9, chance) for chance in (0.0, 1.0)] == [10.0, 20.0]
    plain = RetryConfig(initial_delay=1.0, jitter=False)
    assert [plain.delay(1, chance) for chance in (0.0, 1.0)] == [1.0, 1.0]


def test_pauses_vary_by_chance_within_the_jitter() -> None:
    pauses = {RetryConfig(initial_delay=1.0).pause(1, KeyError()) for _ in range(50)}

    assert len(pauses) > 10
    assert all(pause is not None and 0.5 <= pause <= 1.5 for pause in pauses)


def test_only_errors_to_retry_on_are_retried() -> None:
    retry = RetryConfig(retry_on=(OSError,), give_up_on=(LateError,))

    errors: list[Exception] = [TimeoutError(), LateError(), ValueError(), Refusal("no")]
    assert [retry.allows(error) for error in errors] == [True, False, False, False]
    assert [retry.pause(1, error) is None for error in errors] == [False, True, True, True]


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (Refusal("sold out"), False),
        (Unhandleable("no such product"), False),
        (ConfigurationError("no handler"), False),
        (StoredMessageError("does not fit its class"), False),
        (RecursionError(), False),
        (CircuitOpenError("payments", retry_after=1.0), True),
        (BusClosedError("stopping"), True),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_passes_is_waited_for_and_what_stays_is_not(error: Exception, again: bool) -> None:
    retry = RetryConfig(retry_on=(Exception,))

    assert retry.allows(error) is again
    assert (retry.pause(1, error) is not None) is again


def test_a_process_that_ended_is_followed_by_as_many_attempts_as_any_failure() -> None:
    assert retries_kept(RetryConfig(max_retries=4, message_retries=1), None) == 4


def test_errors_of_the_message_have_a_limit_of_their_own() -> None:
    retry = RetryConfig(max_retries=6, message_retries=2)

    assert retries_kept(retry, ConnectionError()) == 6
    assert retries_kept(retry, ValueError()) == 2
    assert retries_kept(retry, ssl.SSLCertVerificationError()) == 6
    assert retries_kept(RetryConfig(max_retries=1, message_retries=5), ValueError()) == 1
    assert len(delays_in_process(retry, 0.5, ValueError())) == 2
    assert len(delays_in_process(retry, 0.5, ConnectionError())) == 6


def test_a_message_error_after_other_failures_gets_no_retries_of_its_own() -> None:
    assert RetryConfig(max_retries=6, message_retries=2).pause(3, ValueError()) is None


def test_durable_handlers_have_patience_with_an_outage_and_none_with_poison() -> None:
    delays = [DURABLE_RETRY.delay(attempt) for attempt in range(1, 9)]

    assert delays == [0.5, 1.5, 4.5, 13.5, 40.5, 121.5, 364.5, 600.0]
    assert sum(delay > DURABLE_RETRY.in_process for delay in delays) == 5
    assert retries_kept(DURABLE_RETRY, ConnectionError()) == 8
    assert retries_kept(DURABLE_RETRY, ValueError()) == 2


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: RetryConfig(stop=tenacity.stop_after_delay(60)), "stop="),
        (lambda: RetryConfig(wait=tenacity.wait_random(1, 5)), "wait="),
        (lambda: RetryConfig(retry=tenacity.retry_if_exception_type(OSError)), "retry="),
    ],
    ids=["stop", "wait", "retry"],
)
def test_functions_cannot_be_kept_in_the_journal(
    make: Callable[[], RetryConfig], named: str
) -> None:
    with pytest.raises(ConfigurationError, match="kept in the journal") as raised:
        require_storable(make(), "Subscription 'receipts'")

    assert str(raised.value).startswith(f"Subscription 'receipts' cannot use RetryConfig({named}")


def test_numbers_can_be_kept_in_the_journal() -> None:
    require_storable(RetryConfig(max_retries=2), "Subscription 'receipts'")
    require_storable(DURABLE_RETRY, "Subscription 'receipts'")
