"""When a standby may take a lease over: the pure part, on the standby's own clock."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from msgbus.journal.records import Lease

if TYPE_CHECKING:
    from msgbus.runtime.clock import Clock


@final
class LeaseWatch:
    """Watches one lease that another holds.

    No two machines, nor a wall clock before and after a jump, agree on the time. So the
    lease has no expiry: it has a counter that a living holder moves, and the standby takes
    over when it has seen the counter stand still for `ttl` seconds of its own monotonic clock.
    """

    def __init__(self, clock: Clock, ttl: float) -> None:
        self._clock = clock
        self._ttl = ttl
        self._seen: Lease | None = None
        self._since = 0.0

    def observe(self, lease: Lease) -> Lease | None:
        """Take note of the lease; gives it back if its holder is to be taken for gone.

        What comes back goes into `journal.acquire(..., seen=...)`, which takes the lease only
        if it was not renewed in between.
        """
        now = self._clock.now()
        if lease != self._seen:
            self._seen = lease
            self._since = now
            return None
        return lease if now - self._since >= self._ttl else None
