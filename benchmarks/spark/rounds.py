"""Timing of frames: each round makes its plan anew, and throws every row away only at the end.

A frame that is collected twice reuses its shuffle, and a count on top lets Spark leave out what
the count does not need. So rows go to the sink `noop`, which takes all of them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from pyspark.sql import DataFrame


@final
@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of some rounds."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def drain(frame: DataFrame) -> None:
    frame.write.format("noop").mode("overwrite").save()


def timed(work: Callable[[], object], rounds: int, *, warm: bool = True) -> Timing:
    """Rounds of a piece of work, behind one that does not count."""
    if warm:
        work()
    found: list[float] = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return Timing(tuple(found))


def by_turns(
    works: dict[str, Callable[[], object]], rounds: int, *, warm: bool = True
) -> dict[str, Timing]:
    """Rounds of several, by turns, so that a slow minute of the machine hits all of them."""
    if warm:
        for work in works.values():
            work()
    found: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            began = time.perf_counter()
            work()
            found[name].append(time.perf_counter() - began)
    return {name: Timing(tuple(seconds)) for name, seconds in found.items()}
