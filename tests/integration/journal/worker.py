"""A process that works with a journal until it is killed, and says what was acknowledged.

`python -m tests.integration.journal.worker FILE RUN [early]` writes one line for each
acknowledgement to its standard output, which is a file. With `early` it says so before the
journal does: the control that the check must catch.
"""

from __future__ import annotations

import asyncio
import os
import sys

from msgbus.journal import Record, Scheduled, SqliteJournal
from msgbus.journal.operations import (
    Append,
    CreateCursor,
    Mark,
    MoveCursor,
    OpenWindow,
    Schedule,
    Sql,
    Unschedule,
)
from msgbus.testing.conformance.journal import make_record

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
        await journal.append([record(run, producer, number)])
        if not early:
            say("appended", f"{run}.{producer}.{number}")


async def schedule(journal: SqliteJournal, run: str) -> None:
    for number in range(1_000_000):
        name = f"{run}.later.{number}"
        entry = Scheduled(name, 0.0, make_record(number, message_id=name, key="later"))
        await journal.commit([Schedule(entry)])
        say("scheduled", name)
        if number % 2:
            continue
        for due in await journal.due(0.0, limit=1):
            await journal.commit([Unschedule(due.id, required=True), Append(due.record)])


async def consume(journal: SqliteJournal) -> None:
    """Handle each message by a row in a table, in the transaction that moves the cursor."""
    cursor = await journal.cursor(READER)
    assert cursor is not None
    offset = cursor.offset
    while True:
        await journal.wait(offset)
        page = await journal.read(offset + 1, 50)
        await journal.commit([OpenWindow(READER, page[-1].offset)])
        offset = page[-1].offset
        await journal.commit(
            [
                *(Mark(READER, one.message_id, once=True) for one in page),
                *(Sql("INSERT INTO effects VALUES (?)", (one.offset,)) for one in page),
                MoveCursor(READER, offset),
            ]
        )
        say("cursor", offset)


async def main(path: str, run: str, *, early: bool) -> None:
    journal = SqliteJournal(path, reserve=0)
    await journal.commit(
        [Sql("CREATE TABLE IF NOT EXISTS effects (offset)"), CreateCursor(READER, 0)]
    )
    async with asyncio.TaskGroup() as tasks:
        for producer in range(PRODUCERS):
            tasks.create_task(produce(journal, run, producer, early=early))
        tasks.create_task(schedule(journal, run))
        tasks.create_task(consume(journal))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], early="early" in sys.argv))
