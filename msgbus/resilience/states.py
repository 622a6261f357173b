"""The states of a circuit, and a change from one to another."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import final


class CircuitState(Enum):
    """What a circuit does with a call."""

    CLOSED = "closed"
    """Lets it through."""

    HALF_OPEN = "half_open"
    """Lets a few through, to see whether they succeed."""

    OPEN = "open"
    """Refuses it."""


@final
@dataclass(frozen=True, slots=True)
class CircuitChange:
    """A circuit has changed its state."""

    name: str
    old: CircuitState
    new: CircuitState
    reason: str
    retry_after: float
    """Seconds until an open circuit lets a call try; 0 otherwise."""
