"""Replay survives kill -9: nothing that was noted as handled runs again, nothing is forgotten."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import anyio
import pytest

from msgbus.resilience import LetterStatus
from msgbus.testing.conformance.dead_letters import Checked
from tests.counts import REPLAY_KILLS
from tests.evidence import Evidence
from tests.integration.letter_worker import queue_of

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

ROOT = Path(__file__).parents[2]
LETTERS = 120

FILES = pytest.mark.parametrize("name", ["letters.db", "journal.db"])


def bury(path: Path, number: int) -> None:
    async def run() -> None:
        async with queue_of(path) as queue, queue:
            for place in range(number):
                queue.add(
                    Checked(number=place), handler="h", error=ValueError("x"), attempts=1,
                    first_attempt=0.0, reason="r",
                )  # fmt: skip

    anyio.run(run)


def statuses(path: Path) -> dict[int, LetterStatus]:
    """Read as they are: opening a queue would take back void claims."""
    found: dict[int, LetterStatus] = {}

    async def run() -> None:
        async with queue_of(path) as queue:
            for letter in await queue.find(status=None):
                assert isinstance(letter.message, Checked)
                found[letter.message.number] = letter.status

    anyio.run(run)
    return found


def effects(log: Path) -> Counter[int]:
    return Counter(int(line) for line in log.read_text().split()) if log.exists() else Counter()


def started(path: Path, log: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.integration.letter_worker", str(path), str(log)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "open\n"
    return process


def ended(process: subprocess.Popen[str]) -> str:
    out, _ = process.communicate(timeout=100)
    return out


@FILES
@pytest.mark.stress("letters")
def test_a_replay_that_is_killed_again_and_again_handles_every_letter(
    name: str, tmp_path: Path, evidence: Evidence
) -> None:
    path, log = tmp_path / name, tmp_path / "effects.log"
    bury(path, LETTERS)
    chance = random.Random(20260302)
    kills = 0
    risked: set[int] = set()  # letters that were in flight at a kill
    for _ in range(REPLAY_KILLS):
        process = started(path, log)
        try:
            process.wait(timeout=chance.uniform(0.0, 0.15))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            kills += 1
        ended(process)

        seen, now = effects(log), statuses(path)
        noted = {number for number, status in now.items() if status is LetterStatus.REPLAYED}
        left = {number for number, status in now.items() if status is LetterStatus.REPLAYING}
        assert len(now) == LETTERS
        assert noted <= set(seen)  # nothing is noted that did not happen
        assert len(left) <= 1  # one at most was in flight
        risked |= left
        assert set(seen) - noted <= risked  # nothing else happened without being noted
        before = {number: seen[number] for number in noted}

        again = started(path, log)
        again.send_signal(signal.SIGKILL)
        ended(again)
        kills += 1
        risked |= {n for n, one in statuses(path).items() if one is LetterStatus.REPLAYING}
        assert {number: effects(log)[number] for number in noted} == before

    last = ended(started(path, log))

    assert int(last) >= 0
    assert set(statuses(path).values()) == {LetterStatus.REPLAYED}
    counts = effects(log)
    assert set(counts) == set(range(LETTERS))
    assert {number for number, times in counts.items() if times > 1} <= risked
    assert sum(counts.values()) - LETTERS <= kills
    assert kills >= REPLAY_KILLS
    evidence(
        "kill -9 of a process that replays dead letters",
        kills=kills,
        letters=LETTERS,
        lost=0,
        doubled=sum(counts.values()) - LETTERS,
    )


@FILES
def test_two_processes_at_once_share_the_letters_and_repeat_none(name: str, tmp_path: Path) -> None:
    path, log = tmp_path / name, tmp_path / "effects.log"
    bury(path, LETTERS)

    first, second = started(path, log), started(path, log)
    succeeded = int(ended(first)) + int(ended(second))

    assert succeeded == LETTERS
    assert effects(log) == Counter(range(LETTERS))
    assert set(statuses(path).values()) == {LetterStatus.REPLAYED}


@FILES
def test_a_process_may_add_while_another_replays(name: str, tmp_path: Path) -> None:
    path, log = tmp_path / name, tmp_path / "effects.log"
    bury(path, LETTERS)

    process = started(path, log)
    bury(path, 50)
    ended(process)

    async def count() -> tuple[int, int]:
        async with queue_of(path) as queue, queue:
            return await queue.count(status=None), await queue.count(status=LetterStatus.REPLAYED)

    total, replayed = anyio.run(count)
    assert total == LETTERS + 50
    assert replayed >= LETTERS
