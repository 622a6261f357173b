"""Resources that stay open: entered, held and left by one and the same detached task.

A context manager with a task group or cancel scope inside must be left by the task that
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
    __slots__ = ("done", "error", "made", "value")

    def __init__(self, made: Callable[[], Any]) -> None:
        self.made = made
        self.done = anyio.Event()
        self.value: Any = None
        self.error: BaseException | None = None


@final
class Keeper:
    """Opens resources on request and closes them, last first, in `close`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._requests: deque[_Request] = deque()
        self._news: anyio.Event | None = None
        self._closed: anyio.Event | None = None
        self._closing = False
        self._errors: list[BaseException] = []

    async def enter(self, runtime: Runtime, make: Callable[[], Any]) -> Any:
        """Call `make` and enter, await or just keep what it gives; the value of it."""
        if self._news is None:
            self._news = anyio.Event()
            self._closed = anyio.Event()
            runtime.spawn(self._keep, runtime, name=f"{self._name}: resources")
        request = _Request(make)
        self._requests.append(request)
        self._news.set()
        await request.done.wait()
        if request.error is not None:
            raise request.error
        return request.value

    async def close(self) -> list[BaseException]:
        """Leave all resources, last first; the errors of those that failed to close."""
        if self._news is not None and self._closed is not None:
            self._closing = True
            self._news.set()
            await self._closed.wait()
        return self._errors

    async def _keep(self, runtime: Runtime) -> None:
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
                    request.value = await enter_any(stack, request.made())
                except BaseException as error:
                    request.error = error  # raised in `enter`
                    if runtime.is_ending(error):
                        raise
                finally:
                    request.done.set()
            if not self._closing:
                self._news = anyio.Event()
                await self._news.wait()


async def enter_any(stack: AsyncExitStack, made: Any) -> Any:
    """Enter a context manager of either kind, await an awaitable, or take a plain value."""
    if inspect.isawaitable(made):
        made = await made
    if isinstance(made, AbstractAsyncContextManager):
        return await stack.enter_async_context(cast("AbstractAsyncContextManager[Any]", made))
    if isinstance(made, AbstractContextManager):
        return stack.enter_context(cast("AbstractContextManager[Any]", made))
    return made
