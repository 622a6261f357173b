"""Context managers that stay open, entered and exited by one detached task.

A context manager with a task group or cancel scope inside must be exited by the task that
entered it, but a bus may be started by one task and stopped by another.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager, AsyncExitStack
from typing import TYPE_CHECKING, Any, cast, final

import anyio

if TYPE_CHECKING:
    from msgbus.runtime.event_loop import Runtime


@final
class _Request:
    __slots__ = ("done", "error", "make", "value")

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make
        self.done = anyio.Event()
        self.value: Any = None
        self.error: BaseException | None = None


@final
class Resources:
    """Open resources on request, and close them, last first."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._requests: deque[_Request] = deque()
        self._changed: anyio.Event | None = None
        self._closed: anyio.Event | None = None
        self._closing = False
        self._errors: list[BaseException] = []

    async def enter(self, runtime: Runtime, make: Callable[[], Any]) -> Any:
        """Call `make`, enter or await its result if need be, and return the value."""
        if self._changed is None:
            self._changed = anyio.Event()
            self._closed = anyio.Event()
            runtime.spawn(self._run, runtime, name=f"{self._name}: resources")
        request = _Request(make)
        self._requests.append(request)
        self._changed.set()
        await request.done.wait()
        if request.error is not None:
            raise request.error
        return request.value

    async def close(self) -> list[BaseException]:
        """Exit all resources, last first; return the errors of those that failed."""
        if self._changed is not None and self._closed is not None:
            self._closing = True
            self._changed.set()
            await self._closed.wait()
        return self._errors

    async def _run(self, runtime: Runtime) -> None:
        assert self._closed is not None  # noqa: S101 (set before this task is spawned)
        try:
            async with AsyncExitStack() as stack:
                await self._serve(stack, runtime)
        except BaseException as error:
            self._errors.append(error)  # reported by `close`
            if runtime.is_ending(error):
                raise
        finally:
            self._closed.set()

    async def _serve(self, stack: AsyncExitStack, runtime: Runtime) -> None:
        while not self._closing or self._requests:
            while self._requests:
                request = self._requests.popleft()
                try:
                    request.value = await enter_any(stack, request.make())
                except BaseException as error:
                    request.error = error  # raised in `enter`
                    if runtime.is_ending(error):
                        raise
                finally:
                    request.done.set()
            if not self._closing:
                self._changed = anyio.Event()
                await self._changed.wait()


async def enter_any(stack: AsyncExitStack, made: Any) -> Any:
    """Enter a context manager of either kind, await an awaitable, or take a plain value."""
    if inspect.isawaitable(made):
        made = await made
    if isinstance(made, AbstractAsyncContextManager):
        return await stack.enter_async_context(cast("AbstractAsyncContextManager[Any]", made))
    if isinstance(made, AbstractContextManager):
        return stack.enter_context(cast("AbstractContextManager[Any]", made))
    return made
