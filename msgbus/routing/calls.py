"""Functions that users give, sync or async, as something to await."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Final, final

from anyio.lowlevel import RunVar

from msgbus.routing.dispatch.dispatchers import is_async
from msgbus.runtime.threads import ThreadPool

_in_thread: Final[ContextVar[bool]] = ContextVar("msgbus_call_in_thread", default=False)
"""Whether this code was called from a thread that a sync function holds."""


@final
class Callee:
    """Awaits an async function; calls a sync one in a thread of its own few.

    The threads are not shared with others, so that a function that hangs hangs alone. A call
    that another sync function makes is not bounded: to wait for a thread while one holds one
    could be for ever.
    """

    def __init__(self, function: Callable[..., Any], max_threads: int) -> None:
        self._function = function
        self._is_async = is_async(function)
        self._max_threads = max_threads
        self._pools: RunVar[tuple[ThreadPool, ThreadPool]] = RunVar("msgbus_call_threads")

    async def __call__(self, *args: Any) -> Any:
        """What the function gives."""
        if self._is_async:
            return await self._function(*args)

        def work() -> list[Any]:
            _in_thread.set(True)  # in the thread's own copy of the context
            # In a list, as trio would take something to await for a mistake.
            return [self._function(*args)]

        bounded, unbounded = self._threads()
        [value] = await (unbounded if _in_thread.get() else bounded).run(work)
        return await value if inspect.isawaitable(value) else value

    def _threads(self) -> tuple[ThreadPool, ThreadPool]:
        pools = self._pools.get(None)
        if pools is None:
            pools = (ThreadPool(self._max_threads), ThreadPool(math.inf))
            self._pools.set(pools)
        return pools
