"""What went wrong, and what became of it: heard during the rush, put right after it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

from msgbus.demo.messages import OrderPlaced
from msgbus.messages.system_events import (
    CircuitClosedEvent,
    CircuitHalfOpenedEvent,
    CircuitOpenedEvent,
    DeadLetteredEvent,
    RetryScheduledEvent,
)
from msgbus.resilience.bus import ResilientMessageBus
from msgbus.resilience.replay import LetterReplayReport
from msgbus.resilience.stores import LetterGroup

WRONG: Final = "bounce"
RIGHT: Final = "customer"
"""How the addresses begin that do not exist, and those that were meant."""


@final
@dataclass(frozen=True, slots=True)
class CircuitNote:
    """A circuit has changed."""

    seconds: float
    """Since the shop opened."""

    circuit: str
    state: str
    reason: str


@final
class TroubleBook:
    """Writes down what the bus tells about retries, circuits and dead letters."""

    def __init__(self) -> None:
        self.retries = 0
        self.letters = 0
        self.circuit: list[CircuitNote] = []
        self._began = time.perf_counter()

    def count(self, state: str) -> int:
        """How often a circuit came into this state."""
        return sum(note.state == state for note in self.circuit)

    async def note_retry(self, event: RetryScheduledEvent) -> None:
        """A handler has failed, and will be tried again."""
        del event
        self.retries += 1

    async def note_letter(self, event: DeadLetteredEvent) -> None:
        """A message was given up, and kept."""
        del event
        self.letters += 1

    async def note_opened(self, event: CircuitOpenedEvent) -> None:
        """A service is down: it is left alone for a while."""
        self._note(event.circuit, "open", event.reason)

    async def note_half_opened(self, event: CircuitHalfOpenedEvent) -> None:
        """One call may see whether it is back."""
        self._note(event.circuit, "half open", "one call may try")

    async def note_closed(self, event: CircuitClosedEvent) -> None:
        """It is back."""
        self._note(event.circuit, "closed", event.reason)

    def listen(self, bus: ResilientMessageBus) -> None:
        """Subscribe to all of this."""
        on = bus.register_event_handler
        on(RetryScheduledEvent, self.note_retry, name="note_retry")
        on(DeadLetteredEvent, self.note_letter, name="note_letter")
        on(CircuitOpenedEvent, self.note_opened, name="note_opened")
        on(CircuitHalfOpenedEvent, self.note_half_opened, name="note_half_opened")
        on(CircuitClosedEvent, self.note_closed, name="note_closed")

    def _note(self, circuit: str, state: str, reason: str) -> None:
        seconds = time.perf_counter() - self._began
        self.circuit.append(CircuitNote(seconds, circuit, state, reason))


@final
@dataclass(frozen=True, slots=True)
class Aftermath:
    """What was done about the dead letters."""

    groups: Sequence[LetterGroup]
    """What they had died of, before anything was done."""

    mended: int
    """Letters whose address was corrected."""

    replay: LetterReplayReport
    left: int
    """Letters that are still dead."""


async def clear_up(bus: ResilientMessageBus) -> Aftermath:
    """Look at the dead letters, correct what can be corrected, and replay."""
    letters = bus.dead_letters
    groups = await letters.groups()
    # A list, as each edit makes a new letter, which a search still going on would meet.
    bounced = await letters.find(OrderPlaced, handler="send_receipt")
    for letter in bounced:
        order = letter.message
        if isinstance(order, OrderPlaced):
            await letters.edit(letter, email=order.email.replace(WRONG, RIGHT, 1))
    # Orders that broke stay: their callers have seen it, and might have ordered again.
    replay = await letters.replay_all()
    return Aftermath(groups, len(bounced), replay, await letters.count())
