"""Windows of call outcomes that a circuit breaker counts."""

from __future__ import annotations

from collections import deque
from typing import Final, Protocol, final

from msgbus.resilience.config import CircuitBreakerConfig

DEFAULT_CALLS: Final = 100
"""Size of a window of calls if only `failure_rate` is given."""


class CallWindow(Protocol):
    """The outcomes that count now."""

    @property
    def calls(self) -> int:
        """Calls in the window."""
        ...

    @property
    def failures(self) -> int:
        """Failed calls in the window."""
        ...

    def add(self, now: float, *, failed: bool) -> None:
        """Add an outcome and drop old ones."""
        ...

    def expire(self, now: float) -> None:
        """Drop old outcomes."""
        ...

    def clear(self) -> None:
        """Drop all outcomes."""
        ...


@final
class LastCalls:
    """The last `size` calls."""

    __slots__ = ("_outcomes", "_size", "failures")

    def __init__(self, size: int) -> None:
        self._size = size
        self._outcomes: deque[bool] = deque()
        self.failures = 0

    @property
    def calls(self) -> int:
        """Calls in the window."""
        return len(self._outcomes)

    def add(self, now: float, *, failed: bool) -> None:  # noqa: ARG002 (by number, not time)
        """Add an outcome and drop the oldest if the window is full."""
        self._outcomes.append(failed)
        self.failures += failed
        if len(self._outcomes) > self._size:
            self.failures -= self._outcomes.popleft()

    def expire(self, now: float) -> None:
        """Do nothing: calls are kept by number."""

    def clear(self) -> None:
        """Drop all outcomes."""
        self._outcomes.clear()
        self.failures = 0


@final
class LastSeconds:
    """The calls of the last `seconds`, in ten slices: bounded memory, however many calls."""

    SLICES: Final = 10

    __slots__ = ("_slice", "_slices", "calls", "failures")

    def __init__(self, seconds: float) -> None:
        self._slice = seconds / self.SLICES
        self._slices: deque[list[int]] = deque()
        """Slice number, calls, failures."""
        self.calls = 0
        self.failures = 0

    def add(self, now: float, *, failed: bool) -> None:
        """Add an outcome and drop old slices."""
        self.expire(now)
        number = int(now // self._slice)
        if not self._slices or self._slices[-1][0] != number:
            self._slices.append([number, 0, 0])
        self._slices[-1][1] += 1
        self._slices[-1][2] += failed
        self.calls += 1
        self.failures += failed

    def expire(self, now: float) -> None:
        """Drop old slices."""
        oldest = int(now // self._slice) - self.SLICES
        while self._slices and self._slices[0][0] <= oldest:
            _, calls, failures = self._slices.popleft()
            self.calls -= calls
            self.failures -= failures

    def clear(self) -> None:
        """Drop all outcomes."""
        self._slices.clear()
        self.calls = self.failures = 0


def make_window(config: CircuitBreakerConfig) -> CallWindow | None:
    """Make the window that `config` describes; `None` to count failures in a row."""
    if config.window is not None:
        return LastSeconds(config.window)
    if config.window_calls is not None:
        return LastCalls(config.window_calls)
    if config.failure_rate is not None:
        return LastCalls(max(DEFAULT_CALLS, config.minimum_calls))
    return None
