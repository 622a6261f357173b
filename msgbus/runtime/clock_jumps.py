"""Noticing that the wall clock was set, which no timer does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, final

if TYPE_CHECKING:
    from msgbus.runtime.clock import Clock

LEAST: Final = 0.5
"""Seconds by which the clock has to be off; less is the common correction of its speed."""


@final
class ClockJumps:
    """Compares the wall clock with the monotonic one, by which all pauses are measured.

    What is due at a time of the wall clock comes too late after a jump forward, or after the
    machine was suspended, unless somebody looks again.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._offset = clock.time() - clock.now()

    def seconds(self) -> float:
        """Return by how much the wall clock has jumped forward since the last jump; mostly 0."""
        offset = self._clock.time() - self._clock.now()
        jumped = offset - self._offset
        if abs(jumped) < LEAST:
            return 0.0
        self._offset = offset
        return max(jumped, 0.0)
