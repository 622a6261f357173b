"""Processes with subscriptions on one file that are killed: nothing acknowledged is lost."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest

from msgbus.journal import Record, SqliteJournal
from msgbus.resilience import DeadLetterQueue, JournalDeadLetterStore
from msgbus.subscriptions import DurableSubscription, Mode
from msgbus.testing.journal import make_record
from tests.integration.subscriptions.worker import config

ROOT = Path(__file__).resolve().parents[3]
KILLS = 12

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240), pytest.mark.asyncio_only("one is enough")]


def command(path: Path, run: str, what: str) -> list[str]:
    return [
        sys.executable, "-m", "tests.integration.subscriptions.worker", str(path), run, what
    ]  # fmt: skip


def lines_of(said: Path) -> list[list[str]]:
    # The last line may be cut off.
    return [line.split() for line in said.read_text().rpartition("\n")[0].splitlines()]


def run_and_kill(path: Path, run: str, delay: float) -> list[list[str]]:
    said = path.with_name(f"{run}.txt")
    with said.open("wb") as output:
        worker = subprocess.Popen(command(path, run, "storm"), cwd=ROOT, stdout=output)
        try:
            while b"handled" not in said.read_bytes():
                with suppress(subprocess.TimeoutExpired):
                    code = worker.wait(0.01)
                    pytest.fail(f"the worker ended by itself: {code}")
            with suppress(subprocess.TimeoutExpired):
                worker.wait(delay)
        finally:
            worker.kill()
            assert worker.wait() == -signal.SIGKILL
    return lines_of(said)


def check_order(lines: list[list[str]]) -> int:
    """Messages of a key that one process handled before an earlier one of that key."""
    seen: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for what, *words in lines:
        if what == "handled" and words[0] != Mode.SHARED:
            key, _, number = words[1].rpartition(".")
            seen[words[0], key].append(int(number))
    return sum(b <= a for numbers in seen.values() for a, b in pairwise(numbers))


async def finish(path: Path, handled: dict[str, Counter[str]]) -> None:
    """Do what the killed have left; a message that was in hand at three kills is a letter."""
    async with SqliteJournal(path, reserve=0) as journal:
        for mode in Mode:

            async def deliver(record: Record, attempt: int, mode: Mode = mode) -> None:
                handled[mode][record.message_id] += 1

            subscription = DurableSubscription(journal, mode, deliver, config(mode))
            await subscription.start()
            await subscription.caught_up(timeout=60)
            await subscription.close()
        for letter in await journal.dead_letters():
            assert letter.error is not None
            assert "process ended while it was being handled" in letter.error
            handled[letter.subscription][letter.record.message_id] += 1


def run_until_it_ends_well(path: Path) -> list[int]:
    """The exit codes of a process that is started again until it ends by itself."""
    codes: list[int] = []
    while 0 not in codes and len(codes) < 10:
        done = subprocess.run(
            command(path, "deadly", "deadly"), cwd=ROOT, check=False, capture_output=True
        )
        codes.append(done.returncode)
    return codes


async def test_kills_lose_nothing_and_keep_order_and_cursors(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    chance = random.Random(5)
    appended: set[str] = set()
    handled: dict[str, Counter[str]] = {mode: Counter() for mode in Mode}
    cursors: dict[str, list[int]] = {mode: [] for mode in Mode}
    for number in range(KILLS):
        lines = run_and_kill(path, f"run{number}", chance.uniform(0.05, 0.5))
        assert check_order(lines) == 0
        appended |= {words[1] for words in lines if words[0] == "appended"}
        for mode in Mode:
            handled[mode].update(words[2] for words in lines if words[:2] == ["handled", mode])
        async with SqliteJournal(path, reserve=0) as journal:
            for cursor in await journal.cursors():
                cursors[cursor.name].append(cursor.offset)

    await finish(path, handled)

    assert len(appended) > KILLS
    for mode in Mode:
        assert appended - set(handled[mode]) == set()
        again = sum(count - 1 for count in handled[mode].values())
        assert again <= KILLS * (200 + 100), "window and debounce bound what is repeated"
        assert cursors[mode] == sorted(cursors[mode])


async def test_a_message_that_kills_its_process_does_not_do_so_for_ever(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    async with SqliteJournal(path, reserve=0) as journal:
        await journal.append([make_record(number) for number in range(6)])
    codes = run_until_it_ends_well(path)

    async with SqliteJournal(path, reserve=0) as journal:
        letters = await journal.dead_letters("deadly")
        queue = DeadLetterQueue(JournalDeadLetterStore(journal))
        found = await queue.find(handler="deadly")
        cursor = await journal.cursor("deadly")

    # One try of which only the window is known, then three that are counted.
    assert codes == [7, 7, 7, 7, 0]
    assert [letter.record.json()["number"] for letter in letters] == [3]
    assert [(one.payload, one.reason) for one in found] == [('{"number":3}', "retries exhausted")]
    assert cursor is not None
    assert (cursor.offset, cursor.is_clean) == (6, True)
