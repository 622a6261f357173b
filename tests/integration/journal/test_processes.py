"""Several processes on one file: all write, all see it, and one at a time owns a partition."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from msgbus.errors import StaleError
from msgbus.journal import Member, SqliteJournal
from msgbus.journal.operations import Pass
from msgbus.testing.conformance.journal.kit import (
    EVENTS,
    append,
    cursor_of,
    join,
    make_record,
    read_all,
    take,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

ROOT = Path(__file__).resolve().parents[3]
COUNT = 200
RENEWAL = 0.1


async def write(path: str, key: str) -> None:
    """Many small appends, each waited for."""
    async with SqliteJournal(path, reserve=0) as journal:
        for number in range(COUNT):
            await append(journal, make_record(number, key=key))


async def own(path: str, process: str) -> None:
    """Own a partition until killed."""
    journal = SqliteJournal(path, reserve=0)
    member = await journal.join(process, {"ship": ""}, every=RENEWAL)
    await take(journal, member, "ship", EVENTS)
    seen = -1
    while True:
        seen = await journal.changed(seen)


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
        seen, mine = -1, 0
        while mine < COUNT and await journal.head() - mine < 3 * COUNT:
            seen = await journal.changed(seen)
            await append(journal, make_record(mine, key="reader"))
            mine += 1
        assert [writer.wait() for writer in writers] == [0, 0, 0]

        records = await read_all(journal)
        assert [record.offset for record in records] == list(range(1, len(records) + 1))
        by_key: defaultdict[str | None, list[int]] = defaultdict(list)
        for record in records:
            by_key[record.key].append(record.json()["number"])
        for number in range(3):
            assert by_key[f"process{number}"] == list(range(COUNT))
        assert by_key["reader"] == list(range(mine))
        assert (await journal.verify()).is_sound


async def until_owned(journal: SqliteJournal) -> Member:
    seen = -1
    while True:
        seen = await journal.changed(seen, timeout=0.05)
        members = {one.id: one for one in await journal.members()}
        owners = [cursor.owner for cursor in await journal.cursors("ship")]
        if owners and owners[0] is not None:
            return members[owners[0]]


async def test_an_owner_that_lives_is_not_ended_and_one_that_was_killed_is(tmp_path: Path) -> None:
    file = tmp_path / "journal.db"
    async with SqliteJournal(file, reserve=0) as journal:
        owner = start(own, str(file), "first")
        old = seen = await until_owned(journal)
        second = await join(journal)
        renewed, version = 0, -1
        while renewed < 10:  # each time it was renewed since it was looked at
            version = await journal.changed(version, timeout=RENEWAL)
            (now,) = [one for one in await journal.members() if one.id == old.id]
            if now.renewals > seen.renewals:
                assert not await journal.end(seen)
                renewed, seen = renewed + 1, now
        assert await journal.acquire(second, "ship", 0, EVENTS) is None
        before = await cursor_of(journal, "ship")

        owner.kill()
        assert owner.wait() == -signal.SIGKILL
        (last,) = [one for one in await journal.members() if one.id == old.id]
        assert await journal.end(last)
        taken = await journal.acquire(second, "ship", 0, EVENTS)

        assert taken is not None
        assert taken.epoch == before.epoch + 1
        with pytest.raises(StaleError):
            await journal.commit([Pass(before, 0, 0)], old)
        await journal.commit([Pass(taken, 0, 0)], second)
