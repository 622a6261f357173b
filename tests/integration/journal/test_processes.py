"""Several processes on one file: all write, all see it, and one at a time holds a lease."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from msgbus.errors import LeaseLostError
from msgbus.journal import Lease, LeaseWatch, SqliteJournal
from msgbus.journal.operations import CreateCursor, MoveCursor
from msgbus.runtime.clock import SystemClock
from msgbus.testing.conformance.journal import make_record, read_all

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

ROOT = Path(__file__).resolve().parents[3]
COUNT = 200
TTL = 0.5


async def write(path: str, key: str) -> None:
    """Many small appends, each waited for."""
    async with SqliteJournal(path, reserve=0) as journal:
        for number in range(COUNT):
            await journal.append([make_record(number, key=key)])


async def hold(path: str, holder: str) -> None:
    """Hold the lease until killed."""
    journal = SqliteJournal(path, reserve=0)
    lease = await journal.acquire("ship", holder)
    await journal.commit([CreateCursor("ship", 0, lease.epoch)])
    await journal.keep(lease, TTL / 5)
    await journal.wait(1_000_000)


def start(function: Callable[[str, str], Coroutine[Any, Any, None]], *words: str) -> Any:
    code = (
        "import asyncio, sys\n"
        "from tests.integration.journal import test_processes as here\n"
        f"asyncio.run(here.{function.__name__}(*sys.argv[1:]))\n"
    )
    return subprocess.Popen([sys.executable, "-c", code, *words], cwd=ROOT)


async def test_all_processes_write_and_all_is_seen_while_they_do(tmp_path: Path) -> None:
    file = tmp_path / "journal.db"
    async with SqliteJournal(file, reserve=0) as journal:
        writers = [start(write, str(file), f"process{number}") for number in range(3)]
        seen = 0
        while seen < 3 * COUNT:
            seen = await journal.wait(seen)
            await journal.append([make_record(0, key="reader")])
            seen += 1
            if len(await journal.find(key="reader", limit=1_000)) >= COUNT:
                break
        assert [writer.wait() for writer in writers] == [0, 0, 0]

        records = await read_all(journal)
        assert [record.offset for record in records] == list(range(1, len(records) + 1))
        by_key: defaultdict[str | None, list[int]] = defaultdict(list)
        for record in records:
            by_key[record.key].append(record.json()["number"])
        for number in range(3):
            assert by_key[f"process{number}"] == list(range(COUNT))
        assert (await journal.verify()).is_sound


async def until_held(journal: SqliteJournal) -> Lease:
    version = -1
    while True:
        version = await journal.changed(version, timeout=0.05)
        lease = await journal.lease("ship")
        if lease is not None and await journal.cursor("ship") is not None:
            return lease


async def test_a_standby_takes_over_from_a_killed_holder_and_no_sooner(tmp_path: Path) -> None:
    file = tmp_path / "journal.db"
    async with SqliteJournal(file, reserve=0) as journal:
        holder = start(hold, str(file), "first")
        old = await until_held(journal)
        watch = LeaseWatch(SystemClock(), TTL)
        lease, version = old, -1
        for _ in range(30):  # longer than a TTL, with a holder that is alive
            lease = await journal.lease("ship") or lease
            assert watch.observe(lease) is None
            version = await journal.changed(version, timeout=TTL / 10)

        holder.kill()
        assert holder.wait() == -signal.SIGKILL
        taken = lease
        while taken.holder != "second":
            lease = await journal.lease("ship") or lease
            taken = await journal.acquire("ship", "second", seen=watch.observe(lease))
            version = await journal.changed(version, timeout=TTL / 10)

        assert taken.epoch == old.epoch + 1
        with pytest.raises(LeaseLostError):
            await journal.commit([MoveCursor("ship", 0, old.epoch)])
        await journal.commit([MoveCursor("ship", 0, taken.epoch)])
