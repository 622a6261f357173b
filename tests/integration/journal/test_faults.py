"""Any one call of SQLite, and any one function of the user, fails: nothing is lost, all goes on.

What must hold after it is in `Scenario`: each caller got a value or an error in time, what was
acknowledged is handled, nothing is half done, the next publish works, and the file is sound.
"""

from __future__ import annotations

from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from msgbus import MessageBus
from msgbus.errors import JournalError
from msgbus.handlers.delivery import Mode, StartAt
from msgbus.journal.records import Record, State
from msgbus.journal.sqlite.journal import SqliteJournal
from msgbus.journal.sqlite.transactions import WriteTransaction
from msgbus.runtime.clock import VirtualClock
from tests.counts import FAULT_TURNS, STRESS, some
from tests.evidence import Evidence
from tests.integration.journal.faults import (
    CALLBACK_FAULTS,
    FAULTS,
    Placed,
    Scenario,
    Signing,
    Trap,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600 if STRESS else 240)]


def make(folder: Path) -> None:
    folder.mkdir()


async def calls_of(folder: Path, *, of_readers: bool) -> list[tuple[str, int]]:
    """What is called in a run without faults, and when: first, second, in the middle and last."""
    make(folder)
    trap = Trap(of_readers=of_readers)
    await Scenario(folder, trap).run()
    return [
        (what, at)
        for what, times in sorted(trap.calls.items())
        for at in sorted({1, 2, (times + 1) // 2, times} & set(range(1, times + 1)))
    ]


@pytest.mark.stress("journal")
@pytest.mark.parametrize("of_readers", [False, True], ids=["writer", "readers"])
async def test_any_call_of_sqlite_may_fail(
    of_readers: bool, tmp_path: Path, evidence: Evidence
) -> None:
    calls = await calls_of(tmp_path / "clean", of_readers=of_readers)
    # Only the main thread is ever interrupted, and that reads nothing.
    faults = [fault for fault in FAULTS if fault != "interrupted" or not of_readers]
    cases = [
        (what, at, faults[(number + turn) % len(faults)])
        for turn in range(FAULT_TURNS)
        for number, (what, at) in enumerate(calls)
    ]
    sprung = 0
    for number, (what, at, fault) in enumerate(some(cases, 4)):
        trap = Trap(what, at, fault, of_readers=of_readers)
        folder = tmp_path / str(number)
        make(folder)
        try:
            await Scenario(folder, trap).run()
        except BaseException as error:
            error.add_note(f"{fault} at call {at} of {what}")
            raise
        sprung += trap.is_sprung
    evidence("one call of SQLite failed, everything done", faults=sprung, lost=0, doubled=0)

    assert sprung > 0


def test_any_call_may_fail_while_a_journal_is_opened(tmp_path: Path) -> None:
    trap = Trap()
    trap.is_armed = True
    SqliteJournal(tmp_path / "clean.db", _connect=trap.connect)._connection.close()  # pyright: ignore[reportPrivateUsage]
    faults = list(FAULTS)
    for number, what in enumerate(some(list(trap.calls), 15)):
        path = tmp_path / f"{number}.db"
        trap = Trap(what, 1, faults[number % len(faults)])
        trap.is_armed = True
        with pytest.raises((JournalError, KeyboardInterrupt)):
            SqliteJournal(path, _connect=trap.connect)
        SqliteJournal(path)._connection.close()  # pyright: ignore[reportPrivateUsage]


async def test_control_a_writer_that_swallows_a_fault_loses_what_it_acknowledges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    committing = WriteTransaction.commit

    def swallow(self: WriteTransaction) -> None:
        try:
            committing(self)
        except Exception:
            self.roll_back()

    monkeypatch.setattr(WriteTransaction, "commit", swallow)
    monkeypatch.setattr("tests.integration.journal.faults.PATIENCE", 3.0)
    with pytest.raises((AssertionError, TimeoutError)):
        await Scenario(tmp_path, Trap("COMMIT", 2, "I/O error")).run()


# -- functions of the user -------------------------------------------------------------------------


@pytest.mark.stress("journal")
async def test_any_function_of_the_user_may_fail(tmp_path: Path, evidence: Evidence) -> None:
    make(tmp_path / "clean")
    clean = Trap()
    await Scenario(tmp_path / "clean", Trap(), clean).run()
    # A codec that refuses to decode says that a message is damaged: see the test below.
    names = sorted(set(clean.calls) - {"codec.decode"})
    assert len(names) == 10
    calls = [(name, at) for at in (1, 2, 3) for name in names if clean.calls[name] >= at]
    kinds = list(CALLBACK_FAULTS)
    cases = [
        (name, at, kinds[(number + turn) % len(kinds)])
        for turn in range(FAULT_TURNS)
        for number, (name, at) in enumerate(calls)
    ]
    sprung = 0
    for number, (name, at, fault) in enumerate(some(cases, 4)):
        folder, trap = tmp_path / str(number), Trap(name, at, fault)
        make(folder)
        try:
            await Scenario(folder, Trap(), trap).run()
        except BaseException as error:
            error.add_note(f"{fault} at call {at} of {name}")
            raise
        sprung += trap.is_sprung
    evidence("one function of the user failed, everything done", faults=sprung, lost=0)

    assert sprung > 0


@pytest.mark.parametrize("fails", ["key", "codec.decode"])
async def test_what_cannot_be_read_is_read_later_or_shown(fails: str, tmp_path: Path) -> None:
    """A key function that fails is asked again; what a codec refuses is set aside as damaged."""
    trap = Trap(fails, 1, "ValueError")
    path = tmp_path / "shop.db"
    async with SqliteJournal(path, codec=Signing(trap)) as journal:
        bus = MessageBus(journal=journal, clock=(clock := VirtualClock()))
        seen: list[int] = []

        async def handle(event: Placed) -> None:
            seen.append(event.number)

        def key(record: Record) -> str | None:
            trap.step("key")
            return record.key

        await bus.publish(Placed(number=1))
        trap.is_armed = True
        bus.subscribe(
            Placed, handle, durable="seen", mode=Mode.KEY_SHARED, key=key, start=StartAt.at(0)
        )
        async with bus:
            await bus.publish(Placed(number=2))
            with anyio.fail_after(30):
                while 2 not in seen:
                    await clock.advance(0.25)
                    await anyio.to_thread.run_sync(int)
            damaged = await journal.find("seen", [State.DAMAGED])

    assert trap.is_sprung
    assert len(seen) + len(damaged) == 2
    assert (damaged == []) is (fails == "key")
