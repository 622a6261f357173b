"""Processes on one file that are killed: no enqueued command and no delayed event is lost."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from msgbus import TicketFailedError
from msgbus.bus.durable.tickets import TicketState, queue_of
from msgbus.journal import Record
from tests.counts import ENQUEUE_KILLS
from tests.durable_shop import dead_letters, journal_of
from tests.evidence import Evidence
from tests.integration.durability.worker import ATTEMPTS, Pack, Reminded, make_bus

ROOT = Path(__file__).resolve().parents[3]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240), pytest.mark.asyncio_only("one is enough")]


def command(path: Path, what: str) -> list[str]:
    return [sys.executable, "-m", "tests.integration.durability.worker", str(path), what]


class Running:
    """A process that writes down what it does."""

    def __init__(self, path: Path, what: str, said: Path) -> None:
        self._said = said
        with said.open("ab") as output:
            self.process = subprocess.Popen(command(path, what), cwd=ROOT, stdout=output)

    @property
    def lines(self) -> list[list[str]]:
        # The last line may be cut off.
        text = self._said.read_text().rpartition("\n")[0]
        return [line.split() for line in text.splitlines()]

    def until(self, *words: str, times: int = 1) -> None:
        """Wait until it has said this, so many times."""
        while [line[: len(words)] for line in self.lines].count(list(words)) < times:
            with suppress(subprocess.TimeoutExpired):
                pytest.fail(f"it ended by itself: {self.process.wait(0.02)}, {self.lines}")

    def kill(self) -> None:
        self.process.kill()
        assert self.process.wait() == -signal.SIGKILL


@contextmanager
def running(path: Path, what: str, name: str) -> Generator[Running]:
    one = Running(path, what, path.with_name(f"{name}.txt"))
    try:
        yield one
    finally:
        one.process.kill()
        one.process.wait()


def said(path: Path, what: str) -> Counter[int]:
    """How often each number was said, over all processes of a test."""
    found: Counter[int] = Counter()
    for file in path.parent.glob("*.txt"):
        lines = file.read_text().rpartition("\n")[0].splitlines()
        words = [line.split() for line in lines]
        found.update(int(one[1]) for one in words if one[0] == what)
    return found


def until_said(path: Path, what: str, number: int) -> None:
    """Wait until one of the processes has said this."""
    while not said(path, what)[number]:
        time.sleep(0.02)


async def test_another_process_handles_it_and_its_result_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"

    with running(path, "work", "worker") as worker:
        worker.until("started")
        async with make_bus(str(path)) as bus:
            tickets = [await bus.enqueue(Pack(number=number)) for number in range(20)]
            late = await bus.enqueue(Pack(number=20), delay=0.3)
            results = [await ticket.result(timeout=60) for ticket in tickets]

            assert results == [number * 10 for number in range(20)]
            assert await late.result(timeout=60) == 200

    assert said(path, "ended") == Counter(range(21))


async def test_two_processes_share_the_work_and_do_none_of_it_twice(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"

    with running(path, "work", "one") as one, running(path, "work", "two") as two:
        one.until("started")
        two.until("started")
        async with make_bus(str(path)) as bus:
            tickets = [await bus.enqueue(Pack(number=n, seconds=0.01)) for n in range(60)]
            for number in range(20):
                await bus.publish(Reminded(number=number), delay=0.1)
            assert [await one.result(timeout=60) for one in tickets] == list(range(0, 600, 10))
            for number in range(20):
                until_said(path, "reminded", number)

    assert said(path, "ended") == Counter(range(60))
    assert said(path, "reminded") == Counter(range(20))


async def test_a_command_whose_worker_is_killed_is_done_by_the_next(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    async with make_bus(str(path)) as bus:
        ticket = await bus.enqueue(Pack(number=1, seconds=1.0))
        quick = await bus.enqueue(Pack(number=2))
        with running(path, "work", "first") as first:
            first.until("begun", "1")
            assert await quick.result(timeout=60) == 20
            first.kill()
        assert await ticket.state() is TicketState.PENDING

        with running(path, "work", "second") as second:
            second.until("begun", "1", "1")
            assert await ticket.result(timeout=60) == 10

        assert bus.journal is not None
        assert await bus.journal.count() == {}
    assert said(path, "begun") == Counter({1: 2, 2: 1})
    assert said(path, "ended") == Counter({1: 1, 2: 1})


async def test_a_command_that_kills_its_process_ends_as_a_dead_letter(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    async with make_bus(str(path)) as bus:
        deadly = await bus.enqueue(Pack(number=1, seconds=-1))
        codes: list[int] = []
        while 0 not in codes and len(codes) < 10:
            with running(path, "once", f"run{len(codes)}") as one:
                codes.append(one.process.wait(60))

        # Its first process might have died of another message: that attempt is not counted.
        assert codes == [7] * (1 + ATTEMPTS) + [0]
        assert said(path, "begun") == Counter({1: 1 + ATTEMPTS})
        with pytest.raises(TicketFailedError, match=r"process ended .* 4 times"):
            await deadly.result(timeout=60)
        assert bus.journal is not None
        (letter,) = await dead_letters(bus, queue_of("kill.Pack"))
        assert (letter.record.message_id, letter.row.attempt) == (deadly.message_id, ATTEMPTS)


async def test_delayed_events_outlive_a_kill_and_come_once(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    # Long enough for the first process to be dead, on whatever machine, before any is due:
    # what is handled by a process that dies may be handled again.
    due = datetime.now(UTC) + timedelta(seconds=8)
    async with make_bus(str(path)) as bus:
        for number in range(5):
            await bus.publish(Reminded(number=number), at=due)
        await bus.publish(Reminded(number=9), delay=3600)
        with running(path, "work", "first") as first:
            first.until("started")
            first.kill()
    assert datetime.now(UTC) < due, "too slow: this proves nothing"

    with running(path, "once", "second") as second:
        assert second.process.wait(60) == 0

    assert said(path, "reminded") == Counter(range(5))


@pytest.mark.stress("durability")
async def test_kills_lose_nothing_that_was_acknowledged(tmp_path: Path, evidence: Evidence) -> None:
    path = tmp_path / "shop.db"
    chance = random.Random(5)
    for number in range(ENQUEUE_KILLS):
        with (
            running(path, "deliver", f"deliver{number}") as producer,
            running(path, "work", f"work{number}") as worker,
        ):
            producer.until("delayed")
            worker.until("ended", times=chance.randint(1, 300))
            worker.kill()
            producer.kill()

    with running(path, "once", "last") as last:
        assert last.process.wait(120) == 0

    enqueued, delayed = said(path, "enqueued"), said(path, "delayed")
    ended, reminded = said(path, "ended"), said(path, "reminded")
    assert sum(enqueued.values()) > ENQUEUE_KILLS
    # A producer may be killed between a commit and saying so.
    assert 0 <= sum(ended.values()) - sum(enqueued.values()) <= ENQUEUE_KILLS * (1 + 4)
    assert all(ended[number] >= times for number, times in enqueued.items())
    assert all(reminded[number] >= times for number, times in delayed.items())
    async with make_bus(str(path)) as bus:
        assert bus.journal is not None
        assert await bus.journal.count() == {}
        found = (await journal_of(bus).find_messages(name="kill.Pack", limit=100_000)).records
        stored = [record.message_id for record in found if isinstance(record, Record)]
        results = await bus.journal.results(stored)
        assert len(results) == len(stored) == len(found) >= sum(enqueued.values())
        assert {result.error for result in results} == {None}
    evidence(
        "kill -9 of a producer and a worker at once",
        kills=2 * ENQUEUE_KILLS,
        commands=sum(enqueued.values()),
        delayed=sum(delayed.values()),
        lost=0,
        doubled=sum(ended.values()) - sum(enqueued.values()),
    )
