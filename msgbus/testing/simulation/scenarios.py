"""Scenarios of simulated subscriptions, drawn from a seed."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import final

from msgbus.handlers.delivery import Delivery, Mode, Poison
from msgbus.subscriptions.config import RetryTiers, SubscriptionConfig


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Parameters of one run, drawn from its seed."""

    seed: int
    config: SubscriptionConfig
    messages: int
    keys: int
    """Number of different keys; 0 for messages without a key."""
    processes: int
    consumers: int
    """In each process."""
    crashes: int
    freezes: int
    """Times that a process stops renewing its lease without noticing."""
    closes: int
    """Times that a process ends cleanly."""
    commit_crash: float
    """Chance that a process dies just before or after a commit."""
    failure: float
    """Chance that an attempt fails."""
    hang: float
    """Chance that an attempt exceeds `ack_timeout`."""
    poison: frozenset[int]
    """Numbers of messages that always fail."""
    killers: frozenset[int]
    """Numbers of messages that kill their process."""

    @property
    def has_faults(self) -> bool:
        """Whether something may happen after which a message is delivered again."""
        return bool(self.crashes or self.freezes or self.commit_crash or self.hang or self.killers)

    @property
    def is_ordered(self) -> bool:
        """Whether the mode promises an order."""
        config = self.config
        return config.mode is Mode.KEY_SHARED or (
            config.mode is Mode.EXCLUSIVE and config.max_in_flight == 1
        )


def draw(seed: int) -> Scenario:
    """Draw the scenario of a seed."""
    chance = Random(seed)
    more = Random(f"more {seed}")  # for later parameters, so that older seeds stay the same
    messages = chance.randint(5, 60)
    mode = chance.choice(list(Mode))
    delivery = chance.choice([Delivery.AT_LEAST_ONCE] * 3 + [Delivery.AT_MOST_ONCE])
    is_calm = chance.random() < 0.25
    return Scenario(
        seed=seed,
        config=_config(chance, more, mode, delivery),
        messages=messages,
        keys=chance.choice([0, 1, 3, 8]),
        processes=1 if is_calm else chance.randint(1, 3),
        consumers=1 if mode is Mode.EXCLUSIVE else chance.randint(1, 3),
        crashes=0 if is_calm else chance.randint(0, 5),
        freezes=0 if is_calm else chance.choice([0, 0, 1, 2]),
        closes=more.choice([0, 0, 1, 3]),
        commit_crash=0.0 if is_calm else chance.choice([0.0, 0.0, 0.02]),
        failure=chance.choice([0.0, 0.0, 0.1, 0.3]),
        hang=0.0 if is_calm else chance.choice([0.0, 0.0, 0.05]),
        poison=_some(chance, messages),
        killers=frozenset() if is_calm else _some(chance, messages),
    )


def _some(chance: Random, messages: int) -> frozenset[int]:
    if chance.random() < 0.6:
        return frozenset()
    return frozenset(chance.randrange(messages) for _ in range(chance.randint(1, 2)))


def _config(chance: Random, more: Random, mode: Mode, delivery: Delivery) -> SubscriptionConfig:
    retry = RetryTiers(
        max_attempts=chance.randint(1, 4),
        initial_delay=chance.choice([0.0, 0.1, 5.0, 30.0]),
        max_delay=120.0,
        jitter=more.random() < 0.5,
        in_process=chance.choice([1.0, 10.0]),
    )
    return SubscriptionConfig(
        mode=mode,
        delivery=delivery,
        max_in_flight=1 if mode is Mode.EXCLUSIVE else chance.randint(1, 4),
        ack_timeout=chance.choice([2.0, 30.0]),
        rate_limit=chance.choice([None, None, 2.0, 7.0]),
        burst=chance.choice([1, 3]),
        retry=retry,
        on_poison=chance.choice([Poison.DEAD_LETTER, Poison.DEAD_LETTER, Poison.DROP]),
        idempotent=delivery is Delivery.AT_LEAST_ONCE and chance.random() < 0.3,
        fetch_size=chance.choice([1, 4, 20]),
        max_buffered=chance.choice([5, 100]),
        flush_acks=chance.choice([1, 5, 1000]),
        max_ahead=more.choice([6, 15, 10_000]),
        loss_window=more.choice([1, 3, 20]),
    )
