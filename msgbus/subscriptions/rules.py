"""What a subscription is given: how to deliver, and what follows from a failure."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, final

from msgbus.handlers.delivery import Poison
from msgbus.journal.operations import Operation, Reply
from msgbus.journal.records import Letter, Record
from msgbus.telemetry.tracebacks import redacted_traceback

if TYPE_CHECKING:
    from msgbus.subscriptions.decision import RetryRule
    from msgbus.subscriptions.in_flight import InFlight

Deliver = Callable[["InFlight"], Awaitable[Reply | None]]
"""Handles one message: returning acknowledges it, raising is a failed attempt."""

Describe = Callable[["InFlight", Exception | None, float], Letter]
"""Describes a dead letter: the message, its error (none if its process ended), and the time.
Its reason is that of the subscription."""

OnFinalFailure = Callable[["InFlight", Exception | None], object]
"""Notified of a message that is refused, dead-lettered or dropped, with the error."""

OnDeadLetter = Callable[[Record, Exception | None, int], Sequence[Operation]]
"""Returns operations for the commit that writes a dead letter: record, error, attempts."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryRules:
    """How a subscription delivers, beside what it selects."""

    retry: RetryRule
    on_poison: Poison = Poison.DEAD_LETTER
    ack_timeout: float | None = 30.0
    """Seconds that a row which must run alone waits for what runs beside it."""
    rate_limit: float | None = None
    """Deliveries per second in this process."""
    burst: int = 1
    """Deliveries that may begin at once under `rate_limit` after a quiet time."""
    record: Literal["all", "failures", "none"] = "all"
    """Attempts that are recorded as deliveries."""
    is_once: bool = False
    """Messages are acknowledged before they are delivered."""


def describe(one: InFlight, error: Exception | None, now: float) -> Letter:
    """Describe a dead letter by its error."""
    if error is None:
        return Letter("", "", one.received, now)
    traceback = redacted_traceback(error)
    return Letter(type(error).__name__, "", one.received, now, traceback=traceback)


class NotAttemptedError(Exception):
    """Raised by `deliver` to leave a claimed message to other processes; nothing is counted."""
