"""Simulated processes on one journal, inside one test; each can crash at any moment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self, cast, final

import anyio

from msgbus.errors import LeaseLostError
from msgbus.runtime.event_loop import Task, current_runtime

if TYPE_CHECKING:
    from msgbus.journal.operations import Operation
    from msgbus.journal.port import Journal
    from msgbus.journal.records import Ack, Lease
    from msgbus.runtime.clock import Clock


@final
class Process:
    """A simulated process and its view of a journal.

    `process.journal` is a `Journal`. When the process dies, its leases are no longer renewed,
    and pending writes are not written. `on_death` ends what else it runs, such as engines.
    """

    def __init__(self, journal: Journal, clock: Clock) -> None:
        self._inner = journal
        self._clock = clock
        self._keepers: dict[str, Task] = {}
        self.is_dead = False
        self.on_death: list[Callable[[], object]] = []
        self.before_commit: Callable[[Sequence[Operation]], object] = _nothing
        """Called before each commit; it may call `die`."""
        self.after_commit: Callable[[Sequence[Operation]], object] = _nothing
        """Called after each commit, before it returns; it may call `die`."""

    @property
    def journal(self) -> Journal:
        """The journal as this process sees it."""
        return cast("Journal", self)

    def freeze(self) -> None:
        """Stop renewing leases, so that others take over; everything else continues."""
        for keeper in self._keepers.values():
            keeper.cancel()
        self._keepers.clear()

    def die(self) -> None:
        """End as by `kill -9`."""
        self.is_dead = True
        self.freeze()
        for end in self.on_death:
            end()

    def replace(self, name: str, method: Callable[..., object]) -> None:
        """Replace a method of the journal in this process, for instance to fail."""
        self.__dict__[name] = method

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def commit(self, operations: Sequence[Operation]) -> list[Ack]:
        """Commit, unless the process dies before or after it."""
        self.before_commit(operations)
        await self._if_alive()
        acks = await self._inner.commit(operations)
        self.after_commit(operations)
        await self._if_alive()
        return acks

    async def _if_alive(self) -> None:
        if self.is_dead:
            await anyio.sleep_forever()

    async def keep(
        self, lease: Lease, every: float, *, on_lost: Callable[[], object] | None = None
    ) -> None:
        """Keep a lease until the process ends."""
        await self._inner.renew(lease)
        self._drop(lease.name)
        self._keepers[lease.name] = current_runtime().spawn(
            self._keep, lease, every, on_lost, name=f"msgbus lease of {lease.name}"
        )

    async def _keep(self, lease: Lease, every: float, on_lost: Callable[[], object] | None) -> None:
        while True:
            await self._clock.sleep(every)
            try:
                await self._inner.renew(lease)
            except LeaseLostError:
                if on_lost is not None:
                    on_lost()
                return

    async def release(self, lease: Lease) -> None:
        """Release a lease."""
        self._drop(lease.name)
        await self._inner.release(lease)

    async def close(self) -> None:
        """Close the journal, for all processes on it."""
        self.freeze()
        await self._inner.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    def _drop(self, name: str) -> None:
        keeper = self._keepers.pop(name, None)
        if keeper is not None:
            keeper.cancel()


def _nothing(_: Sequence[Operation]) -> None:
    pass
