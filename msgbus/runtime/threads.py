"""A bounded thread pool for sync handlers."""

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
    """Limits the sync handlers that run at once, abandoned ones included.

    A handler that timed out runs on, as a thread cannot be stopped. It keeps its slot until it
    ends, so that timeouts cannot add threads without bound.

    If no slot is free, a sync handler that was called through a portal runs in the thread of
    its caller, which is waiting for it.

    Args:
        max_threads: Slots.
        runtime: The event loop that may use it; any, one at a time, unless given.
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
        """Call `function` in a thread; it is abandoned if this is cancelled."""
        slots, unbounded, runtime = self._limits()
        caller = waiting_thread.get()
        if caller is not None and slots.available_tokens < 1:
            job = caller.give(function)
            if job is not None:
                return await _outcome(job, runtime)
        slot = _ThreadSlot(slots, runtime)
        await slot.acquire()

        def work() -> T:
            slot.is_working = True
            try:
                with handler_thread():
                    return function()
            finally:
                slot.release_from_thread()

        try:
            return await anyio.to_thread.run_sync(work, limiter=unbounded, abandon_on_cancel=True)
        except BaseException:
            if not slot.is_working:
                slot.release()
            raise


async def _outcome(job: Future[T], runtime: Runtime) -> T:
    """Wait for a job in another thread; if cancelled before it begins, it never does."""
    reply = runtime.reply()

    def wake() -> None:
        if not reply.done():
            reply.set_result(None)

    job.add_done_callback(lambda _: runtime.call_soon(wake))
    try:
        await reply
    except BaseException:
        job.cancel()
        raise
    return job.result()


@final
class _ThreadSlot:
    """One slot of the pool, released exactly once."""

    def __init__(self, slots: anyio.CapacityLimiter, runtime: Runtime) -> None:
        self._slots = slots
        self._runtime = runtime
        self._once = threading.Lock()
        self.is_working = False

    async def acquire(self) -> None:
        await self._slots.acquire_on_behalf_of(self)

    def release_from_thread(self) -> None:
        self._runtime.call_soon(self.release)

    def release(self) -> None:
        if self._once.acquire(blocking=False):
            self._slots.release_on_behalf_of(self)
