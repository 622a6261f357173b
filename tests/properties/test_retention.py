"""Random histories of subscriptions and trims: retention never takes what a row needs.

Real subscriptions on one file: in all modes, failing, parking, dead-lettering, dying, seeking and
being replaced, while trims of all policies run between and inside their reads.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest

from msgbus.handlers.delivery import Delivery, Mode
from msgbus.journal.records import State
from msgbus.journal.reports import Retention
from msgbus.journal.sqlite import retention
from msgbus.journal.sqlite.holds import Holds
from msgbus.journal.sqlite.journal import SqliteJournal
from msgbus.resilience.config import RetryConfig
from msgbus.subscriptions import DurableSubscription, SubscriptionTuning
from msgbus.testing.conformance.journal.kit import numbers
from tests.counts import RETENTION_SEEDS
from tests.evidence import Evidence
from tests.stage import Handler, Stage, stage

NEEDING = (State.WAITING, State.CLAIMED, State.PARKED, State.DEAD)
LATER = RetryConfig(max_retries=2, initial_delay=20, max_delay=20, in_process=0, jitter=False)
POLICIES = [
    Retention(max_count=0),
    Retention(max_count=5, hold_count=10),
    Retention(max_count=0, hold_count=8, beyond="skip", warn_for=0),
    Retention(max_age=5, hold_age=30, beyond="skip", warn_for=10),
]


class History:
    """One random history on one file."""

    def __init__(self, s: Stage, seed: int) -> None:
        self.random = Random(seed)
        self.s = s
        self.journal: Any = s.shared
        self.mode = self.random.choice(list(Mode))
        self.delivery = self.random.choice(list(Delivery))
        self.handler = Handler()
        self.subscription: DurableSubscription | None = None
        self.process: Any = None
        self.appended = 0
        self.lost: list[str] = []

    async def run(self, steps: int) -> None:
        await self.serve()
        for _ in range(steps):
            await self.random.choice(
                [self.append, self.append, self.trim, self.trim, self.wait, self.serve, self.stop]
            )()
            await self.check()
        await self.finish()

    async def append(self) -> None:
        for _ in range(self.random.randint(1, 12)):
            number, key = self.appended, str(self.random.randrange(3))
            if self.random.random() < 0.3:
                self.handler.failures[number] = self.random.choice([1, 2, -1])
            if self.random.random() < 0.2:
                self.handler.hangs.add(number)  # until its time is over
            await self.s.append_keyed((number, key))
            self.appended += 1

    async def trim(self) -> None:
        await self.journal.trim(self.random.choice(POLICIES))

    async def wait(self) -> None:
        await self.s.quiet(self.random.choice([0.05, 0.2, 5.0]))

    async def serve(self) -> None:
        if self.subscription is None:
            self.process = self.s.process()
            self.subscription = await self.s.start(
                self.handler,
                mode=self.mode,
                delivery=self.delivery,
                retry=LATER,
                ack_timeout=10.0,
                park_key=self.delivery is Delivery.AT_LEAST_ONCE and self.mode is not Mode.SHARED,
                process=self.process,
                tuning=SubscriptionTuning(buffer=4, partitions=2),
            )

    async def stop(self) -> None:
        if self.subscription is None:
            return
        if self.random.random() < 0.5:
            await self.subscription.close(timeout=0)
        else:
            await self.crash()
        self.subscription = None

    async def crash(self) -> None:
        """End the process at once; others see at once that it is gone."""
        self.process.die()
        await self.process.journal.close()
        for member in await self.journal.members():
            await self.journal.end(member)

    async def check(self) -> None:
        """Every row has its message; what is gone was handled, or counted as skipped."""
        kept = set(numbers((await self.journal.find_messages(limit=10_000)).records))
        for row in await self.journal.find("receipts", tuple(State), limit=10_000):
            record = await self.journal.record(row)
            if row.state is State.DAMAGED:
                self.lost.append(f"message {row.offset} is taken for damaged")
            elif record is not None:
                kept.add(record.json()["number"])
            elif row.state in NEEDING:
                self.lost.append(f"the row {row.offset} ({row.state}) has no message")
        missing = set(range(self.appended)) - set(self.handler.handled) - kept
        skipped = (await self.journal.next_due("receipts")).skipped
        # At most once, a crash loses what was handed out.
        if len(missing) > skipped and self.delivery is Delivery.AT_LEAST_ONCE:
            self.lost.append(f"{sorted(missing)} are missing, {skipped} were skipped")

    async def finish(self) -> None:
        """Let the rest be handled, as far as no letter holds it back."""
        await self.serve()
        for _ in range(6):
            await self.s.quiet(2.0)
            await self.check()
        report = await self.journal.verify()
        self.lost += [str(problem) for problem in (*report.damaged, *report.problems)]


async def history(path: Path, seed: int) -> list[str]:
    async with stage(lambda clock: SqliteJournal(path, clock=clock, reserve=0)) as s:
        made = History(s, seed)
        await made.run(25)
        if made.subscription is not None:
            await made.subscription.close(timeout=0)
        return made.lost


@pytest.mark.stress("journal")
async def test_retention_never_takes_what_a_row_needs(tmp_path: Path, evidence: Evidence) -> None:
    lost = {seed: await history(tmp_path / f"{seed}.db", seed) for seed in range(RETENTION_SEEDS)}

    assert {seed: found for seed, found in lost.items() if found} == {}
    evidence("histories of trims and subscriptions", histories=len(lost), lost=0)


CONTROLS = ["rows", "what is in flight", "what was skipped"]


def break_it(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out a part of what retention looks at."""

    def nothing(*_: object) -> list[object]:
        return []

    if what == "rows":
        query = "SELECT offset FROM msgbus_pending WHERE 0 AND subscription = ? AND ? = ?"
        monkeypatch.setattr(retention, "_NEEDED", query)
    else:
        method = "in_flight" if what == "what is in flight" else "count"
        monkeypatch.setattr(Holds, method, nothing)


@pytest.mark.parametrize("what", CONTROLS)
@pytest.mark.asyncio_only("the control is about the check, not the event loop")
async def test_without_a_part_of_it_the_loss_is_found(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_it(what, monkeypatch)
    for seed in range(60):
        if await history(tmp_path / f"{seed}.db", seed):
            return
    pytest.fail(f"sixty histories do not find that {what} are not kept")
