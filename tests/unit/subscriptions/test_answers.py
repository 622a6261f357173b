"""Refusals, open circuits, and subscriptions that join or leave a running membership."""

from __future__ import annotations

import math

import pytest

from msgbus.errors import CircuitOpenError, HandlerTimeoutError, Refusal, StaleError
from msgbus.handlers.delivery import Poison
from msgbus.journal.records import Outcome, State
from msgbus.subscriptions.failures import outcome_of
from msgbus.subscriptions.in_flight import InFlight
from tests.unit.subscriptions.cluster import Process, cluster, number_of

MODES = ["exclusive", "key_shared", "shared", "queue"]


class SoldOut(Refusal):
    """An expected answer."""


def test_each_way_an_attempt_ends_has_an_outcome() -> None:
    late = HandlerTimeoutError(handler="h", message_type=int, seconds=1.0)
    ends = [None, SoldOut("no"), late, ValueError("no"), KeyboardInterrupt()]

    assert [outcome_of(end) for end in ends] == [
        Outcome.OK,
        Outcome.REFUSED,
        Outcome.TIMED_OUT,
        Outcome.FAILED,
        Outcome.CANCELLED,
    ]


@pytest.mark.parametrize("mode", MODES)
async def test_a_refusal_acknowledges_the_message(mode: str) -> None:
    async def refuse(process: Process, one: InFlight) -> None:
        if number_of(one) == 1:
            raise SoldOut("no more")

    async with cluster(mode) as them:
        them.handler = refuse
        told: list[tuple[int, Exception | None]] = []
        loop = them.processes[0].loop
        loop.on_final_failure = lambda one, error: told.append((number_of(one), error))
        await them.publish(1, 2)
        await them.until_handled(2)
        await them.settled()

        assert them.attempts[1] == [1]
        assert await them.rows() == []
        assert (loop.state.counts.refused, loop.state.counts.failed) == (1, 0)
        assert [(number, type(error)) for number, error in told] == [(1, SoldOut)]


async def test_a_refused_command_has_a_result_that_says_so() -> None:
    async def refuse(process: Process, one: InFlight) -> None:
        ids.append(one.record.message_id)
        raise SoldOut("no more")

    ids: list[str] = []
    async with cluster("queue") as them:
        them.handler = refuse
        await them.publish(1)
        await them.until(lambda: bool(ids))
        await them.settled()

        result = await them.journal.result(ids[0])
        assert result is not None
        assert result.error == "SoldOut: no more"


@pytest.mark.parametrize("retry_after", [30.0, math.inf])
async def test_a_command_waits_for_an_open_circuit_and_no_attempt_is_counted(
    retry_after: float,
) -> None:
    async def call(process: Process, one: InFlight) -> None:
        if is_open:
            raise CircuitOpenError("payments", retry_after=retry_after)

    is_open = [True]
    async with cluster("queue") as them:
        them.handler = call
        await them.publish(1)
        await them.until(lambda: bool(them.attempts[1]))
        await them.settled()
        (row,) = await them.rows()
        assert (row.state, row.attempt) == (State.WAITING, 0)

        is_open.clear()
        await them.until_handled(1, within=90.0)
        assert them.attempts[1] == [1, 1]


@pytest.mark.parametrize("mode", MODES)
async def test_a_dropped_message_is_acknowledged_and_told(mode: str) -> None:
    async def fail(process: Process, one: InFlight) -> None:
        if number_of(one) == 1:
            raise ValueError("no")

    async with cluster(mode, on_poison=Poison.DROP) as them:
        them.handler = fail
        told: list[int] = []
        loop = them.processes[0].loop
        loop.on_final_failure = lambda one, error: told.append(number_of(one))
        await them.publish(1, 2)
        await them.until(lambda: loop.state.counts.dropped == 1)
        await them.settled()

        assert told == [1]
        assert await them.rows() == []
        assert them.attempts[1] == [1, 2, 3]


@pytest.mark.parametrize("mode", MODES)
async def test_a_subscription_that_is_excluded_goes_on_in_another_process(mode: str) -> None:
    async with cluster(mode, 2) as them:
        first, second = them.processes
        await them.publish(1)
        await them.until_handled(1)

        assert await first.membership.exclude(first.loop) == 0
        await them.publish(2, 3, by=1)
        await them.until_handled(2, 3)
        assert {2, 3} <= set(second.numbers)
        (member,) = [one for one in await them.journal.members() if one.process == "host:0:"]
        assert dict(member.serves) == {}


@pytest.mark.parametrize("mode", MODES)
async def test_a_subscription_can_be_included_while_the_process_runs(mode: str) -> None:
    async with cluster(mode, 0) as them:
        process = them.make(is_serving=False)
        await process.membership.start()
        await them.publish(1)
        assert await them.journal.members() == []

        process.membership.add(process.loop)
        await process.membership.start()
        await them.publish(2)
        await them.until_handled(1, 2)


async def test_what_a_lost_member_had_in_flight_is_marked_as_lost() -> None:
    seen: list[InFlight] = []

    async def wait(process: Process, one: InFlight) -> None:
        seen.append(one)
        await them.clock.sleep(1000)

    async with cluster("exclusive") as them:
        them.handler = wait
        await them.publish(1)
        await them.until(lambda: bool(seen))
        process = them.processes[0]
        (member,) = await them.journal.members()

        assert await them.journal.end(member)
        with pytest.raises(StaleError):
            await process.journal.commit([], member)
        await them.turns()
        assert seen[0].is_lost
