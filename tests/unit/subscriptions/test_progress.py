"""Seek, rate limit, and how far a subscription has come."""

from __future__ import annotations

import anyio
import pytest

from msgbus.errors import SettleTimeoutError
from msgbus.journal.records import State
from msgbus.subscriptions.in_flight import InFlight
from msgbus.subscriptions.progress import caught_up, progress_of
from tests.unit.subscriptions.cluster import Process, Retries, cluster, number_of

MODES = ["exclusive", "key_shared", "shared"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("count", [1, 2])
async def test_a_seek_repeats_what_is_behind_the_offset(mode: str, count: int) -> None:
    async with cluster(mode, count) as them:
        await them.publish(*((number, f"k{number % 3}") for number in range(12)))
        await them.until_handled(*range(12))
        await them.settled()
        await them.processes[0].membership.seek("s", 6)
        await them.until(lambda: len(them.handled) == 18)
        await them.settled()

        assert them.handled == sorted([*range(12), *range(6, 12)])
        assert await them.rows() == []


async def test_a_seek_forward_skips_messages() -> None:
    async with cluster("exclusive") as them:
        loop = them.processes[0].loop
        loop.pause()
        await them.publish(*range(6))
        await them.processes[0].membership.seek("s", 4)
        loop.resume()
        await them.until_handled(4, 5)
        await them.settled()

        assert them.handled == [4, 5]


@pytest.mark.parametrize("keeps_done", [False, True])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("mode", MODES)
async def test_a_seek_meets_a_settlement_that_is_not_written(
    mode: str, count: int, keeps_done: bool
) -> None:
    async def fail_once(process: Process, one: InFlight) -> None:
        if number_of(one) == 3 and len(them.attempts[3]) == 1:
            raise OSError("away")

    retry = Retries(pauses=20.0, in_process=1.0)
    async with cluster(mode, count, retry=retry, keeps_done=keeps_done) as them:
        them.handler = fail_once
        for process in them.processes:
            process.loop.flush = lambda: None  # it waits for the commit of the seek
        await them.publish((1, "a"), (2, "b"), (3, "a"))
        await them.turns()
        for process in them.processes:
            process.loop.flush = process.membership.flush_soon
        await them.processes[-1].membership.seek(them.name, 0)
        await them.until_handled(1, 2, 3)
        await them.publish((4, "a"))
        await them.until_handled(4)
        await them.settled()

        assert await them.is_done(4)
        assert not any(process.loop.state.has_unwritten for process in them.processes)
        assert them.overlaps == []


@pytest.mark.parametrize("offset", [0, 1, 3])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("mode", MODES)
async def test_a_seek_meets_a_retry_that_runs(mode: str, count: int, offset: int) -> None:
    async def fail_then_wait(process: Process, one: InFlight) -> None:
        if number_of(one) == 1 and len(them.attempts[1]) == 1:
            raise OSError("away")
        if number_of(one) == 1 and len(them.attempts[1]) == 2:
            await may_end.wait()

    may_end = anyio.Event()
    retry = Retries(pauses=10.0, in_process=1.0)
    async with cluster(mode, count, retry=retry) as them:
        them.handler = fail_then_wait
        await them.publish((1, "a"), (2, "a"), (3, "b"))
        await them.until(lambda: len(them.attempts[1]) == 2)
        await them.processes[-1].membership.seek(them.name, offset)
        await them.settled()
        may_end.set()
        await them.publish((4, "a"))
        await them.until_handled(1, 4)
        await them.settled()

        assert await them.is_done(4)
        assert await them.rows() == []
        assert them.overlaps == []


async def test_a_message_that_a_seek_repeats_while_it_runs_ends_once() -> None:
    async def wait(process: Process, one: InFlight) -> None:
        await may_end.wait()

    may_end = anyio.Event()
    async with cluster("shared") as them:
        them.handler = wait
        await them.publish(1)
        await them.until(lambda: len(them.attempts[1]) == 1)
        await them.processes[0].membership.seek(them.name, 0)
        await them.until(lambda: len(them.attempts[1]) == 2)
        may_end.set()
        await them.settled()

        assert await them.rows() == []
        await them.publish(2)
        await them.until_handled(2)
        await them.settled()
        assert await them.is_done(2)


@pytest.mark.parametrize("mode", MODES)
async def test_done_means_handled_and_written(mode: str) -> None:
    released = anyio.Event()

    async def wait(process: Process, one: InFlight) -> None:
        await released.wait()

    async with cluster(mode) as them:
        them.handler = wait
        await them.publish((1, "a"), (2, "b"))
        await them.settled()
        before = await them.is_done(2)
        released.set()
        await them.until_handled(1, 2)
        await them.settled()

        assert not before
        assert await them.is_done(2)


async def test_a_message_whose_retry_is_not_due_counts_as_done() -> None:
    async def fail(process: Process, one: InFlight) -> None:
        raise ValueError("not yet")

    async with cluster("shared", retry=Retries(pauses=60.0)) as them:
        them.handler = fail
        await them.publish(1)
        await them.settled()

        progress = await progress_of(them.journal, "s")
        assert await them.is_done(1)
        assert not await them.is_done(1, later=60.0)
        assert (progress.acked, progress.head, progress.rows) == (1, 1, {State.WAITING: 1})


async def test_messages_of_others_do_not_hold_a_subscription_up() -> None:
    async with cluster("key_shared") as them:
        await them.publish((1, "a"))
        await them.until_handled(1)
        await them.settled()

        progress = await progress_of(them.journal, "s")
        assert progress.acked == 0  # three partitions had nothing to write
        assert await them.is_done(1)


async def test_waiting_for_an_offset_ends_with_what_is_missing() -> None:
    async def hang(process: Process, one: InFlight) -> None:
        await anyio.sleep_forever()

    async with cluster("exclusive") as them, anyio.create_task_group() as group:
        them.handler = hang
        await them.publish(1)
        error: SettleTimeoutError | None = None

        async def wait() -> None:
            nonlocal error
            with pytest.raises(SettleTimeoutError) as raised:
                await caught_up(them.journal, them.clock, "s", them.selection, 1, timeout=2.0)
            error = raised.value

        group.start_soon(wait)
        await them.until(lambda: error is not None)

        assert error is not None
        assert "s at offset 0 of 1" in str(error)


async def test_a_rate_limit_spreads_deliveries_over_time() -> None:
    begun: list[float] = []

    async def note(process: Process, one: InFlight) -> None:
        begun.append(them.clock.now())

    async with cluster("shared", rate_limit=10.0, burst=2) as them:
        them.handler = note
        await them.publish(*range(12))
        await them.until_handled(*range(12))

        assert begun[-1] - begun[0] >= 0.9
        assert max(sum(one <= other < one + 0.1 for other in begun) for one in begun) <= 3


@pytest.mark.parametrize("by", [0, 1])
async def test_a_seek_cuts_off_shared_handlers_of_messages_that_come_again(by: int) -> None:
    cancelled: list[int] = []

    async def wait_once(process: Process, one: InFlight) -> None:
        if len(them.attempts[number_of(one)]) > 1:
            return
        try:
            await anyio.sleep_forever()
        except BaseException:
            cancelled.append(number_of(one))
            raise

    async with cluster("shared", 2) as them:
        them.handler = wait_once
        await them.publish(1, by=0)
        await them.until(lambda: len(them.attempts[1]) == 1)
        await them.processes[by].membership.seek(them.name, 0)
        await them.until_handled(1)
        await them.settled()

        assert cancelled == [1]
        assert them.handled == [1]
        assert await them.rows() == []
        assert await them.is_done(1)


@pytest.mark.parametrize("mode", ["exclusive", "key_shared"])
async def test_the_end_of_a_pause_lets_no_parked_key_go(mode: str) -> None:
    async def fail_the_first(process: Process, one: InFlight) -> None:
        if number_of(one) == 1:
            raise ValueError("no")

    async with cluster(mode, parks=True) as them:
        them.handler = fail_the_first
        await them.publish((1, "a"), (2, "a"))
        await them.until(lambda: len(them.attempts[1]) == 3)
        await them.settled()
        loop = them.processes[0].loop

        loop.pause()
        await them.publish((3, "a"))
        loop.resume()
        await them.settled()
        assert them.handled == []

        loop.resume()
        await them.until_handled(2, 3)
        assert [number for _, number in them.processes[0].handled] == [2, 3]
        assert [row.state for row in await them.rows()] == [State.DEAD]
