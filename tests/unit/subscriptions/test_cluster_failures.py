"""Retries, dead letters, parked keys, and what others decide about them."""

from __future__ import annotations

import pytest

from msgbus.errors import StaleError
from msgbus.handlers.delivery import Poison
from msgbus.journal.operations import Drop, Put, Seek
from msgbus.journal.records import State
from msgbus.subscriptions.in_flight import InFlight
from tests.unit.subscriptions.cluster import Cluster, Process, Retries, cluster, number_of

MODES = ["exclusive", "key_shared", "shared", "queue"]
LONG = Retries(pauses=60.0)


class Failing:
    """A handler that fails for some numbers, until it is told not to."""

    def __init__(self, *numbers: int) -> None:
        self.numbers = set(numbers)

    async def __call__(self, process: Process, one: InFlight) -> None:
        if number_of(one) in self.numbers:
            raise ValueError(f"no {number_of(one)}")


def order_of(them: Cluster, key: str) -> list[int]:
    (process,) = them.processes
    return [number for one, number in process.handled if one == key]


@pytest.mark.parametrize("mode", MODES)
async def test_the_last_failure_is_a_dead_letter(mode: str) -> None:
    async with cluster(mode) as them:
        them.handler = Failing(2)
        await them.publish(1, 2, 3)
        await them.until_handled(1, 3)
        await them.until(lambda: them.processes[0].loop.state.counts.dead_lettered == 1)
        await them.settled()

        (row,) = await them.rows()
        letter = await them.journal.letter(row)
        assert (row.state, row.attempt, row.error) == (State.DEAD, 3, "ValueError: no 2")
        assert letter is not None
        assert (letter.error_type, letter.reason) == ("ValueError", "retries exhausted")
        assert them.attempts[2] == [1, 2, 3]


async def test_a_dead_command_has_a_result_that_says_so() -> None:
    async with cluster("queue") as them:
        them.handler = Failing(1)
        await them.publish(1)
        await them.until(lambda: them.processes[0].loop.state.counts.dead_lettered == 1)
        await them.settled()

        (row,) = await them.rows(State.DEAD)
        record = await them.journal.record(row)
        assert record is not None
        result = await them.journal.result(record.message_id)
        assert result is not None
        assert result.error == "ValueError: no 1"


@pytest.mark.parametrize("mode", MODES)
async def test_a_long_pause_is_kept_in_the_journal(mode: str) -> None:
    async with cluster(mode, retry=LONG) as them:
        them.handler = Failing(1)
        await them.publish(1)
        await them.settled()
        (row,) = await them.rows()
        assert (row.state, row.attempt, row.owner) == (State.WAITING, 1, None)
        them.handler = Failing()
        await them.until_handled(1, within=120.0)
        await them.settled()

        assert them.attempts[1] == [1, 2]
        assert await them.rows() == []


@pytest.mark.parametrize("mode", MODES)
async def test_a_long_pause_survives_the_process(mode: str) -> None:
    async with cluster(mode, retry=LONG) as them:
        them.handler = Failing(1)
        await them.publish(1)
        await them.settled()
        await them.kill(them.processes[0])
        await them.start(1)
        them.handler = Failing()
        await them.until_handled(1, within=120.0)

        assert them.attempts[1] == [1, 2]


@pytest.mark.parametrize("mode", ["exclusive", "key_shared"])
async def test_later_messages_of_a_key_wait_for_a_retry(mode: str) -> None:
    async with cluster(mode, retry=LONG) as them:
        failing = Failing(1)
        them.handler = failing
        await them.publish((1, "a"), (2, "a"), (3, "a"))
        await them.settled()
        await them.publish((4, "a"), (5, "b"))
        await them.settled()
        waited = them.handled
        failing.numbers.clear()
        await them.until_handled(1, 2, 3, 4, 5, within=120.0)
        await them.settled()

        assert waited == ([] if mode == "exclusive" else [5])
        assert order_of(them, "a") == [1, 2, 3, 4]
        assert await them.rows() == []
        assert them.overlaps == []


