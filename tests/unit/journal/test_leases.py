"""When a standby takes a lease over: by its own monotonic clock, whatever the time of day."""

from __future__ import annotations

import pytest

from msgbus.journal import Lease, LeaseWatch, MemoryJournal, Scheduled
from msgbus.journal.operations import Append, Schedule, Unschedule
from msgbus.runtime.clock import VirtualClock
from msgbus.testing.conformance.journal import make_record

HELD = Lease("receipts", "a", 1, 0)


async def test_a_lease_that_stands_still_for_a_ttl_is_given_up_for_lost() -> None:
    clock = VirtualClock()
    watch = LeaseWatch(clock, ttl=5.0)

    assert watch.observe(HELD) is None
    await clock.advance(4.9)
    assert watch.observe(HELD) is None
    await clock.advance(0.1)
    assert watch.observe(HELD) == HELD


async def test_every_renewal_begins_the_time_anew() -> None:
    clock = VirtualClock()
    watch = LeaseWatch(clock, ttl=5.0)
    for renewals in range(10):
        assert watch.observe(HELD._replace(renewals=renewals)) is None
        await clock.advance(4.0)
        assert watch.observe(HELD._replace(renewals=renewals)) is None


class JumpingClock(VirtualClock):
    """A wall clock that somebody sets; the monotonic one does not care."""

    offset = 0.0

    def time(self) -> float:
        return super().time() + self.offset


@pytest.mark.parametrize("jump", [3600.0, -3600.0])
async def test_a_jump_of_the_wall_clock_moves_no_lease(jump: float) -> None:
    clock = JumpingClock()
    async with MemoryJournal(clock=clock) as journal:
        watch = LeaseWatch(clock, ttl=5.0)
        lease = await journal.acquire("receipts", "a")
        await journal.keep(lease, 1.0)
        for _ in range(10):
            await clock.advance(1.0)
            clock.offset += jump
            now = await journal.lease("receipts")
            assert now is not None
            assert watch.observe(now) is None


async def test_a_holder_that_has_gone_is_followed_after_one_ttl() -> None:
    clock = VirtualClock()
    async with MemoryJournal(clock=clock) as journal:
        watch = LeaseWatch(clock, ttl=5.0)
        await journal.acquire("receipts", "a")
        taken = None
        started = clock.now()
        while taken is None or taken.holder != "b":
            lease = await journal.lease("receipts")
            assert lease is not None
            taken = await journal.acquire("receipts", "b", seen=watch.observe(lease))
            await clock.advance(0.5)

        assert taken.epoch == 2
        assert clock.now() - started == 5.5


@pytest.mark.parametrize("jump", [3600.0, -3600.0])
async def test_a_scheduled_message_is_neither_lost_nor_doubled_by_a_jump(jump: float) -> None:
    clock = JumpingClock()
    async with MemoryJournal(clock=clock) as journal:
        due = clock.time() + 10
        await journal.commit([Schedule(Scheduled("a", due, make_record(1)))])
        for _ in range(2):
            clock.offset += jump
            for entry in await journal.due(clock.time()):
                await journal.commit([Unschedule(entry.id, required=True), Append(entry.record)])
            jump = -jump
        await clock.advance(11)
        for entry in await journal.due(clock.time()):
            await journal.commit([Unschedule(entry.id, required=True), Append(entry.record)])

        assert len(await journal.read(0)) == 1
        assert await journal.next_due() is None
