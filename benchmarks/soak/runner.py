"""Runs the processes of a soak, kills one now and then, and notes what can be seen of them."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import monotonic, sleep
from typing import Final, final

from benchmarks.soak.board import MODES, Board, quantile

WORKERS: Final = 3
KEPT: Final = 60
"""Seconds that the journal keeps messages: its file has to stop growing."""

PROBE: Final = 20_000
"""Messages by which the highest rate is measured."""

PATIENCE: Final = 300.0
"""Seconds to wait for what is left when the publisher has ended."""

_PAGE: Final = os.sysconf("SC_PAGE_SIZE")


@dataclass
class Sample:
    """What could be seen at one moment."""

    time: float
    """Seconds since the begin."""
    memory: int
    """Bytes of the largest process."""
    file: int
    """Bytes of the journal with its write-ahead log."""
    lag: int
    """Messages that the slowest mode has still to handle."""
    median: float | None
    """Seconds from before `publish` to the handler, since the sample before."""
    p99: float | None


@dataclass
class Soak:
    """The outcome."""

    rate: float
    """Messages a second that were to be published."""
    highest: float
    """Messages a second that could be published and handled."""
    seconds: float = 0.0
    kills: list[float] = field(default_factory=list[float])
    samples: list[Sample] = field(default_factory=list[Sample])
    acknowledged: int = 0
    lost: dict[str, int] = field(default_factory=dict[str, int])
    repeated: dict[str, int] = field(default_factory=dict[str, int])

    def growth(self, figure: Callable[[Sample], float | None]) -> float:
        """Return the median of the last quarter over that of the second one."""
        values = [value for one in self.samples if (value := figure(one)) is not None]
        quarter = max(len(values) // 4, 1)
        before, after = sorted(values[quarter : 2 * quarter]), sorted(values[-quarter:])
        if not before or not after:
            return 1.0
        return after[len(after) // 2] / max(before[len(before) // 2], 1e-9)

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Soak:
        """Read what `save` has written."""
        found = json.loads(path.read_text(encoding="utf-8"))
        found["samples"] = [Sample(**one) for one in found["samples"]]
        return cls(**found)


@final
class Site:
    """A journal, the board, and the processes that work on it."""

    def __init__(self, folder: Path, capacity: int, *, is_control: bool = False) -> None:
        self.journal = folder / "journal.db"
        self._board_path = folder / "board"
        self._url = f"sqlite:///{self.journal}?max_age={KEPT}"
        self._is_control = is_control
        self.board = Board(self._board_path, capacity, WORKERS + 1)
        self.running: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, process: int, rate: float = 0.0, limit: int = 0) -> None:
        """Start a process; the first one publishes."""
        options: dict[str, object] = {
            "process": process,
            "board": self._board_path,
            "capacity": self.board.capacity,
            "url": self._url,
            "rate": rate,
            "limit": limit or self.board.capacity,
        }
        words = [f"--{name}={value}" for name, value in options.items()]
        command = [sys.executable, "-m", "benchmarks.soak", "--role", *words]
        command += ["--control"] if self._is_control else []
        self.running[process] = subprocess.Popen(command)

    def kill(self, process: int) -> None:
        """End a process at once."""
        self.running[process].send_signal(signal.SIGKILL)
        self.running.pop(process).wait()

    def stop(self, process: int) -> None:
        """Let a process end."""
        self.running[process].send_signal(signal.SIGTERM)
        self.running.pop(process).wait(60)

    def close(self) -> None:
        """End everything."""
        for process in list(self.running):
            self.kill(process)
        self.board.close()

    def check(self) -> None:
        """Raise if a process has ended by itself."""
        for process, one in self.running.items():
            if one.poll() not in (None, 0) or (process and one.poll() is not None):
                message = f"Process {process} of the soak has ended with {one.poll()}."
                raise RuntimeError(message)

    def lag(self) -> int:
        """Return how many messages the slowest mode has still to handle."""
        handled = min(self.board.handled_by(mode) for mode in range(len(MODES)))
        return max(self.board.published - handled, 0)

    def memory(self) -> int:
        """Return the bytes of the largest process."""
        sizes = [0]
        for one in self.running.values():
            path = Path(f"/proc/{one.pid}/statm")
            if one.poll() is None:
                sizes.append(int(path.read_text(encoding="ascii").split()[1]) * _PAGE)
        return max(sizes)

    def size(self) -> int:
        """Return the bytes of the journal."""
        paths = (self.journal, Path(f"{self.journal}-wal"))
        return sum(path.stat().st_size for path in paths if path.exists())

    def until_handled(self, patience: float = PATIENCE) -> None:
        """Wait until nothing that was acknowledged is left, or too long."""
        end = monotonic() + patience
        while self._has_left() and monotonic() < end:
            self.check()
            sleep(0.5)

    def _has_left(self) -> bool:
        return any(self.board.lost(mode) for mode in range(len(MODES)))


@contextmanager
def site(folder: Path, capacity: int, *, is_control: bool = False) -> Generator[Site]:
    """Make the site with its workers, and end them all."""
    made = Site(folder, capacity, is_control=is_control)
    try:
        for process in range(1, WORKERS + 1):
            made.start(process)
        yield made
    finally:
        made.close()


def highest_rate(folder: Path, messages: int = PROBE) -> float:
    """Return how many messages a second are published and handled in every mode."""
    folder.mkdir()
    with site(folder, messages) as made:
        made.start(0, limit=messages)
        while not made.board.published:
            made.check()
            sleep(0.01)
        began = monotonic()
        made.until_handled()
        while made.lag():
            made.check()
            sleep(0.05)
        return messages / (monotonic() - began)


def soak(
    folder: Path,
    seconds: float,
    *,
    rate: float | None = None,
    kill_every: float = 60.0,
    sample_every: float = 5.0,
    is_control: bool = False,
    tell: Callable[[str], object] = lambda line: None,  # noqa: ARG005
) -> Soak:
    """Publish for so many seconds at half the highest rate, and kill a process now and then.

    Args:
        folder: Where the files go.
        seconds: How long.
        rate: Messages a second, instead of half the highest rate.
        kill_every: Seconds between kills.
        sample_every: Seconds between samples.
        is_control: Note messages as acknowledged too early, and kill the publisher only: some
            have to be lost.
        tell: Called with a line for each sample.
    """
    highest = rate * 2 if rate else highest_rate(folder / "probe")
    rate = highest / 2
    tell(f"{highest:,.0f} messages a second can be handled; it runs at {rate:,.0f}.")
    found = Soak(rate, highest)
    place = folder / "soak"
    place.mkdir()
    with site(place, int(rate * (seconds + 60)) + 1000, is_control=is_control) as made:
        made.start(0, rate)
        victims = [0] if is_control else list(range(WORKERS + 1))
        _watch(made, found, seconds, kill_every, sample_every, victims, tell)
        if 0 in made.running:
            made.stop(0)
        made.until_handled(3.0 if is_control else PATIENCE)
        for process in range(1, WORKERS + 1):
            made.stop(process)
        found.acknowledged = made.board.acknowledged_count()
        found.lost = {mode: made.board.lost(number) for number, mode in enumerate(MODES)}
        found.repeated = {mode: made.board.repeated(number) for number, mode in enumerate(MODES)}
    return found


def _watch(
    made: Site,
    found: Soak,
    seconds: float,
    kill_every: float,
    sample_every: float,
    victims: Sequence[int],
    tell: Callable[[str], object],
) -> None:
    while not made.board.published:
        made.check()
        sleep(0.01)
    began, before = monotonic(), made.board.latencies()
    next_sample, next_kill = sample_every, kill_every
    while (now := monotonic() - began) < seconds:
        made.check()
        if now >= next_kill:
            next_kill += kill_every
            victim = random.choice(victims)
            made.kill(victim)
            made.start(victim, found.rate)
            found.kills.append(now)
        if now >= next_sample:
            next_sample += sample_every
            counts = made.board.latencies()
            recent = [new - old for new, old in zip(counts, before, strict=True)]
            before = counts
            sample = Sample(
                time=now,
                memory=made.memory(),
                file=made.size(),
                lag=made.lag(),
                median=quantile(recent, 0.5),
                p99=quantile(recent, 0.99),
            )
            found.samples.append(sample)
            tell(_line(sample, len(found.kills)))
        sleep(min(max(min(next_sample, next_kill, seconds) - (monotonic() - began), 0.0), 1.0))
    found.seconds = monotonic() - began


def _line(sample: Sample, kills: int) -> str:
    def milliseconds(value: float | None) -> str:
        return "-" if value is None else f"{value * 1000:,.1f} ms"

    return (
        f"{sample.time:6.0f} s  {sample.memory / 1e6:6.1f} MB  file {sample.file / 1e6:7.1f} MB  "
        f"lag {sample.lag:7,}  p50 {milliseconds(sample.median)}  "
        f"p99 {milliseconds(sample.p99)}  kills {kills}"
    )
