"""A bounded pool of threads for sync handlers."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar, final

import anyio
import anyio.to_thread

from msgbus.runtime.event_loop import Runtime, current_runtime, foreign_loop
from msgbus.runtime.waiting_threads import handler_thread, waiting_thread

T = TypeVar("T")


@final
class ThreadPool:
    """At most so many sync handlers at work, those included that nobody waits for any more.

    A handler that ran out of time goes on in its thread, as a thread cannot be stopped. It
    keeps its place until it ends, so that time-outs cannot pile up threads without bound.

    If no place is free, what a sync handler called through a portal runs in that handler's own
    thread, which is waiting for it.

    Args:
        max_threads: How many.
        runtime: The one event loop that may use it; any, one at a time, unless given.
    """

    def __init__(self, max_threads: float, runtime: Runtime | None = None) -> None:
        self._max_threads = max_threads
        self._is_bound = runtime is not None
        self._runtime = runtime
        self._limiters: tuple[anyio.CapacityLimiter, anyio.CapacityLimiter] | None = None

    def _limits(self) -> tuple[anyio.CapacityLimiter, anyio.CapacityLimiter, Runtime]:
        runtime = current_runtime(self._runtime)
        if runtime is not self._runtime and self._is_bound:
            raise foreign_loop("run a sync handler of")
        if runtime is not self._runtime or self._limiters is None:
            self._runtime = runtime
            self._limiters = (
                anyio.CapacityLimiter(self._max_threads),
                anyio.CapacityLimiter(math.inf),
            )
        return *self._limiters, runtime

    async def run(self, function: Callable[[], T]) -> T:
        """The value of `function`, called in a thread; abandoned if this is cancelled."""
        places, unbounded, runtime = self._limits()
        caller = waiting_thread.get()
        if caller is not None and places.available_tokens < 1:
            job = caller.give(function)
            if job is not None:
                return await _outcome(job, runtime)
        place = _Place(places, runtime)
        await place.take()

        def work() -> T:
            place.is_working = True
            try:
                with handler_thread():
                    return function()
            finally:
                place.give_back_from_thread()

        try:
            return await anyio.to_thread.run_sync(work, limiter=unbounded, abandon_on_cancel=True)
        except BaseException:
            if not place.is_working:
                place.give_back()
            raise


async def _outcome(job: Future[T], runtime: Runtime) -> T:
    """What a job in another thread gives; not begun at all if this is cancelled before."""
    reply = runtime.reply()

    def tell() -> None:
        if not reply.done():
            reply.set_result(None)

    job.add_done_callback(lambda _: runtime.call_soon(tell))
    try:
        await reply
    except BaseException:
        job.cancel()
        raise
    return job.result()


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
