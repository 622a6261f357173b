"""Who may work on a subscription: one engine at a time, over all processes on one journal."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, final

from msgbus.journal.leases import LeaseWatch

if TYPE_CHECKING:
    from msgbus.journal.port import Journal
    from msgbus.journal.records import Lease
    from msgbus.runtime.clock import Clock

RENEWALS_PER_TTL = 3
"""One that is late does not cost the lease."""


@final
class Tenure:
    """The lease of one subscription, as one engine sees it."""

    def __init__(
        self,
        journal: Journal,
        name: str,
        holder: str,
        clock: Clock,
        ttl: float,
        on_lost: Callable[[], object],
    ) -> None:
        self._journal = journal
        self._name = name
        self._holder = holder
        self._clock = clock
        self._ttl = ttl
        self._on_lost = on_lost
        self._watch = LeaseWatch(clock, ttl)
        self.lease: Lease | None = None
        self.owner: str | None = None
        """Who has the lease as far as is known, if not this engine."""

    @property
    def epoch(self) -> int:
        """What the journal is to compare with; 0 without a lease, which it refuses."""
        return 0 if self.lease is None else self.lease.epoch

    async def take(self) -> bool:
        """Take the lease if it is free, or if its holder has given no sign of life."""
        current = await self._journal.lease(self._name)
        held_by_other = current is not None and current.holder not in {None, self._holder}
        self.owner = current.holder if current is not None and held_by_other else None
        seen = self._watch.observe(current) if current is not None and held_by_other else None
        if held_by_other and seen is None:
            return False
        lease = await self._journal.acquire(self._name, self._holder, seen=seen)
        if lease.holder != self._holder:
            self.owner = lease.holder
            return False
        self.owner = None
        self.lease = lease
        return True

    async def keep(self) -> None:
        """Begin to give signs of life."""
        lease = self.lease
        assert lease is not None  # noqa: S101 (called after `take`)

        def lost() -> None:
            # It may be told late, when a newer lease is held already.
            if self.lease is lease:
                self._on_lost()

        await self._journal.keep(lease, self._ttl / RENEWALS_PER_TTL, on_lost=lost)

    def lose(self) -> None:
        """Another has it; begin to watch that one."""
        self.lease = None
        self._watch = LeaseWatch(self._clock, self._ttl)

    async def release(self) -> None:
        """Let the next one in at once."""
        lease, self.lease = self.lease, None
        if lease is not None:
            await self._journal.release(lease)
