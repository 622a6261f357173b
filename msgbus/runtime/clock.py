"""Clocks: the system's, and a virtual one for tests."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, Protocol, final

import anyio
import anyio.lowlevel

if TYPE_CHECKING:
    from collections.abc import Generator


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
    millisecond and is deterministic.
    """

    # Checkpoints after each timer. A woken task may need a few before it sets its next
    # timer; ten are enough for the bus itself.
    _TURNS = 10

    def __init__(self, start: float = 1_000_000.0) -> None:
        self._now = start
        self._timers: list[tuple[float, int, Callable[[], object]]] = []
        self._order = count()

    def now(self) -> float:
        """Virtual seconds; they pass only in `advance`."""
        return self._now

    def time(self) -> float:
        """The same instant as `now`, read as seconds since the epoch."""
        return self._now

    def _call_at(self, due: float, callback: Callable[[], object]) -> None:
        heappush(self._timers, (due, next(self._order), callback))

    async def sleep(self, seconds: float) -> None:
        """Return once the clock has been advanced by `seconds`."""
        if seconds <= 0:
            await anyio.lowlevel.checkpoint()
            return
        wakeup = anyio.Event()
        self._call_at(self._now + seconds, wakeup.set)
        await wakeup.wait()

    @contextmanager
    def cancel_after(self, seconds: float) -> Generator[anyio.CancelScope]:
        """A cancel scope that cancels itself once the clock has moved by `seconds`."""
        with anyio.CancelScope() as scope:
            running = True

            def fire() -> None:
                if running:
                    scope.cancel()

            if seconds <= 0:
                scope.cancel()
            else:
                self._call_at(self._now + seconds, fire)
            try:
                yield scope
            finally:
                running = False

    async def advance(self, seconds: float) -> None:
        """Advance by `seconds`, firing timers in the order in which they are due.

        Tasks run between two timers, so a task that sleeps again in between is woken
        at the right virtual time.
        """
        target = self._now + seconds
        await self._let_tasks_run()
        while self._timers and self._timers[0][0] <= target:
            due, _, fire = heappop(self._timers)
            self._now = max(self._now, due)
            fire()
            await self._let_tasks_run()
        self._now = max(self._now, target)  # another task may have advanced it further
        await self._let_tasks_run()

    async def _let_tasks_run(self) -> None:
        for _ in range(self._TURNS):
            await anyio.lowlevel.checkpoint()
