"""A process with durable subscriptions, and what it has done, line by line, until it is killed.

`python -m tests.integration.subscriptions.worker FILE RUN storm` publishes and consumes for
ever. With `deadly` instead of `storm` it ends when all is done; message 3 ends it at once.
"""

from __future__ import annotations

import asyncio
import os
import sys

from msgbus.journal import Record, SqliteJournal
from msgbus.subscriptions import DurableSubscription, Mode, RetryTiers, SubscriptionConfig
from msgbus.testing.journal import make_record

PRODUCERS = 6


def say(*words: object) -> None:
    """One line, written at once: it survives the end of the process."""
    os.write(1, f"{' '.join(map(str, words))}\n".encode())


def config(mode: Mode) -> SubscriptionConfig:
    return SubscriptionConfig(
        mode=mode,
        max_in_flight=1 if mode is Mode.EXCLUSIVE else 4,
        lease_ttl=0.3,
        max_buffered=200,
        flush_acks=100,
        retry=RetryTiers(max_attempts=3, initial_delay=0.001),
    )


async def produce(journal: SqliteJournal, run: str, producer: int) -> None:
    key = f"{run}.{producer}"
    for number in range(1_000_000):
        record = make_record(number, key=key, message_id=f"{key}.{number}")
        await journal.append([record])
        say("appended", record.message_id)


async def storm(journal: SqliteJournal, run: str) -> None:
    for mode in Mode:

        async def deliver(record: Record, attempt: int, mode: Mode = mode) -> None:
            if record.json()["number"] % 20 == 3 and attempt == 1:
                raise ValueError
            await asyncio.sleep(0)
            say("handled", mode, record.message_id)

        await DurableSubscription(journal, mode, deliver, config(mode)).start()
    say("started")
    await asyncio.gather(*(produce(journal, run, producer) for producer in range(PRODUCERS)))


async def deadly(journal: SqliteJournal, run: str) -> None:
    async def deliver(record: Record, attempt: int) -> None:
        say("begun", record.json()["number"])
        if record.json()["number"] == 3:
            os._exit(7)

    subscription = DurableSubscription(journal, "deadly", deliver, config(Mode.SHARED))
    await subscription.start()
    await subscription.caught_up(timeout=30)
    await subscription.close()


async def main(path: str, run: str, what: str) -> None:
    async with SqliteJournal(path, reserve=0) as journal:
        await (storm if what == "storm" else deadly)(journal, run)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:4]))
