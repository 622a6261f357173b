"""A subscription holds retention back only as far as configured, and never in silence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from msgbus.errors import JournalOpenError
from msgbus.handlers.delivery import Delivery, Mode
from msgbus.journal import open_journal
from msgbus.journal.operations import Drop, Pass, Put, Remove
from msgbus.journal.records import State
from msgbus.journal.reports import Retention
from msgbus.journal.sqlite.journal import SqliteJournal
from msgbus.resilience.config import RetryConfig
from msgbus.runtime.clock import VirtualClock
from msgbus.subscriptions import DurableSubscription, SubscriptionTuning
from msgbus.subscriptions.figures import PAGE
from msgbus.testing.conformance.journal.kit import (
    EVENTS,
    cursor_of,
    fill,
    join,
    make_row,
    numbers,
    read_all,
    take,
)
from tests.fakes import logged
from tests.stage import Handler, Stage, stage

WARN = Retention(max_count=0, hold_count=10)
SKIP = Retention(max_count=0, hold_count=10, beyond="skip", warn_for=60)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.db"


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def make(path: Path, clock: VirtualClock) -> Callable[..., SqliteJournal]:
    def made(**options: Any) -> SqliteJournal:
        return SqliteJournal(path, clock=clock, reserve=0, **options)

    return made


Make = Callable[..., SqliteJournal]


async def left(journal: SqliteJournal) -> list[int]:
    return numbers((await journal.find_messages(limit=10_000)).records)


# -- the policies ----------------------------------------------------------------------------


async def test_beyond_its_bound_a_subscription_is_warned_of_once_and_keeps_its_messages(
    make: Make, clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with make() as journal:
        await journal.open("mail", EVENTS, 0)
        await fill(journal, 30)
        for _ in range(3):
            report = await journal.trim(WARN)
            assert (report.removed, report.overdue, report.held_back_by) == (
                0,
                ("mail",),
                ("mail",),
            )
            await clock.advance(86_400)

    (entry,) = logged(caplog, "retention_held_back")
    assert (entry["subscription"], entry["offset"], entry["held_upto"]) == ("mail", 0, 20)
    assert entry["is_served"] is False
    for choice in ("serve it", "seek it", "Remove('mail')", "kept until then"):
        assert choice in entry["fix"]


async def test_within_its_bound_nothing_is_said(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    async with make() as journal:
        await journal.open("mail", EVENTS, 0)
        await fill(journal, 10)
        report = await journal.trim(SKIP)

    assert (report.removed, report.overdue, report.held_back_by) == (0, (), ("mail",))
    assert logged(caplog, "retention_held_back") == []


async def test_the_warning_comes_first_and_the_removal_at_a_later_look(
    make: Make, clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with make() as journal:
        await journal.open("mail", EVENTS, 0)
        await fill(journal, 30)
        first = await journal.trim(SKIP)
        await clock.advance(59)
        second = await journal.trim(SKIP)
        assert (first.removed, second.removed, await journal.first()) == (0, 0, 1)
        assert "in 60 s or later" in logged(caplog, "retention_held_back")[0]["fix"]

        await clock.advance(1)
        third = await journal.trim(SKIP)

        assert (third.removed, dict(third.skipped), third.first) == (20, {"mail": 20}, 21)
        assert await left(journal) == list(range(20, 30))
        assert (await journal.next_due("mail")).skipped == 20
        assert (await journal.verify()).is_sound
    (entry,) = logged(caplog, "messages_skipped")
    found = entry["subscription"], entry["messages"], entry["first"], entry["last"]
    assert found == ("mail", 20, 1, 20)
    assert len(logged(caplog, "retention_held_back")) == 1


async def test_also_with_no_time_between_the_first_look_only_warns(make: Make) -> None:
    now = Retention(max_count=0, hold_count=10, beyond="skip", warn_for=0)
    async with make() as journal:
        await journal.open("mail", EVENTS, 0)
        await fill(journal, 30)
        assert [(await journal.trim(now)).removed for _ in range(2)] == [0, 20]


async def test_one_that_falls_behind_again_is_warned_of_again(
    make: Make, clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with make() as journal:
        member = await join(journal)
        cursor = await take(journal, member, "mail", EVENTS)
        await fill(journal, 30)
        await journal.trim(SKIP)
        await journal.commit([Pass(cursor, 30, 30)], member)
        await journal.trim(SKIP)
        await clock.advance(100)
        await fill(journal, 30)
        report = await journal.trim(SKIP)

        assert (report.overdue, dict(report.skipped)) == (("mail",), {})
    assert [one["offset"] for one in logged(caplog, "retention_held_back")] == [0, 30]


async def test_one_that_stays_away_is_warned_of_once_and_stepped_over_each_time(
    make: Make, clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with make() as journal:
        await journal.open("mail", EVENTS, 0)
        await fill(journal, 30)
        await journal.trim(SKIP)
        await clock.advance(60)
        skipped: list[int] = []
        for _ in range(3):
            skipped.append((await journal.trim(SKIP)).skipped.get("mail", 0))
            await fill(journal, 5)
        assert skipped == [20, 5, 5]
        assert (await journal.next_due("mail")).skipped == 30
    assert len(logged(caplog, "retention_held_back")) == 1
    assert [one["messages"] for one in logged(caplog, "messages_skipped")] == [20, 5, 5]


async def test_only_the_subscription_that_is_too_far_behind_is_stepped_over(
    make: Make, clock: VirtualClock
) -> None:
    async with make() as journal:
        member = await join(journal)
        slow = await take(journal, member, "slow", EVENTS)
        await journal.open("away", EVENTS, 0)
        await fill(journal, 30)
        await journal.commit([Pass(slow, 22, 22)], member)
        await journal.trim(SKIP)
        await clock.advance(60)
        report = await journal.trim(SKIP)

        assert (dict(report.skipped), report.overdue) == ({"away": 20}, ("away",))
        assert await left(journal) == list(range(20, 30))


async def test_age_and_size_are_bounds_too(make: Make, clock: VirtualClock) -> None:
    old = Retention(max_age=10, hold_age=100, beyond="skip", warn_for=0)
    large = Retention(max_count=0, hold_bytes=1, beyond="skip", warn_for=0)
    async with make() as journal:
        await journal.open("mail", EVENTS, 0)
        await fill(journal, 5, time=clock.time())
        await clock.advance(95)
        await fill(journal, 5, time=clock.time())
        assert [(await journal.trim(old)).overdue for _ in range(2)] == [(), ()]
        await clock.advance(6)
        reports = [await journal.trim(old) for _ in range(2)]
        assert [report.removed for report in reports] == [0, 5]
        assert reports[1].overdue == ("mail",)
        await journal.commit([Remove("mail")])
        await journal.open("print", EVENTS, 0)
        assert [(await journal.trim(large)).removed for _ in range(2)] == [0, 5]


async def test_a_warning_counts_for_all_processes_and_after_a_restart(
    make: Make, clock: VirtualClock
) -> None:
    async with make() as journal:
        await journal.open("mail", EVENTS, 0)
        await fill(journal, 30)
        await journal.trim(SKIP)
    await clock.advance(60)
    async with make() as one, make() as other:
        assert (await other.trim(Retention(max_count=0))).removed == 0
        assert (await other.trim(WARN)).removed == 0
        assert (await one.trim(SKIP)).removed == 20


async def test_a_journal_trims_itself_in_the_same_way(
    path: Path, clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"sqlite:///{path}?reserve=0&max_count=100&hold_count=500&beyond=skip&warn_for=60"
    async with open_journal(url, clock=clock) as journal:
        assert isinstance(journal, SqliteJournal)
        await journal.open("mail", EVENTS, 0)
        await fill(journal, 1001)
        await fill(journal, 1)
        assert await journal.first() == 1
        await clock.advance(60)
        await fill(journal, 1000)
        while await journal.first() < 1502:
            await fill(journal, 1)
        assert len(logged(caplog, "retention_held_back")) == 1
        while not logged(caplog, "messages_skipped"):
            await fill(journal, 1)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ("max_count=1&beyond=skip", "needs a limit"),
        ("max_count=1&hold_count=2&beyond=drop", "makes no sense"),
        ("max_count=1&hold_count=x", "makes no sense"),
    ],
)
async def test_options_that_make_no_sense_are_refused(path: Path, options: str, text: str) -> None:
    with pytest.raises(JournalOpenError, match=text):
        SqliteJournal(f"sqlite:///{path}?{options}")


def test_a_policy_that_is_unknown_is_refused() -> None:
    with pytest.raises(ValueError, match="Write 'warn' or 'skip'"):
        Retention(hold_count=1, beyond="drop")  # type: ignore[arg-type]


# -- what stays in any case ------------------------------------------------------------------


@pytest.mark.parametrize("state", [State.WAITING, State.PARKED, State.CLAIMED, State.DEAD])
async def test_what_a_row_needs_stays_when_a_subscription_is_stepped_over(
    make: Make, clock: VirtualClock, state: State
) -> None:
    async with make() as journal:
        member = await join(journal)
        cursor = await take(journal, member, "mail", EVENTS)
        await fill(journal, 30)
        owner = member.id if state is State.CLAIMED else None
        rows = [make_row("mail", offset, state, owner=owner) for offset in (3, 4)]
        await journal.commit([*map(Put, rows), Pass(cursor, 4, 5)], member)
        for _ in range(2):
            await journal.trim(SKIP)
            await clock.advance(60)
        report = await journal.trim(SKIP)

        assert await left(journal) == [2, 3, 4, *range(20, 30)]  # 4 is in flight
        assert report.held_back_by == ("mail",)
        await journal.commit([Drop(row) for row in rows], member)
        await journal.trim(SKIP)
        assert await left(journal) == [4, *range(20, 30)]
        assert (await journal.verify()).is_sound


async def test_a_new_owner_gets_what_was_in_flight_and_what_is_left(
    make: Make, clock: VirtualClock
) -> None:
    async with make() as journal:
        member = await join(journal)
        cursor = await take(journal, member, "mail", EVENTS)
        await fill(journal, 30)
        await journal.commit([Pass(cursor, 2, 5)], member)
        await journal.end((await journal.members())[0])
        for _ in range(2):
            await journal.trim(SKIP)
            await clock.advance(60)

        other = await join(journal)
        assert await journal.acquire(other, "mail", 0, EVENTS) is not None
        rows = await journal.find("mail", tuple(State))
        assert [(row.offset, row.state) for row in rows] == [
            (3, State.WAITING),
            (4, State.PARKED),
            (5, State.PARKED),
        ]
        assert numbers(await read_all(journal)) == [2, 3, 4, *range(20, 30)]
        assert (await cursor_of(journal, "mail")).acked == 5


# -- an owner that runs ----------------------------------------------------------------------


def on(path: Path) -> Callable[[VirtualClock], SqliteJournal]:
    return lambda clock: SqliteJournal(path, clock=clock, reserve=0)


async def behind(s: Stage, mode: Mode) -> tuple[DurableSubscription, Handler]:
    """Start a subscription that hangs at its first message, with 200 behind it."""
    handler = Handler()
    handler.hangs = {0}
    await s.append(*range(200))
    tuning = SubscriptionTuning(buffer=4)
    subscription = await s.start(handler, mode=mode, ack_timeout=None, tuning=tuning)
    await s.until(lambda: bool(handler.seen))
    return subscription, handler


@pytest.mark.parametrize("mode", list(Mode))
async def test_an_owner_steps_over_what_is_removed_before_it(
    path: Path, mode: Mode, caplog: pytest.LogCaptureFixture
) -> None:
    async with stage(on(path)) as s:
        subscription, handler = await behind(s, mode)
        journal: Any = s.shared
        await journal.trim(SKIP)
        await s.clock.advance(60)
        report = await journal.trim(SKIP)
        skipped = report.skipped["receipts"]
        assert skipped > 90

        handler.release.set()
        await subscription.caught_up()
        await s.until(lambda: subscription.progress().trimmed == skipped)

        assert set(range(190, 200)) <= set(handler.handled)
        assert len(handler.handled) >= 200 - skipped
        progress = subscription.progress()
        assert (progress.damaged, progress.counts.redelivered, progress.lag) == (0, 0, 0)
        assert logged(caplog, "messages_damaged") == []
        assert (await journal.verify()).is_sound


@pytest.mark.parametrize("is_guarded", [True, False])
@pytest.mark.parametrize("mode", [Mode.EXCLUSIVE, Mode.KEY_SHARED])
async def test_a_page_that_was_read_before_the_trim_is_not_handed_out(
    path: Path, mode: Mode, is_guarded: bool, caplog: pytest.LogCaptureFixture
) -> None:
    retry = RetryConfig(max_retries=1, initial_delay=100, max_delay=100, in_process=0)
    async with stage(on(path)) as s:
        journal: Any = s.shared
        await (await s.start(Handler(), mode=mode)).close()
        await s.append(*range(200))
        await journal.trim(SKIP)
        await s.clock.advance(60)
        process = s.process()
        read, removed = process.journal.read, list[int]()

        async def read_and_trim(*arguments: Any, **options: Any) -> Any:
            scan = await read(*arguments, **options)
            if scan.records and not removed and arguments[1] < PAGE:
                removed.append((await journal.trim(SKIP)).removed)
            return scan if is_guarded else scan._replace(trimmed=1_000_000)

        process.replace("read", read_and_trim)
        handler = Handler()
        handler.failures = dict.fromkeys(range(200), 1)
        subscription = await s.start(handler, process=process, retry=retry, mode=mode)
        await s.until(lambda: bool(removed) and len(handler.seen) >= 1)
        if is_guarded:
            await s.until(lambda: len(handler.handled) == 10, within=2000)
        else:
            await s.until(lambda: bool(logged(caplog, "messages_damaged")), within=2000)

        assert removed == [190]
        if is_guarded:
            assert sorted(handler.handled) == list(range(190, 200))
            assert subscription.progress().trimmed == 190
    assert bool(logged(caplog, "messages_damaged")) is not is_guarded


@pytest.mark.parametrize("mode", list(Mode))
async def test_at_most_once_a_letter_keeps_its_message_though_that_was_trimmed(
    path: Path, mode: Mode
) -> None:
    async with stage(on(path)) as s:
        handler = Handler()
        handler.hangs = {0}
        subscription = await s.start(
            handler,
            mode=mode,
            delivery=Delivery.AT_MOST_ONCE,
            ack_timeout=30.0,
            tuning=SubscriptionTuning(partitions=1),
        )
        await s.append(0)
        await s.until(lambda: bool(handler.seen))
        await s.append(*range(1, 5))
        journal: Any = s.shared
        await s.clock.advance(1)
        await journal.trim(Retention(max_count=0))
        assert 0 not in await left(journal)
        await s.clock.advance(31)
        await s.until(lambda: subscription.progress().counts.dead_lettered == 1)
        await subscription.caught_up()

        (row,) = await journal.find("receipts", (State.DEAD,))
        record = await journal.record(row)
        assert numbers([record]) == [0]