async def test_exclusive_reads_nothing_while_its_order_is_blocked() -> None:
    async with cluster("exclusive", retry=LONG) as them:
        failing = Failing(0)
        them.handler = failing
        await them.publish(0)
        await them.settled()
        await them.publish(*range(1, 500), by=None)
        await them.settled()

        assert len(await them.rows()) == 1


async def test_a_dead_letter_lets_its_key_go_on() -> None:
    async with cluster("key_shared") as them:
        them.handler = Failing(1)
        await them.publish((1, "a"), (2, "a"), (3, "a"))
        await them.until_handled(2, 3)
        await them.settled()

        assert order_of(them, "a") == [2, 3]
        assert [row.state for row in await them.rows()] == [State.DEAD]


@pytest.mark.parametrize("decision", ["replay", "discard"])
@pytest.mark.parametrize("mode", ["exclusive", "key_shared"])
async def test_a_dead_letter_may_park_its_key(mode: str, decision: str) -> None:
    async with cluster(mode, parks=True) as them:
        failing = Failing(1)
        them.handler = failing
        await them.publish((1, "a"), (2, "a"), (3, "a"))
        await them.until(lambda: them.processes[0].loop.state.counts.dead_lettered == 1)
        await them.settled()
        await them.publish((4, "a"))
        await them.settled()
        parked = them.handled
        (dead,) = await them.rows(State.DEAD)
        failing.numbers.clear()
        if decision == "replay":
            again = dead.moved(State.WAITING, time=them.clock.time(), due=0.0, attempt=0)
            await them.journal.commit([Put(again)])
        else:
            await them.journal.commit([Drop(dead)])
        await them.until_handled(2, 3, 4)
        await them.settled()

        assert parked == []
        assert order_of(them, "a") == ([1, 2, 3, 4] if decision == "replay" else [2, 3, 4])
        assert await them.rows() == []


async def test_dropped_messages_leave_no_letter() -> None:
    async with cluster("exclusive", on_poison=Poison.DROP) as them:
        them.handler = Failing(1)
        await them.publish(1, 2)
        await them.until_handled(2)
        await them.settled()

        assert await them.rows() == []


async def test_a_blocked_subscription_stops_at_its_message_until_it_is_resumed() -> None:
    async with cluster("exclusive", on_poison=Poison.BLOCK) as them:
        failing = Failing(1)
        them.handler = failing
        await them.publish(1, 2)
        await them.settled()
        loop = them.processes[0].loop
        assert (loop.blocked_at, them.handled) == (1, [])

        failing.numbers.clear()
        loop.resume()
        await them.until_handled(1, 2)

        assert them.processes[0].numbers == [1, 2]


@pytest.mark.parametrize("mode", MODES)
async def test_a_row_that_is_in_flight_cannot_be_discarded_by_others(mode: str) -> None:
    refused: list[str] = []

    async def discard(process: Process, one: InFlight) -> None:
        (row,) = await them.rows(State.CLAIMED)
        with pytest.raises(StaleError, match="in flight in another process"):
            await them.journal.commit([Drop(row)])
        refused.append(row.state)

    async with cluster(mode, retry=LONG) as them:
        them.handler = Failing(1)
        await them.publish((1, "a"))
        await them.settled()
        them.handler = discard
        await them.until_handled(1, within=120.0)
        await them.settled()

        assert refused == [State.CLAIMED]
        assert await them.rows() == []


@pytest.mark.parametrize("mode", MODES)
async def test_a_row_that_a_seek_removed_while_it_ran_stops_nothing(mode: str) -> None:
    async with cluster(mode, retry=LONG) as them:
        them.handler = Failing(1)
        await them.publish((1, "a"))
        await them.settled()

        async def seek(process: Process, one: InFlight) -> None:
            if number_of(one) == 1 and not them.handled:
                await them.journal.commit([Seek(them.name, 0)])

        them.handler = seek
        await them.until_handled(1, within=120.0)
        await them.publish((2, "a"), (3, "b"))
        await them.until_handled(2, 3)
        await them.settled()

        assert await them.rows() == []
        assert them.handled == ([1, 2, 3] if mode == "queue" else [1, 1, 2, 3])
