"""Somebody else's service, which fails now and then, and once for a while."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final

from msgbus.resilience.config import CircuitBreakerConfig, RetryConfig

HICCUP_EVERY: Final = 100
"""One order in so many is refused at the first try, and taken at the second."""

OUTAGE: Final = 6
"""Calls that fail in a row when the service is down: five open the circuit, and the first
look after the pause comes too early."""

RETRY: Final = RetryConfig(
    max_retries=OUTAGE, initial_delay=0.005, max_delay=0.05, retry_on=(ConnectionError,)
)
CIRCUIT: Final = CircuitBreakerConfig(failure_threshold=OUTAGE - 1, recovery_time=0.2)


@final
@dataclass(slots=True)
class Ledger:
    """The books of an accountant far away. It counts by itself what it was asked.

    It is called by one worker, one order at a time, so what fails depends on the orders
    alone, and not on how fast the machine is.

    Args:
        outage_after: Entries after which it goes down for a while.
    """

    outage_after: int
    entries: int = 0
    cents: int = 0
    hiccups: int = 0
    calls_while_down: int = 0
    last_hiccup: int | None = None
    """The order that was refused last."""

    def book(self, number: int, cents: int) -> None:
        """Enter one order, or raise."""
        if number % HICCUP_EVERY == HICCUP_EVERY // 2:
            if self.last_hiccup != number:
                self.last_hiccup = number
                self.hiccups += 1
                message = "the ledger closed the connection"
                raise ConnectionResetError(message)
        elif self.entries >= self.outage_after and self.calls_while_down < OUTAGE:
            self.calls_while_down += 1
            message = "the ledger does not answer"
            raise ConnectionRefusedError(message)
        self.entries += 1
        self.cents += cents
