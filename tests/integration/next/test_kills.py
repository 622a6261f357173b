"""Processes that are killed and stopped: nothing is lost, doubled or reordered."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import anyio
import pytest
from uuid_utils import uuid7

from msgbus._next.journal.operations import Append
from msgbus._next.journal.records import Kind, Record, Selection, State
from msgbus._next.journal.sqlite.journal import SqliteJournal
from tests.counts import DELIVERY_KILLS, DELIVERY_STOPS
from tests.evidence import Evidence
from tests.integration.next.worker import QUEUE

MODES = ["exclusive", "key_shared", "shared", "queue"]
KEYS = 5


class Workers:
    """Three processes on one journal; each that is killed is replaced."""

    def __init__(self, path: Path, mode: str, *, fenced: bool = True) -> None:
        self._command = [sys.executable, "-m", "tests.integration.next.worker", str(path), mode]
        self._command.append("fenced" if fenced else "unfenced")
        self.running = [self._start() for _ in range(3)]

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self._command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)

    def wait_until_started(self) -> None:
        for process in self.running:
            assert process.stdout is not None
            assert process.stdout.readline() == b"started\n"

    def kill_one(self) -> None:
        victim = random.randrange(len(self.running))
        self._end(self.running[victim])
        self.running[victim] = self._start()

    @staticmethod
    def _end(process: subprocess.Popen[bytes]) -> None:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()

    def end(self) -> None:
        for process in self.running:
            self._end(process)


def make_record(number: int, mode: str) -> Record:
    message_id = str(uuid7())
    kind = Kind.COMMAND if mode == "queue" else Kind.EVENT
    key = f"k{number % KEYS}"
    return Record(
        message_id,
        "Message",
        1,
        "message",
        key,
        kind,
        0.0,
        message_id,
        None,
        message_id,
        0,
        None,
        {},
        b"%d" % number,
    )


async def publish(journal: SqliteJournal, mode: str, numbers: range) -> None:
    for number in numbers:
        queue = QUEUE if mode == "queue" else None
        await journal.commit([Append(make_record(number, mode), queue)])


async def effects_of(journal: SqliteJournal) -> list[int]:
    """Return the numbers of messages in the order of their effects."""
    selection, after, found = Selection(kind=Kind.CONTROL), 0, list[int]()
    while True:
        scan = await journal.read(after, 1000, selection)
        found += [int(one.payload) for one in scan.records if isinstance(one, Record)]
        if scan.upto <= after:
            return found
        after = scan.upto


async def until_all_have_effects(journal: SqliteJournal, count: int) -> list[int]:
    version = -1
    with anyio.fail_after(60):
        while len(set(effects := await effects_of(journal))) < count:
            version = await journal.changed(version, 0.5)
    return effects


def disorder(effects: list[int], mode: str) -> int:
    """Count effects that came before that of an earlier message of their order."""
    if mode == "exclusive":
        return sum(later < earlier for earlier, later in pairwise(effects))
    if mode == "key_shared":
        per_key = [[one for one in effects if one % KEYS == key] for key in range(KEYS)]
        return sum(disorder(one, "exclusive") for one in per_key)
    return 0


@pytest.mark.stress("subscriptions")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.asyncio_only("the processes run on asyncio")
async def test_killed_processes_lose_and_repeat_nothing(
    mode: str, tmp_path: Path, evidence: Evidence
) -> None:
    path, chunk = tmp_path / "journal.db", 60
    async with SqliteJournal(path) as journal:
        workers = Workers(path, mode)
        try:
            workers.wait_until_started()
            for kill in range(DELIVERY_KILLS):
                await publish(journal, mode, range(kill * chunk, kill * chunk + chunk))
                workers.kill_one()
            count = DELIVERY_KILLS * chunk
            effects = await until_all_have_effects(journal, count)
        finally:
            workers.end()
        rows = await journal.find(None, [State.DEAD, State.DAMAGED])

    twice = sum(number > 1 for number in Counter(effects).values())
    assert (sorted(set(effects)), twice, disorder(effects, mode), rows) == (
        list(range(count)),
        0,
        0,
        [],
    )
    evidence(
        f"kill -9 of one of three processes, new subscriptions, {mode}",
        kills=DELIVERY_KILLS,
        messages=count,
        lost=0,
        twice=0,
        reordered=0,
    )


@pytest.mark.stress("subscriptions")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.asyncio_only("the processes run on asyncio")
async def test_processes_that_are_stopped_for_longer_than_a_ttl_repeat_no_effect(
    mode: str, tmp_path: Path, evidence: Evidence
) -> None:
    path, chunk = tmp_path / "journal.db", 40
    async with SqliteJournal(path) as journal:
        workers = Workers(path, mode)
        try:
            workers.wait_until_started()
            for stop in range(DELIVERY_STOPS):
                victim = random.choice(workers.running)
                await publish(journal, mode, range(stop * chunk, stop * chunk + chunk // 2))
                victim.send_signal(signal.SIGSTOP)
                await publish(journal, mode, range(stop * chunk + chunk // 2, stop * chunk + chunk))
                # Others take over while it stands still, and go on when it comes back.
                await until_all_have_effects(journal, (stop + 1) * chunk)
                victim.send_signal(signal.SIGCONT)
            count = DELIVERY_STOPS * chunk
            effects = await until_all_have_effects(journal, count)
        finally:
            workers.end()

    twice = sum(number > 1 for number in Counter(effects).values())
    assert (sorted(set(effects)), twice, disorder(effects, mode)) == (list(range(count)), 0, 0)
    evidence(
        f"SIGSTOP beyond the TTL of one of three processes, new subscriptions, {mode}",
        stops=DELIVERY_STOPS,
        messages=count,
        lost=0,
        twice=0,
        reordered=0,
    )


@pytest.mark.asyncio_only("the processes run on asyncio")
async def test_effects_that_are_not_part_of_the_acknowledgement_are_found_twice(
    tmp_path: Path,
) -> None:
    path, count = tmp_path / "journal.db", 0
    async with SqliteJournal(path) as journal:
        workers = Workers(path, "shared", fenced=False)
        try:
            workers.wait_until_started()
            effects: list[int] = []
            while len(effects) == len(set(effects)):
                assert count < 6000
                await publish(journal, "shared", range(count, count + 60))
                count += 60
                workers.kill_one()
                effects = await until_all_have_effects(journal, count)
        finally:
            workers.end()

    assert len(effects) > len(set(effects))
