"""How long taking the next messages needs, the more a subscription has before it."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Final

from benchmarks.durable import new_folder
from benchmarks.rows import Row
from benchmarks.subscriptions import append
from benchmarks.timing import Effort, Measurement, WorkNotDoneError, steady, summarise
from msgbus.journal import SqliteJournal
from msgbus.journal.operations import Pass
from msgbus.journal.records import Order, Selection
from msgbus.testing.conformance.journal.kit import make_record

SHORT: Final = 1_000
PAGE: Final = 100
"""Messages that are taken at once."""

GROUP: Final = 20_000
CLAIMED: Final = Selection(order=Order.NONE, text="claimed")
FETCHED: Final = Selection(text="fetched")


async def fill(journal: SqliteJournal, number: int) -> None:
    for start in range(0, number, GROUP):
        count = min(GROUP, number - start)
        await append(journal, [make_record(place, payload=b"{}") for place in range(count)])
    if await journal.head() != number:
        message = f"{await journal.head()} messages were appended, not {number}."
        raise WorkNotDoneError(message)


async def take(journal: SqliteJournal, turn: int) -> float:
    """Seconds for one claim and one fetch, of two new subscriptions that have everything to do."""
    shared, exclusive = f"shared-{turn}", f"exclusive-{turn}"
    await journal.open(shared, CLAIMED, 0)
    await journal.open(exclusive, FETCHED, 0)
    member = await journal.join("benchmark", {shared: CLAIMED.text, exclusive: FETCHED.text})
    cursor = await journal.acquire(member, exclusive, 0, FETCHED)
    assert cursor is not None
    gc.collect()
    began = time.perf_counter()
    claims = await journal.claim(member, shared, PAGE, time.time(), selection=CLAIMED)
    scan = await journal.read(0, PAGE, FETCHED, [0])
    await journal.commit([Pass(cursor, 0, scan.upto)], member)
    took = time.perf_counter() - began
    if not len(claims) == len(scan.records) == PAGE:
        message = f"{len(claims)} were claimed and {len(scan.records)} fetched, not {PAGE}."
        raise WorkNotDoneError(message)
    await journal.end(member)
    return took / PAGE


async def claim_and_fetch(effort: Effort) -> Measurement:
    with new_folder() as folder:
        short, long = (Path(folder) / f"{name}.db" for name in ("short", "long"))
        async with SqliteJournal(short) as few, SqliteJournal(long) as many:
            await fill(few, SHORT)
            await fill(many, effort.messages)
            pairs: list[tuple[float, float]] = []
            with steady():
                for turn in range(effort.repeats):
                    if turn % 2:
                        second = await take(many, turn)
                        first = await take(few, turn)
                    else:
                        first = await take(few, turn)
                        second = await take(many, turn)
                    pairs.append((first, second))
    return summarise(pairs[1:])


ROWS: Final = (
    Row(
        name="durable.behind",
        title=f"claim and fetch {PAGE}, 1,000,000 behind",
        baseline=f"claim and fetch {PAGE}, {SHORT:,} behind",
        measure=claim_and_fetch,
        budget=1.5,
        aim=1.1,
        heavy=True,
    ),
)
