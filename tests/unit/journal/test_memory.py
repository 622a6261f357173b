"""A journal in memory, where it differs from those that outlive their process."""

from __future__ import annotations

import gc
import weakref
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

import pytest

from msgbus.errors import JournalClosedError, JournalError
from msgbus.journal.memory import MemoryJournal
from msgbus.journal.records import Member
from msgbus.runtime.clock import VirtualClock
from msgbus.testing.conformance.journal.kit import append, make_record


async def read_members(journal: MemoryJournal, clock: VirtualClock) -> list[Member]:
    await clock.advance(10)
    return await journal.members()


async def test_a_member_whose_process_dies_in_its_last_commit_is_not_renewed() -> None:
    clock = VirtualClock()
    journal = MemoryJournal(clock=clock)

    def die() -> None:
        dying.freeze()
        raise JournalError("the process has ended")

    @asynccontextmanager
    async def turn() -> AsyncGenerator[Callable[[], None] | None]:
        yield die if is_ending else None

    is_ending = False
    dying = journal.beside(turn)
    member = await dying.join("process", {}, every=1)
    assert await read_members(journal, clock) == [member._replace(renewals=10)]

    is_ending = True
    with pytest.raises(JournalError, match="the process has ended"):
        await dying.end((await journal.members())[0])

    (left,) = await read_members(journal, clock)
    assert [left] == await read_members(journal, clock)
    assert await journal.end(left)


async def test_a_closed_journal_hears_of_no_lost_member_and_takes_nothing() -> None:
    lost: list[str] = []
    journal = MemoryJournal()
    closing = journal.beside()
    member = await closing.join("process", {}, on_lost=lambda: lost.append("closing"))
    await closing.close()
    assert await journal.end(member)

    with pytest.raises(JournalClosedError):
        await closing.commit([])

    assert lost == []


async def test_a_journal_that_nobody_uses_is_collected() -> None:
    journal = MemoryJournal()
    await append(journal, make_record())
    gone = weakref.ref(journal)

    del journal
    gc.collect()

    assert gone() is None
