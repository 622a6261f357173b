"""The retry policy of a resilient bus, as a durable subscription keeps it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pydantic import ValidationError

from msgbus.errors import ConfigurationError, Refusal, WrongMessageTypeError
from msgbus.subscriptions.config import RetryTiers

if TYPE_CHECKING:
    from msgbus.resilience.config import RetryConfig

HOPELESS: Final = (Refusal, ConfigurationError, WrongMessageTypeError, ValidationError)
"""What comes out the same however often it is tried.

An open circuit and a closed bus are not among them: a subscription can wait for both to pass.
"""


def tiers_of(retry: RetryConfig) -> RetryTiers | None:
    """The same patience for a durable subscription; `None` if it cannot be said in numbers.

    That is so with strategies of tenacity, and with an `on_retry` function: they would be asked
    in one process, and a restart would know nothing of them.
    """
    if any((retry.stop, retry.wait, retry.retry, retry.on_retry)):
        return None
    return RetryTiers(
        max_attempts=retry.max_retries + 1,
        initial_delay=retry.initial_delay,
        exponential_base=retry.exponential_base,
        max_delay=retry.max_delay,
        jitter=retry.jitter,
        retry_on=retry.retry_on,
        give_up_on=(*retry.give_up_on, *HOPELESS),
    )
