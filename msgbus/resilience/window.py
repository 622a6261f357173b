"""What a circuit breaker remembers of its calls."""

from __future__ import annotations

from collections import deque
from typing import Final, Protocol, final

from msgbus.resilience.config import CircuitBreakerConfig

DEFAULT_CALLS: Final = 100


class Window(Protocol):
    """The outcomes that count at this moment."""

    @property
    def calls(self) -> int:
        """Calls remembered."""
        ...

    @property
    def failures(self) -> int:
        """How many of them failed."""
        ...

    def add(self, now: float, *, failed: bool) -> None:
        """Take one more outcome, and let go of what is too old."""
        ...

    def let_go(self, now: float) -> None:
        """Let go of what is too old."""
        ...

    def clear(self) -> None:
        """Forget everything."""
        ...


@final
class Streak:
    """Failures in a row: any success begins anew."""

    __slots__ = ("calls", "failures")

    def __init__(self) -> None:
        self.calls = 0
        self.failures = 0

    def add(self, now: float, *, failed: bool) -> None:  # noqa: ARG002 (a streak has no time)
        """Take one more outcome."""
        self.failures = self.failures + 1 if failed else 0
        self.calls = self.failures

    def let_go(self, now: float) -> None:
        """Nothing: a streak has no time."""

    def clear(self) -> None:
        """Forget everything."""
        self.calls = self.failures = 0


@final
class LastCalls:
    """The last so many calls."""

    __slots__ = ("_outcomes", "_size", "failures")

    def __init__(self, size: int) -> None:
        self._size = size
        self._outcomes: deque[bool] = deque()
        self.failures = 0

    @property
    def calls(self) -> int:
        """Calls remembered."""
        return len(self._outcomes)

    def add(self, now: float, *, failed: bool) -> None:  # noqa: ARG002 (by number, not time)
        """Take one more outcome, and let go of the oldest if there are too many."""
        self._outcomes.append(failed)
        self.failures += failed
        if len(self._outcomes) > self._size:
            self.failures -= self._outcomes.popleft()

    def let_go(self, now: float) -> None:
        """Nothing: calls are kept by number."""

    def clear(self) -> None:
        """Forget everything."""
        self._outcomes.clear()
        self.failures = 0


@final
class LastSeconds:
    """The calls of the last so many seconds, in ten slices: bounded, however many calls."""

    SLICES: Final = 10

    __slots__ = ("_slice", "_slices", "calls", "failures")

    def __init__(self, seconds: float) -> None:
        self._slice = seconds / self.SLICES
        self._slices: deque[list[int]] = deque()
        """Number of the slice, its calls, its failures."""
        self.calls = 0
        self.failures = 0

    def add(self, now: float, *, failed: bool) -> None:
        """Take one more outcome, and let go of slices that are too old."""
        self.let_go(now)
        number = int(now // self._slice)
        if not self._slices or self._slices[-1][0] != number:
            self._slices.append([number, 0, 0])
        self._slices[-1][1] += 1
        self._slices[-1][2] += failed
        self.calls += 1
        self.failures += failed

    def let_go(self, now: float) -> None:
        """Let go of slices that are too old."""
        oldest = int(now // self._slice) - self.SLICES
        while self._slices and self._slices[0][0] <= oldest:
            _, calls, failures = self._slices.popleft()
            self.calls -= calls
            self.failures -= failures

    def clear(self) -> None:
        """Forget everything."""
        self._slices.clear()
        self.calls = self.failures = 0


def make_window(config: CircuitBreakerConfig) -> Window:
    """The window that `config` asks for."""
    if config.window is not None:
        return LastSeconds(config.window)
    if config.window_calls is not None:
        return LastCalls(config.window_calls)
    if config.failure_rate is not None:
        return LastCalls(max(DEFAULT_CALLS, config.minimum_calls))
    return Streak()
