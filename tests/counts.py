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
