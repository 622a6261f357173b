"""What becomes of a message that failed: a pure decision."""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING, NamedTuple

from msgbus.handlers.delivery import Mode, Poison

if TYPE_CHECKING:
    from msgbus.subscriptions.config import SubscriptionConfig
    from msgbus.subscriptions.window import Entry


class Fate(Enum):
    """What becomes of it."""

    RETRY = auto()
    """Another try in this process, after `delay`; it keeps its place."""

    KEEP_DATE = auto()
    """The same, but the journal keeps the date, so that a restart does."""

    SCHEDULE = auto()
    """It leaves the window for the journal's schedule; others go on."""

    DEAD_LETTER = auto()
    DROP = auto()
    BLOCK = auto()


class Verdict(NamedTuple):
    """The fate of one message."""

    fate: Fate
    delay: float = 0.0


_LAST_RESORT = {
    Poison.DEAD_LETTER: Fate.DEAD_LETTER,
    Poison.DROP: Fate.DROP,
    Poison.BLOCK: Fate.BLOCK,
}


def is_final(config: SubscriptionConfig, attempt: int, error: Exception) -> bool:
    """Whether no other attempt follows number `attempt`, which ended in `error`."""
    retry = config.retry
    return config.is_at_most_once or attempt >= retry.max_attempts or not retry.allows(error)


def judge(
    config: SubscriptionConfig, mode: Mode, entry: Entry, error: Exception, chance: float
) -> Verdict:
    """What becomes of `entry`, whose try number `entry.attempt` ended in `error`.

    `chance` is a random number from 0 to 1, for the jitter of the pause.
    """
    retry = config.retry
    if is_final(config, entry.attempt, error):
        return Verdict(_LAST_RESORT[config.on_poison])
    delay = retry.delay(entry.attempt, chance)
    if delay <= retry.in_process and not entry.is_retry:
        return Verdict(Fate.RETRY, delay)
    # Where order is promised, those behind it have to wait for it in any case.
    keeps_place = mode is Mode.EXCLUSIVE or (mode is Mode.KEY_SHARED and entry.key is not None)
    return Verdict(Fate.KEEP_DATE if keeps_place else Fate.SCHEDULE, delay)
