"""Waiting for news: from this process by a call, from other processes by a look at the file."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final, final

from msgbus.runtime.clock import look_after
from msgbus.runtime.event_loop import Runtime, Waker, current_runtime

if TYPE_CHECKING:
    from msgbus.runtime.clock import Clock

BUSY: Final = 0.02
"""Seconds between looks while other processes write."""

IDLE: Final = 0.5
"""Seconds between looks when they have been quiet for long."""


@final
class Watch:
    """Knows the head and a count of commits, and wakes those who wait for them to grow."""

    def __init__(self, clock: Clock, look: Callable[[], int | None] | None = None) -> None:
        self._clock = clock
        self._look = look
        """Returns the head if another process has written since the last look."""
        self._guard = threading.Lock()
        self._waiting: dict[Waker, tuple[Runtime, bool]] = {}
        """With the event loop of each, and whether it waits for other processes only."""
        self._interval = BUSY
        self._looked = clock.now()
        self.head = 0
        self.version = 0
        """Grows with every commit."""
        self.foreign = 0
        """Grows with commits of other processes."""

    def tell(self, head: int, *, others: bool = False) -> None:
        """Take note of a commit, of this process or of others; from any thread."""
        with self._guard:
            self.head = max(self.head, head)
            self.version += 1
            if others:
                self.foreign += 1
                self._interval = BUSY
            waiting = list(self._waiting.items())
        for waker, (runtime, is_for_others) in waiting:
            if others or not is_for_others:
                runtime.call_soon(waker.wake)

    async def until(
        self, is_news: Callable[[], bool], timeout: float | None, *, others: bool = False
    ) -> None:
        """Return when `is_news`, which may look at the counts here, or out of time.

        Args:
            is_news: Asked after each commit.
            timeout: Seconds to wait at most.
            others: Only wait for commits of other processes.
        """
        deadline = None if timeout is None else self._clock.now() + timeout
        self._look_if_due(at_once=True)
        runtime = current_runtime()
        while not is_news():
            left = None if deadline is None else deadline - self._clock.now()
            if left is not None and left <= 0:
                return
            waker = runtime.waker()
            with self._guard:
                self._waiting[waker] = (runtime, others)
            try:
                # A commit between the question above and this registration is not missed.
                if is_news():
                    return
                await self._sleep(waker, left)
            finally:
                with self._guard:
                    del self._waiting[waker]
            self._look_if_due()

    async def _sleep(self, waker: Waker, left: float | None) -> None:
        """Wait for a commit, the next look at the file, or the end of the time that is left."""
        with ExitStack() as limits:
            if left is not None:
                limits.enter_context(self._clock.cancel_after(left))
            if self._look is not None:
                pause = max(self._looked + self._interval - self._clock.now(), 0.001)
                limits.enter_context(look_after(pause, self._clock))
            await waker.wait()

    def _look_if_due(self, *, at_once: bool = False) -> None:
        """Look at the file, however many wait, at most once in an interval."""
        now = self._clock.now()
        if self._look is None or (not at_once and now - self._looked < self._interval):
            return
        self._looked = now
        head = self._look()
        if head is not None:
            self.tell(head, others=True)
        elif not at_once:
            self._interval = min(self._interval * 2, IDLE)
