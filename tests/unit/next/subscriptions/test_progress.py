"""Seek, rate limit, and how far a subscription has come."""

from __future__ import annotations

import anyio
import pytest

from msgbus._next.journal.records import State
from msgbus._next.subscriptions.in_flight import InFlight
from msgbus._next.subscriptions.progress import caught_up, is_done, progress_of
from msgbus.errors import SettleTimeoutError
from tests.unit.next.subscriptions.cluster import Process, Retries, cluster

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


@pytest.mark.parametrize("mode", MODES)
async def test_done_means_handled_and_written(mode: str) -> None:
    released = anyio.Event()

    async def wait(process: Process, one: InFlight) -> None:
        await released.wait()

    async with cluster(mode) as them:
        them.handler = wait
        await them.publish((1, "a"), (2, "b"))
        await them.settled()
        before = await is_done(them.journal, "s", them.selection, 2)
        released.set()
        await them.until_handled(1, 2)
        await them.settled()

        assert not before
        assert await is_done(them.journal, "s", them.selection, 2)


async def test_a_message_that_waits_for_a_retry_is_not_done() -> None:
    async def fail(process: Process, one: InFlight) -> None:
        raise ValueError("not yet")

    async with cluster("shared", retry=Retries(pauses=60.0)) as them:
        them.handler = fail
        await them.publish(1)
        await them.settled()

        progress = await progress_of(them.journal, "s")
        assert not await is_done(them.journal, "s", them.selection, 1)
        assert (progress.acked, progress.head, progress.rows) == (1, 1, {State.WAITING: 1})


async def test_messages_of_others_do_not_hold_a_subscription_up() -> None:
    async with cluster("key_shared") as them:
        await them.publish((1, "a"))
        await them.until_handled(1)
        await them.settled()

        progress = await progress_of(them.journal, "s")
        assert progress.acked == 0  # three partitions had nothing to write
        assert await is_done(them.journal, "s", them.selection, 1)


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
