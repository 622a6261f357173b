"""A process that is killed at any moment loses nothing that the journal has acknowledged."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from msgbus.journal import Cursor, Record, SqliteJournal
from msgbus.journal.records import DELAYED
from msgbus.testing.conformance.journal.kit import STATES, cursor_of, read_all
from tests.counts import JOURNAL_KILLS, JOURNAL_SEEDS
from tests.evidence import Evidence
from tests.integration.journal.worker import READER

ROOT = Path(__file__).resolve().parents[3]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.stress("journal"),
    pytest.mark.timeout(240),
    pytest.mark.asyncio_only("one is enough"),
]


@dataclass
class Findings:
    """What many kills have led to, counted."""

    acked: int = 0
    lost: int = 0
    faults: list[str] = field(default_factory=list[str])


def run_and_kill(path: Path, run: str, delay: float, *, early: bool) -> list[list[str]]:
    """Let a worker work for a moment, kill it, and give the lines it managed to write."""
    said = path.with_name(f"{run}.txt")
    command = [sys.executable, "-m", "tests.integration.journal.worker", str(path), run]
    with said.open("wb") as output:
        worker = subprocess.Popen([*command, *["early"] * early], cwd=ROOT, stdout=output)
        try:
            while said.stat().st_size == 0:  # until it has begun
                with suppress(subprocess.TimeoutExpired):
                    code = worker.wait(0.005)
                    pytest.fail(f"the worker ended by itself: {code}")
            with suppress(subprocess.TimeoutExpired):
                worker.wait(delay)
        finally:
            worker.kill()
            assert worker.wait() == -signal.SIGKILL
    # The last line may be cut off.
    return [line.split() for line in said.read_text().rpartition("\n")[0].splitlines()]


class Check:
    """Holds what is in the journal against what the workers were told."""

    def __init__(self) -> None:
        self.found = Findings()
        self.appended: set[str] = set()
        self.delayed: set[str] = set()
        self.cursor = 0

    def listen(self, lines: list[list[str]]) -> int:
        """Remember what was acknowledged; gives the last cursor that was."""
        last = self.cursor
        for what, value in lines:
            if what == "appended":
                self.appended.add(value)
            elif what == "delayed":
                self.delayed.add(value)
            else:
                last = int(value)
        return last

    async def look(self, journal: SqliteJournal, acked_cursor: int) -> None:
        records = await read_all(journal)
        ids = [record.message_id for record in records]
        rows = await journal.find(DELAYED, STATES, limit=1_000_000)
        waiting = [row.key for row in rows]
        cursor = await cursor_of(journal, READER)
        self.found.acked = len(self.appended) + len(self.delayed)
        self.found.lost = len(self.appended - set(ids))
        self.found.lost += len(self.delayed - set(ids) - set(waiting))
        self.expect(len(ids) == len(set(ids)), "a message is there twice")
        self.expect(not set(ids) & set(waiting), "a delayed event was published and still waits")
        self.check_order(records)
        self.check_cursor(cursor, acked_cursor)
        await self.check_effects(journal, records, cursor)
        report = await journal.verify()
        self.expect(report.is_sound, str(report))

    def check_order(self, records: list[Record]) -> None:
        by_key: defaultdict[str | None, list[int]] = defaultdict(list)
        for record in records:
            if record.key != "later":
                by_key[record.key].append(record.json()["number"])
        for key, numbers in by_key.items():
            self.expect(numbers == list(range(len(numbers))), f"{key} has a gap or is out of order")

    def check_cursor(self, cursor: Cursor, acked: int) -> None:
        self.expect(cursor.acked >= self.cursor, "the cursor went back")
        self.expect(cursor.acked >= acked, "a cursor that was acknowledged is lost")
        self.cursor = cursor.acked

    async def check_effects(
        self, journal: SqliteJournal, records: list[Record], cursor: Cursor
    ) -> None:
        """What is acknowledged has had its effect once; what is in flight or pending none."""
        effects, _ = await journal.transact(
            lambda connection: connection.execute("SELECT offset FROM effects").fetchall()
        )
        pending = {row.offset for row in await journal.find(READER, STATES, limit=1_000_000)}
        acked = [record.offset for record in records if record.offset <= cursor.acked]
        done = [offset for offset in acked if offset not in pending]
        self.expect(sorted(offset for (offset,) in effects) == done, "effects and acks differ")

    def expect(self, condition: bool, fault: str) -> None:
        if not condition:
            self.found.faults.append(fault)


async def kill_often(path: Path, seed: int, kills: int, *, early: bool = False) -> Findings:
    chance = random.Random(seed)
    check = Check()
    for number in range(kills):
        lines = run_and_kill(path, f"run{number}", chance.uniform(0.0, 0.25), early=early)
        acked_cursor = check.listen(lines)
        journal = SqliteJournal(path, reserve=0)
        await check.look(journal, acked_cursor)
        await journal.close()
        if early and check.found.lost:
            break
    return check.found


@pytest.mark.parametrize("seed", JOURNAL_SEEDS)
async def test_nothing_acknowledged_is_lost_by_many_kills(
    tmp_path: Path, seed: int, evidence: Evidence
) -> None:
    found = await kill_often(tmp_path / "journal.db", seed, JOURNAL_KILLS)

    assert found.acked > 50 * JOURNAL_KILLS
    assert found.lost == 0
    assert found.faults == []
    evidence(
        "kill -9 of a process that appends, delays and moves a cursor",
        kills=JOURNAL_KILLS,
        acknowledged=found.acked,
        lost=found.lost,
        doubled=0,
        reordered=0,
    )


async def test_the_check_finds_what_is_acknowledged_too_early(
    tmp_path: Path, evidence: Evidence
) -> None:
    found = await kill_often(tmp_path / "journal.db", seed=4, kills=20, early=True)

    assert found.lost > 0
    evidence("control: acknowledged before the commit", acknowledged=found.acked, lost=found.lost)
