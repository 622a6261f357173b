"""A bounded pool of threads for sync handlers."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import TypeVar, final

import anyio
import anyio.to_thread

from msgbus.runtime import Runtime, current_runtime

T = TypeVar("T")


@final
class ThreadPool:
    """At most so many sync handlers at work, those included that nobody waits for any more.

    A handler that ran out of time goes on in its thread, as a thread cannot be stopped. It
    keeps its place until it ends, so that time-outs cannot pile up threads without bound.
    """

    def __init__(self, max_threads: float) -> None:
        self._max_threads = max_threads
        self._places: anyio.CapacityLimiter | None = None
        self._unbounded: anyio.CapacityLimiter | None = None

    async def run(self, function: Callable[[], T]) -> T:
        """The value of `function`, called in a thread; abandoned if this is cancelled."""
        if self._places is None or self._unbounded is None:
            self._places = anyio.CapacityLimiter(self._max_threads)
            self._unbounded = anyio.CapacityLimiter(math.inf)
        place = _Place(self._places, current_runtime())
        await place.take()

        def work() -> T:
            place.is_working = True
            try:
                return function()
            finally:
                place.give_back_from_thread()

        try:
            return await anyio.to_thread.run_sync(
                work, limiter=self._unbounded, abandon_on_cancel=True
            )
        except BaseException:
            if not place.is_working:
                place.give_back()
            raise


@final
class _Place:
    """One place in the pool, given back exactly once."""

    def __init__(self, places: anyio.CapacityLimiter, runtime: Runtime) -> None:
        self._places = places
        self._runtime = runtime
        self._once = threading.Lock()
        self.is_working = False

    async def take(self) -> None:
        await self._places.acquire_on_behalf_of(self)

    def give_back_from_thread(self) -> None:
        self._runtime.call_soon(self.give_back)

    def give_back(self) -> None:
        if self._once.acquire(blocking=False):
            self._places.release_on_behalf_of(self)
