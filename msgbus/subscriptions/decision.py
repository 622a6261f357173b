"""What follows from a failed attempt."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple, Protocol

from msgbus.handlers.delivery import Poison


class RetryRule(Protocol):
    """When a failed delivery is repeated."""

    @property
    def in_process(self) -> float:
        """Pauses beyond so many seconds are kept in the journal."""
        ...

    def pause(self, attempt: int, error: BaseException | None) -> float | None:
        """Return the seconds until the next attempt, or `None` for none.

        Args:
            attempt: Number of the failed attempt, from 1.
            error: Why it failed; `None` if its process ended.
        """
        ...


class Next(StrEnum):
    """What becomes of a message after a failed attempt."""

    RETRY = "retry"
    """Another attempt in this process, after a short pause."""

    LATER = "later"
    """Another attempt when a row of the journal is due."""

    DEAD = "dead"
    """A dead letter."""

    DROP = "drop"
    """Acknowledged."""

    BLOCK = "block"
    """The subscription stops at it."""


class FailureDecision(NamedTuple):
    """What to do after a failed attempt."""

    then: Next
    pause: float = 0.0
    """Seconds."""


def decide(
    rule: RetryRule, on_poison: Poison, attempt: int, error: BaseException | None
) -> FailureDecision:
    """Decide what follows from the failure of attempt number `attempt`."""
    pause = rule.pause(attempt, error)
    if pause is not None:
        return FailureDecision(Next.RETRY if pause <= rule.in_process else Next.LATER, pause)
    return FailureDecision(_LAST[on_poison])


def reason_of(rule: RetryRule, error: BaseException | None) -> str:
    """Return why a message is dead-lettered, in the words of `msgbus.resilience`."""
    if error is None:
        return "its process ended in every attempt"
    if rule.pause(1, error) is not None:
        return "retries exhausted"
    return "not retried" if rule.pause(1, None) is None else "not to be retried"


_LAST = {Poison.DEAD_LETTER: Next.DEAD, Poison.DROP: Next.DROP, Poison.BLOCK: Next.BLOCK}
