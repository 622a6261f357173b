"""Tasks that look at the journal whenever it has changed, or when a time has come."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final, final

import anyio

from msgbus.errors import BusClosedError, JournalClosedError
from msgbus.telemetry.logging import log
from msgbus.telemetry.redaction import redact_exception

if TYPE_CHECKING:
    from msgbus.durability.hub import Durability
    from msgbus.runtime.event_loop import Runtime, Waker

PAUSE: Final = 0.5
"""Seconds before a journal that failed is asked again."""

REST: Final = 0.05
"""Seconds after news before others are passed on. Real ones, whatever the bus's clock: it is
about the work that a busy journal would otherwise make."""

GRACE: Final = 1.0
"""Real seconds that a task which is to end gets to clean up."""


@final
class Rounds:
    """One task that does a round of work when it is woken, or when time asks for it."""

    def __init__(
        self, hub: Durability, name: str, work: Callable[[], Awaitable[float | None]]
    ) -> None:
        self._hub = hub
        self._name = name
        self._work = work
        """Does what is to be done now; gives the seconds until time alone makes more."""
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
        """Begin, if it has not."""
        if self._scope is None:
            self._runtime = runtime
            self._waker = runtime.waker()
            self._has_news = True
            # Not cancelled as a task: that would cut off a commit in the middle.
            self._scope = anyio.CancelScope()
            runtime.spawn(self._run, self._scope, name=f"msgbus {self._name}")

    def wake(self) -> None:
        """Look at once whether there is something to do."""
        self._has_news = True
        if self._waker is not None:
            self._waker.wake()

    async def next(self) -> None:
        """Have a round done, and wait for its end."""
        if self._scope is not None:
            self.wake()
            await self.news()

    async def news(self) -> None:
        """Wait for the end of a round, or until `tell` is called."""
        event = anyio.Event()
        self._waiting.append(event)
        await event.wait()

    def tell(self) -> None:
        """Let those who wait look again."""
        waiting, self._waiting = self._waiting, []
        for event in waiting:
            event.set()

    async def stop(self) -> None:
        """End the task, in the middle of a round if need be, but never of a commit."""
        scope = self._scope
        if scope is not None:
            scope.cancel()
            with anyio.move_on_after(GRACE):
                while self._scope is not None:
                    await self.news()
            self._scope = None  # one that does not end is left behind

    async def _run(self, scope: anyio.CancelScope) -> None:
        try:
            with scope:
                while await self._round():
                    pass
        finally:
            if self._scope is scope:
                self._scope = None
            self.tell()

    async def _round(self) -> bool:
        """One round, and the rest after it; false if there will be no other."""
        self._has_news = False
        try:
            pause = await self._work()
        except (JournalClosedError, BusClosedError):
            return False
        except Exception as error:  # a full disk may have room again
            log.error(
                "journal_task_failed",
                bus=self._hub.state.config.name,
                task=self._name,
                error=redact_exception(error),
            )
            await self._hub.state.clock.sleep(PAUSE)
            return True
        self.tell()
        await self._rest(pause)
        return True

    async def _rest(self, pause: float | None) -> None:
        assert self._waker is not None  # noqa: S101 (made before the task)
        assert self._runtime is not None  # noqa: S101 (given before the task)
        if self._has_news or (pause is not None and pause <= 0):
            await self._runtime.checkpoint()
        elif pause is None:
            await self._waker.wait()
        else:
            with self._hub.state.clock.cancel_after(pause):
                await self._waker.wait()


@final
class Listener:
    """Passes on that the journal has changed, by this process or by another."""

    def __init__(self, hub: Durability, *tell: Callable[[], object]) -> None:
        self._since = -1
        self._hub = hub
        self._tell = tell
        self._rounds = Rounds(hub, "news of the journal", self._listen)

    def open(self, runtime: Runtime) -> None:
        """Begin; a journal that was opened again counts its changes anew."""
        self._since = -1
        self._rounds.open(runtime)

    async def stop(self) -> None:
        """End."""
        await self._rounds.stop()

    async def _listen(self) -> float | None:
        self._since = await self._hub.journal.changed(self._since)
        for tell in self._tell:
            tell()
        await anyio.sleep(REST)
        return 0.0
