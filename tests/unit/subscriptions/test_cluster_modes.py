"""Every mode: what is published is handled once, in its order, and nothing is left over."""

from __future__ import annotations

import anyio
import pytest

from msgbus.journal.operations import Seek
from msgbus.journal.records import State
from msgbus.subscriptions.in_flight import InFlight
from tests.unit.subscriptions.cluster import Process, Retries, cluster, number_of

MODES = ["exclusive", "key_shared", "shared", "queue"]
LOG_MODES = MODES[:3]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("count", [1, 3])
async def test_what_is_published_is_handled_once(mode: str, count: int) -> None:
    async with cluster(mode, count) as them:
        await them.publish(*((number, f"k{number % 5}") for number in range(60)))
        await them.until_handled(*range(60))
        await them.settled()

        assert them.handled == list(range(60))
        assert await them.rows() == []
        assert them.overlaps == []


@pytest.mark.parametrize("mode", LOG_MODES)
async def test_what_was_published_before_the_start_is_handled(mode: str) -> None:
    async with cluster(mode, 0) as them:
        await them.publish(*range(300), by=None)
        await them.start(1)
        await them.until_handled(*range(300))
        await them.settled()

        assert them.handled == list(range(300))


@pytest.mark.parametrize("mode", MODES)
async def test_a_message_of_another_process_is_noticed(mode: str) -> None:
    async with cluster(mode) as them:
        await them.publish(1, by=None)
        await them.until_handled(1)

        assert them.handled == [1]


async def test_exclusive_keeps_the_order_of_the_log() -> None:
    async with cluster("exclusive") as them:
        await them.publish(*range(50), by=None)
        await them.publish(*range(50, 100))
        await them.until_handled(*range(100))

        assert them.processes[0].numbers == list(range(100))


async def test_exclusive_is_handled_by_one_process() -> None:
    async with cluster("exclusive", 3) as them:
        await them.publish(*range(20))
        await them.until_handled(*range(20))

        assert sorted(len(one.handled) for one in them.processes) == [0, 0, 20]


async def test_key_shared_keeps_the_order_of_each_key_across_processes() -> None:
    async with cluster("key_shared", 3) as them:
        await them.until(lambda: all(one.loop.state.owned for one in them.processes))
        await them.publish(*((number, f"k{number % 7}") for number in range(140)))
        await them.until_handled(*range(140))

        for key in range(7):
            orders = [
                [number for one, number in process.handled if one == f"k{key}"]
                for process in them.processes
            ]
            assert sorted(orders) == [[], [], list(range(key, 140, 7))]
        assert sum(1 for one in them.processes if one.handled) > 1


async def test_shared_is_split_between_processes() -> None:
    async def wait(process: Process, one: InFlight) -> None:
        await them.clock.sleep(0.01)

    async with cluster("shared", 3, max_in_flight=2) as them:
        them.handler = wait
        await them.until(lambda: all(one.loop.state.others == 2 for one in them.processes))
        await them.publish(*range(90), by=None)
        await them.until_handled(*range(90))

        assert them.handled == list(range(90))
        assert all(len(one.handled) >= 10 for one in them.processes)


async def test_a_process_that_joins_gets_what_has_not_begun_elsewhere() -> None:
    async def wait(process: Process, one: InFlight) -> None:
        await them.clock.sleep(1.0)

    async with cluster("shared", 1, max_in_flight=2) as them:
        them.handler = wait
        await them.publish(*range(12))
        await them.start(1)
        await them.until_handled(*range(12))

        assert them.handled == list(range(12))
        assert len(them.processes[1].handled) >= 4


@pytest.mark.parametrize("mode", MODES)
async def test_no_more_run_at_once_than_max_in_flight(mode: str) -> None:
    running, most = 0, 0

    async def count(process: Process, one: InFlight) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await them.clock.sleep(0.01)
        running -= 1

    async with cluster(mode, max_in_flight=3) as them:
        them.handler = count
        await them.publish(*((number, f"k{number}") for number in range(40)))
        await them.until_handled(*range(40))

        assert most == 3


@pytest.mark.parametrize("mode", LOG_MODES)
async def test_a_stop_leaves_no_doubt_and_the_next_start_goes_on(mode: str) -> None:
    async with cluster(mode) as them:
        await them.publish(*range(10))
        await them.until_handled(*range(10))
        assert await them.processes[0].membership.stop(1.0) == 0
        await them.publish(10, 11, by=None)
        await them.start(1)
        await them.until_handled(10, 11)
        await them.settled()

        assert them.handled == list(range(12))
        assert sorted(them.processes[1].numbers) == [10, 11]
        assert await them.rows() == []


async def test_at_most_once_is_passed_before_it_is_handled() -> None:
    began = anyio.Event()

    async def hang(process: Process, one: InFlight) -> None:
        began.set()
        await anyio.sleep_forever()

    async with cluster("exclusive", at_most_once=True) as them:
        them.handler = hang
        await them.publish(1)
        await them.until(began.is_set)
        (cursor,) = await them.journal.cursors("s")
        await them.kill(them.processes[0])
        await them.start(1)
        await them.settled()
        await them.clock.advance(20.0)
        await them.settled()

        assert cursor.acked == 1
        assert them.handled == []
        assert them.attempts == {1: [1]}
        assert await them.rows() == []


async def test_a_paused_subscription_begins_nothing() -> None:
    async with cluster("shared") as them:
        loop = them.processes[0].loop
        loop.pause()
        await them.publish(1, 2)
        await them.settled()
        assert them.handled == []

        loop.resume()
        await them.until_handled(1, 2)

        assert them.handled == [1, 2]


@pytest.mark.parametrize("mode", ["exclusive", "key_shared"])
async def test_an_acknowledgement_in_the_handlers_own_commit_counts(mode: str) -> None:
    async def acknowledge(process: Process, one: InFlight) -> None:
        await process.journal.commit(one.acknowledgement(them.clock.time()), one.member)
        process.loop.state.acknowledged_in_commit(one)

    async with cluster(mode) as them:
        them.handler = acknowledge
        await them.publish(*range(5))
        await them.until_handled(*range(5))
        await them.settled()

        assert them.handled == list(range(5))
        assert await them.rows(State.DONE) == []


async def test_numbers_of_attempts_are_given_to_the_handler() -> None:
    async def fail(process: Process, one: InFlight) -> None:
        if number_of(one) == 2 and one.attempt < 3:
            raise ValueError("not yet")

    async with cluster("exclusive", retry=Retries(pauses=0.5)) as them:
        them.handler = fail
        await them.publish(1, 2, 3)
        await them.until_handled(1, 2, 3)

        assert them.attempts == {1: [1], 2: [1, 2, 3], 3: [1]}
        assert them.processes[0].numbers == [1, 2, 3]


@pytest.mark.parametrize("mode", LOG_MODES)
async def test_an_idempotent_subscription_repeats_nothing_after_a_seek(mode: str) -> None:
    async with cluster(mode, keeps_done=True) as them:
        await them.publish(*((number, f"k{number % 3}") for number in range(30)))
        await them.until_handled(*range(30))
        await them.settled()
        assert len(await them.rows(State.KEPT)) == 30

        await them.journal.commit([Seek("s", 10)])
        await them.publish((30, "k0"))
        await them.until_handled(30)
        await them.settled()

        assert them.handled == list(range(31))
