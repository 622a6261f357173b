"""Token bucket: a long-run rate with bursts, computed from the time it is given."""

from __future__ import annotations

import math
from typing import Final, final

# Tokens are binary fractions: three times a third must be one.
_ROUNDING: Final = 1e-9


@final
class TokenBucket:
    """Tokens that refill evenly at `rate` per second, up to `burst`. It starts full.

    Args:
        rate: Tokens per second; `None` for no limit.
        burst: Tokens at most.
        now: Monotonic seconds, as every `now` here; only differences mean anything.
    """

    __slots__ = ("_burst", "_rate", "_tokens", "_updated")

    def __init__(self, rate: float | None, burst: float, now: float) -> None:
        self._rate = rate
        self._burst = self._tokens = float(burst)
        self._updated = now

    def tokens(self, now: float) -> float:
        """Tokens available now, below zero while a debt is repaid; infinite without a rate."""
        if self._rate is None:
            return math.inf
        if now > self._updated:
            self._tokens = min(self._burst, self._tokens + (now - self._updated) * self._rate)
            self._updated = now
        return self._tokens

    def wait(self, now: float, cost: float = 1.0) -> float:
        """Seconds until `cost` tokens are available; 0 if they are."""
        missing = cost - self.tokens(now)
        return missing / self._rate if self._rate and missing > _ROUNDING else 0.0

    def allows(self, now: float, cost: float = 1.0) -> bool:
        """Whether `cost` tokens are available now."""
        return cost - self.tokens(now) <= _ROUNDING

    def take(self, now: float, cost: float = 1.0) -> None:
        """Take `cost` tokens, into debt if there are fewer."""
        if self._rate is not None:
            self._tokens = self.tokens(now) - cost
