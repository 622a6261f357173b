"""Processes with durable subscriptions, and what they have done, line by line, until they die.

`python -m tests.integration.subscriptions.worker` reads one job a line, `WHAT FILE RUN OUTPUT`,
and forks a process for each, so that a new one costs no imports. It says the process's id when
it has begun, and its exit code when it has ended.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from time import time
from typing import Final

from msgbus.errors import JournalConflictError
from msgbus.journal import Record, Scheduled, SqliteJournal
from msgbus.journal.operations import Append, Schedule, Unschedule
from msgbus.subscriptions import DurableSubscription, Mode, RetryTiers, SubscriptionConfig
from msgbus.subscriptions.desk import Desk
from msgbus.subscriptions.window import Entry
from msgbus.testing.conformance.journal import make_record

PRODUCERS: Final = 6
FLUSH: Final = 50
AHEAD: Final = 100
"""After each kill, no more than these two together may be handled again."""


def say(*words: object) -> None:
    """One line, written at once: it survives the end of the process."""
    os.write(1, f"{' '.join(map(str, words))}\n".encode())


def config(mode: Mode) -> SubscriptionConfig:
    return SubscriptionConfig(
        mode=mode,
        max_in_flight=1 if mode is Mode.EXCLUSIVE else 4,
        lease_ttl=0.2,
        fetch_size=20,
        max_buffered=AHEAD,
        max_ahead=AHEAD,
        flush_acks=FLUSH,
        flush_interval=0.1,
        # The first pause is kept in memory, the others in the journal.
        retry=RetryTiers(
            max_attempts=8, initial_delay=0.002, exponential_base=10.0, max_delay=0.05,
            in_process=0.01,
        ),
    )  # fmt: skip


def has_to_fail(record: Record, attempt: int) -> bool:
    place = record.json()["number"] % 25
    return (place == 3 and attempt == 1) or (place == 7 and attempt <= 2)


# -- jobs ----------------------------------------------------------------------------------


async def produce(journal: SqliteJournal, run: str, producer: int, *, early: bool = False) -> None:
    key = f"{run}.{producer}"
    for number in range(1_000_000):
        record = make_record(number, key=key, message_id=f"{key}.{number}")
        if early:
            say("appended", record.message_id)
        await journal.append([record])
        if not early:
            say("appended", record.message_id)
        await asyncio.sleep(0.002)


async def schedule(journal: SqliteJournal, run: str) -> None:
    """Messages for later, and whoever sends them when it is time."""
    for number in range(1_000_000):
        name = f"{run}.later.{number}"
        record = make_record(0, message_id=name)
        await journal.commit([Schedule(Scheduled(name, time() + 0.03, record))])
        say("scheduled", name)
        await asyncio.sleep(0.005)
        for due in await journal.due(time()):
            try:
                await journal.commit([Unschedule(due.id, required=True), Append(due.record)])
            except JournalConflictError:
                say("taken", due.id)


async def subscribe(journal: SqliteJournal, mode: Mode) -> DurableSubscription:
    async def deliver(record: Record, attempt: int) -> None:
        if has_to_fail(record, attempt):
            raise ValueError
        epoch = subscription.engine.epoch
        await asyncio.sleep(0)
        say("handled", mode, epoch, record.offset, record.message_id)

    subscription = DurableSubscription(journal, mode, deliver, config(mode))
    return subscription


async def storm(journal: SqliteJournal, run: str, *, early: bool = False) -> None:
    for mode in Mode:
        await (await subscribe(journal, mode)).start()
    say("started")
    async with asyncio.TaskGroup() as tasks:
        for producer in range(PRODUCERS):
            tasks.create_task(produce(journal, run, producer, early=early))
        tasks.create_task(schedule(journal, run))


async def early_storm(journal: SqliteJournal, run: str) -> None:
    """A control: it says that a message is safe before the journal does."""
    await storm(journal, run, early=True)


async def early_ack_storm(journal: SqliteJournal, run: str) -> None:
    """A control: the cursor passes a message when it is handed out."""
    take = Desk.next

    def acked(desk: Desk) -> Entry | None:
        entry = take(desk)
        if entry is not None and not entry.is_retry:
            desk.cursor.done(entry.offset)
        return entry

    setattr(Desk, "next", acked)  # noqa: B010 (a method, on purpose)
    await storm(journal, run)


async def deadly(journal: SqliteJournal, run: str) -> None:
    """Ends when all is done; message 3 ends it at once."""

    async def deliver(record: Record, attempt: int) -> None:
        say("begun", record.json()["number"])
        if record.json()["number"] == 3:
            os._exit(7)

    tiers = RetryTiers(max_attempts=3, initial_delay=0.001)
    settings = config(Mode.SHARED).model_copy(update={"retry": tiers})
    subscription = DurableSubscription(journal, "deadly", deliver, settings)
    await subscription.start()
    await subscription.caught_up(timeout=30)
    await subscription.close()


async def follow(journal: SqliteJournal, run: str) -> None:
    """An exclusive consumer that says when it begins, gains and loses the lease."""

    async def deliver(record: Record, attempt: int) -> None:
        epoch = subscription.engine.epoch
        say("begun", epoch, record.offset)
        await asyncio.sleep(0.002)
        say("handled", epoch, record.offset)

    settings = config(Mode.EXCLUSIVE).model_copy(update={"lease_ttl": 1.0})
    subscription = DurableSubscription(journal, "followed", deliver, settings)
    await subscription.start()
    before = None
    while True:
        standing = subscription.engine.standing
        if standing != before:
            say("standing", standing, subscription.engine.epoch)
            before = standing
        await asyncio.sleep(0.005)


JOBS: Final[dict[str, Callable[[SqliteJournal, str], Awaitable[None]]]] = {
    "storm": storm,
    "early": early_storm,
    "early-ack": early_ack_storm,
    "deadly": deadly,
    "follow": follow,
}


async def work(what: str, path: str, run: str) -> None:
    async with SqliteJournal(path, reserve=0) as journal:
        await JOBS[what](journal, run)


# -- processes -----------------------------------------------------------------------------


def fork(what: str, path: str, run: str, output: str) -> int:
    child = os.fork()
    if child:
        return child
    os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
    code = 1
    try:
        asyncio.run(work(what, path, run))
        code = 0
    finally:
        os._exit(code)


def main() -> None:
    for line in sys.stdin:
        what, *words = line.split()
        if what == "wait":
            _, status = os.waitpid(int(words[0]), 0)
            say(os.waitstatus_to_exitcode(status))
        else:
            say(fork(what, *words))


if __name__ == "__main__":
    main()
