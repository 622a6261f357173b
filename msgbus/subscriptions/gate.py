"""`AloneGate`: lets one delivery run with nothing beside it in its process."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import anyio

from msgbus.runtime.timeouts import time_limit

if TYPE_CHECKING:
    from msgbus.runtime.clock import Clock


@final
class AloneGate:
    """Counts running deliveries; one that must run alone waits for them and keeps others out."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.running = 0
        """Deliveries that run."""
        self.is_closed = False
        self._changed: anyio.Event | None = None
        """Set at the next change, if somebody waits for one."""

    async def opened(self) -> None:
        """Wait while a delivery runs alone."""
        while self.is_closed:
            await self._change()

    async def close(self, timeout: float | None) -> bool:
        """Keep others out and wait for those that run; false if they took longer.

        It is open again then.
        """
        await self.opened()
        self.is_closed = True
        try:
            with time_limit(timeout, self._clock):
                while self.running:
                    await self._change()
                return True
        except BaseException:
            self.open()
            raise
        self.open()
        return False

    def open(self) -> None:
        """Let others run again."""
        self.is_closed = False
        self.notify()

    def notify(self) -> None:
        """Wake those who wait for the end of deliveries, or for the gate to open."""
        changed, self._changed = self._changed, None
        if changed is not None:
            changed.set()

    async def _change(self) -> None:
        if self._changed is None:
            self._changed = anyio.Event()
        await self._changed.wait()
