"""A process that works with a journal until it is killed, and says what was acknowledged.

`python -m tests.integration.journal.worker FILE RUN [early]` writes one line for each
acknowledgement to its standard output, which is a file. With `early` it says so before the
journal does: the control that the check must catch.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import sys
import time
from collections.abc import Callable, Iterable

from msgbus.journal import Cursor, Member, Record, SqliteJournal
from msgbus.journal.operations import Append, Drop, Pass
from msgbus.journal.records import DELAYED
from msgbus.testing.conformance.journal.kit import EVENTS, append, make_record

PRODUCERS = 16
READER = "reader"


def say(*words: object) -> None:
    """One line, written at once: it survives the end of the process."""
    os.write(1, f"{' '.join(map(str, words))}\n".encode())


def record(run: str, producer: int, number: int) -> Record:
    return make_record(number, key=f"{run}.{producer}", message_id=f"{run}.{producer}.{number}")


async def produce(journal: SqliteJournal, run: str, producer: int, *, early: bool) -> None:
    for number in range(1_000_000):
        if early:
            say("appended", f"{run}.{producer}.{number}")
        await append(journal, record(run, producer, number))
        if not early:
            say("appended", f"{run}.{producer}.{number}")


async def delay(journal: SqliteJournal, run: str) -> None:
    """Delay events, and publish every second one."""
    for number in range(1_000_000):
        name = f"{run}.later.{number}"
        event = make_record(number, message_id=name, key="later")
        await journal.commit([Append(event, queue=DELAYED, due=0.0)])
        say("delayed", name)
        if number % 2:
            continue
        for row in await journal.due(DELAYED, time.time(), limit=1):
            assert row.body is not None
            await journal.commit([Drop(row), Append(row.body)])


async def take_over(journal: SqliteJournal, run: str) -> tuple[Member, Cursor]:
    """Take the place of the process that was killed before."""
    for member in await journal.members():
        await journal.end(member)
    member = await journal.join(run, {READER: ""})
    cursor = await journal.acquire(member, READER, 0, EVENTS)
    assert cursor is not None
    return member, cursor


def effects(offsets: Iterable[int]) -> Callable[[sqlite3.Connection], object]:
    values = [(offset,) for offset in offsets]
    return lambda connection: connection.executemany("INSERT INTO effects VALUES (?)", values)


async def consume(journal: SqliteJournal, run: str) -> None:
    """Handle each message by a row in a table, in the transaction that acknowledges it."""
    member, cursor = await take_over(journal, run)
    say("acked", cursor.acked)
    # What may have been in flight before, one after another.
    while claims := await journal.claim(
        member, READER, 1, time.time(), partitions=(0,), alone=True
    ):
        for claim in claims:
            offset = claim.row.offset
            await journal.transact(effects([offset]), [Drop(claim.row)], member=member)
    seen = -1
    while True:
        scan = await journal.read(cursor.fetched, 50, EVENTS)
        if scan.upto == cursor.fetched:
            seen = await journal.changed(seen)
            continue
        fetched = Pass(cursor, cursor.acked, scan.upto)
        await journal.commit([fetched], member)
        acked = Pass(fetched.after, scan.upto, scan.upto)
        handled = [one.offset for one in scan.records if isinstance(one, Record)]
        await journal.transact(effects(handled), [acked], member=member)
        cursor = acked.after
        say("acked", cursor.acked)


async def main(path: str, run: str, *, early: bool) -> None:
    journal = SqliteJournal(path, reserve=0)
    await journal.transact(
        lambda connection: connection.execute("CREATE TABLE IF NOT EXISTS effects (offset)")
    )
    await journal.open(READER, EVENTS, 0)
    async with asyncio.TaskGroup() as tasks:
        for producer in range(PRODUCERS):
            tasks.create_task(produce(journal, run, producer, early=early))
        tasks.create_task(delay(journal, run))
        tasks.create_task(consume(journal, run))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], early="early" in sys.argv))
