"""A wall clock that somebody sets: members go by the monotonic one, delayed events wait or come."""

from __future__ import annotations

import pytest

from msgbus.journal import MemoryJournal
from msgbus.journal.operations import Append, Drop
from msgbus.journal.records import DELAYED, State
from msgbus.runtime.clock import VirtualClock
from msgbus.testing.conformance.journal.kit import make_record, numbers, read_all


class JumpingClock(VirtualClock):
    """A wall clock that somebody sets; the monotonic one does not care."""

    offset = 0.0

    def time(self) -> float:
        return super().time() + self.offset


@pytest.mark.parametrize("jump", [3600.0, -3600.0])
async def test_a_jump_of_the_wall_clock_renews_no_member_and_ends_none(jump: float) -> None:
    clock = JumpingClock()
    async with MemoryJournal(clock=clock) as journal:
        seen = await journal.join("process", {}, every=1.0)
        for _ in range(10):
            clock.offset += jump
            assert await journal.members() == [seen]
            await clock.advance(1.0)
            (now,) = await journal.members()
            assert now.renewals == seen.renewals + 1
            assert not await journal.end(seen)
            seen = now


async def publish_due(journal: MemoryJournal, clock: JumpingClock) -> None:
    for row in await journal.due(DELAYED, clock.time()):
        assert row.body is not None
        await journal.commit([Drop(row), Append(row.body)])


@pytest.mark.parametrize("jump", [3600.0, -3600.0])
async def test_a_delayed_event_is_neither_lost_nor_doubled_by_a_jump(jump: float) -> None:
    clock = JumpingClock()
    async with MemoryJournal(clock=clock) as journal:
        due = clock.time() + 10
        await journal.commit([Append(make_record(1), queue=DELAYED, due=due)])
        for _ in range(2):
            clock.offset += jump
            await publish_due(journal, clock)
            jump = -jump
        await clock.advance(11)
        await publish_due(journal, clock)

        assert numbers(await read_all(journal)) == [1]
        assert await journal.find(DELAYED, list(State)) == []
