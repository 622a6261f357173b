"""Clocks: the system's, and a virtual one for tests."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import TYPE_CHECKING, Protocol, final

import anyio
import anyio.lowlevel

if TYPE_CHECKING:
    from collections.abc import Generator

    _Timer = tuple[float, int, Callable[[], object]]


class Clock(Protocol):
    """Source of time for the bus."""

    def now(self) -> float:
        """Monotonic seconds; only differences mean anything."""
        ...

    def time(self) -> float:
        """Seconds since the Unix epoch."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Return after `seconds`."""
        ...

    def cancel_after(self, seconds: float) -> AbstractContextManager[anyio.CancelScope]:
        """A cancel scope that cancels itself after `seconds`."""
        ...


@final
class SystemClock:
    """The system's time."""

    # Assigned, not wrapped: `now` is on the hot path and a method would double its cost.
    now = staticmethod(time.monotonic)
    time = staticmethod(time.time)

    async def sleep(self, seconds: float) -> None:
        """Return after `seconds`."""
        await anyio.sleep(seconds)

    def cancel_after(self, seconds: float) -> AbstractContextManager[anyio.CancelScope]:
        """A cancel scope that cancels itself after `seconds`."""
        return anyio.move_on_after(seconds)


class VirtualClock:
    """A clock for tests: time passes only in `advance`.

    Timeouts, delays and rate limits of the bus follow it, so a test of an hour takes a
    millisecond and is deterministic. Looks for news, which the bus takes several times a second,
    follow it too, but become rarer while nothing else is due: see `advance`.
    """

    # Checkpoints after each timer. A woken task may need a few before it sets its next
    # timer; ten are enough for the bus itself.
    _TURNS = 10

    # Seconds of quiet during which looks keep their times, more than a member's TTL; from then on
    # each is later than the one before by this part of the quiet time.
    _EXACT = 10.0
    _RARER = 0.25

    def __init__(self, start: float = 1_000_000.0) -> None:
        self._now = start
        self._timers: list[_Timer] = []
        self._looks: list[_Timer] = []
        """Timers of looks for news."""
        self._quiet_since = start
        """The last time that was not one of a look."""
        self._order = count()

    def now(self) -> float:
        """Virtual seconds; they pass only in `advance`."""
        return self._now

    def time(self) -> float:
        """The same instant as `now`, read as seconds since the epoch."""
        return self._now

    def _call_at(
        self, due: float, callback: Callable[[], object], *, is_look: bool = False
    ) -> None:
        heappush(self._looks if is_look else self._timers, (due, next(self._order), callback))

    async def sleep(self, seconds: float) -> None:
        """Return once the clock has been advanced by `seconds`."""
        if seconds <= 0:
            await anyio.lowlevel.checkpoint()
            return
        wakeup = anyio.Event()
        self._call_at(self._now + seconds, wakeup.set)
        await wakeup.wait()

    def cancel_after(self, seconds: float) -> AbstractContextManager[anyio.CancelScope]:
        """A cancel scope that cancels itself once the clock has moved by `seconds`."""
        return self._limit(seconds)

    def look_after(self, seconds: float) -> AbstractContextManager[anyio.CancelScope]:
        """The same, but maybe later while nothing else is due: see `advance`."""
        return self._limit(seconds, is_look=True)

    @contextmanager
    def _limit(self, seconds: float, *, is_look: bool = False) -> Generator[anyio.CancelScope]:
        with anyio.CancelScope() as scope:
            running = True

            def fire() -> None:
                if running:
                    scope.cancel()

            if seconds <= 0:
                scope.cancel()
            else:
                self._call_at(self._now + seconds, fire, is_look=is_look)
            try:
                yield scope
            finally:
                running = False

    async def advance(self, seconds: float) -> None:
        """Advance by `seconds`, firing timers in the order in which they are due.

        Tasks run between two timers, so a task that sleeps again in between is woken
        at the right virtual time. Looks for news keep their times in the first ten seconds, and
        as long after each timer; then they become rarer. All that are due are taken at the end.
        """
        target = self._now + seconds
        self._quiet_since = self._now
        await self._let_tasks_run()
        while (due := self._next_due(target)) is not None:
            self._now = max(self._now, due)
            timers = min(self._timers, self._looks, key=_first_of)
            if timers is self._timers:
                self._quiet_since = self._now
            heappop(timers)[2]()
            await self._let_tasks_run()
        self._now = max(self._now, target)  # another task may have advanced it further
        await self._let_tasks_run()

    def _next_due(self, target: float) -> float | None:
        """Return the next time at which a timer fires, up to `target`."""
        timer, _ = _first_of(self._timers)
        look, _ = _first_of(self._looks)
        if min(timer, look) > target:
            return None
        if look > self._now:  # those of one time are all taken
            quiet = self._now - self._quiet_since
            later = quiet * self._RARER if quiet >= self._EXACT else 0.0
            look = max(look, self._now + later)
        return min(timer, look, target)

    async def _let_tasks_run(self) -> None:
        for _ in range(self._TURNS):
            await anyio.lowlevel.checkpoint()


def _first_of(timers: list[_Timer]) -> tuple[float, int]:
    return timers[0][:2] if timers else (inf, 0)


def look_after(seconds: float, clock: Clock) -> AbstractContextManager[anyio.CancelScope]:
    """A cancel scope that cancels itself after `seconds`, for a task that looks for news then.

    Nothing is due at that moment: on a virtual clock, it may be later.
    """
    if isinstance(clock, VirtualClock):
        return clock.look_after(seconds)
    return clock.cancel_after(seconds)
