"""How often each test repeats what it does; all counts of kills, seeds, cuts and rows.

Every test runs with the first number in `make test`, and with the second in `make stress`,
which sets STRESS=1. STRESS=2 doubles the second.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final, TypeVar

T = TypeVar("T")

STRESS: Final = int(os.environ.get("STRESS", "0"))


def count(small: int, published: int) -> int:
    """The number for this run."""
    return published * STRESS if STRESS else small


def seeds(small: int, published: int) -> range:
    """The seeds for this run, from 1 on."""
    return range(1, count(small, published) + 1)


def some(things: Sequence[T], small: int) -> Sequence[T]:
    """All of them in `make stress`, otherwise so many, spread over the whole."""
    return things if STRESS else things[:: max(1, len(things) // small)][:small]


# core, in one process
SESSIONS: Final = count(500, 10_000)
REQUESTS: Final = count(10_000, 100_000)
RACED_REQUESTS: Final = count(1_000, 5_000)
REGISTRY_TURNS: Final = count(500, 5_000)
DISPATCHES_A_THREAD: Final = count(1_250, 12_500)

# the journal's file
JOURNAL_SEEDS: Final = seeds(1, 5)
JOURNAL_KILLS: Final = count(6, 20)  # a seed
POWER_CUTS: Final = count(40, 500)  # dropped and torn, each
FULL_DISKS: Final = seeds(2, 20)
FORKS: Final = count(17, 100)  # on each event loop
FLIPPED_BITS: Final = count(60, 1_000)
CUT_FILES: Final = count(20, 200)
DAMAGED_LOGS: Final = count(25, 300)
FAULT_TURNS: Final = count(1, 2)  # each with another fault at each call; `make test` takes few
STORED_CLASSES: Final = count(100, 10_000)
RETENTION_SEEDS: Final = count(3, 300)

# subscriptions
MEMBER_KILLS: Final = count(3, 50)  # a mode
MEMBER_STOPS: Final = count(1, 125)  # a mode and number of processes: 1,000 in all
POISON_SEEDS: Final = seeds(1, 100)  # a mode
ENGINE_SEEDS: Final = count(2, 200)
DELIVERY_SEEDS: Final = count(50, 10_000)

# a bus with a journal, dead letters
BUS_KILLS: Final = count(4, 60)
ENQUEUE_KILLS: Final = count(3, 20)  # of a producer and a worker
REPLAY_KILLS: Final = count(3, 15)  # in the middle of a replay, and as many at its beginning

# Spark, whose processes are slow to start
CLUSTER_KILLS: Final = seeds(1, 5)
EXPORT_KILLS: Final = count(1, 6)
STREAM_KILLS: Final = count(1, 5)
RANDOM_JOURNALS: Final = seeds(1, 25)
RANDOM_HISTORIES: Final = count(5, 200)

# benchmarks
ROWS: Final = 8  # in `make test`; all of them in `make stress`
