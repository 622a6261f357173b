"""`PeriodicTask`: one background task that works when it is woken, or when a time has come."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Final, final

import anyio

from msgbus.runtime.clock import look_after

if TYPE_CHECKING:
    from msgbus.runtime.clock import Clock
    from msgbus.runtime.event_loop import Runtime, Waker

GRACE: Final = 1.0
"""Real seconds that a task which is to end gets to clean up."""


@final
class PeriodicTask:
    """A task that calls `work` again and again.

    Args:
        name: Name of the task.
        work: Does what there is to do; returns the seconds until time alone makes more, `None`
            for never.
        clock: Time.
        on_error: Called with an exception of `work`; returns the seconds until the next call, or
            `None` to end the task.
        is_look: Whether `work` only looks for news: nothing is due when its time comes.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[], Awaitable[float | None]],
        clock: Clock,
        on_error: Callable[[Exception], float | None],
        *,
        is_look: bool = False,
    ) -> None:
        self._name = name
        self._work = work
        self._clock = clock
        self._on_error = on_error
        self._limit = partial(look_after, clock=clock) if is_look else clock.cancel_after
        self._runtime: Runtime | None = None
        self._waker: Waker | None = None
        self._scope: anyio.CancelScope | None = None
        self._has_news = False
        self._waiting: list[anyio.Event] = []

    @property
    def is_open(self) -> bool:
        """Whether the task runs."""
        return self._scope is not None

    def open(self, runtime: Runtime) -> None:
        """Begin, unless it has."""
        if self._scope is None:
            self._runtime = runtime
            self._waker = runtime.waker()
            self._has_news = True
            # Not cancelled as a task: that would cut off a commit in the middle.
            self._scope = anyio.CancelScope()
            runtime.spawn(self._run, self._scope, name=f"msgbus {self._name}")

    def wake(self) -> None:
        """Work at once."""
        self._has_news = True
        if self._waker is not None:
            self._waker.wake()

    async def next(self) -> None:
        """Have a call of `work` that begins now, and wait for its end."""
        if self._scope is not None:
            self.wake()
            await self.news()

    async def news(self) -> None:
        """Wait for the end of a call of `work`, or for `notify`."""
        event = anyio.Event()
        self._waiting.append(event)
        await event.wait()

    def notify(self) -> None:
        """Wake those who wait for news."""
        waiting, self._waiting = self._waiting, []
        for event in waiting:
            event.set()

    def cancel(self) -> None:
        """End the task soon, in the middle of `work` if it waits there."""
        if self._scope is not None:
            self._scope.cancel()

    async def stop(self) -> None:
        """End the task, and wait for its end."""
        scope = self._scope
        if scope is not None:
            self.cancel()
            with anyio.move_on_after(GRACE):
                while self._scope is scope:
                    await self.news()
            self._scope = None  # one that does not end is left behind

    async def _run(self, scope: anyio.CancelScope) -> None:
        try:
            with scope:
                while True:
                    self._has_news = False
                    try:
                        pause = await self._work()
                    except Exception as error:
                        again = self._on_error(error)
                        if again is None:
                            return
                        await self._clock.sleep(again)
                    else:
                        self.notify()
                        await self._pause(pause)
        finally:
            if self._scope is scope:
                self._scope = None
            self.notify()

    async def _pause(self, pause: float | None) -> None:
        assert self._waker is not None  # noqa: S101 (made before the task)
        assert self._runtime is not None  # noqa: S101 (given before the task)
        if self._has_news or (pause is not None and pause <= 0):
            await self._runtime.checkpoint()
        elif pause is None:
            await self._waker.wait()
        else:
            with self._limit(pause):
                await self._waker.wait()
