"""How fast messages may go out: a bucket of tokens that fills evenly."""

from __future__ import annotations

from typing import final


@final
class RateLimit:
    """Asked before a message is taken, so that a message is never taken in vain.

    It fills with every instant, not once a second: five a second are one every 200 ms.
    """

    def __init__(self, rate: float | None, burst: int, now: float) -> None:
        self._rate = rate
        self._burst = float(burst)
        self._tokens = float(burst)
        self._at = now

    def _fill(self, now: float) -> None:
        if self._rate is not None and now > self._at:
            self._tokens = min(self._burst, self._tokens + (now - self._at) * self._rate)
            self._at = now

    def available(self, now: float) -> int | None:
        """Messages that may go out now; `None` for any number."""
        if self._rate is None:
            return None
        self._fill(now)
        # Binary fractions: three times a third must be one.
        return int(self._tokens + 1e-9)

    def allows(self, now: float) -> bool:
        """Whether a message may go out now."""
        available = self.available(now)
        return available is None or available > 0

    def take(self, now: float) -> None:
        """A message goes out."""
        if self._rate is not None:
            self._fill(now)
            self._tokens -= 1

    def wait(self, now: float) -> float:
        """Seconds until a message may go out."""
        if self._rate is None or self.allows(now):
            return 0.0
        return (1 - self._tokens) / self._rate
