"""Members of this process: when to renew them, and whom to tell that one was ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple, final

from msgbus._next.journal.sqlite.claims import JournalSteps
from msgbus.runtime.event_loop import Runtime


class JoinedMember(NamedTuple):
    """A member that joined through this journal object."""

    id: int
    every: float | None
    """Seconds between renewals; `None` if the caller renews it."""
    on_lost: Callable[[], object] | None
    runtime: Runtime


@final
class Renewals:
    """The members that joined through one journal object; used on the writer's thread."""

    def __init__(self) -> None:
        self._joined: dict[int, JoinedMember] = {}
        self._times: dict[int, float] = {}
        """When each must be renewed, by the monotonic clock."""

    def add(self, joined: JoinedMember) -> None:
        """Renew a member from now on."""
        self._joined[joined.id] = joined
        if joined.every is not None:
            self._times[joined.id] = time.monotonic() + joined.every

    def drop(self, member: int) -> JoinedMember | None:
        """Renew a member no more; from any thread."""
        self._times.pop(member, None)
        return self._joined.pop(member, None)

    def patience(self) -> float:
        """Return the seconds until a member must be renewed; -1 for ever."""
        times = list(self._times.values())
        return max(0.0, min(times) - time.monotonic()) if times else -1

    def is_due(self) -> bool:
        """Tell whether a member must be renewed."""
        return bool(self._times) and self.patience() == 0.0

    def renew(self, steps: JournalSteps) -> list[int]:
        """Renew those that are due; return those that were ended."""
        if not self._times:
            return []
        now = time.monotonic()
        lost: list[int] = []
        for member, due in list(self._times.items()):
            if due > now:
                continue
            # Also if the commit fails: a full disk is no reason to try without a pause.
            self._times[member] = now + (self._joined[member].every or 0.0)
            if not steps.count_renewal(member):
                lost.append(member)
        return lost

    def calls(self, lost: list[int]) -> list[tuple[Runtime, Callable[[], Any]]]:
        """Forget members that were ended; return what to call, and on which event loop."""
        found = [self.drop(member) for member in lost]
        return [(one.runtime, one.on_lost) for one in found if one is not None and one.on_lost]
