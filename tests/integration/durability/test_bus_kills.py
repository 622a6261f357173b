"""kill -9 of a whole bus, again and again: nothing that was acknowledged is lost."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.counts import BUS_KILLS
from tests.evidence import Evidence

pytestmark = [pytest.mark.slow, pytest.mark.stress("durability")]

WORKER = Path(__file__).with_name("kill_worker.py")
ROOT = Path(__file__).parents[3]
HANDLERS = ("exclusive", "shared", "by_key")
KEYS = 5


class Run:
    """One journal, one diary, and the processes that write to them."""

    def __init__(self, folder: Path) -> None:
        self.url = f"sqlite:///{folder / 'run.db'}"
        self.path = folder / "diary"
        self.path.touch()

    def facts(self) -> list[tuple[str, int]]:
        lines = self.path.read_text().splitlines()
        return [(who, int(number)) for who, number in (line.split() for line in lines)]

    def of(self, who: str) -> list[int]:
        return [number for name, number in self.facts() if name == who]

    def _start(self, *options: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(WORKER), self.url, str(self.path), *options]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE)

    def kill_after(self, lines: int, *options: str) -> None:
        """Let it live until so many facts are added, then end it without a word."""
        first = max((number for who, number in self.facts() if who == "acked"), default=-1) + 1
        with self._start("--first", str(first), *options) as process:
            assert process.stdout is not None
            for _ in range(lines):
                assert process.stdout.readline(), "it ended by itself"
            process.send_signal(signal.SIGKILL)

    def finish(self) -> None:
        with self._start("--finish") as process:
            process.communicate(timeout=120)
        assert process.returncode == 0


def lost(run: Run) -> dict[str, list[int]]:
    """Acknowledged events that a handler never handled."""
    acked = set(run.of("acked"))
    missing = {who: sorted(acked - set(run.of(who))) for who in HANDLERS}
    return {who: numbers for who, numbers in missing.items() if numbers}


def first_times(numbers: list[int]) -> list[int]:
    return list(dict.fromkeys(numbers))


def test_nothing_acknowledged_is_lost_whenever_a_bus_is_killed(
    tmp_path: Path, evidence: Evidence
) -> None:
    run = Run(tmp_path)
    chance = random.Random(20)
    for _ in range(BUS_KILLS):
        run.kill_after(chance.randint(20, 1_500))
    before = {who: len(run.of(who)) for who in HANDLERS}
    run.finish()

    assert run.of("acked"), "nothing was published: the test proves nothing"
    assert min(before.values()) > 0, "nothing was handled before a kill: it proves little"
    assert lost(run) == {}
    for who in ("exclusive", "by_key"):
        for key in range(KEYS):
            # Scheduled ones are published when they are due, and so have a place of their own.
            handled = [n for n in run.of(who) if n % KEYS == key and n % 10 != 9]
            assert first_times(handled) == sorted(first_times(handled)), (who, key)
    repeated = {who: len(run.of(who)) - len(set(run.of(who))) for who in HANDLERS}
    # A window, and what was acknowledged in memory since the cursor was last written.
    assert max(repeated.values()) <= BUS_KILLS * 1_100, repeated
    evidence(
        "kill -9 of a bus with a durable handler of each mode",
        kills=BUS_KILLS,
        acknowledged=len(run.of("acked")),
        lost=0,
        doubled=sum(repeated.values()),
        reordered=0,
    )


def test_the_check_finds_what_is_acknowledged_too_early(tmp_path: Path, evidence: Evidence) -> None:
    run = Run(tmp_path)
    for _ in range(3):
        run.kill_after(50, "--ahead", "20")
    run.finish()

    missing = lost(run)
    assert set(missing) == set(HANDLERS)
    evidence("control: acknowledged ahead", kills=3, lost=sum(map(len, missing.values())))
