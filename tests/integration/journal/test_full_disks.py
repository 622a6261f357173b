"""Disks that are full again and again: every write ends, nothing is lost, and work goes on."""

from __future__ import annotations

import time
from pathlib import Path
from random import Random

import anyio
import pytest

from msgbus.errors import JournalFullError
from msgbus.journal import Record, Retention, SqliteJournal
from msgbus.journal.operations import Pass
from msgbus.journal.records import Member
from msgbus.journal.sqlite.reserve import SMALLEST
from msgbus.testing.conformance.journal.kit import (
    EVENTS,
    append,
    cursor_of,
    join,
    make_record,
    read_all,
    take,
)
from tests.counts import FULL_DISKS
from tests.evidence import Evidence
from tests.integration.disk import Disk, small_disk

pytestmark = [
    pytest.mark.slow,
    pytest.mark.stress("journal"),
    pytest.mark.timeout(120),
    pytest.mark.asyncio_only("one is enough"),
]

MEGABYTE = 1024 * 1024
KEPT = 100
RESERVES = (SMALLEST, 4 * MEGABYTE, 2 * MEGABYTE, 8 * MEGABYTE, 3 * MEGABYTE + 1)
BOUND = 10.0
"""Seconds in which a write on a full disk has to end: twice what is promised."""


class Work:
    """Publishes and acknowledges on a disk that gets full, and counts what comes of it."""

    def __init__(self, disk: Disk, seed: int) -> None:
        self._disk = disk
        self.random = Random(seed)
        self.acked: dict[int, Record] = {}
        self.handled = 0
        self.refused = 0
        self.longest = 0.0

    async def begin(self, journal: SqliteJournal) -> None:
        self.journal = self._disk.bound(journal)
        self.member: Member = await join(journal)
        await take(journal, self.member, "orders", EVENTS)

    async def publish(self) -> bool:
        """Append a few messages; tell whether there was room."""
        size = self.random.choice((100, 1_000, 1_000, 10_000))
        number = self.random.choice((1, 10, 50)) if size == 10_000 else self.random.randint(1, 500)
        records = [make_record(n, payload=bytes(size)) for n in range(number)]
        began = time.monotonic()
        try:
            with anyio.fail_after(BOUND):
                offsets = await append(self.journal, *records)
        except JournalFullError:
            self.refused += 1
            return False
        finally:
            self.longest = max(self.longest, time.monotonic() - began)
        for record, offset in zip(records, offsets, strict=True):
            self.acked[offset] = record._replace(offset=offset)
        return True

    async def acknowledge(self) -> bool:
        """Let the subscription pass what there is."""
        head = max(self.acked, default=0)
        cursor = await cursor_of(self.journal, "orders")
        began = time.monotonic()
        try:
            with anyio.fail_after(BOUND):
                await self.journal.commit([Pass(cursor, head, head)], self.member)
        except JournalFullError:
            self.refused += 1
            return False
        finally:
            self.longest = max(self.longest, time.monotonic() - began)
        self.handled = head
        return True

    async def turn(self) -> bool:
        """Acknowledge and publish; tell whether there was room for both."""
        return await self.acknowledge() and await self.publish()

    async def until_refused(self) -> None:
        """Publish until the disk is full of messages that nobody has handled."""
        while await self.publish():
            pass
        await self.publish()

    async def lost(self) -> int:
        """Count messages that were acknowledged, not trimmed, and are not there as they were."""
        found = {record.offset: record for record in await read_all(self.journal)}
        first = await self.journal.first()  # now: retention may go on meanwhile
        assert first <= self.handled + 1, "retention took what nobody had handled"
        return sum(
            found.get(offset) != one for offset, one in self.acked.items() if offset >= first
        )


async def until_it_works(work: Work) -> None:
    """Work on once there is room: at once, or after the pause of a trim that was of no use."""
    end = time.monotonic() + BOUND
    while not await work.turn():
        assert time.monotonic() < end, "there is room, and the journal does not use it"


async def fill_again_and_again(disk: Disk, work: Work) -> None:
    random, journal = work.random, work.journal
    await work.until_refused()  # the journal itself fills the disk
    await until_it_works(work)
    disk.fill()  # others do, and go away again
    for _ in range(random.randint(1, 10)):
        await work.turn()
    await work.until_refused()
    disk.free()
    await until_it_works(work)

    # A read that takes long keeps the log from being moved into the file.
    async with SqliteJournal(journal.path, reserve=0) as reader:
        connection = reader._connection  # pyright: ignore[reportPrivateUsage]
        connection.execute("BEGIN")
        connection.execute("SELECT count(*) FROM msgbus_messages").fetchall()
        for _ in range(random.randint(10, 60)):
            await work.turn()
        if random.random() < 0.5:
            disk.fill()
            await work.turn()
        connection.execute("ROLLBACK")
    disk.free()
    await until_it_works(work)


async def test_any_reserve_gets_a_journal_over_a_full_disk(
    tmp_path: Path, evidence: Evidence
) -> None:
    acked = refused = lost = 0
    longest = 0.0
    for seed in FULL_DISKS:
        reserve = RESERVES[seed % len(RESERVES)]
        with small_disk(tmp_path / f"disk{seed}", (16 + seed % 10) * MEGABYTE) as disk:
            path = disk.folder / "journal.db"
            keep = Retention(max_count=KEPT)
            async with SqliteJournal(path, reserve=reserve, retention=keep) as journal:
                work = Work(disk, seed)
                await work.begin(journal)
                await fill_again_and_again(disk, work)
                lost += await work.lost()
                assert (await journal.verify()).is_sound
            async with SqliteJournal(path, reserve=0) as work.journal:
                lost += await work.lost()
        assert work.refused or not disk.is_real, "the disk was never full"
        acked, refused = acked + len(work.acked), refused + work.refused
        longest = max(longest, work.longest)

    assert lost == 0
    evidence(
        "full disks, with any reserve; each write ends and work goes on",
        disks=len(FULL_DISKS),
        acknowledged=acked,
        refused=refused,
        milliseconds_at_most=round(1_000 * longest),
        lost=lost,
    )


async def test_without_a_reserve_the_disk_stays_full(tmp_path: Path, evidence: Evidence) -> None:
    with small_disk(tmp_path / "disk", 16 * MEGABYTE) as disk:
        path = disk.folder / "journal.db"
        keep = Retention(max_count=KEPT)
        async with SqliteJournal(path, reserve=0, retention=keep) as journal:
            work = Work(disk, 1)
            await work.begin(journal)
            await work.until_refused()
            stuck = 0
            for _ in range(20):
                stuck += not await work.turn()
            lost = await work.lost()

    assert stuck >= 15 or not disk.is_real, "the log had some room left, but not much"
    assert lost == 0
    evidence("control: full disk without a reserve", disks=1, refused=work.refused, lost=lost)
