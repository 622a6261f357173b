"""`Board`: what each process has done, in a file that all of them map and that survives them."""

from __future__ import annotations

import math
import mmap
from pathlib import Path
from typing import Final, final

BUCKETS: Final = 128
PER_OCTAVE: Final = 4
"""Buckets of latency between one power of two microseconds and the next."""

MODES: Final = ("exclusive", "key_shared", "shared")
_NUMBERS: Final = 1 + len(MODES) + BUCKETS
"""Numbers of one process: the next to publish, messages handled by mode, and latencies."""


@final
class Board:
    """One byte for each message and mode, and some numbers for each process.

    A process that is killed leaves what it wrote: the pages belong to the file.

    Args:
        path: The file; made if it is new.
        capacity: Messages there is room for.
        processes: Processes that write; the first one publishes.
    """

    def __init__(self, path: Path, capacity: int, processes: int) -> None:
        self.capacity = capacity
        self.processes = processes
        numbers = 8 * _NUMBERS * processes
        size = numbers + capacity * (1 + len(MODES))
        if not path.exists():
            with path.open("wb") as made:
                made.truncate(size)
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), size)
        self._view = memoryview(self._map)
        self._numbers = self._view[:numbers].cast("Q")
        self._bytes = self._view[numbers:]

    def close(self) -> None:
        """Release the file."""
        self._numbers.release()
        self._bytes.release()
        self._view.release()
        self._map.close()

    # -- the publisher -------------------------------------------------------------------------

    def next_number(self) -> int:
        """Take the number of the next message; none is given twice, whoever is killed."""
        number = self._numbers[0]
        self._numbers[0] = number + 1
        return number

    def acknowledged(self, number: int) -> None:
        """Note that `publish` has returned."""
        self._bytes[number] = 1

    # -- the handlers --------------------------------------------------------------------------

    def handled(self, process: int, mode: int, number: int, latency: float) -> None:
        """Note that a handler has had a message."""
        start = process * _NUMBERS
        place = (mode + 1) * self.capacity + number
        times = self._bytes[place]
        self._bytes[place] = min(times + 1, 255)
        if not times:
            self._numbers[start + 1 + mode] += 1
            bucket = int(math.log2(max(latency * 1e6, 1.0)) * PER_OCTAVE)
            self._numbers[start + 1 + len(MODES) + min(bucket, BUCKETS - 1)] += 1

    # -- the one that watches --------------------------------------------------------------------

    @property
    def published(self) -> int:
        """Messages that were given a number."""
        return int(self._numbers[0])

    def handled_by(self, mode: int) -> int:
        """Return how many messages the handlers of a mode have had."""
        return sum(self._numbers[process * _NUMBERS + 1 + mode] for process in self._all())

    def latencies(self) -> list[int]:
        """Return how many messages took how long, by bucket."""
        first = 1 + len(MODES)
        starts = [process * _NUMBERS + first for process in self._all()]
        return [sum(self._numbers[start + one] for start in starts) for one in range(BUCKETS)]

    def _all(self) -> range:
        return range(self.processes)

    def lost(self, mode: int) -> int:
        """Count messages that were acknowledged and not handled."""
        acknowledged, handled = self._column(0), self._column(mode + 1)
        return sum(1 for one, times in zip(acknowledged, handled, strict=True) if one and not times)

    def repeated(self, mode: int) -> int:
        """Count messages that were handled more than once."""
        return sum(1 for times in self._column(mode + 1) if times > 1)

    def acknowledged_count(self) -> int:
        """Count messages whose `publish` has returned."""
        return self._column(0).count(1)

    def _column(self, number: int) -> bytes:
        return bytes(self._bytes[number * self.capacity :][: self.published])


def quantile(counts: list[int], share: float) -> float | None:
    """Return the latency in seconds that a share of the messages did not exceed."""
    wanted, seen = sum(counts) * share, 0
    for bucket, count in enumerate(counts):
        seen += count
        if count and seen >= wanted:
            return float(2 ** ((bucket + 1) / PER_OCTAVE)) / 1e6
    return None
