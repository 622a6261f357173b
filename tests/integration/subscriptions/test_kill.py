"""Processes with subscriptions on one file that are killed: nothing acknowledged is lost."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from time import sleep

import pytest

from msgbus.journal import Record, SqliteJournal
from msgbus.resilience import DeadLetterQueue, JournalDeadLetterStore
from msgbus.subscriptions import DurableSubscription, Mode
from msgbus.testing.conformance.journal import make_record
from tests.counts import SUBSCRIPTION_KILLS, SUBSCRIPTION_SEEDS
from tests.evidence import Evidence
from tests.integration.subscriptions.nursery import Child, Nursery, nursery
from tests.integration.subscriptions.worker import AHEAD, FLUSH, config

pytestmark = [
    pytest.mark.slow,
    pytest.mark.stress("subscriptions"),
    pytest.mark.timeout(300),
    pytest.mark.asyncio_only("one is enough"),
]


class Book:
    """What the killed have said, and what the journal says of it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.appended: set[str] = set()
        self.scheduled: set[str] = set()
        self.handled: dict[str, Counter[str]] = {mode: Counter() for mode in Mode}
        self.cursors: dict[str, list[int]] = {mode: [] for mode in Mode}
        self.reordered = 0
        self.repeated = 0
        self.most_repeated = 0
        self.sent_too_early = 0
        """Messages that were sent, and are in the schedule still."""

    def listen(self, lines: list[list[str]]) -> None:
        self.appended |= {words[1] for words in lines if words[0] == "appended"}
        self.scheduled |= {words[1] for words in lines if words[0] == "scheduled"}
        handled = [words[1:] for words in lines if words[0] == "handled"]
        self.reordered += out_of_order(handled)
        for mode in Mode:
            before = self.handled[mode].copy()
            mine = [words[3] for words in handled if words[0] == mode]
            repeated = sum(1 for message_id in mine if before[message_id])
            self.repeated += repeated
            self.most_repeated = max(self.most_repeated, repeated)
            self.handled[mode].update(mine)

    async def look(self) -> None:
        async with SqliteJournal(self.path, reserve=0) as journal:
            for cursor in await journal.cursors():
                self.cursors[cursor.name].append(cursor.offset)

    async def finish(self) -> None:
        """Do what the killed have left."""
        async with SqliteJournal(self.path, reserve=0) as journal:
            for mode in Mode:

                async def deliver(record: Record, attempt: int, mode: Mode = mode) -> None:
                    self.handled[mode][record.message_id] += 1

                subscription = DurableSubscription(journal, mode, deliver, config(mode))
                await subscription.start()
                await subscription.caught_up(timeout=120)
                while await journal.count_scheduled(subscription=mode):
                    await journal.changed(await journal.changed(-1), timeout=0.1)
                await subscription.close()
            for letter in await journal.dead_letters():
                # In hand at so many kills that its tries are used up.
                self.handled[letter.subscription][letter.record.message_id] += 1
            for entry in await journal.due(float("inf"), 1_000_000):
                for mode in Mode:
                    self.sent_too_early += self.handled[mode][entry.id] > 0
                    self.handled[mode][entry.id] += 1

    def lost(self) -> int:
        safe = self.appended | self.scheduled
        return sum(len(safe - set(self.handled[mode])) for mode in Mode)


def out_of_order(handled: list[list[str]]) -> int:
    """Messages that one process handled before an earlier one of the same order."""
    orders: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
    for mode, epoch, offset, message_id in handled:
        if mode == Mode.EXCLUSIVE:
            orders[mode, epoch].append(int(offset))
        elif mode == Mode.KEY_SHARED and ".later." not in message_id:
            orders[mode, epoch, message_id.rpartition(".")[0]].append(int(offset))
    return sum(b <= a for offsets in orders.values() for a, b in pairwise(offsets))


def run_and_kill(home: Nursery, path: Path, what: str, run: str, delay: float) -> Child:
    child = home.start(what, path, run)
    child.until(lambda lines: any(words[0] == "handled" for words in lines))
    sleep(delay)
    child.kill()
    return child


@pytest.mark.parametrize("seed", SUBSCRIPTION_SEEDS)
async def test_many_kills_lose_nothing_and_keep_order_and_cursors(
    tmp_path: Path, seed: int, evidence: Evidence
) -> None:
    book = Book(tmp_path / "journal.db")
    chance = random.Random(seed)
    with nursery() as home:
        for number in range(SUBSCRIPTION_KILLS):
            delay = chance.uniform(0.0, 0.3)
            book.listen(run_and_kill(home, book.path, "storm", f"run{number}", delay).lines())
            await book.look()
    await book.finish()

    assert min(len(book.appended), len(book.scheduled)) > SUBSCRIPTION_KILLS
    assert book.lost() == 0
    assert book.reordered == 0
    assert book.sent_too_early == 0
    assert book.most_repeated <= FLUSH + AHEAD, "window and debounce bound what is repeated"
    for positions in book.cursors.values():
        assert positions == sorted(positions)
        assert positions[-1] > positions[0]
    evidence(
        "kill -9 of a process with a subscription of each mode",
        kills=SUBSCRIPTION_KILLS,
        messages=len(book.appended | book.scheduled),
        lost=book.lost(),
        doubled=book.repeated,
        reordered=book.reordered,
    )


@pytest.mark.parametrize("what", ["early", "early-ack"])
async def test_what_is_acknowledged_too_early_is_found(
    tmp_path: Path, what: str, evidence: Evidence
) -> None:
    book = Book(tmp_path / "journal.db")
    kills = 0
    with nursery() as home:
        while not book.lost() and kills < 20:
            for _ in range(4):
                kills += 1
                book.listen(run_and_kill(home, book.path, what, f"run{kills}", 0.1).lines())
            await book.finish()

    assert book.lost() > 0
    evidence(f"control: {what}", kills=kills, lost=book.lost())


async def test_a_message_that_kills_its_process_does_not_do_so_for_ever(
    tmp_path: Path, evidence: Evidence
) -> None:
    path = tmp_path / "journal.db"
    async with SqliteJournal(path, reserve=0) as journal:
        await journal.append([make_record(number) for number in range(6)])
    codes: list[int] = []
    with nursery() as home:
        while 0 not in codes and len(codes) < 10:
            codes.append(home.start("deadly", path, f"run{len(codes)}").wait())

    async with SqliteJournal(path, reserve=0) as journal:
        letters = await journal.dead_letters("deadly")
        queue = DeadLetterQueue(JournalDeadLetterStore(journal))
        found = await queue.find(handler="deadly")
        cursor = await journal.cursor("deadly")

    # One try of which only the window is known, then three that are counted.
    assert codes == [7, 7, 7, 7, 0]
    assert [letter.record.json()["number"] for letter in letters] == [3]
    assert [(one.payload, one.reason) for one in found] == [('{"number":3}', "retries exhausted")]
    assert cursor is not None
    assert (cursor.offset, cursor.is_clean) == (6, True)
    evidence("a message that kills its process is dead-lettered", kills=4, messages=6, lost=0)
